"""A checkpoint folder: config.json, one safetensors file or shards with an index. Standard library only."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from headrace.errors import ModelError
from headrace_plugins.checkpoint.header import Entry, Header, meant, read_header, shown, strict_json

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 1 << 28
"""Of config.json and the index. The index of a model with 384 experts in 40 layers takes about 10 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What a folder holds, from its headers."""

    files: tuple[str, ...]
    """Paths of the safetensors files."""
    n_tensors: int
    bytes_by_dtype: Mapping[str, int]
    """Type of the file (`BF16`, `F8_E4M3`, ...) -> bytes."""
    digest: str
    """Hex sha256 that names config and weights; of the data it reads samples only."""

    @property
    def tensor_bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


@dataclass(frozen=True, slots=True)
class Folder:
    """The tensors of a checkpoint, every header checked."""

    path: str
    entries: Mapping[str, Entry]
    """By name without "model." in front."""
    headers: tuple[Header, ...]


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a folder. Raises ModelError HR-CKPT-01 when it is missing, damaged or no JSON object."""
    path = os.path.join(folder, CONFIG)
    help = "a checkpoint is a folder with config.json and safetensors: name that folder, or download it again"
    if not os.path.isdir(folder):
        raise ModelError("HR-CKPT-01", f"{os.fspath(folder)} is not a folder", help)
    config = _read_json(path, "HR-CKPT-01", help)
    if not isinstance(config, dict):
        raise ModelError("HR-CKPT-01", f"{path} holds a {type(config).__name__}, not a JSON object", help)
    return config


def inspect(folder: str | os.PathLike[str]) -> CheckpointFacts:
    """Say what a folder holds, from headers and samples. Raises ModelError HR-CKPT-01 to 04 and 08."""
    read_config(folder)
    found = open_folder(folder)
    n_bytes: Counter[str] = Counter()
    for entry in found.entries.values():
        n_bytes[entry.dtype] += entry.n_bytes
    digest = hashlib.sha256()
    with open(os.path.join(folder, CONFIG), "rb") as file:
        digest.update(hashlib.sha256(file.read()).digest())
    for header in found.headers:
        digest.update(bytes.fromhex(header.digest))
    return CheckpointFacts(
        files=tuple(header.path for header in found.headers),
        n_tensors=len(found.entries),
        bytes_by_dtype=dict(n_bytes),
        digest=digest.hexdigest(),
    )


def open_folder(folder: str | os.PathLike[str]) -> Folder:
    """Read every header. Raises ModelError HR-CKPT-02 (nothing to read), -03, -08 (damaged file), -04 (bad index)."""
    root = os.fspath(folder)
    # a link that leads nowhere is there, and can't be read; the single file before the index, as transformers does
    if os.path.lexists(os.path.join(root, SINGLE)):
        headers = [read_header(os.path.join(root, SINGLE))]
    elif os.path.lexists(os.path.join(root, INDEX)):
        headers = _read_shards(root)
    else:
        _nothing(root)
    entries: dict[str, Entry] = {}
    for header in headers:
        for name, entry in header.entries.items():
            known = entries.setdefault(name.removeprefix("model."), entry)
            if known is not entry:
                _bad_index(
                    f"tensor {shown(name)} of {entry.path} is there a second time: {shown(known.name)} of {known.path}"
                )
    return Folder(root, entries, tuple(headers))


def _read_shards(root: str) -> list[Header]:
    path = os.path.join(root, INDEX)
    index = _read_json(path, "HR-CKPT-04", "download the index again")
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        _bad_index(f"{path} has no table weight_map of tensor = shard")
    names = sorted(set(shards.values()))
    for name in names:
        _check_shard_name(path, name)
    missing = [name for name in names if not os.path.exists(os.path.join(root, name))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _bad_index(
            f"{path} names {len(names)} shards; {shown(missing[0])}{more} not found in {root}",
            "the download is incomplete: fetch the missing files",
        )
    headers = {name: read_header(os.path.join(root, name)) for name in names}
    for tensor, name in shards.items():
        if tensor not in headers[name].entries:
            _bad_index(
                f"{path}: tensor {shown(tensor)} is not in its shard {name}",
                f"{meant(tensor, headers[name].entries)}download index and shard again",
            )
    return list(headers.values())


def _check_shard_name(path: str, name: str) -> None:
    """A shard lies in the folder of its index or below."""
    for pure in (PurePosixPath(name), PureWindowsPath(name)):
        if pure.is_absolute() or pure.drive or ".." in pure.parts or not pure.name or not name.isprintable():
            _bad_index(f"{path}: {shown(name)!r} is not the name of a shard in this folder")


def _read_json(path: str, code: str, help: str) -> Any:
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_JSON_BYTES:
            raise ModelError(code, f"{path} is no file of at most {MAX_JSON_BYTES} bytes", help)
        with open(path, "rb") as file:
            return strict_json(file.read(about.st_size))
    except OSError as error:
        raise ModelError(code, f"can't read {path}: {error.strerror}", help) from error
    except ValueError as error:
        raise ModelError(code, f"{path} is not JSON: {error}", help) from error


def _nothing(root: str) -> NoReturn:
    if not os.path.isdir(root):
        raise ModelError("HR-CKPT-02", f"{root} is not a folder", "name a folder with config.json and safetensors")
    names = sorted(os.listdir(root))
    if any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            "HR-CKPT-02",
            f"{root} has safetensors files, but neither {SINGLE} nor {INDEX}",
            f"rename a single file to {SINGLE}, or download the index",
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ModelError(
            "HR-CKPT-02",
            f"{root} holds its weights as pickled files, which can run code",
            "convert them to safetensors first",
        )
    raise ModelError("HR-CKPT-02", f"{root} holds no {SINGLE}", "name a folder with config.json and safetensors")


def _bad_index(message: str, help: str = "download the checkpoint again") -> NoReturn:
    raise ModelError("HR-CKPT-04", message, help)
