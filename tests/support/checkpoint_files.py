"""Checkpoint files byte by byte, damaged ones included. Needs no tensor library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Stored = tuple[str, list[int], bytes]
"""(dtype, shape, data)"""


def safetensors_bytes(tensors: Mapping[str, Stored], *, header: Mapping[str, Any] | None = None) -> bytes:
    """A file that holds the tensors in this order. header: entries that replace or join those of the tensors."""
    entries: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return framed(json.dumps(entries | dict(header or {})).encode(), data)


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def folder_of(path: Path, files: Mapping[str, bytes | object], config: object = None) -> Path:
    """A folder of files; values that are no bytes are written as JSON. config.json is {} when it isn't given."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": config or {}, **files}.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def zeros(dtype: str, *shape: int, size: int) -> Stored:
    n = size
    for each in shape:
        n *= each
    return dtype, list(shape), bytes(n)
