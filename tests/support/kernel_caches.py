"""Caches for tests of kernels: views into a larger pool of junk bytes, as an executor lays them out. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.modeling import Cache, CacheFormat
from headrace.ops import KernelContext
from headrace_plugins.reference.kernels import formats
from headrace_plugins.reference.kernels.cache import store

JUNK = 0xFF
"""Fills fresh pools: NaN in every format that has one."""


def context(compute: Literal["float32", "bfloat16"] = "float32", exact: bool = False) -> KernelContext:
    return KernelContext(device="cpu", compute=compute, exact=exact)


def round_trip(format: CacheFormat, x: Tensor) -> Tensor:
    """x as it comes back from a cache of this format. [..., width] -> like x."""
    return formats.unpack_entries(format, formats.pack(format, x)).to(x.dtype)


def make_cache(format: CacheFormat, grains: int, grain: int, before: int = 32, after: int = 96) -> Cache:
    """A cache of `grains` grains in the middle of a pool with `before` and `after` foreign bytes per grain."""
    size = grain * format.entry_bytes
    pool = torch.full((grains, before + size + after), JUNK, dtype=torch.uint8)
    return Cache(pool[:, before : before + size], format, grain)


@dataclass
class Paged:
    """A paged cache that holds `lengths[i]` random entries of row i, in blocks of its table in random order."""

    cache: Cache
    table: Tensor
    """[R, B] int64, -1 padded"""
    values: list[Tensor]
    """What was stored, per row: [lengths[i], width] float32"""


def make_paged(format: CacheFormat, lengths: list[int], grain: int, seed: int = 0) -> Paged:
    random = torch.Generator().manual_seed(seed)
    n_blocks = [-(-length // grain) for length in lengths]
    cache = make_cache(format, sum(n_blocks) + 3, grain)
    order = torch.randperm(sum(n_blocks) + 3, generator=random).tolist()
    table = torch.full((len(lengths), max(n_blocks, default=0) + 1), -1)
    values = []
    for row, (length, count) in enumerate(zip(lengths, n_blocks, strict=True)):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        at = torch.arange(length)
        values.append(torch.randn(length, format.width, generator=random))
        store(cache, table[row, at // grain] * grain + at % grain, values[-1])
    return Paged(cache, table, values)
