"""What every constraint engine, its compiled grammars and its matchers must do."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.contracts import Compiled, ConstraintEngine, Matcher, Tokenizer
from headrace.errors import HeadraceError
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ConstraintConformance:
    """Subclass; return a new engine from `make()`, and say which grammars with which complete texts it can enforce."""

    n_walks = 8

    def make(self, tokenizer: Tokenizer) -> ConstraintEngine:
        raise NotImplementedError("return your engine from make()")

    def cases(self) -> list[tuple[Grammar, list[str], list[str]]]:
        """(grammar, complete texts that it allows, texts that it refuses); small ones, at least one."""
        raise NotImplementedError("return (grammar, good texts, bad texts) from cases()")

    def bad_grammars(self) -> list[Grammar]:
        """Grammars that compile() must refuse with a HeadraceError."""
        return [Grammar("no-such-kind", "x")]

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return ToyTokenizer(320)

    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> ConstraintEngine:
        return self.make(tokenizer)

    @pytest.fixture
    def compiled(self, engine: ConstraintEngine) -> list[Compiled]:
        return [engine.compile(grammar) for grammar, _, _ in self.cases()]

    # --- grammars

    def test_bad_grammars_are_refused(self, engine: ConstraintEngine) -> None:
        for grammar in self.bad_grammars():
            with pytest.raises(HeadraceError) as caught:
                engine.compile(grammar)
            assert caught.value.code
            assert caught.value.message

    def test_compiles_on_several_threads(self, engine: ConstraintEngine) -> None:
        grammars = [grammar for grammar, _, _ in self.cases()] * 4
        with ThreadPoolExecutor(4) as pool:
            compiled = list(pool.map(engine.compile, grammars))
        assert all(isinstance(one, Compiled) for one in compiled)

    def test_size_is_a_count_of_bytes(self, compiled: list[Compiled]) -> None:
        assert all(one.size_bytes() >= 0 for one in compiled)

    # --- texts

    def test_good_texts_pass_and_then_may_end(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one, (grammar, good, _) in zip(compiled, self.cases(), strict=True):
            for text in good:
                matcher, rest = one.start(), text.encode()
                while rest:
                    assert not matcher.done(), f"{grammar} is done within {text!r}"
                    token = next_token(matcher, rest)
                    assert token in allowed(matcher, tokenizer), f"{grammar} refuses {rest!r} at the end of {text!r}"
                    assert matcher.accept(token)
                    piece = tokenizer.token_bytes(token)
                    assert rest.startswith(piece), f"{grammar} forces {piece!r} where {text!r} goes on with {rest!r}"
                    rest = rest[len(piece) :]
                assert self._may_end(matcher, tokenizer), f"{grammar} does not let {text!r} end"

    def test_bad_texts_do_not_pass(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one, (grammar, _, bad) in zip(compiled, self.cases(), strict=True):
            for text in bad:
                matcher, rest = one.start(), text.encode()
                while rest and not matcher.done():
                    token = next_token(matcher, rest)
                    piece = tokenizer.token_bytes(token)
                    if not rest.startswith(piece) or not matcher.accept(token):
                        break
                    rest = rest[len(piece) :]
                assert rest or not self._may_end(matcher, tokenizer), f"{grammar} allows {text!r}"

    # --- masks

    def test_mask_agrees_with_accept(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        """Every token of the vocabulary: bit set iff accept says yes. accept(False) leaves the state alone."""
        for one in compiled:
            for matcher in self._walks(one, tokenizer):
                if matcher.done():
                    continue
                before = mask(matcher, tokenizer)
                bits = allowed(matcher, tokenizer)
                for token in range(tokenizer.n_vocab):
                    if matcher.accept(token):
                        matcher.rollback(1)
                        assert token in bits, f"token {token} is accepted but masked"
                    else:
                        assert token not in bits, f"token {token} is allowed by the mask but refused"
                assert np.array_equal(mask(matcher, tokenizer), before)

    def test_mask_is_never_empty_before_the_end(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one in compiled:
            for matcher in self._walks(one, tokenizer):
                assert matcher.done() or allowed(matcher, tokenizer)

    def test_fill_overwrites_the_whole_row(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one in compiled:
            clean = mask(one.start(), tokenizer)
            dirty = np.full_like(clean, -1)
            one.start().fill(dirty)
            n_vocab = tokenizer.n_vocab
            assert np.array_equal(unpack(dirty)[:n_vocab], unpack(clean)[:n_vocab])

    def test_fill_twice_is_the_same(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one in compiled:
            matcher = one.start()
            assert np.array_equal(mask(matcher, tokenizer), mask(matcher, tokenizer))

    # --- state

    def test_matchers_are_independent(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one in compiled:
            fresh = mask(one.start(), tokenizer)
            other = one.start()
            for token in self._path(one, tokenizer, random.Random(1)):
                other.accept(token)
            assert np.array_equal(mask(one.start(), tokenizer), fresh)

    @pytest.mark.parametrize("seed", range(6))
    def test_rollback_equals_a_fresh_matcher(self, compiled: list[Compiled], tokenizer: Tokenizer, seed: int) -> None:
        """Advance k, roll back j: masks byte-equal with a matcher that only ever saw k - j tokens."""
        rng = random.Random(seed)
        for one in compiled:
            path = self._path(one, tokenizer, rng)
            for _ in range(self.n_walks):
                k = rng.randint(0, len(path))
                j = rng.randint(0, k)
                matcher, fresh = one.start(), one.start()
                for token in path[:k]:
                    assert matcher.accept(token)
                matcher.rollback(j)
                for token in path[: k - j]:
                    assert fresh.accept(token)
                assert matcher.done() == fresh.done()
                if not fresh.done():
                    assert np.array_equal(mask(matcher, tokenizer), mask(fresh, tokenizer))
                for token in path[k - j :]:
                    assert matcher.accept(token), "after a rollback the same path is allowed again"

    def test_rollback_of_nothing(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        for one in compiled:
            matcher = one.start()
            matcher.rollback(0)
            assert np.array_equal(mask(matcher, tokenizer), mask(one.start(), tokenizer))

    def test_end_token_can_be_rolled_back(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        eos = min(tokenizer.eos_ids)
        for one, (_, good, _) in zip(compiled, self.cases(), strict=True):
            matcher, rest = one.start(), good[0].encode()
            while rest:
                token = next_token(matcher, rest)
                matcher.accept(token)
                rest = rest[len(tokenizer.token_bytes(token)) :]
            if matcher.done():
                continue
            before = mask(matcher, tokenizer)
            assert matcher.accept(eos)
            assert matcher.done()
            matcher.rollback(1)
            assert not matcher.done()
            assert np.array_equal(mask(matcher, tokenizer), before)

    @pytest.mark.parametrize("seed", range(6))
    def test_fill_path_equals_step_by_step(self, compiled: list[Compiled], tokenizer: Tokenizer, seed: int) -> None:
        rng = random.Random(seed)
        width = -(-tokenizer.n_vocab // 32)
        for one in compiled:
            path = self._path(one, tokenizer, rng)
            k = rng.randint(0, max(0, len(path) - 1))
            drafts = path[k : k + 4]
            if drafts and rng.random() < 0.5:
                drafts[rng.randrange(len(drafts))] = rng.randrange(tokenizer.n_vocab)
            matcher, manual = one.start(), one.start()
            for token in path[:k]:
                matcher.accept(token)
                manual.accept(token)
            want = []
            for j in range(len(drafts) + 1):
                if manual.done():
                    break
                want.append(mask(manual, tokenizer))
                if j == len(drafts) or not manual.accept(drafts[j]):
                    break
            bits = np.zeros((1 + len(drafts), width), np.int32)
            assert matcher.fill_path(drafts, bits) == len(want)
            for row, mask_wanted in zip(bits, want, strict=False):
                assert np.array_equal(row, mask_wanted)
            if not matcher.done() and want:
                assert np.array_equal(mask(matcher, tokenizer), want[0]), "fill_path must restore the state"

    # --- forced tokens

    def test_forced_tokens_are_all_that_is_allowed(self, compiled: list[Compiled], tokenizer: Tokenizer) -> None:
        """One after the other; asking changes nothing, and after a rollback the same ones are forced."""
        for one in compiled:
            for matcher in self._walks(one, tokenizer):
                forced = list(matcher.forced())
                assert list(matcher.forced()) == forced, "forced() twice is the same"
                assert not (forced and matcher.done()), "nothing is forced where nothing can follow"
                for i, token in enumerate(forced):
                    assert not matcher.done(), f"done before forced token {i} of {forced}"
                    assert allowed(matcher, tokenizer) == {token}, f"forced token {i} of {forced} is not the only one"
                    assert token not in tokenizer.eos_ids, "the end is never forced: done() says it"
                    assert matcher.accept(token)
                matcher.rollback(len(forced))
                assert list(matcher.forced()) == forced
                if forced:
                    assert allowed(matcher, tokenizer) == {forced[0]}

    # --- helpers

    def _may_end(self, matcher: Matcher, tokenizer: Tokenizer) -> bool:
        return matcher.done() or bool(allowed(matcher, tokenizer) & tokenizer.eos_ids)

    def _path(self, compiled: Compiled, tokenizer: Tokenizer, rng: random.Random, most: int = 12) -> list[int]:
        """A random walk through allowed tokens, without EOS."""
        matcher, path = compiled.start(), list[int]()
        while len(path) < most and not matcher.done():
            choices = sorted(allowed(matcher, tokenizer) - tokenizer.eos_ids)
            if not choices:
                break
            path.append(rng.choice(choices))
            assert matcher.accept(path[-1])
        return path

    def _walks(self, compiled: Compiled, tokenizer: Tokenizer) -> Seq[Matcher]:
        matchers = [compiled.start()]
        for seed in range(self.n_walks // 4):
            rng = random.Random(seed)
            path = self._path(compiled, tokenizer, rng)
            matcher = compiled.start()
            for token in path[: rng.randint(0, len(path))]:
                matcher.accept(token)
            matchers.append(matcher)
        return matchers


def next_token(matcher: Matcher, text: bytes) -> int:
    """What a model that writes this text, a byte per token, says next: a forced token where there is one."""
    forced = matcher.forced()
    return forced[0] if forced else text[0]


def mask(matcher: Matcher, tokenizer: Tokenizer) -> NDArray[np.int32]:
    bits = np.zeros(-(-tokenizer.n_vocab // 32), np.int32)
    matcher.fill(bits)
    return bits


def unpack(bits: NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")


def allowed(matcher: Matcher, tokenizer: Tokenizer) -> set[int]:
    """Ids that the matcher's mask allows."""
    return set(np.flatnonzero(unpack(mask(matcher, tokenizer))[: tokenizer.n_vocab]).tolist())
