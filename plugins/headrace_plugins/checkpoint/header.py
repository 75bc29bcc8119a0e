"""The header of one safetensors file, checked in full before a byte of data is touched. Standard library only.

No length is believed before it was compared with the file's size, so a damaged file costs no memory.
Format: https://huggingface.co/docs/safetensors (u64 header length, JSON, data without holes).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, BinaryIO, NoReturn

from headrace.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library allows."""
MAX_DIMS = 8
DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Types of safetensors 0.8, bits per element."""
_N_SAMPLES, _SAMPLE_BYTES = 64, 4096
_NEAR = 1000
"""Names that one is compared with; more would take seconds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    name: str
    """As in the file."""
    dtype: str
    """Key of `DTYPE_BITS`."""
    shape: tuple[int, ...]
    path: str
    begin: int
    """[begin, end) in bytes from the start of the file."""
    end: int

    @property
    def n_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    path: str
    size_bytes: int
    entries: Mapping[str, Entry]
    digest: str
    """Names the file's contents without reading all of it: sha256 of header, size and 64 samples of the data."""


def shown(name: str) -> str:
    """A name from a file, fit for an error message."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= 120 else text[:117] + "..."


def meant(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'x'? " or an empty string. Names of tensors are long and alike: only a slip of the pen counts."""
    close = get_close_matches(name, itertools.islice(known, _NEAR), n=1, cutoff=0.9)
    return f"did you mean '{shown(close[0])}'? " if close else ""


def read_header(path: str) -> Header:
    """Check a file's header. Raises ModelError HR-CKPT-02 (can't be read), -03 (damaged), -08 (unknown type)."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelError("HR-CKPT-02", f"{path} is not a regular file", "name a folder of safetensors")
        with open(path, "rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise ModelError(
            "HR-CKPT-02", f"can't read {path}: {error.strerror}", "check the file and its permissions"
        ) from error


def strict_json(data: bytes) -> Any:
    """Parse UTF-8 JSON; ValueError also for duplicate keys, NaN, Infinity, what overflows to it, and nesting without
    end."""
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)!r} appears twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


class _Reader:
    """One pass over the header of an open file."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> Header:
        prefix = self._file.read(8)
        if len(prefix) < 8:
            self._fail(f"{self._size} bytes are too few for a header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES or 8 + length > self._size:
            if prefix[:4] == b"GGUF":
                self._fail("it is a GGUF file", "give it the ending .gguf")
            if prefix == b"version ":
                self._fail("it is a pointer of Git LFS, not the file itself", "run `git lfs pull` in its folder")
            self._fail(f"a header of {length} bytes in a file of {self._size}")
        raw = self._file.read(length)
        if len(raw) < length:
            self._fail("it became shorter while it was read")
        try:
            header = strict_json(raw)
        except ValueError as error:
            self._fail(f"its header is not JSON: {error}")
        if not isinstance(header, dict):
            self._fail("its header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, about, 8 + length) for name, about in header.items()}
        self._check_layout(entries, 8 + length)
        digest = hashlib.sha256(prefix + raw)
        self._sample(digest, 8 + length)
        return Header(self.path, self._size, entries, digest.hexdigest())

    def _entry(self, name: str, about: Any, start: int) -> Entry:
        if not isinstance(about, dict) or not {"dtype", "shape", "data_offsets"} <= about.keys():
            self._fail(f"tensor {shown(name)}: dtype, shape or data_offsets is missing in its header")
        dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise ModelError(
                "HR-CKPT-08",
                f"{self.path}: tensor {shown(name)} has the unknown type {shown(str(dtype))!r}",
                f"known types: {', '.join(DTYPE_BITS)}; upgrade headrace, or convert the checkpoint",
            )
        if not _is_counts(shape) or len(shape) > MAX_DIMS:
            self._fail(f"tensor {shown(name)}: {shown(str(shape))} is not a shape")
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(f"tensor {shown(name)}: {shown(str(offsets))} are not offsets [begin, end]")
        n_bits = math.prod(shape) * DTYPE_BITS[dtype]
        if n_bits != 8 * (offsets[1] - offsets[0]):
            self._fail(
                f"tensor {shown(name)}: {dtype} {shown(str(shape))} takes {n_bits / 8:.0f} bytes,"
                f" its offsets are {shown(str(offsets))}"
            )
        if start + offsets[1] > self._size:
            self._fail(
                f"truncated: tensor {shown(name)} ends at byte {start + offsets[1]}, the file at {self._size}",
                "the download is incomplete: fetch this file again",
            )
        return Entry(name, dtype, tuple(shape), self.path, start + offsets[0], start + offsets[1])

    def _check_layout(self, entries: Mapping[str, Entry], start: int) -> None:
        """The format wants every byte to belong to one tensor."""
        at, before = start, ""
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin < at:
                self._fail(f"the tensors {shown(before)} and {shown(entry.name)} overlap")
            if entry.begin > at:
                self._fail(f"{entry.begin - at} bytes before tensor {shown(entry.name)} belong to no tensor")
            at, before = entry.end, entry.name
        if at != self._size:
            self._fail(f"{self._size - at} bytes at its end belong to no tensor")

    def _sample(self, digest: Any, start: int) -> None:
        digest.update(self._size.to_bytes(8, "little"))
        n_bytes = self._size - start
        for i in range(_N_SAMPLES if n_bytes > 0 else 0):
            self._file.seek(start + n_bytes * i // _N_SAMPLES)
            digest.update(self._file.read(_SAMPLE_BYTES))

    def _fail(self, what: str, help: str = "the file is damaged: download it again") -> NoReturn:
        raise ModelError("HR-CKPT-03", f"{self.path}: {what}", help)


def _is_counts(value: Any) -> bool:
    """A list of integers >= 0 that could be bytes of a file (bounded, so that products and texts stay small)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
