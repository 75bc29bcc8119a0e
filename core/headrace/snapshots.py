"""Which place of an executor's snapshot pool keeps the rings for the end of which block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class Snapshots:
    """Least recently used goes first. A snapshot belongs to a block of the prefix index: a sequence with the tokens up
    to the block's end can start there. It goes when the block is forgotten.

    Operations are applied in the order in which they were asked for, so a place may be given away while an operation
    that reads it still waits for its plan.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._free = list(range(n - 1, -1, -1))
        self._places: OrderedDict[int, int] = OrderedDict()
        """Block -> place, in the order of use."""

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def use(self, block: int) -> int:
        """The place of the block's snapshot, which is now the last to go."""
        self._places.move_to_end(block)
        return self._places[block]

    def take(self, block: int) -> int:
        """A place for a new snapshot; the one that nobody used for longest may lose its own."""
        place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        self._places[block] = place
        return place

    def drop(self, block: int) -> None:
        """Forget the block's snapshot, if it has one."""
        place = self._places.pop(block, None)
        if place is not None:
            self._free.append(place)

    def check(self, indexed: Callable[[int], bool]) -> None:
        assert sorted([*self._free, *self._places.values()]) == list(range(self.n)), (
            "snapshot places leak or are shared"
        )
        assert all(indexed(block) for block in self._places), "a snapshot of a block that nobody can find"
