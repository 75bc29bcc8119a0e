"""The toy's rings: the last positions of each sequence, apart from its blocks, as sliding windows are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.types import Begin, Restore, Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNSET = -1


class RingCorrupt(AssertionError):
    """A row needs what its ring does not hold."""


class ToyRings:
    """Position p lies in cell p mod (window + slack) of its slot. The token at p reads positions (p - window, p].

    A row may start up to `slack` positions before the end of what was written. Positions before the start of the first
    row after Begin don't exist: they read as EMPTY, which changes logits where a window reaches that far.
    """

    def __init__(self, n_slots: int, window: int, slack: int, n_snapshots: int, empty: int) -> None:
        self.window, self.slack, self.empty = window, slack, empty
        self.size = window + slack
        n = n_slots + n_snapshots
        self._n_slots = n_slots
        self._cells = np.full((n, self.size), empty, np.int64)
        """[slots, then snapshots; size]"""
        self._first = [UNSET] * n
        """Lowest position that exists."""
        self._end = [UNSET] * n
        """End of what was written."""
        self.begun = [False] * n_slots
        """Begin came, and no row since then."""

    def apply(self, op: Begin | Snapshot | Restore) -> None:
        match op:
            case Begin(slot):
                self._cells[slot] = self.empty
                self._first[slot] = self._end[slot] = UNSET
                self.begun[slot] = True
            case Snapshot(slot, _, dst):
                self._copy(slot, self._place(dst), op)
            case Restore(slot, _, src):
                self._copy(self._place(src), slot, op)

    def _place(self, snapshot: int) -> int:
        if not 0 <= snapshot < len(self._first) - self._n_slots:
            raise RingCorrupt(f"snapshot {snapshot} of {len(self._first) - self._n_slots}")
        return self._n_slots + snapshot

    def _copy(self, src: int, dst: int, op: object) -> None:
        if self._end[src] == UNSET:
            raise RingCorrupt(f"{op} copies a ring that holds nothing")
        self._cells[dst] = self._cells[src]
        self._first[dst], self._end[dst] = self._first[src], self._end[src]

    def read(self, slot: int, start: int) -> NDArray[np.int64]:
        """Cells that a row which starts at `start` needs: positions [max(0, start - window + 1), start)."""
        if self._end[slot] == UNSET:
            if not self.begun[slot]:
                raise RingCorrupt(f"slot {slot} is used before Begin")
            self._first[slot] = self._end[slot] = start
        self.begun[slot] = False
        if not start <= self._end[slot] <= start + self.slack:
            raise RingCorrupt(f"a row of slot {slot} starts at {start}, its ring ends at {self._end[slot]}")
        positions = np.arange(max(0, start - self.window + 1), start)
        cells = self._cells[slot, positions % self.size]
        exist = positions >= self._first[slot]
        wrong = np.flatnonzero(exist & (cells >> 32 != positions))
        if len(wrong):
            raise RingCorrupt(
                f"position {positions[wrong[0]]} of slot {slot} was overwritten by {cells[wrong[0]] >> 32}"
            )
        return np.where(exist, cells, self.empty)

    def write(self, slot: int, start: int, cells: NDArray[np.int64]) -> None:
        """Cells of positions [start, start + len(cells))."""
        end = start + len(cells)
        kept = np.arange(max(start, end - self.size), end)
        self._cells[slot, kept % self.size] = cells[kept - start]
        self._end[slot] = max(end, self._end[slot])
