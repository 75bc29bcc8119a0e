"""Forced tokens: where a grammar leaves no choice, its text is tokenised once and appended without a model step.

`Forcing` makes a contract of core of a program. The mask at a forced state allows the first forced token alone, so that
the text is the same whether forced tokens are appended, drafted or sampled one by one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from headrace.contracts import Compiled, Matcher
from headrace.errors import HeadraceError
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Forced, Program, Walk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BYTES = 4096
"""Of text that is tokenised at once."""
MOST_KEPT_BYTES = 1 << 20
"""Of texts whose tokens are kept."""

Ids = tuple[int, ...]


class Spelling:
    """The tokens of forced text, kept by text; shared by the grammars of one vocabulary. Any thread: what
    two work out at once is the same."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: dict[tuple[bytes, bool], Ids] = {}
        self._n_kept_bytes = 0

    def tokens(self, forced: Forced, ends: bool = False) -> Ids:
        """The tokens that certainly come next, in order. They are what the model's own tokenizer makes of the text;
        those at its end which what follows might still join to a longer token are left out. ends: nothing follows."""
        ids: list[int] = []
        for i, part in enumerate(forced):
            if isinstance(part, int):
                ids.append(part)
                continue
            closed = ends or i + 1 < len(forced)
            spelt, whole = self._spell(part, closed)
            ids += spelt
            if not whole:
                break
        return tuple(ids)

    def _spell(self, text: bytes, closed: bool) -> tuple[Ids, bool]:
        """(tokens, are they all of the text?). closed: a special token follows, so nothing can join its end."""
        whole = closed and len(text) <= MOST_BYTES
        key = (text[:MOST_BYTES], whole)
        ids = self._kept.get(key)
        if ids is None:
            ids = self._encode(*key)
            self._n_kept_bytes += len(key[0])
            if self._n_kept_bytes > MOST_KEPT_BYTES:
                self._kept.clear()
                self._n_kept_bytes = len(key[0])
            self._kept[key] = ids
        pieces = self.vocabulary.text
        return ids, closed and sum(len(pieces[token]) for token in ids) == len(text)

    def _encode(self, data: bytes, closed: bool) -> Ids:
        text = data.decode("utf-8", "ignore").encode()  # a character whose end is not forced yet is left for later
        if not data.startswith(text):  # begins within a character
            return ()
        ids = self.vocabulary.spell(text)
        if closed and text == data:
            return tuple(ids)
        pieces = self.vocabulary.text
        # one token may take the place of several: look for the first of which a longer one could take the end
        end, tail = len(ids), b""
        for i in reversed(range(len(ids))):
            tail = pieces[ids[i]] + tail
            if len(tail) >= self.vocabulary.longest:
                break
            if self.vocabulary.has_longer(tail):
                end = i
        return tuple(ids[:end])


class Forcing(Compiled):
    """A program with forced tokens. jumps: tell core of them; their masks are the same without."""

    def __init__(self, program: Program, spelling: Spelling, jumps: bool = True) -> None:
        self._program, self._spelling, self._jumps = program, spelling, jumps

    def start(self) -> Matcher:
        return _Forced(self._program.start(), self._spelling, self._jumps)

    def size_bytes(self) -> int:
        return self._program.size_bytes()


class _Forced(Matcher):
    """Which tokens are forced is worked out once per state, before the state is left, and is part of the record that
    `rollback` restores: it depends on what was accepted alone, not on which methods were called."""

    __slots__ = ("_jumps", "_record", "_spelling", "_walk")

    def __init__(self, walk: Walk, spelling: Spelling, jumps: bool) -> None:
        self._walk, self._spelling, self._jumps = walk, spelling, jumps
        self._record: list[tuple[Ids, int] | None] = [None]
        """The forced tokens of each state, and how many of them lie behind it; None: not worked out yet."""

    def fill(self, bits: NDArray[np.int32]) -> None:
        ids, at = self._record[-1] or self._look()
        if not ids:
            self._walk.fill(bits)
            return
        token = ids[at]
        bits.fill(0)
        bits[token >> 5] = (1 << (token & 31)) - (1 << 32 if token & 31 == 31 else 0)

    def accept(self, token: int) -> bool:
        if self._walk.done():
            return False
        ids, at = self._record[-1] or self._look()
        if (ids and token != ids[at]) or not self._walk.accept(token):
            return False
        self._record.append((ids, at + 1) if at + 1 < len(ids) else None)
        return True

    def rollback(self, n: int) -> None:
        if n:
            self._walk.rollback(n)
            del self._record[-n:]

    def done(self) -> bool:
        return self._walk.done()

    def forced(self) -> Seq[int]:
        if not self._jumps or self._walk.done():
            return ()
        ids, at = self._record[-1] or self._look()
        return ids[at:]

    def verdict(self) -> HeadraceError | None:
        return self._walk.verdict()

    def _look(self) -> tuple[Ids, int]:
        """Of a state that is not done."""
        forced = self._walk.forced()
        ids = self._spelling.tokens(forced) if forced else ()
        if forced and isinstance(forced[-1], bytes):
            whole = self._spelling.tokens(forced, ends=True)
            if len(whole) > len(ids) and self._ends_with(whole):
                ids = whole
        self._record[-1] = found = ids, 0
        return found

    def _ends_with(self, ids: Ids) -> bool:
        """Is the text over behind these tokens?"""
        walk, n_accepted = self._walk, 0
        while n_accepted < len(ids) and not walk.done() and walk.accept(ids[n_accepted]):
            n_accepted += 1
        ended = n_accepted == len(ids) and walk.done()
        walk.rollback(n_accepted)
        return ended
