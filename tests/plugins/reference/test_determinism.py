"""batch-invariant: the bits of a request's logits are its own, whatever runs beside it and however it got there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from headrace.types import EngineOptions, Sequence

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from golden import GOLDEN  # noqa: E402
from reference_driver import Determinism, Run, logits_of, new_executor, opened, request, tokens_of  # noqa: E402

from headrace.testing.toy import ToyOracle  # noqa: E402
from headrace_plugins.reference.executor import ReferenceExecutor  # noqa: E402

ENGINE = EngineOptions(max_sequences=45, max_batch_tokens=256, prefill_chunk_tokens=64, block_tokens=8)
V41 = str(GOLDEN / "model_full" / "f1")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, float32": ("dense", {}),
    "dense, bfloat16": ("dense", {"compute": "bfloat16"}),
    "deepseek_v41, float32": (V41, {"block_tokens": 8}),
    "deepseek_v41, bfloat16": (V41, {"block_tokens": 8, "compute": "bfloat16"}),
    "deepseek_v41, compact": (V41, {"block_tokens": 8, "replay": "compact"}),
}


def prompts(n: int) -> list[list[int]]:
    """Different lengths, some with a common beginning."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 300, 20).tolist()
    return [
        (shared[: 20 if i % 3 == 0 else 0] + rng.integers(3, 300, int(rng.integers(4, 40))).tolist()) for i in range(n)
    ]


PROMPTS = prompts(45)


@dataclass
class Case:
    path: str
    options: dict[str, Any]
    executor: ReferenceExecutor
    alone: dict[Any, Sequence] = field(default_factory=dict)

    def ask(self, i: int, **more: Any) -> Any:
        """Prompt i: 4 greedy tokens, with the logits of all its positions where the model has them."""
        given: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "logits": self.executor.caps.prompt_logits}
        return request(str(i), PROMPTS[i], **given | more)

    def run(self, some: Any, engine: EngineOptions = ENGINE, **more: Any) -> dict[str, Sequence]:
        return Run(self.executor, engine).add(*(self.ask(i, **more) for i in some)).finish()

    def check(self, i: int, found: Sequence, **more: Any) -> None:
        """found is, to the bit, what prompt i gives with the machine to itself."""
        key = (i, *more.items())
        if key not in self.alone:
            self.alone[key] = self.run([i], **more)[str(i)]
        want = self.alone[key]
        assert tokens_of(found) == tokens_of(want)
        assert found.logprobs == want.logprobs
        if want.prompt_logits is not None:
            np.testing.assert_array_equal(logits_of(found), logits_of(want))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, dense: Callable[..., str]) -> Iterator[Case]:
    path, options = CASES[request.param]
    path = dense() if path == "dense" else path
    executor = opened(path, engine=ENGINE, **options)
    assert executor.caps.row_invariant
    yield Case(path, options, executor)
    executor.close()


@pytest.mark.parametrize("n", [3, 8, 45])
def test_in_flight_with_others_in_any_order(case: Case, n: int) -> None:
    if n == 45 and case.options.keys() & {"compute", "replay"}:
        pytest.skip("45 once per model")
    some = np.random.default_rng(n).permutation(len(PROMPTS))[:n].tolist()
    for order in (some, some[::-1])[: 1 if n == 45 else 2]:
        done = case.run(order)
        for i in some:
            case.check(i, done[str(i)])


def test_tokens_of_a_seed_follow(case: Case) -> None:
    warm = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
    done = case.run(range(4), **warm)
    for i in range(4):
        case.check(i, done[str(i)], **warm)
    assert tokens_of(done["0"]) != tokens_of(case.run([0], **warm | {"seed": 6})["0"])


@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_prefilled_in_any_chunks(case: Case, chunk: int) -> None:
    some = range(0, 45, 9)
    run = Run(case.executor, replace(ENGINE, prefill_chunk_tokens=chunk))
    done = run.add(*(case.ask(i) for i in some)).finish()
    assert run.engine.n_steps >= max(len(PROMPTS[i]) for i in some) // chunk
    for i in some:
        case.check(i, done[str(i)])


def test_decode_gives_the_logits_of_prefill(case: Case) -> None:
    """Logprobs of decoded tokens are those of the same text read as a prompt, to the bit."""
    if not case.executor.caps.prompt_logits:
        pytest.skip("the second half of the model reads no prompt")
    found = case.run([0])["0"]
    text = PROMPTS[0] + tokens_of(found)
    read = Run(case.executor).add(request("p", text, max_tokens=0, prompt_logprobs=2)).finish()["p"]
    assert read.prompt_logprobs is not None
    assert found.logprobs == read.prompt_logprobs[len(PROMPTS[0]) :]


def test_cold_or_from_a_prefix_hit(case: Case) -> None:
    some = [i for i in range(0, 45, 3) if len(PROMPTS[i]) > 40]
    assert len(some) >= 3
    run = Run(case.executor)
    turns = []
    for _ in range(2):
        turns.append(dict(run.add(*(case.ask(i, logits=False) for i in some)).finish()))
    for i in some:
        latest = len(PROMPTS[i]) - max(1, case.executor.layout.rerun_tokens)
        assert turns[1][str(i)].cached >= latest - latest % 8, "the second turn must find the prefix"
        for done in turns:  # not before: who asks alone takes the blocks of this run
            case.check(i, done[str(i)], logits=False)


def test_after_the_turn_before(case: Case) -> None:
    """A chat: the next prompt is the last one, its answer and something new; its rings come from the answer's end."""
    run = Run(case.executor)
    first = run.add(request("a", PROMPTS[1], max_tokens=30)).finish()["a"]
    text = [*first.tokens, 17, 23, 5]
    second = run.add(request("b", text, max_tokens=6, logprobs=2)).finish()["b"]
    assert second.cached >= 8 * (len(PROMPTS[1]) // 8), "at least the prompt must be found"
    cold = Run(case.executor).add(request("b", text, max_tokens=6, logprobs=2)).finish()["b"]
    assert cold.cached == 0
    assert tokens_of(second) == tokens_of(cold)
    assert second.logprobs == cold.logprobs


def test_after_preemption(case: Case) -> None:
    small = opened(case.path, engine=ENGINE, kv_tokens=7 * 8, **case.options)
    asked = [request(str(i), PROMPTS[i][:12], logprobs=2, max_tokens=16) for i in range(3)]
    run = Run(small).add(*asked)
    done = run.finish()
    assert run.engine.scheduler.n_preemptions > 0, "the pool is too large for this test"
    for i, each in enumerate(asked):
        whole = Run(case.executor).add(each).finish()[str(i)]
        assert tokens_of(done[str(i)]) == tokens_of(whole)
        assert done[str(i)].logprobs == whole.logprobs


def test_drafts_change_nothing(case: Case) -> None:
    some = range(5)
    plain = case.run(some, logits=False, max_tokens=16)
    whole = [plain[str(i)].tokens for i in some]

    def continuation(tokens: Any, n: int) -> list[int]:
        found = next((text for text in whole if text[: len(tokens)] == list(tokens)), None)
        return found[len(tokens) : len(tokens) + n] if found else [5] * n

    run = Run(case.executor, drafter=ToyOracle(continuation, p=0.6, max_draft=4))
    done = run.add(*(case.ask(i, logits=False, max_tokens=16) for i in some)).finish()
    assert 0 < run.engine.n_accepted < run.engine.n_drafted
    for i in some:
        assert tokens_of(done[str(i)]) == tokens_of(plain[str(i)])
        assert done[str(i)].logprobs == plain[str(i)].logprobs


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["dense, float32", "deepseek_v41, float32"])
def test_threads_share_the_work_by_no_rule_that_shows(dense: Callable[..., str], name: str) -> None:
    path, options = CASES[name]
    executor = opened(dense() if path == "dense" else path, engine=ENGINE, **options)
    fresh = Case(path, options, executor)
    done = fresh.run(range(8), replace(ENGINE, prefill_chunk_tokens=5))
    for i in range(8):
        fresh.check(i, done[str(i)])
    executor.close()


# --- what it is not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("determinism", ["off", "seeded"])
def test_without_it_company_shows_in_the_bits(
    dense: Callable[..., str], determinism: Determinism, varying_products: None
) -> None:
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


def test_a_rebuilt_window_is_called_an_approximation() -> None:
    exact = new_executor(V41, engine=ENGINE, block_tokens=8)
    rebuilt = new_executor(V41, engine=ENGINE, block_tokens=8, prefix="replay")
    assert not exact.caps.approximations
    assert exact.layout.n_snapshots > 0
    assert "8 tokens before" in rebuilt.caps.approximations[0]
    assert (rebuilt.layout.n_snapshots, rebuilt.layout.replay_tokens) == (0, 8)


@pytest.mark.parametrize("replay", ["mask", "compact"])
def test_a_model_that_is_cut_says_so_and_repeats(replay: str) -> None:
    cut = new_executor(V41, engine=ENGINE, block_tokens=8, replay=replay, determinism="batch-invariant")
    assert (cut.caps.row_invariant, cut.caps.approximations) == (True, ())
    assert f"backend.replay = '{replay}'" in cut.caps.departures[0]
    assert not new_executor(V41, engine=ENGINE, block_tokens=8).caps.departures


def test_a_rebuilt_window_is_close_and_is_no_copy() -> None:
    """prefix = "replay" runs the tokens before a hit again: near the exact logits, not equal to them."""
    executor = opened(V41, engine=ENGINE, block_tokens=8, prefix="replay")
    run = Run(executor)
    prompt = PROMPTS[3]
    cold = run.add(request("a", prompt, logprobs=300, max_tokens=1)).finish()["a"]
    again = run.add(request("b", prompt, logprobs=300, max_tokens=1)).finish()["b"]
    assert again.cached > 0
    values = [dict(zip(*seq.logprobs[0], strict=True)) for seq in (cold, again) if seq.logprobs]
    shared = sorted(set(values[0]) & set(values[1]))
    rows = np.array([[each[i] for i in shared] for each in values])
    assert np.corrcoef(rows)[0, 1] > 0.5
    assert not np.array_equal(*rows)


def test_mask_and_compact_are_the_same() -> None:
    asked = [request(str(i), PROMPTS[i], logprobs=3) for i in range(6)]
    found = []
    for replay in ("mask", "compact"):
        executor = opened(V41, engine=ENGINE, block_tokens=8, replay=replay)
        assert executor.layout.rerun_tokens == 8 + 12, "the window and the slack"
        assert executor.caps.refuses
        assert not executor.caps.prompt_logits
        tails: set[int] = set()
        _watch_tails(executor, tails)
        found.append(Run(executor).add(*asked).finish())
        assert tails == {max(0, len(PROMPTS[i]) - 20) for i in range(6)}
    for i in range(6):
        assert tokens_of(found[0][str(i)]) == tokens_of(found[1][str(i)])
        assert found[0][str(i)].logprobs == found[1][str(i)].logprobs


def _watch_tails(executor: ReferenceExecutor, tails: set[int]) -> None:
    """Note where the second half of the model begins, of every row."""
    real = executor._forward

    def forward(batch: Any, caches: Any) -> Any:
        tails.update(batch.tail.tolist())
        return real(batch, caches)

    executor._forward = forward
