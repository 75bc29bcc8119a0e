"""Grammars on llguidance: an Earley parser over a lexer of regular expressions, walked along the trie of all tokens."""

from __future__ import annotations

import re
from ctypes import addressof, c_char
from typing import TYPE_CHECKING

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Rules
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Forced, Program, Walk

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

INITIAL_FUEL = 20_000_000
"""Lexer fuel of a compile, 20 times llguidance's default: it takes a second or so, and then ends in an error."""
STEP_FUEL = 1_000_000
STEP_ITEMS = 200_000
"""Fuel and Earley items of one mask: about 70 ms at most."""
LEXER_STATES = 50_000
"""Of one grammar, at 1 to 2 kB each: 100 MB at most."""
GRAMMAR_SIZE = 2_000_000

_SPECIAL = re.compile(rb"\xff\[\d+\]")
"""How forced bytes name a special token."""
_LIMITS = re.compile(r"limits\.|fuel|too (large|complex|big|many)|; max is |^panic", re.IGNORECASE)
_BITS = (*(1 << i for i in range(31)), -(1 << 31))
"""The bits of an int32."""
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""Reasons to stop where nothing can follow."""
LONG_BYTES = 4096
"""Of longer forced text so much is looked at: the library tokenises all that is forced, each time it is asked."""
MOST_SAID = 300
"""Characters of what the library says that an error repeats."""


class LLGuidance:
    """Compiles for one vocabulary. Any thread."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self.vocabulary = vocabulary
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=sorted(vocabulary.eos_ids))
        self.limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_lexer_states=LEXER_STATES,
            max_grammar_size=GRAMMAR_SIZE,
            verbose_errors=False,
        )

    def print(self, rules: Rules) -> str:
        """See `headrace_plugins.constraints.engines.Engine`."""
        from headrace_plugins.constraints.lark import print_lark

        return print_lark(rules, self.vocabulary.special)

    def compile_text(self, text: str) -> Program:
        """Compile a Lark grammar. See `Engine`."""
        from llguidance import LLMatcher

        from headrace_plugins.constraints.lark import HEADER

        grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)
        # works out the first mask, so that every copy begins with its lexer states
        allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error() and not _dead_end(matcher):
            raise _refused(matcher)
        if not any(allowed):
            raise RequestError(
                "HR-CONSTRAINT-07", "no text matches the grammar, or the vocabulary can't spell its beginning",
                "look for rules without an end, and for character sets that exclude each other",
            )  # fmt: skip
        over = matcher.is_accepting() and allowed.rstrip(b"\0") == self.vocabulary.eos_words.tobytes().rstrip(b"\0")
        program = LLProgram(matcher, self.vocabulary, len(text), over)
        if "~" not in text or text.startswith(HEADER):
            return program
        return Guarded(program, self._named(text), self.vocabulary)

    def _named(self, text: str) -> frozenset[int]:
        """Special tokens that a Lark text may name; more than it does where it has ranges."""
        special = self.vocabulary.special
        if re.search(r"<\[[^\]]*[*^]", text):
            return self.vocabulary.special_ids
        named = {token for name, token in special.items() if name in text}
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", " ".join(re.findall(r"<\[([^\]]*)\]>", text))):
            named |= self.vocabulary.special_ids & set(range(int(first), int(last or first) + 1))
        return frozenset(named)


class _Tokens:
    """The vocabulary as llguidance's TokenizerWrapper takes it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        self.eos_token_id = min(vocabulary.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.tokens = list(vocabulary.text)
        for token in self.special_token_ids:
            self.tokens[token] = tokenizer.token_bytes(token)
        self._spell = vocabulary.spell

    def __call__(self, text: bytes | str) -> list[int]:
        return self._spell(text if isinstance(text, bytes) else text.encode())


class LLProgram(Program):
    """A matcher at the start, to be copied. over: the empty text is all that the grammar allows."""

    __slots__ = ("_matcher", "_over", "_size", "_vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, n_text: int, over: bool) -> None:
        self._matcher, self._vocabulary, self._over = matcher, vocabulary, over
        self._size = FIXED_BYTES + BYTES_PER_CHARACTER * n_text

    def start(self) -> Walk:
        return LLWalk(self._matcher, self._vocabulary, self._over)

    def size_bytes(self) -> int:
        return self._size


class Guarded(Program):
    """A program that lets no special tokens through but some. A complement (`~`) in a Lark grammar matches any bytes,
    those too that stand for special tokens in llguidance; what `print_lark` writes never does."""

    __slots__ = ("_program", "_refused", "_words")

    def __init__(self, program: Program, named: frozenset[int], vocabulary: Vocabulary) -> None:
        self._program = program
        self._refused = vocabulary.special_ids - named - vocabulary.eos_ids
        self._words = vocabulary.mask(self._refused, negated=True)

    def start(self) -> Walk:
        return _GuardedWalk(self._program.start(), self._refused, self._words)

    def size_bytes(self) -> int:
        return self._program.size_bytes() + self._words.nbytes


class _GuardedWalk(Walk):
    __slots__ = ("_refused", "_walk", "_words")

    def __init__(self, walk: Walk, refused: frozenset[int], words: NDArray[np.int32]) -> None:
        self._walk, self._refused, self._words = walk, refused, words

    def fill(self, bits: NDArray[np.int32]) -> None:
        self._walk.fill(bits)
        bits[: len(self._words)] &= self._words

    def accept(self, token: int) -> bool:
        return token not in self._refused and self._walk.accept(token)

    def rollback(self, n: int) -> None:
        self._walk.rollback(n)

    def done(self) -> bool:
        return self._walk.done()

    def complete(self) -> bool:
        return self._walk.complete()

    def forced(self) -> Forced:
        return self._walk.forced()


FIXED_BYTES = 45_000
BYTES_PER_CHARACTER = 100
"""Memory of a compiled grammar by the length of its Lark text. The resident memory per grammar, 150 unique ones with
SmolLM2's vocabulary: 42 kB for a choice of two texts (estimated 45), 147 kB for an object of two members (226), 243 kB
for one of twenty (594), 165 kB for a choice of 300 texts (993)."""


class LLWalk(Walk):
    """llguidance's matcher never leaves an error; then the walk goes on with a new one, from its own record."""

    __slots__ = ("_bytes", "_failed", "_free", "_matcher", "_over", "_start", "_tokens", "_vocabulary", "_words")

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary, over: bool) -> None:
        self._start, self._over = start, over
        self._matcher = start.deep_copy()
        self._tokens: list[int] = []
        self._failed = False
        self._free = False
        """Known: nothing is forced in this state."""
        self._vocabulary = vocabulary
        self._words = vocabulary.n_words
        self._bytes = 4 * vocabulary.n_words

    def fill(self, bits: NDArray[np.int32]) -> None:
        matcher = self._matcher
        forced = b"" if self._free else matcher.compute_ff_bytes()
        # without tokens llguidance's own mask is the right one, but not for text that can't be spelt
        long = len(forced) > LONG_BYTES
        if forced and (long or matcher.compute_ff_tokens() or not self._spelt(forced)):
            self._fill_forced(bits, forced[:LONG_BYTES] if long else forced)
            return
        # bits.ctypes.data says the same at four times the cost
        matcher.unsafe_compute_mask_ptr(addressof(c_char.from_buffer(bits)), self._bytes)  # type: ignore[arg-type]
        if len(bits) > self._words:
            bits[self._words :] = 0
        if matcher.is_error():
            self._fail()
            bits[:] = 0

    def _fill_forced(self, bits: NDArray[np.int32], forced: bytes) -> None:
        """The mask where text is forced: any of its spellings. llguidance's own has but one."""
        vocabulary = self._vocabulary
        text, special, number = forced.partition(b"\xff[")
        if text:
            tokens = [token for token in vocabulary.with_prefix(text[:1]) if text.startswith(vocabulary.text[token])]
            if not special:
                longer = vocabulary.longer_than(text)
                tokens += [token for token in longer if self._matcher.validate_tokens([token])]
        else:
            tokens = [int(number[: number.index(b"]")])]
        bits[:] = 0
        for token in tokens:
            bits[token >> 5] |= _BITS[token & 31]

    def accept(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) == 1:
            self._tokens.append(token)
            self._free = False
            return True
        if self._matcher.is_error():
            self._fail()
        return False

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self._tokens), f"rollback of {n} tokens, {len(self._tokens)} were accepted"
        if not n:
            return
        del self._tokens[-n:]
        self._free = False
        if self._failed:
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._tokens)
            self._failed = False
        else:
            self._matcher.rollback(n)

    def done(self) -> bool:
        if self._over:  # llguidance would stop behind the end token alone
            return True
        return not self._failed and self._matcher.is_stopped() and not self._matcher.is_error()

    def complete(self) -> bool:
        return not self._failed and self._matcher.is_accepting()

    def forced(self) -> Forced:
        # llguidance tokenises with `_Tokens` and leaves out what a longer allowed token might take
        matcher = self._matcher
        rest = b"" if self._free else matcher.compute_ff_bytes()
        if not rest:
            self._free = True
            return ()
        if len(rest) > LONG_BYTES:
            text, special, _ = rest[:LONG_BYTES].partition(b"\xff")
            if not special:
                return (text,)
            if text:
                return (text,) if len(text) >= self._vocabulary.longest else ()
        ids: list[int] = []
        for token in matcher.compute_ff_tokens():
            data = self._vocabulary.text[token] or b"\xff[%d]" % token
            if not rest.startswith(data):
                break  # from here on the vocabulary can't spell it
            ids.append(token)
            rest = rest[len(data) :]
        return ids

    def _spelt(self, forced: bytes) -> bool:
        """Can the vocabulary spell this text?"""
        return all(self._vocabulary.spell(text) for text in _SPECIAL.split(forced) if text)

    def _fail(self) -> None:
        """The matcher is in an error: nothing to go on with (then the mask is empty), or a limit."""
        self._failed = True
        if not _dead_end(self._matcher):
            raise _refused(self._matcher)


def _dead_end(matcher: LLMatcher) -> bool:
    """Is the error that nothing can follow? The reason to stop does not always say it, the text does."""
    return matcher.stop_reason() in _DEAD_ENDS or matcher.get_error().partition("\n")[0] in _DEAD_ENDS


def _refused(matcher: LLMatcher) -> RequestError:
    text = matcher.get_error().split("\n<state>")[0].strip()
    first, _, rest = text.partition("\n")
    if matcher.stop_reason().endswith("TooComplex") or (_LIMITS.search(first) and not first.startswith("at ")):
        return RequestError(
            "HR-CONSTRAINT-04", f"the grammar is beyond a limit of llguidance: {_short(first)}",
            "make it smaller: shorter patterns, lower bounds of repetitions, fewer alternatives",
        )  # fmt: skip
    near = rest.replace("<non-verbose/>", "").rstrip()
    return RequestError("HR-CONSTRAINT-02", f"the grammar can't be read: {_short(first)}", _short(near))


def _short(text: str) -> str:
    """The library repeats the lines of a grammar, however long they are."""
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]} ..."
