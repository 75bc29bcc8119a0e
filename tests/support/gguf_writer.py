"""Writes small GGUF files, right or wrong, byte by byte."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    return text(content) if kind == STRING else struct.pack("<" + _FORMATS[kind], content)


def key(name: str | bytes, kind: int, content: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + value(kind, content)


def array(name: str, kind: int, contents: list[Any]) -> bytes:
    head = text(name) + struct.pack("<IIQ", ARRAY, kind, len(contents))
    return head + b"".join(value(kind, each) for each in contents)


@dataclass
class Tensor:
    name: str = "token_embd.weight"
    shape: tuple[int, ...] = (8, 4)
    kind: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        dims = b"".join(struct.pack("<q", n) for n in self.shape)
        return text(self.name) + struct.pack("<I", len(self.shape)) + dims + struct.pack("<IQ", self.kind, self.offset)


def sound_keys() -> dict[str, bytes]:
    """Metadata that passes every check, by name."""
    a, t = "llama.", "tokenizer.ggml."
    entries = [
        ("general.architecture", STRING, "llama"),
        (a + "context_length", U32, 128),
        (a + "block_count", U32, 1),
        (a + "embedding_length", U32, 8),
        (a + "attention.head_count", U32, 2),
        (t + "model", STRING, "llama"),
        (t + "bos_token_id", U32, 1),
        (t + "eos_token_id", U32, 2),
    ]
    keys = {name: key(name, kind, content) for name, kind, content in entries}
    keys[t + "tokens"] = array(t + "tokens", STRING, ["<unk>", "<s>", "</s>", "a"])
    keys[t + "scores"] = array(t + "scores", F32, [0.0] * 4)
    keys[t + "token_type"] = array(t + "token_type", I32, [2, 3, 3, 1])
    return keys


@dataclass
class File:
    """A file in parts: change one and `write` it."""

    keys: dict[str, bytes] = field(default_factory=sound_keys)
    tensors: list[Tensor] = field(default_factory=lambda: [Tensor()])
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    data: bytes = bytes(128)
    alignment: int = 32

    def pack(self) -> bytes:
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        head += b"".join(self.keys.values()) + b"".join(tensor.pack() for tensor in self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data

    def write(self, path: Path) -> str:
        path.write_bytes(self.pack())
        return str(path)
