"""What the layers of one forward share: rotations, addresses, windows, selections. Computed once, at first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.modeling import Batch, Cache, CacheFormat
from headrace.ops import Ops

Rotation = tuple[Tensor, Tensor]
"""cos, sin: [n, rope_dim / 2] float32 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Frequencies, [rope_dim / 2] float32."""

    base: Tensor
    """Layers of ratio 0 and the drafter."""
    yarn: Tensor
    """Layers with compressed keys."""


def scratch_cache(format: CacheFormat, entries: int, device: torch.device) -> Cache:
    """Memory for `entries` entries that live as long as the call: one grain, so that entry e has the address e."""
    pool = torch.empty(1, entries * format.entry_bytes, dtype=torch.uint8, device=device)
    return Cache(pool, format, entries)


@dataclass(frozen=True, slots=True)
class Windows:
    """Where a token finds the keys of its window, the same in every ring of one length.

    A run of a row that is no longer than the slack of the ring + 1 writes the ring first and reads it afterwards. In a
    longer run the last tokens would overwrite what the first ones still have to read, so such a step puts the old
    entries of its rows and all the new ones side by side into scratch memory, in the ring's format, and reads there:

        scratch, per row:  [ start .. p0 )          [ p0 .. p0 + n )       start = max(first, p0 - window + 1)
                           copied from the ring     new, copied to it
    """

    index: Tensor
    """[T, window] int64 addresses, in the ring or in scratch."""
    store: Tensor
    """[T] int64 addresses of the new entries, in the same."""
    total: int = 0
    """Entries in scratch; 0 = there is none."""
    old: tuple[Tensor, Tensor, Tensor] | None = None
    """slot, entry in the ring, address in scratch of what is copied from the ring; [O] int64 each."""
    new: tuple[Tensor, Tensor, Tensor] | None = None
    """The same of what is copied to the ring: the last tokens of each row that fit."""

    def put(self, ops: Ops, ring: Cache, values: Tensor) -> Cache:
        """Store the keys of the step; -> the cache that `index` addresses. values: [T, width]."""
        if self.old is None or self.new is None:
            ops.kv.store(ring, self.store, values)
            return ring
        scratch = scratch_cache(ring.format, self.total, values.device)
        width = ring.format.entry_bytes
        entries = ring.pool.unflatten(1, (ring.grain, width))
        copies = scratch.pool.view(self.total, width)
        slot, entry, address = self.old
        copies[address] = entries[slot, entry]
        ops.kv.store(scratch, self.store, values)
        slot, entry, address = self.new
        entries[slot, entry] = copies[address]
        return scratch


def plan_windows(ops: Ops, batch: Batch, first: Tensor, window: int, ring: int) -> Windows:
    """first: [T] int64, lowest visible position; ring: entries of the rings."""
    slot, positions = batch.slot, batch.positions
    n = len(positions)
    if n > ring - window + 1:
        counts = torch.unique_consecutive(batch.row, return_counts=True)[1]
        if int(counts.max()) > ring - window + 1:
            return _plan_scratch(ops, batch, counts, first, window, ring)
    return Windows(ops.index.window(slot, positions, first, window, ring), slot * ring + positions % ring)


def _plan_scratch(ops: Ops, batch: Batch, counts: Tensor, first: Tensor, window: int, ring: int) -> Windows:
    """counts: [U] int64, tokens of each run."""
    positions = batch.positions
    head = counts.cumsum(0) - counts
    begin, slot = positions[head], batch.slot[head]
    start = torch.minimum(torch.maximum(first[head], begin - window + 1), begin)
    n_old = begin - start
    size = n_old + counts
    shift = size.cumsum(0) - size - start
    """[U], address in scratch = position + shift"""
    total = int(size.sum())
    shift_new = shift.repeat_interleave(counts)
    address = positions + shift_new
    run = torch.arange(len(counts), device=positions.device).repeat_interleave(n_old)
    old = torch.arange(len(run), device=positions.device) + (start - (n_old.cumsum(0) - n_old))[run]
    last = (begin + counts).repeat_interleave(counts)
    kept = (positions >= last - ring).nonzero()[:, 0]
    return Windows(
        index=ops.index.window(torch.zeros_like(positions), address, first + shift_new, window, total),
        store=address,
        total=total,
        old=(slot[run], old % ring, old + shift[run]),
        new=(batch.slot[kept], positions[kept] % ring, address[kept]),
    )


@dataclass(frozen=True, slots=True)
class Entries:
    """Compressed entries that the tokens of a step complete."""

    closing: Tensor | None
    """[C] int64, the tokens that complete one; None = every token."""
    address: Tensor
    """[C] int64 in the caches of this ratio, -1 = not written."""
    rotation: Rotation
    """At the position of the first token of each entry."""


class Step:
    """One forward over one set of tokens. `take` gives the step of some of them."""

    def __init__(self, ops: Ops, rotary: Rotary, batch: Batch, caches: Mapping[str, Cache]) -> None:
        self.ops = ops
        self.rotary = rotary
        self.batch = batch
        self.caches = caches
        self.trace = batch.trace
        self.selected: dict[int, Tensor] = {}
        """Per selecting layer, the addresses of its entries: [T, index_top] int64."""
        self.candidates: dict[int, Tensor] = {}
        """Per publishing layer, its candidate blocks: [T, blocks] int64."""
        self._rotations: dict[bool, Rotation] = {}
        self._windows: dict[tuple[int, int, bool], Windows] = {}
        self._entries: dict[int, Entries] = {}
        self._ring_slots: dict[int, Tensor] = {}
        self._visible: dict[int, tuple[Tensor, int]] = {}

    def take(self, keep: Tensor) -> Step:
        """The step of the tokens at `keep` [K] int64 only."""
        taken = Step(self.ops, self.rotary, self.batch.take(keep), self.caches)
        taken._rotations = {kind: (cos[keep], sin[keep]) for kind, (cos, sin) in self._rotations.items()}
        return taken

    def rotation(self, yarn: bool) -> Rotation:
        """Of the tokens' own positions."""
        found = self._rotations.get(yarn)
        if found is None:
            frequencies = self.rotary.yarn if yarn else self.rotary.base
            found = self._rotations[yarn] = self.ops.rope.table(self.batch.positions, frequencies)
        return found

    def windows(self, window: int, ring: int, tail: bool = False) -> Windows:
        """tail: what lies before `Batch.tail` is not visible."""
        limit = self.batch.tail if tail else None
        tail = limit is not None
        found = self._windows.get((window, ring, tail))
        if found is None:
            first = self.batch.first if limit is None else torch.maximum(self.batch.first, limit)
            found = self._windows[window, ring, tail] = plan_windows(self.ops, self.batch, first, window, ring)
        return found

    def ring_slots(self, ring: int) -> Tensor:
        """Addresses in rings of this length, of each token's entry; of two tokens for one address only the later one
        has it, the other has -1. -> [T] int64"""
        found = self._ring_slots.get(ring)
        if found is None:
            batch = self.batch
            found = batch.slot * ring + batch.positions % ring
            if len(found) > ring:
                counts = torch.unique_consecutive(batch.row, return_counts=True)[1]
                last = batch.positions[counts.cumsum(0) - 1].repeat_interleave(counts)
                found = torch.where(batch.positions > last - ring, found, -1)
            self._ring_slots[ring] = found
        return found

    def visible(self, ratio: int) -> tuple[Tensor, int]:
        """Entries that each token sees: complete ones only. -> [T] int64, and the largest of them"""
        found = self._visible.get(ratio)
        if found is None:
            entries = (self.batch.positions + 1) // ratio
            found = self._visible[ratio] = (entries, int(entries.max()))
        return found

    def entries(self, ratio: int) -> Entries:
        found = self._entries.get(ratio)
        if found is None:
            found = self._entries[ratio] = self._plan_entries(ratio)
        return found

    def _plan_entries(self, ratio: int) -> Entries:
        batch, closing = self.batch, None
        positions, row, store = batch.positions, batch.row, batch.store
        rotation = self.rotation(yarn=True) if ratio == 1 else None
        if ratio > 1:
            closing = (positions % ratio == ratio - 1).nonzero()[:, 0]
            positions, row = positions[closing], row[closing]
            store = None if store is None else store[closing]
            rotation = self.ops.rope.table(positions - (ratio - 1), self.rotary.yarn)
        assert rotation is not None
        entry = positions // ratio
        address = self.ops.index.entries(entry[:, None], batch.table, row, batch.block_tokens // ratio)[:, 0]
        if store is not None:
            address = torch.where(store, address, -1)
        return Entries(closing, address, rotation)
