"""Programs that list their texts, for what stands above engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import HeadraceError, RequestError
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Forced, Program, Walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

Word = tuple[int, ...]
"""Bytes, and special tokens as 256 + id."""


class Words(Program):
    """Exactly these texts. A text: str, or a list of str and names of special tokens in one-element lists."""

    def __init__(self, texts: Iterable[Any], vocabulary: Vocabulary, problem: HeadraceError | None = None) -> None:
        self.vocabulary, self.problem = vocabulary, problem
        self.words = frozenset(self._word(text) for text in texts)
        self.begun = frozenset(word[:i] for word in self.words for i in range(len(word) + 1))

    def _word(self, text: Any) -> Word:
        word: list[int] = []
        for part in [text] if isinstance(text, str) else text:
            word += part.encode() if isinstance(part, str) else [256 + self.vocabulary.special[part[0]]]
        return tuple(word)

    def start(self) -> Walk:
        return WordWalk(self)

    def size_bytes(self) -> int:
        return sum(map(len, self.words))


class WordWalk(Walk):
    def __init__(self, program: Words) -> None:
        self.program = program
        self.states: list[Word] = [()]
        self.ended = False

    def fill(self, bits: NDArray[np.int32]) -> None:
        vocabulary = self.program.vocabulary
        allowed = np.zeros(32 * len(bits), np.uint8)
        allowed[: vocabulary.n_tokens] = [self._after(token) is not None for token in range(vocabulary.n_tokens)]
        allowed[list(vocabulary.eos_ids)] = self.complete()
        bits[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        after = self._after(token)
        if token in self.program.vocabulary.eos_ids:
            after = self.states[-1] if self.complete() else None
            self.ended = after is not None
        if after is None:
            return False
        self.states.append(after)
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self.states)
        if n:
            self.ended = False
            del self.states[-n:]

    def done(self) -> bool:
        state = self.states[-1]
        return self.ended or (
            self.complete() and not any(len(w) > len(state) and w[: len(state)] == state for w in self.program.begun)
        )

    def complete(self) -> bool:
        return self.states[-1] in self.program.words

    def forced(self) -> Forced:
        found, state = [], self.states[-1]
        while state not in self.program.words:
            following = {
                word[len(state)]
                for word in self.program.begun
                if len(word) > len(state) and word[: len(state)] == state
            }
            if len(following) != 1:
                break
            found += following
            state = (*state, *following)
        parts: list[bytes | int] = []
        for symbol in found:
            if symbol >= 256:
                parts.append(symbol - 256)
            elif parts and isinstance(parts[-1], bytes):
                parts[-1] += bytes([symbol])
            else:
                parts.append(bytes([symbol]))
        return parts

    def verdict(self) -> HeadraceError | None:
        text = bytes(symbol for symbol in self.states[-1] if symbol < 256).decode()
        if not self.complete():
            return RequestError("HR-TEST-01", f"asked of the unfinished text {text!r}")
        return self.program.problem and RequestError("HR-CONSTRAINT-09", text)

    def _after(self, token: int) -> Word | None:
        vocabulary = self.program.vocabulary
        if token in vocabulary.eos_ids or self.ended:
            return None
        data = vocabulary.text[token]
        after = (*self.states[-1], *(data or [256 + token]))
        return after if after in self.program.begun else None
