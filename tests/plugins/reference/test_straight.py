"""The engine against the straight loop over the same ops: same bits, same text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.types import EngineOptions

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from golden import model  # noqa: E402
from reference_driver import Run, logits_of, opened, request, tokens_of  # noqa: E402
from straight import straight_greedy, straight_logits  # noqa: E402

from headrace_plugins.reference.baseline import StraightLoop  # noqa: E402

PROMPTS = [[7, 31, 250, 4, 9], [5, 8, 100, 101, 102, 103, 104, 105, 106, 107], [299, 3, 17]]
ENGINE = EngineOptions(max_sequences=4, block_tokens=4, prefill_chunk_tokens=6)


@pytest.mark.parametrize("name", ["dense", "f1"])
def test_tokens_of_a_batch(dense: Callable[..., str], name: str) -> None:
    executor = opened(dense() if name == "dense" else str(model(name).folder), engine=ENGINE)
    want = straight_greedy(executor, PROMPTS, 20)
    done = Run(executor).add(*(request(str(i), p, max_tokens=20) for i, p in enumerate(PROMPTS))).finish()
    assert [tokens_of(done[str(i)]) for i in range(3)] == want


def test_logits_of_a_prompt(dense: Callable[..., str]) -> None:
    executor = opened(dense(), engine=ENGINE)
    prompt = np.random.default_rng(0).integers(3, 300, 41).tolist()
    done = Run(executor).add(request("r", prompt, max_tokens=0, logits=True)).finish()
    for chunk in (41, 7, 1):
        np.testing.assert_array_equal(logits_of(done["r"]), straight_logits(executor, prompt, chunk))


def test_the_loop_times_the_executor_and_lets_go_of_it(dense: Callable[..., str]) -> None:
    executor = opened(dense(), engine=ENGINE)
    real = executor._forward
    loop = StraightLoop(executor)
    loop.start(PROMPTS)
    loop.step()
    assert loop.decode_s == 0.0, "its own forwards don't count"
    Run(executor).add(request("r", PROMPTS[0])).finish()
    assert loop.decode_s > 0.0
    loop.close()
    assert executor._forward is real
