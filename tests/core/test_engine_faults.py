"""Whatever a plugin's part raises or answers wrongly ends what it owns, and never the engine."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import MODEL, Setup, drain, output, plain, request, run

from headrace.contracts import Drafter, Observer
from headrace.errors import StepFailed
from headrace.testing.toy import ToyObserver
from headrace.testing.toy_parts import _ToyMatcher
from headrace.types import Grammar, Proposal, SamplingParams, StepPlan, StepStats

PARAMS = SamplingParams(max_tokens=10, temperature=0.5, ignore_eos=True)
GRAMMAR = SamplingParams(max_tokens=10, temperature=0.5, constraint=Grammar("charset", "abcdefg{3,14}"))


def boom(*args: Any, **more: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize("method", ["token_bytes", "is_special"])
def test_a_token_that_the_tokenizer_does_not_know_ends_its_request(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = request("good", "good one", PARAMS), request("bad", "bad", PARAMS)
    only_bad = (set(plain(bad)) - set(plain(good))).pop()
    engine = Setup().engine()
    real = getattr(engine.executor.tokenizer, method)
    monkeypatch.setattr(engine.executor.tokenizer, method, lambda token: boom() if token == only_bad else real(token))
    found = run(engine, [good, bad])
    assert output(found["good"]) == plain(good)
    assert found["bad"][0].finish_reason == "error"
    assert "the tokenizer failed" in str(found["bad"][0].error)


@pytest.mark.parametrize("blamed", [[0, 0], [99], [-1], ["x"], [None, 0]])
@pytest.mark.parametrize("fail_at", ["forward", "sample", "collect"])
def test_rows_named_twice_or_wrongly(blamed: list[Any], fail_at: str) -> None:
    failures = iter([None, StepFailed("named", blamed)])
    engine = Setup(faults={"fail": lambda plan: next(failures, None), "fail_at": fail_at}).engine()
    requests = [request("a", "first", PARAMS), request("b", "second", PARAMS)]
    found = run(engine, requests)
    ended = ["a"] if 0 in blamed else []
    assert [id for id, seqs in found.items() if seqs[0].error is not None] == ended
    assert all(output(found[req.id]) == plain(req) for req in requests if req.id not in ended)


@pytest.mark.parametrize("n", [None, -1, 0, 99, "x", 1.5])
def test_a_matcher_that_miscounts_its_masks_ends_its_request(n: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ToyMatcher, "fill_path", lambda self, drafts, bits: n)
    good = request("good", "good one", PARAMS)
    engine = Setup().engine()
    found = run(engine, [good, request("bad", "bad", GRAMMAR)])
    assert output(found["good"]) == plain(good)
    assert not engine.n_failed_steps
    assert "HR-STEP-03" in str(found["bad"][0].error)


def test_sampling_that_raises_leaves_no_step_open(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = iter([False, True])
    engine = Setup().engine()
    from headrace import sampling

    real = sampling.sample_step
    monkeypatch.setattr(sampling, "sample_step", lambda *args: boom() if next(raised, False) else real(*args))
    requests = [request("a", "first", PARAMS), request("b", "second", PARAMS)]
    found = run(engine, requests)
    assert [output(found[req.id]) for req in requests] == [plain(req) for req in requests]


class Moody(Drafter):
    """Fails where it is told to."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    @property
    def max_draft(self) -> int:  # type: ignore[override]
        return boom() if self._fault == "max_draft" else 4

    def propose(self, views: Any) -> Any:
        answers: dict[str, Any] = {"propose": boom, "none": lambda: None, "short": list}
        made = {"no tokens": None, "text": Proposal(("a",)), "far": Proposal((10**9, -1))}  # type: ignore[arg-type]
        return answers.get(self._fault, lambda: [made.get(self._fault, Proposal((97,)))] * len(views))()

    def observe(self, index: int, proposed: int, accepted: int) -> None:
        if self._fault == "observe":
            boom()

    def forget(self, index: int) -> None:
        if self._fault == "forget":
            boom()


@pytest.mark.parametrize(
    "fault", ["max_draft", "propose", "none", "short", "no tokens", "text", "far", "observe", "forget"]
)
def test_a_drafter_that_fails_anywhere_costs_speed_only(fault: str) -> None:
    requests = [request("a", "first", PARAMS), request("b", "second", PARAMS)]
    found = run(Setup(drafter=Moody(fault)).engine(), requests)
    assert [output(found[req.id]) for req in requests] == [plain(req) for req in requests]


class Blind(Observer):
    def on_step(self, stats: StepStats) -> None:
        pass

    def close(self) -> None:
        boom()


def test_every_observer_is_closed_whatever_another_does() -> None:
    engine = Setup(model=MODEL).engine()
    other = ToyObserver()
    engine.observers = [Blind(), other]
    engine.add(request("a", "first", PARAMS))
    drain(engine)
    engine.close()
    assert other.closed


def test_a_nan_in_a_prompt_that_is_only_read_ends_its_request() -> None:
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1, ignore_eos=True)
    good, bad = request("good", "a good long prompt", params), request("bad", "a bad long prompt", params)
    poisoned = {ord("b")}
    engine = Setup(chunk=3, faults={"nan": lambda plan, row: bool(poisoned & set(_tokens(plan, row)))}).engine()
    found = run(engine, [good, bad])
    assert output(found["good"]) == plain(good)
    assert found["bad"][0].finish_reason == "error"
    assert "NaN" in str(found["bad"][0].error)


def _tokens(plan: StepPlan, row: int) -> list[int]:
    return plan.tokens[plan.offset[row] : plan.offset[row + 1]].tolist()


def test_a_request_that_can_not_be_queued_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Setup().engine()
    monkeypatch.setattr(engine._grammars, "compile", boom)
    timed = SamplingParams(max_tokens=4, constraint=Grammar("charset", "abc{1,4}"), deadline_s=0.0)
    with pytest.raises(RuntimeError):
        engine.add(request("a", "first", timed))
    good = request("a", "first", PARAMS)
    assert output(run(engine, [good])["a"]) == plain(good)
    engine.close()
