"""Masks and forced tokens over the vocabulary of a real model, in which 21 bytes have no token of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.contracts import Compiled, Matcher, Tokenizer
from headrace.testing.conformance.constraint import allowed, mask
from headrace.types import Grammar
from headrace_plugins.constraints.engines import SERVES
from headrace_plugins.constraints.router import Constraints

pytestmark = pytest.mark.gguf

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "n": {"type": "integer", "minimum": -5},
            "kind": {"enum": ["Große Straße", "日本", "a\u0300"]},
        },
        "required": ["name", "n", "kind"],
        "additionalProperties": False,
    }
)
GRAMMARS = [
    Grammar("json_schema", SCHEMA),
    Grammar("regex", "(the answer is |Ответ: )[0-9]{2,4}( degrees)?\\."),
    Grammar("json_schema", SCHEMA, trigger="<|im_end|>"),
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Iterator[Tokenizer]:
    from gguf_driver import new_executor

    executor = new_executor(smollm2, context_tokens=64)
    executor.open()
    yield executor.tokenizer
    executor.close()


@pytest.fixture(scope="module", params=SERVES)
def compiled(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> list[Compiled]:
    pytest.importorskip(SERVES[request.param].package, reason=f"the engine {request.param} is not installed")
    engine = Constraints(None, tokenizer, (request.param,))
    return [engine.compile(grammar) for grammar in GRAMMARS]


def path(compiled: Compiled, tokenizer: Tokenizer, rng: random.Random, most: int = 40) -> list[int]:
    """Allowed tokens, drawn at random, to the end if that comes soon."""
    matcher, tokens = compiled.start(), list[int]()
    while not matcher.done() and len(tokens) < most:
        choices = sorted(allowed(matcher, tokenizer))
        assert choices, f"a dead end after {spelt(tokens, tokenizer)!r}"
        tokens.append(rng.choice(choices))
        assert matcher.accept(tokens[-1])
    return tokens


def spelt(tokens: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in tokens)


def after(compiled: Compiled, tokens: list[int]) -> Matcher:
    matcher = compiled.start()
    for token in tokens:
        assert matcher.accept(token)
    return matcher


@pytest.mark.parametrize("seed", range(4))
def test_rollback_equals_a_fresh_matcher(compiled: list[Compiled], tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    for one in compiled:
        tokens = path(one, tokenizer, rng)
        for _ in range(6):
            k = rng.randint(0, len(tokens))
            j = rng.randint(0, k)
            matcher, fresh = after(one, tokens[:k]), after(one, tokens[: k - j])
            if rng.random() < 0.5:
                matcher.forced()
            matcher.rollback(j)
            assert matcher.done() == fresh.done()
            assert list(matcher.forced()) == list(fresh.forced())
            if not fresh.done():
                assert np.array_equal(mask(matcher, tokenizer), mask(fresh, tokenizer))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_masked_is_refused(compiled: list[Compiled], tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    for one in compiled:
        tokens = path(one, tokenizer, rng, 20)
        matcher = after(one, tokens[: rng.randint(0, len(tokens))])
        if matcher.done():
            continue
        bits = allowed(matcher, tokenizer)
        near = {token + d for token in list(bits)[:200] for d in (-1, 1)} | set(
            rng.sample(range(tokenizer.n_vocab), 500)
        )
        for token in (near | set(list(bits)[:200])) & set(range(tokenizer.n_vocab)):
            accepted = matcher.accept(token)
            assert accepted == (token in bits), (token, tokenizer.token_bytes(token))
            if accepted:
                matcher.rollback(1)


def test_finished_texts_are_valid(compiled: list[Compiled], tokenizer: Tokenizer) -> None:
    for seed in range(4):
        matcher, tokens, rng = compiled[0].start(), list[int](), random.Random(seed)
        while not matcher.done():
            forced = list(matcher.forced())
            bits = allowed(matcher, tokenizer)
            assert not forced or bits == {forced[0]}
            short = sorted(bits, key=lambda token: (len(tokenizer.token_bytes(token)), token))
            tokens.append(forced[0] if forced else rng.choice(short[:40]))
            assert matcher.accept(tokens[-1])
        value = json.loads(spelt(tokens, tokenizer))
        assert len(value["name"]) <= 12
        assert value["kind"] in ("Große Straße", "日本", "a\u0300")


def test_forced_tokens_are_those_of_the_tokenizer(compiled: list[Compiled], tokenizer: Tokenizer) -> None:
    matcher = after(compiled[1], tokenizer.encode("the", add_bos=False))
    forced = list(matcher.forced())
    assert len(forced) >= 2
    assert forced == tokenizer.encode(" answer is 42", add_bos=False)[: len(forced)]
