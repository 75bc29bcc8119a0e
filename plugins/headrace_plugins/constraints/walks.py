"""What an engine gives: programs and walks, below the contracts of core.

A `Program` is a grammar that an engine compiled, a `Walk` the state of one text in it. `forcing.py` makes a
`headrace.contracts.Compiled` of a program; `tagged.py` makes one program of free text and other programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Forced = Seq[bytes | int]
"""What must come next: bytes of text that is not tokenised yet, and ids of tokens. Adjacent bytes are one item."""


class Walk(ABC):
    """The state of one text. One thread at a time; a token is accepted in one step, whatever it stands for."""

    __slots__ = ()

    @abstractmethod
    def fill(self, bits: NDArray[np.int32]) -> None:
        """Write what may come next: [W] int32, bit 1 = allowed, W at least the vocabulary's words; what lies beyond the
        vocabulary is 0. EOS is allowed iff `complete()`. Where no token of the vocabulary goes on, all of it is 0. Not
        called once done(). Raises RequestError HR-CONSTRAINT-04 where a limit of the engine ends it."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token; False (state unchanged) if the grammar does not allow it."""

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Undo the last n accepted tokens, EOS too."""

    @abstractmethod
    def done(self) -> bool:
        """The text is complete and nothing can follow, or EOS was accepted."""

    @abstractmethod
    def complete(self) -> bool:
        """The text may end here."""

    @abstractmethod
    def forced(self) -> Forced:
        """What must come next whatever the model says, as far as the engine sees; empty where there is a choice (the
        end is one). Does not change the state."""

    def verdict(self) -> HeadraceError | None:
        """See `headrace.contracts.Matcher.verdict`."""
        return None


class Program(ABC):
    """A compiled grammar: immutable, shared between requests and threads."""

    __slots__ = ()

    @abstractmethod
    def start(self) -> Walk:
        """A walk at the start of the text; cheap."""

    @abstractmethod
    def size_bytes(self) -> int:
        """Memory held, measured or estimated from above."""
