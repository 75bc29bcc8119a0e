"""batch-invariant: the bits of a request's logits are its own, whatever runs beside it and however it got there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.types import EngineOptions

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from reference_driver import Determinism, Run, logits_of, opened, request, tokens_of  # noqa: E402

ENGINE = EngineOptions(max_sequences=45, max_batch_tokens=256, prefill_chunk_tokens=64, block_tokens=8)


def prompts(n: int) -> list[list[int]]:
    """Different lengths, some with a common beginning."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 300, 20).tolist()
    return [
        (shared[: 20 if i % 3 == 0 else 0] + rng.integers(3, 300, int(rng.integers(4, 40))).tolist()) for i in range(n)
    ]


PROMPTS = prompts(45)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def executor(request: pytest.FixtureRequest, dense: Callable[..., str]) -> Iterator[Any]:
    executor = opened(dense(), engine=ENGINE, compute=request.param)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def alone(executor: Any) -> list[Any]:
    """What each prompt gives with the machine to itself: (prompt logits, greedy tokens, sampled tokens)."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        run = Run(executor).add(request("logits", prompt, max_tokens=0, logits=True)).finish()
        greedy = Run(executor).add(request("greedy", prompt)).finish()
        warm = Run(executor).add(request("warm", prompt, temperature=1.0, seed=i)).finish()
        found.append((logits_of(run["logits"]), tokens_of(greedy["greedy"]), tokens_of(warm["warm"])))
    return found


@pytest.mark.parametrize("n", [3, 8, 45])
@pytest.mark.parametrize("order", [0, 1])
def test_in_flight_with_others_in_any_order(executor: Any, alone: list[Any], n: int, order: int) -> None:
    some = np.random.default_rng(order).permutation(len(PROMPTS))[:n].tolist()
    logits = Run(executor).add(*(request(str(i), PROMPTS[i], max_tokens=0, logits=True) for i in some)).finish()
    greedy = Run(executor).add(*(request(str(i), PROMPTS[i]) for i in some)).finish()
    warm = Run(executor).add(*(request(str(i), PROMPTS[i], temperature=1.0, seed=i) for i in some)).finish()
    for i in some:
        np.testing.assert_array_equal(logits_of(logits[str(i)]), alone[i][0])
        assert tokens_of(greedy[str(i)]) == alone[i][1]
        assert tokens_of(warm[str(i)]) == alone[i][2]


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 63])
def test_prefilled_in_any_chunks(executor: Any, alone: list[Any], chunk: int) -> None:
    some = range(0, 45, 5)
    run = Run(executor, replace(ENGINE, prefill_chunk_tokens=chunk))
    done = run.add(*(request(str(i), PROMPTS[i], max_tokens=0, logits=True) for i in some)).finish()
    assert run.engine.n_steps >= max(len(PROMPTS[i]) for i in some) // chunk
    for i in some:
        np.testing.assert_array_equal(logits_of(done[str(i)]), alone[i][0])


def decoded_logits(executor: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Logits of prompt + tokens read in one go, for the positions that gave the tokens."""
    done = Run(executor).add(request("r", prompt + tokens, max_tokens=0, logits=True)).finish()
    return logits_of(done["r"])[len(prompt) - 1 :]


def test_decode_gives_the_logits_of_prefill(executor: Any, alone: list[Any]) -> None:
    """Logprobs of decoded tokens are those of the same text read as a prompt, to the bit."""
    prompt, tokens = PROMPTS[0], alone[0][1]
    run = Run(executor).add(request("r", prompt, logprobs=5))
    got = run.finish()["r"].logprobs
    read = Run(executor).add(request("p", prompt + tokens, max_tokens=0, prompt_logprobs=5)).finish()["p"]
    assert got == read.prompt_logprobs[len(prompt) :]
    assert decoded_logits(executor, prompt, tokens).argmax(1).tolist()[:-1] == tokens


def test_cold_or_from_a_prefix_hit(executor: Any, alone: list[Any]) -> None:
    run = Run(executor)
    for turn in range(2):
        run.add(*(request(f"{turn}-{i}", PROMPTS[i], logprobs=3) for i in range(0, 45, 3)))
        done = run.finish()
    for i in range(0, 45, 3):
        first, second = done[f"0-{i}"], done[f"1-{i}"]
        assert second.cached >= 16, "the second turn must find the prefix"
        assert tokens_of(first) == tokens_of(second) == alone[i][1]
        assert first.logprobs == second.logprobs


def test_after_preemption(dense: Callable[..., str], executor: Any) -> None:
    small = opened(dense(), engine=ENGINE, compute=executor._options.compute, kv_tokens=12 * 8)
    run = Run(small)
    run.add(*(request(str(i), PROMPTS[i][:12], logprobs=2, max_tokens=50) for i in range(6)))
    done = run.finish()
    assert run.engine.scheduler.n_preemptions > 0, "the pool is too large for this test"
    for i in range(6):
        whole = Run(executor).add(request("r", PROMPTS[i][:12], logprobs=2, max_tokens=50)).finish()["r"]
        assert tokens_of(done[str(i)]) == tokens_of(whole)
        assert done[str(i)].logprobs == whole.logprobs


def test_drafts_change_nothing(executor: Any, alone: list[Any]) -> None:
    from headrace.testing.toy import ToyOracle

    def continuation(tokens: Any, n: int) -> list[int]:
        for prompt, (_, greedy, _) in zip(PROMPTS, alone, strict=True):
            whole = prompt + greedy
            if len(tokens) >= len(prompt) and whole[: len(tokens)] == list(tokens):
                return whole[len(tokens) : len(tokens) + n]
        return [5] * n

    run = Run(executor, drafter=ToyOracle(continuation, p=0.6, max_draft=4))
    done = run.add(*(request(str(i), PROMPTS[i], logprobs=2) for i in range(12))).finish()
    assert 0 < run.engine.n_accepted < run.engine.n_drafted
    plain = Run(executor).add(*(request(str(i), PROMPTS[i], logprobs=2) for i in range(12))).finish()
    for i in range(12):
        assert tokens_of(done[str(i)]) == alone[i][1]
        assert done[str(i)].logprobs == plain[str(i)].logprobs


@pytest.mark.parametrize("determinism", ["off", "seeded"])
def test_without_it_company_shows_in_the_bits(dense: Callable[..., str], determinism: Determinism) -> None:
    """The promise costs something, so it must be worth something: plain kernels do break it."""
    executor = opened(dense(), engine=ENGINE, determinism=determinism)
    assert not executor.caps.row_invariant
    whole = [Run(executor).add(request("r", p, max_tokens=0, logits=True)).finish()["r"] for p in PROMPTS[:8]]
    run = Run(executor, replace(ENGINE, prefill_chunk_tokens=3))
    parts = run.add(*(request(str(i), PROMPTS[i], max_tokens=0, logits=True) for i in range(8))).finish()
    same = [np.array_equal(logits_of(whole[i]), logits_of(parts[str(i)])) for i in range(8)]
    assert not all(same)
    for i in range(8):
        np.testing.assert_allclose(logits_of(whole[i]), logits_of(parts[str(i)]), rtol=0, atol=1e-3)


def test_seeded_tokens_follow_the_seed(dense: Callable[..., str]) -> None:
    executor = opened(dense(), engine=ENGINE, determinism="seeded")
    runs = [
        tokens_of(Run(executor).add(request("r", PROMPTS[0], temperature=1.5, top_p=1.0, seed=seed)).finish()["r"])
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
