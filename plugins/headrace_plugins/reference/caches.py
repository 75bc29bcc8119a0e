"""Memory of the caches: one pool of blocks, one of rings, one of ring snapshots, and the states' views into them.

    blocks     [n_blocks, block bytes]      a block is  | state a, all its entries | state b | ... |
    rings      [n_slots, ring bytes]        a slot is   | ring c | ring d | ... |
    snapshots  [n_snapshots, ring bytes]

The block manager in core sees blocks, slots and snapshots by number, never what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.modeling import Cache, StateSpec
from headrace.types import Begin, CopyBlock, Free, KVOp, Restore, Snapshot, Trim

ALIGN = 32
"""Bytes. Every state starts at a multiple, so that its pool can be viewed in any number format."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a state lies in a block, or in a slot's rings: bytes [start, end)."""

    state: StateSpec
    start: int
    end: int
    grain: int
    """Entries."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the states of a model share a block, and a slot."""

    paged: tuple[_Place, ...]
    rings: tuple[_Place, ...]
    block_bytes: int
    ring_bytes: int


def arrange(states: Iterable[StateSpec], block_tokens: int) -> Arrangement:
    """Place every state. ConfigError HR-REFERENCE-10 where a block is no whole number of entries."""
    paged: list[_Place] = []
    rings: list[_Place] = []
    for state in states:
        if state.kind == "paged" and block_tokens % state.ratio:
            raise ConfigError(
                "HR-REFERENCE-10",
                f"backend.block_tokens = {block_tokens}; cache '{state.name}' has an entry per {state.ratio} tokens",
                f"set a multiple of {state.ratio}, such as {max(1, block_tokens // state.ratio) * state.ratio}",
            )
        places = paged if state.kind == "paged" else rings
        grain = block_tokens // state.ratio if state.kind == "paged" else state.entries
        start = _aligned(places[-1].end) if places else 0
        places.append(_Place(state, start, start + grain * state.format.entry_bytes, grain))
    return Arrangement(
        tuple(paged),
        tuple(rings),
        _aligned(paged[-1].end) if paged else 0,
        _aligned(rings[-1].end) if rings else 0,
    )


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def _zeros(n: int, n_bytes: int) -> torch.Tensor:
    """[n, n_bytes] uint8. From numpy, whose zeros take memory only once they are written."""
    return torch.from_numpy(np.zeros((n, n_bytes), np.uint8))


class Pools:
    """The memory itself. Freed with the object."""

    def __init__(self, arrangement: Arrangement, n_blocks: int, n_slots: int, n_snapshots: int) -> None:
        self._blocks = _zeros(n_blocks, arrangement.block_bytes)
        self._rings = _zeros(n_slots, arrangement.ring_bytes)
        self._snapshots = _zeros(n_snapshots, arrangement.ring_bytes)
        self.ring_from: NDArray[np.int64] = np.full(n_slots, -1, np.int64)
        """[n_slots] lowest position that the slot's rings hold; -1: they hold nothing yet."""
        self._snapshot_from: NDArray[np.int64] = np.full(n_snapshots, -1, np.int64)
        self.caches: Mapping[str, Cache] = {
            place.state.name: Cache(pool[:, place.start : place.end], place.state.format, place.grain)
            for pool, places in ((self._blocks, arrangement.paged), (self._rings, arrangement.rings))
            for place in places
        }

    def apply(self, op: KVOp) -> None:
        """Do what core asks for. Raises ValueError for an operation of slot executors, IndexError for bad numbers."""
        match op:
            case Begin(slot):
                self.ring_from[slot] = -1
            case Snapshot(slot, _, dst):
                self._snapshots[dst] = self._rings[slot]
                self._snapshot_from[dst] = self.ring_from[slot]
            case Restore(slot, _, src):
                self._rings[slot] = self._snapshots[src]
                self.ring_from[slot] = self._snapshot_from[src]
            case CopyBlock(_, src, dst):
                self._blocks[dst] = self._blocks[src]
            case Trim() | Free():
                pass  # the block table and the rows' starts say the same
            case _:
                raise ValueError(f"{op} means nothing to a paged executor")

    def enter(self, slots: NDArray[np.int32], starts: NDArray[np.int32]) -> NDArray[np.int64]:
        """Note where rows start. Returns [R], the lowest position whose ring entries each row may read: a sequence
        that began, or starts over, has none before its first row."""
        known = self.ring_from[slots]
        fresh = (known < 0) | (known > starts)
        if fresh.any():
            known = np.where(fresh, starts, known)
            self.ring_from[slots] = known
        return known
