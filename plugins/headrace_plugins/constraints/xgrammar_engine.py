"""Grammars on xgrammar: a pushdown automaton with masks worked out when a grammar is compiled.

Importing xgrammar imports torch and transformers; it happens with the first grammar that is compiled here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Rules
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Forced, Program, Walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POSITION = re.compile(r"(?:^|: )(EBNF \w+ error.*)", re.DOTALL)
"""What xgrammar says behind the time and the line of its own source."""


class XGrammar:
    """Compiles for one vocabulary. Any thread."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self.vocabulary = vocabulary
        text = list(vocabulary.text)
        for token in vocabulary.special_ids:
            # no UTF-8 text has this byte, so no text stands for them; an empty token could not be named either
            text[token] = b"\xff" + vocabulary.tokenizer.token_bytes(token)
        info = xgrammar.TokenizerInfo(
            text,
            xgrammar.VocabType.RAW,
            vocab_size=32 * vocabulary.n_words,
            stop_token_ids=sorted(vocabulary.eos_ids),
        )
        # the router has a cache, and compiles on several threads already
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def print(self, rules: Rules) -> str:
        """See `headrace_plugins.constraints.engines.Engine`."""
        from headrace_plugins.constraints.ebnf import print_ebnf

        return print_ebnf(rules, self.vocabulary.special)

    def compile_text(self, text: str) -> Program:
        """Compile an EBNF grammar. See `Engine`."""
        from xgrammar import GrammarMatcher

        try:
            compiled = self._compiler.compile_grammar(text)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise _too_large() from None
            said = _POSITION.search(str(error))
            raise RequestError(
                "HR-CONSTRAINT-02", f"the grammar can't be read: {(said[1] if said else str(error)).strip()}"
            ) from None
        program = XProgram(compiled, GrammarMatcher, self.vocabulary)
        bits = np.zeros(self.vocabulary.n_words, np.int32)
        program.start().fill(bits)
        if not bits.any():
            raise RequestError(
                "HR-CONSTRAINT-07", "no text matches the grammar, or the vocabulary can't spell its beginning",
                "look for rules without an end, and for character sets that exclude each other",
            )  # fmt: skip
        return program


def _too_large() -> RequestError:
    return RequestError(
        "HR-CONSTRAINT-04", "the grammar takes xgrammar more memory than there is",
        "make it smaller: lower bounds of repetitions, fewer alternatives",
    )  # fmt: skip


class XProgram(Program):
    __slots__ = ("_compiled", "_make", "_size", "_vocabulary")

    def __init__(self, compiled: Any, make: Any, vocabulary: Vocabulary) -> None:
        self._compiled, self._make, self._vocabulary = compiled, make, vocabulary
        self._size = int(compiled.memory_size_bytes)

    def start(self) -> Walk:
        return XWalk(self._make(self._compiled), self._vocabulary)

    def size_bytes(self) -> int:
        return self._size


class XWalk(Walk):
    """xgrammar has no word for "complete, and nothing can follow": there the mask tells, which is kept for `fill`."""

    __slots__ = ("_matcher", "_n_accepted", "_peeked", "_vocabulary", "_words")

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._words = vocabulary.n_words
        self._n_accepted = 0
        self._peeked: NDArray[np.int32] | None = None
        """The mask of this state."""

    def fill(self, bits: NDArray[np.int32]) -> None:
        row = bits
        if len(bits) > self._words:
            row = bits[: self._words]
            bits[self._words :] = 0
        if self._peeked is None:
            self._matcher.fill_next_token_bitmask(row)
        else:
            row[:] = self._peeked

    def accept(self, token: int) -> bool:
        # xgrammar writes to stderr about these before it refuses them
        if not 0 <= token < self._vocabulary.n_tokens or self._matcher.is_terminated():
            return False
        if token in self._vocabulary.special_ids and not self._allows(token):
            return False
        if not self._matcher.accept_token(token):
            return False
        self._n_accepted += 1
        self._peeked = None
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n <= self._n_accepted, f"rollback of {n} tokens, {self._n_accepted} were accepted"
        if n:
            self._matcher.rollback(n)
            self._n_accepted -= n
            self._peeked = None

    def done(self) -> bool:
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        mask = self._mask()
        eos = self._vocabulary.eos_words
        return bool((mask == eos).all())

    def complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced(self) -> Forced:
        text = self._matcher.find_jump_forward_string()
        return (text.encode(),) if text else ()

    def _mask(self) -> NDArray[np.int32]:
        if self._peeked is None:
            self._peeked = np.zeros(self._words, np.int32)
            self._matcher.fill_next_token_bitmask(self._peeked)
        return self._peeked

    def _allows(self, token: int) -> bool:
        return bool(self._mask()[token >> 5] >> (token & 31) & 1)
