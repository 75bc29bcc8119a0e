"""Structure of a GGUF file, checked before llama.cpp sees it.

llama.cpp ends the process on some malformed files, so every count, length, type and offset is checked here first, with
bounded reads: no more than `MAX_METADATA_BYTES` is ever held, and no length is believed before it was compared with the
file's size. Standard library only. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from headrace.errors import ModelError

MAX_METADATA_BYTES = 64 << 20
"""Header, key/values and tensor infos together. Real models stay below 24 MiB."""
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 21
"""Entries of all string arrays. The largest known model has about 800 000: 262 144 tokens and their merges."""
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 63
"""GGML_MAX_NAME - 1."""
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
KEEP_ARRAY = 4096
"""Longer arrays are checked and counted, their values are not kept."""

_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
"""ggml type -> (name, elements per block, bytes per block). Sizes as ggml_type_size() of ggml 0.25 says."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array that was checked; its values are kept only where they are few numbers."""

    kind: str
    """Element type, as in `TYPE_NAMES`."""
    length: int
    values: tuple[Any, ...] = ()
    """Empty for strings and for more than `KEEP_ARRAY` numbers."""
    repeated: bool = False
    """Tokens only: a text other than the empty one appears twice."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Fastest dimension first."""
    type: str
    offset: int
    """From the start of the tensor data, bytes."""
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """One structurally sound file."""

    path: str
    size_bytes: int
    metadata: Mapping[str, Any]
    """Scalars and `Array`s, by key."""
    tensors: tuple[TensorInfo, ...]
    data_start: int
    digest: str
    """sha256 of the metadata, the tensor infos, the file's size and samples of the weights."""


def read_gguf(path: str) -> GGUFFile:
    """Check one file and return what it says. Raises ModelError HR-GGUF-01..09."""
    size = _regular_file(path)
    try:
        with open(path, "rb") as file:
            return _Reader(path, file, size).read()
    except OSError as error:
        raise ModelError(
            "HR-GGUF-01", f"can't read {path}: {error.strerror}", "check the file's permissions"
        ) from error


def _regular_file(path: str) -> int:
    """Size of a regular file; a clear error for anything else."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        raise ModelError(
            "HR-GGUF-01", f"no such file: {path}", "check the path, or use hf://owner/repo/file.gguf"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError("HR-GGUF-01", f"can't read {path}: {error}", "check the path and its permissions") from error
    if stat.S_ISDIR(info.st_mode):
        raise ModelError("HR-GGUF-01", f"{path} is a folder, not a GGUF file", "name the .gguf file inside it")
    if not stat.S_ISREG(info.st_mode):
        raise ModelError("HR-GGUF-01", f"{path} is not a regular file", "copy the model into a regular file")
    return info.st_size


class _Reader:
    """Sequential reader that never believes a length. Lives for one `read`."""

    def __init__(self, path: str, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._buffer = bytearray()
        """The file's first bytes, read so far."""
        self._pos = 0
        self._n_strings = 0

    # --- bounded reads -----------------------------------------------------------------------------------------------

    def _fail(self, code: int, what: str, where: str, help: str = "") -> NoReturn:
        raise ModelError(
            f"HR-GGUF-{code:02d}",
            f"{self.path}: {what} ({where}, byte {self._pos})",
            help or "the file is damaged or hostile: download or convert it again",
        )

    def _need(self, end: int, where: str) -> None:
        """Make bytes [0, end) available."""
        if end > self.size:
            self._fail(
                4, f"the file ends early: {end - self._pos} bytes needed, {self.size - self._pos} left", where,
                "the file is truncated: download it again",
            )  # fmt: skip
        if end > MAX_METADATA_BYTES:
            self._fail(5, f"metadata larger than {MAX_METADATA_BYTES >> 20} MiB", where)
        while len(self._buffer) < end:
            piece = self._file.read(min(max(end - len(self._buffer), 1 << 20), self.size - len(self._buffer)))
            if not piece:
                self._fail(4, "the file shrank while it was read", where, "the file is truncated: download it again")
            self._buffer += piece

    def _scalar(self, kind: struct.Struct, where: str) -> Any:
        end = self._pos + kind.size
        if end > len(self._buffer):
            self._need(end, where)
        value = kind.unpack_from(self._buffer, self._pos)[0]
        self._pos = end
        return value

    def _bytes(self, where: str, limit: int | None = None) -> bytes:
        length = self._scalar(_U64, where)
        if limit is not None and length > limit:
            self._fail(6, f"a string of {length} bytes, at most {limit} are allowed", where)
        self._need(self._pos + length, where)
        text = bytes(self._buffer[self._pos : self._pos + length])
        self._pos += length
        return text

    def _text(self, where: str, limit: int | None = None) -> str:
        text = self._bytes(where, limit)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(6, f"a string that is not UTF-8 ({error.reason} in {text[:24]!r})", where)

    # --- sections ----------------------------------------------------------------------------------------------------

    def read(self) -> GGUFFile:
        n_tensors, n_keys = self._header()
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            key = self._text(f"key {i}", MAX_KEY_BYTES)
            if not key:
                self._fail(6, "an empty key", f"key {i}")
            if key in metadata:
                self._fail(6, f"key '{key}' appears twice", f"key {i}")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        tensors = tuple(self._tensor(i) for i in range(n_tensors))
        end = self._pos
        data_start = (end + alignment - 1) // alignment * alignment
        self._layout(tensors, data_start, alignment)
        return GGUFFile(
            path=self.path, size_bytes=self.size, metadata=metadata, tensors=tensors, data_start=data_start,
            digest=self._digest(end, data_start),
        )  # fmt: skip

    def _header(self) -> tuple[int, int]:
        """(tensors, keys) of a file in a version that is supported."""
        if self.size == 0:
            raise ModelError("HR-GGUF-02", f"{self.path} is empty", "download the model again")
        self._need(min(4, self.size), "magic")
        magic = bytes(self._buffer[:4])
        if magic != b"GGUF":
            help = "use a GGUF model" if magic != b"FUGG" else "the file is byte-swapped: convert it on this machine"
            raise ModelError("HR-GGUF-02", f"{self.path} is not a GGUF file: it starts with {magic!r}", help)
        self._pos = 4
        version = self._scalar(_U32, "version")
        if version & 0xFFFF == 0:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, 2, 3):
                self._fail(
                    3, f"a byte-swapped (big-endian) GGUF of version {swapped}", "version",
                    "convert the model for little-endian machines (gguf-convert-endian)",
                )  # fmt: skip
        if version not in (2, 3):
            self._fail(
                3, f"GGUF version {version}, versions 2 and 3 are supported", "version",
                "convert the model again with a current llama.cpp",
            )  # fmt: skip
        n_tensors = self._scalar(_U64, "tensor count")
        n_keys = self._scalar(_U64, "key count")
        for count, least, most, where in (
            (n_tensors, 32, MAX_TENSORS, "tensor count"),
            (n_keys, 13, MAX_KEYS, "key count"),
        ):
            if count > most or count * least > self.size:
                self._fail(5, f"{count} is too large for a file of {self.size} bytes (at most {most})", where)
        return n_tensors, n_keys

    def _value(self, key: str) -> Any:
        kind = self._scalar(_U32, f"type of '{key}'")
        where = f"'{key}'"
        if kind == _STRING:
            return self._text(where)
        if kind == _ARRAY:
            return self._array(where)
        if kind not in _SCALARS:
            self._fail(6, f"unknown value type {kind}", where)
        value = self._scalar(_SCALARS[kind], where)
        if kind == _BOOL:
            if value > 1:
                self._fail(6, f"a bool with value {value}", where)
            return bool(value)
        return value

    def _array(self, where: str) -> Array:
        kind = self._scalar(_U32, where)
        length = self._scalar(_U64, where)
        if kind == _ARRAY:
            self._fail(6, "an array of arrays, which GGUF readers don't support", where)
        if kind == _STRING:
            return Array(
                "string", length, repeated=self._strings(length, where, unique=where == "'tokenizer.ggml.tokens'")
            )
        if kind not in _SCALARS:
            self._fail(6, f"unknown array element type {kind}", where)
        n_bytes = length * _SCALARS[kind].size
        self._need(self._pos + n_bytes, where)
        start, self._pos = self._pos, self._pos + n_bytes
        if length > KEEP_ARRAY:
            return Array(TYPE_NAMES[kind], length)
        values = struct.unpack_from(f"<{length}{_SCALARS[kind].format[1:]}", self._buffer, start)
        return Array(TYPE_NAMES[kind], length, values)

    def _strings(self, length: int, where: str, unique: bool) -> bool:
        """Walk over a string array. True if it should be unique and is not."""
        self._n_strings += length
        if self._n_strings > MAX_STRINGS or length * 8 > self.size:
            self._fail(5, f"{length} strings are too many for a file of {self.size} bytes", where)
        unpack, pos = _U64.unpack_from, self._pos
        seen: set[bytes] = set()
        n_empty = 0
        for first in range(0, length, 4096):
            pieces = []
            for _ in range(first, min(first + 4096, length)):
                self._pos = pos
                if pos + 8 > len(self._buffer):
                    self._need(pos + 8, where)
                start = pos + 8
                pos = start + unpack(self._buffer, pos)[0]
                if pos > len(self._buffer):
                    self._need(pos, where)
                pieces.append(self._buffer[start:pos])
            if unique:
                seen.update(map(bytes, pieces))
                n_empty += pieces.count(bytearray())
            try:
                # NUL is ASCII, so a joined text is valid iff each piece is
                b"\0".join(pieces).decode("utf-8")
            except UnicodeDecodeError as error:
                self._fail(6, f"an array with a string that is not UTF-8 ({error.reason})", where)
        self._pos = pos
        return unique and len(seen - {b""}) != length - n_empty

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        valid = isinstance(alignment, int) and not isinstance(alignment, bool) and 8 <= alignment <= MAX_ALIGNMENT
        if not valid or alignment & (alignment - 1):
            self._fail(7, f"{alignment!r} is not a power of two from 8 to {MAX_ALIGNMENT}", "'general.alignment'")
        return int(alignment)

    def _tensor(self, i: int) -> TensorInfo:
        name = self._text(f"name of tensor {i}", MAX_NAME_BYTES)
        where = f"tensor '{name}'"
        n_dims = self._scalar(_U32, where)
        if not 1 <= n_dims <= MAX_DIMS:
            self._fail(8, f"{n_dims} dimensions, from 1 to {MAX_DIMS} are allowed", where)
        shape = tuple(self._scalar(_SCALARS[11], where) for _ in range(n_dims))
        kind = self._scalar(_U32, where)
        offset = self._scalar(_U64, where)
        if min(shape) < 1:
            self._fail(8, f"shape {list(shape)} has a dimension below 1", where)
        if kind not in TENSOR_TYPES:
            self._fail(
                8, f"unknown tensor type {kind}", where,
                "the file may need a newer llama.cpp: pip install --upgrade 'headrace[gguf]'",
            )  # fmt: skip
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if shape[0] % block:
            self._fail(8, f"{shape[0]} columns are not a multiple of the block size {block} of {type_name}", where)
        n_elements = 1
        for n in shape:
            n_elements *= n
        n_bytes = n_elements // block * block_bytes
        if n_bytes > self.size:
            self._fail(8, f"shape {list(shape)} of {type_name} needs {n_bytes} bytes, the file has {self.size}", where)
        return TensorInfo(name, shape, type_name, offset, n_bytes)

    def _layout(self, tensors: tuple[TensorInfo, ...], data_start: int, alignment: int) -> None:
        """Offsets are aligned, inside the file and disjoint; names are unique."""
        seen: set[str] = set()
        end, last = 0, ""
        for tensor in sorted(tensors, key=lambda t: t.offset):
            where = f"tensor '{tensor.name}'"
            if tensor.name in seen:
                self._fail(9, "the name appears twice", where)
            seen.add(tensor.name)
            if tensor.offset % alignment:
                self._fail(9, f"offset {tensor.offset} is not a multiple of the alignment {alignment}", where)
            if tensor.offset < end:
                self._fail(9, f"offset {tensor.offset} overlaps tensor '{last}', which ends at {end}", where)
            end, last = tensor.offset + tensor.n_bytes, tensor.name
            if data_start + end > self.size:
                self._fail(
                    4, f"data ends at byte {data_start + end}, the file has {self.size}", where,
                    "the file is truncated: download it again",
                )  # fmt: skip

    def _digest(self, end: int, data_start: int) -> str:
        """Names weights without reading them all: metadata, size, and 64 samples of the tensor data."""
        digest = hashlib.sha256(memoryview(self._buffer)[:end])
        digest.update(_U64.pack(self.size))
        n_bytes, n_samples = self.size - data_start, 64
        for i in range(n_samples if n_bytes > 0 else 0):
            self._file.seek(data_start + n_bytes * i // n_samples)
            digest.update(self._file.read(4096))
        return digest.hexdigest()
