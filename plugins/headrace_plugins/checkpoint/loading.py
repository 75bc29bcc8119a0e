"""Read the tensors of a model from a checkpoint, through a memory map, in pieces.

What is held: plain tensors in the type that the model computes with; packed ones unpacked (`keep="dequant"`), or packed
as views of the file (`keep="quantised"`). Such views cost no copy, and the system may drop and read their pages again;
so files of a loaded checkpoint must not be changed in place. Pages that were read are given back piece by piece, which
keeps peak memory near what is held. Every number is checked on the way.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from math import prod
from os import PathLike
from typing import Literal, NoReturn

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.modeling import Quantised, TensorSpec
from headrace_plugins.checkpoint.folder import open_folder, read_config
from headrace_plugins.checkpoint.header import Entry, shown
from headrace_plugins.checkpoint.matching import BLOCK, Match, match
from headrace_plugins.reference.kernels.formats import unpack

CHUNK = 1 << 18
"""Numbers that are converted at a time: scratch memory is a few times 1 MB."""
CHECK_BYTES = 1 << 22
ALIGN = 64
FAULT_AROUND = 1 << 20
"""A read maps the pages around it too, those before it included (Linux: 64 KB by default)."""
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LARGEST_SCALE = {"fp8_block": 246, "fp8_row": 246, "fp4_row": 252}
"""With a larger ue8m0 byte the largest code, 448 or 6, is beyond float32. Byte 255 is NaN."""


def load_weights(
    folder: str | PathLike[str],
    specs: Iterable[TensorSpec],
    *,
    compute: torch.dtype,
    keep: Literal["dequant", "quantised"],
    ignored: Callable[[str], bool] = lambda name: False,
    report: Callable[[float], None] = lambda fraction: None,
) -> dict[str, Tensor | Quantised]:
    """Load every tensor of `specs`, by name.

    compute: type of tensors whose spec says "compute". ignored: which tensors of the checkpoint may be left over.
    report: progress, 0..1. A kept `Quantised` has uint8 codes and scales.
    Raises ModelError: HR-CKPT-01 to 04 and 08 for damaged files, -05 for tensors that are missing, surplus or wrong,
    -06 for another quantisation, -07 for NaN and infinity.
    """
    matches = match(open_folder(folder), specs, read_config(folder), ignored)
    maps: dict[str, _Map] = {}
    arena = _Arena(sum(_held_bytes(found, compute, keep) for found in matches))
    weights: dict[str, Tensor | Quantised] = {}
    n_bytes, done = sum(found.weight.n_bytes for found in matches), 0
    report(0.0)
    for found in sorted(matches, key=lambda found: (found.weight.path, found.weight.begin)):  # as they lie on the disk
        for entry in (found.weight, found.scale):
            if entry is not None and entry.path not in maps:
                maps[entry.path] = _Map(entry.path)
        dtype = held_dtype(found.spec, compute)
        if found.scale is None:
            weights[found.spec.name] = _plain(found, maps, arena.take(found.weight.shape, dtype))
        elif keep == "quantised":
            weights[found.spec.name] = _still_packed(found, found.scale, maps)
        else:
            weights[found.spec.name] = _unpacked(found, found.scale, maps, arena.take(found.spec.shape, dtype))
        done += found.weight.n_bytes
        report(done / n_bytes if n_bytes else 1.0)
    return {found.spec.name: weights[found.spec.name] for found in matches}


def held_dtype(spec: TensorSpec, compute: torch.dtype) -> torch.dtype:
    """Type of a tensor that is held unpacked."""
    return compute if spec.dtype == "compute" else torch.float32


class _Arena:
    """Memory for every tensor that is held, in one piece: where thousands of large ones are allocated in between
    short-lived scratch, the heap keeps holes (measured: a quarter more than is held)."""

    def __init__(self, n_bytes: int) -> None:
        self._bytes = torch.empty(n_bytes, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor, not set, aligned as torch's own allocator does."""
        start, n_bytes = self._used, prod(shape) * dtype.itemsize
        self._used += _aligned(n_bytes)
        return self._bytes[start : start + n_bytes].view(dtype).view(shape)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def _held_bytes(found: Match, compute: torch.dtype, keep: Literal["dequant", "quantised"]) -> int:
    """Arena of one tensor; those that stay packed stay in their file."""
    if found.scale is not None and keep == "quantised":
        return 0
    return _aligned(prod(found.spec.shape) * held_dtype(found.spec, compute).itemsize)


class _Map:
    """A file in memory. Writing to it would change a private copy, never the file."""

    def __init__(self, path: str) -> None:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)  # else the system may want memory for all of it
        self._path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - for `check`; closed with the last reference
            self._mmap = mmap.mmap(self._file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise ModelError(
                "HR-CKPT-02", f"can't map {path} into memory: {error}", "check the file and its permissions"
            ) from error
        self._bytes = torch.frombuffer(self._mmap, dtype=torch.uint8)

    def of(self, entry: Entry) -> Tensor:
        """The bytes of a tensor, [n] uint8: a view that keeps the map alive."""
        if entry.end > len(self._bytes):
            self._shorter()
        return self._bytes[entry.begin : entry.end]

    def check(self, end: int) -> None:
        """To be called before bytes up to `end` are touched: a page beyond the end of a file that was cut meanwhile
        would end the process."""
        if os.fstat(self._file.fileno()).st_size < end:
            self._shorter()

    def _shorter(self) -> NoReturn:
        raise ModelError("HR-CKPT-03", f"{self._path} became shorter while it was read", "try again")

    def drop(self, begin: int, end: int) -> None:
        """Give the pages of bytes [begin, end) back; they are read again when they are touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = begin // FAULT_AROUND * FAULT_AROUND
            if end > begin:
                self._mmap.madvise(mmap.MADV_DONTNEED, start, end - start)


def _plain(found: Match, maps: dict[str, _Map], out: Tensor) -> Tensor:
    """Copy a tensor into `out`, whose type may be another."""
    entry, mapped = found.weight, maps[found.weight.path]
    stored = _STORED[entry.dtype]
    flat = out.view(-1)
    raw, size = mapped.of(entry), stored.itemsize
    for start in range(0, len(flat), CHUNK):
        end = min(start + CHUNK, len(flat))
        mapped.check(entry.begin + size * end)
        piece = raw[size * start : size * end]
        if (entry.begin + size * start) % size:
            piece = piece.clone()  # a view as numbers must be aligned
        flat[start:end] = piece.view(stored)
        _check_finite(flat[start:end], entry, start)
        mapped.drop(entry.begin + size * start, entry.begin + size * end)
    return out


def _still_packed(found: Match, scale: Entry, maps: dict[str, _Map]) -> Quantised:
    """A packed matrix as views of the file."""
    codes_map = maps[found.weight.path]
    scales = _scales(found, scale, maps)
    codes_map.check(found.weight.end)
    if found.weight.dtype == "F8_E4M3":
        _check_codes(found.weight, codes_map)
    maps[scale.path].drop(scale.begin, scale.end)
    codes = codes_map.of(found.weight).view(found.weight.shape)
    return Quantised(codes, scales, found.spec.packing, found.spec.shape)


def _unpacked(found: Match, scale: Entry, maps: dict[str, _Map], out: Tensor) -> Tensor:
    """Unpack a matrix into `out`, in pieces of whole scale blocks."""
    spec, codes_map, scale_map = found.spec, maps[found.weight.path], maps[scale.path]
    scales = _scales(found, scale, maps)
    codes = codes_map.of(found.weight).view(found.weight.shape)
    m, k = spec.shape
    step = max(BLOCK, CHUNK // max(k, 1) // BLOCK * BLOCK)
    rows_per_scale = BLOCK if spec.packing == "fp8_block" else 1
    for start in range(0, m, step):
        end = min(start + step, m)
        codes_map.check(found.weight.begin + end * codes.shape[1])
        scale_map.check(scale.end)
        piece = codes[start:end], scales[start // rows_per_scale : -(-end // rows_per_scale)]
        out[start:end] = unpack(Quantised(*piece, spec.packing, (end - start, k)), out.dtype)
        if found.weight.dtype == "F8_E4M3":  # e2m1 has no NaN
            _check_finite(out[start:end].view(-1), found.weight, start * k)
        codes_map.drop(found.weight.begin + start * codes.shape[1], found.weight.begin + end * codes.shape[1])
    scale_map.drop(scale.begin, scale.end)
    return out


def _scales(found: Match, scale: Entry, maps: dict[str, _Map]) -> Tensor:
    """The scales of a packed matrix, checked: a view of the file, uint8."""
    scale_map = maps[scale.path]
    scales = scale_map.of(scale).view(scale.shape)
    scale_map.check(scale.end)
    _check_scales(found.spec, scale, scales)
    return scales


# --- numbers that are none -------------------------------------------------------------------------------------------


def _check_finite(values: Tensor, entry: Entry, first: int) -> None:
    """values: flat, number `first` of the tensor and on."""
    if not values.numel():
        return
    low, high = values.aminmax()  # one pass without scratch memory; NaN wins
    if not (low.isfinite() and high.isfinite()):
        _not_a_number(entry, first + int((~values.isfinite()).nonzero()[0]))


def _check_codes(entry: Entry, mapped: _Map) -> None:
    """e4m3 has NaN as 0x7f and 0xff, and no infinity. e2m1 has neither."""
    raw = mapped.of(entry)
    for start in range(0, len(raw), CHECK_BYTES):
        mapped.check(entry.begin + min(start + CHECK_BYTES, len(raw)))
        piece = raw[start : start + CHECK_BYTES] & 0x7F
        if int(piece.max()) == 0x7F:
            _not_a_number(entry, start + int((piece == 0x7F).nonzero()[0]))
        mapped.drop(entry.begin + start, entry.begin + start + len(piece))


def _check_scales(spec: TensorSpec, entry: Entry, scales: Tensor) -> None:
    limit = _LARGEST_SCALE[spec.packing]
    if scales.numel() and int(scales.max()) > limit:
        _not_a_number(entry, int((scales.view(-1) > limit).nonzero()[0]))


def _not_a_number(entry: Entry, at: int) -> None:
    """at: index into the flat tensor of the file."""
    index: list[int] = []
    for n in reversed(entry.shape):
        at, i = divmod(at, n)
        index.insert(0, i)
    where = f"[{', '.join(map(str, index))}]"
    raise ModelError(
        "HR-CKPT-07",
        f"{entry.path}: tensor {shown(entry.name)} is not finite at {where}",
        "the file is damaged, or the model diverged in training: download it again, or use another checkpoint",
    )
