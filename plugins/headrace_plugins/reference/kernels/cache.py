"""Caches: entries into and out of a pool of bytes, and the compressor that pools pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.modeling import Cache
from headrace.ops import KernelContext
from headrace_plugins.reference.kernels.formats import act_dtype, pack, unpack_entries


def store(cache: Cache, slots: Tensor, values: Tensor) -> None:
    """Op `kv.store`."""
    if not _all_differ(slots):
        chosen = _last_writes(slots)
        slots, values = slots[chosen], values[chosen]
    entries = pack(cache.format, values)
    grains, places = slots // cache.grain, slots % cache.grain
    start = 0
    for section in _sections(cache):
        end = start + section.shape[2]
        section[grains, places] = entries[:, start:end]
        start = end


def load(cache: Cache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries at flat addresses; -1 gives zeros. slots: [...] int64 -> [..., width] `dtype`."""
    # -1 reads the last entry of the pool, which exists; what was read is dropped
    grains, places = slots // cache.grain, slots % cache.grain
    parts = [section[grains, places] for section in _sections(cache)]
    entries = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return unpack_entries(cache.format, entries).to(dtype).masked_fill_((slots < 0).unsqueeze(-1), 0)


def kv_store(context: KernelContext) -> Callable[[Cache, Tensor, Tensor], None]:
    return store


def kv_load(context: KernelContext) -> Callable[[Cache, Tensor], Tensor]:
    act = act_dtype(context)

    def kv_load(cache: Cache, slots: Tensor) -> Tensor:
        return load(cache, slots, torch.float32 if cache.format.name == "float32" else act)

    return kv_load


def compress_pool(context: KernelContext) -> Callable[[Cache, Tensor, Tensor, Tensor, Tensor], Tensor]:
    act = act_dtype(context)

    def compress_pool(cache: Cache, latent: Tensor, score: Tensor, slot: Tensor, positions: Tensor) -> Tensor:
        here = torch.cat([score, latent], 1)
        ring = slot * cache.grain
        # the token before: the row above, or for the first row of each run what the ring remembers
        first = torch.ones_like(slot, dtype=torch.bool)
        first[1:] = slot[1:] != slot[:-1]
        runs = first.nonzero().squeeze(1)
        before = here.roll(1, 0)
        before[runs] = load(cache, ring[runs] + (positions[runs] - 1) % cache.grain, torch.float32)
        store(cache, ring + positions % cache.grain, here)
        score_before, latent_before = before.chunk(2, 1)
        # by exp and division, whose bits don't depend on an element's place in the tensor (those of sigmoid do)
        most = torch.maximum(score_before, score)
        weight_before, weight = (score_before - most).exp_(), (score - most).exp_()
        pooled = (weight_before * latent_before + weight * latent) / (weight_before + weight)
        return pooled.to(act).masked_fill_((positions % 2 == 0).unsqueeze(1), 0)

    return compress_pool


def _all_differ(slots: Tensor) -> bool:
    """Whether few slots, as decoding has them, are known to be all real and different."""
    if len(slots) > 64:
        return False
    known = slots.tolist()
    return min(known, default=-1) >= 0 and len(set(known)) == len(known)


def _last_writes(slots: Tensor) -> Tensor:
    """Rows to write, so that no address is written twice: of each address the last. [n] -> [<= n] int64."""
    ordered, rows = torch.sort(slots, stable=True)
    keep = ordered >= 0
    keep[:-1] &= ordered[1:] != ordered[:-1]
    return rows[keep]


def _sections(cache: Cache) -> list[Tensor]:
    """Views [grains, grain, bytes] of the parts that an entry lies in: codes and scales apart for qm, else one."""
    format, grain = cache.format, cache.grain
    widths = [format.width // 2, format.width // 32] if format.name == "qm" else [format.entry_bytes]
    views, start = [], 0
    for width in widths:
        views.append(cache.pool[:, start : start + grain * width].unflatten(1, (grain, width)))
        start += grain * width
    return views
