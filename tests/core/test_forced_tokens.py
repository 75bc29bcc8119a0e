"""Tokens that a grammar forces are appended without a model step, and nothing else differs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from engine_harness import Setup, drain, ngram, oracle, output, plain, request, run

from headrace.contracts import Compiled, Matcher
from headrace.engine import Engine
from headrace.errors import RequestError, StepFailed
from headrace.runner import build_output
from headrace.testing import toy_parts
from headrace.testing.toy_parts import _ToyMatcher
from headrace.testing.toy_tokenizer import ToyTokenizer
from headrace.types import Grammar, Request, SamplingParams, Sequence, StepPlan

BRANCHES = Grammar("choice", '["it was one and the same thing", "it was another one in the end", "it was"]')
ONE = Grammar("choice", '["that and the other thing"]')
ONE_IDS = ToyTokenizer(270).encode("that and the other thing", add_bos=False)


def ask(grammar: Grammar, id: str = "r", prompt: str = "what? ", **params: Any) -> Request:
    defaults = {"max_tokens": 40, "temperature": 0.8, "constraint": grammar}
    return request(id, prompt, SamplingParams(**defaults | params))  # type: ignore[arg-type]


def both_ways(req: Request, **setup: Any) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences with forced tokens appended, and with each of them sampled; equal in all but the steps."""
    jumped, sampled = Setup(**setup).engine(), Setup(**setup, jumps=False).engine()
    found, wanted = run(jumped, [req])[req.id], run(sampled, [req])[req.id]
    assert [output([seq]) for seq in found] == [output([seq]) for seq in wanted]
    assert [seq.finish_reason for seq in found] == [seq.finish_reason for seq in wanted]
    assert [seq.stop_reason for seq in found] == [seq.stop_reason for seq in wanted]
    assert [str(seq.error) for seq in found] == [str(seq.error) for seq in wanted]
    assert [seq.stream.text for seq in found] == [seq.stream.text for seq in wanted]
    assert not any(seq.n_forced for seq in wanted)
    assert not jumped.n_failed_steps
    assert jumped.kv.used_ratio() == 0
    return found, wanted


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_steps_are_saved_and_tokens_are_the_same(kv: str) -> None:
    req = ask(BRANCHES)
    engine = Setup(kv=kv).engine()
    (seq,) = run(engine, [req])["r"]
    assert output([seq]) == plain(req)
    assert seq.n_forced > 0
    assert engine.n_steps == seq.n_generated - seq.n_forced


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_a_text_that_is_forced_to_its_end_needs_no_step(kv: str) -> None:
    engine = Setup(kv=kv).engine()
    seqs = run(engine, [ask(ONE, n=2)])["r"]
    assert engine.n_steps == 0
    assert [output([seq]) for seq in seqs] == [ONE_IDS] * 2
    assert [seq.finish_reason for seq in seqs] == ["stop"] * 2
    assert build_output(seqs, engine.executor.tokenizer, None).usage.forced_tokens == 2 * len(ONE_IDS)


@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("drafts", [False, True])
def test_samples_share_the_prompt_and_what_is_forced_at_once(kv: str, drafts: bool) -> None:
    req = ask(BRANCHES, n=4, temperature=1.5, ignore_eos=True)
    wanted = [plain(req, sample_index=i) for i in range(4)]
    assert len({tuple(tokens) for tokens in wanted}) > 1
    engine = Setup(kv=kv, block_tokens=2, drafter=ngram() if drafts else None).engine()
    seqs = run(engine, [req])["r"]
    assert [output([seq]) for seq in seqs] == wanted
    assert all(0 < seq.cached <= seq.n_prompt for seq in seqs[1:])
    assert len({seq.n_start for seq in seqs}) == 1
    assert seqs[0].n_start > 0


@pytest.mark.parametrize("most", [0, 1, 5, len(ONE_IDS)])
def test_the_limit_may_lie_among_them(most: int) -> None:
    found, _ = both_ways(ask(ONE, max_tokens=most, n=2))
    assert [output([seq]) for seq in found] == [ONE_IDS[:most]] * 2
    assert found[0].finish_reason == ("stop" if most == len(ONE_IDS) else "length")


def test_stops_among_them() -> None:
    found, _ = both_ways(ask(ONE, stop=("he oth",)))
    assert found[0].stream.text == "that and t"
    found, _ = both_ways(ask(ONE, stop_token_ids=(ONE_IDS[6],)))
    assert output(found) == ONE_IDS[:7]


def test_penalties_count_them() -> None:
    req = ask(BRANCHES, repetition_penalty=1.7, frequency_penalty=0.9, temperature=1.0)
    found, wanted = both_ways(req)
    assert found[0].n_forced
    assert found[0].counts == wanted[0].counts


def test_with_logprobs_each_goes_through_the_model() -> None:
    for grammar in (ONE, BRANCHES):
        found, wanted = both_ways(ask(grammar, logprobs=2))
        assert found[0].n_forced == 0
        assert found[0].logprobs == wanted[0].logprobs
        assert len(found[0].logprobs or ()) == found[0].n_generated


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_prompt_whose_positions_are_reported_is_read_first(chunk: int) -> None:
    found, wanted = both_ways(ask(BRANCHES, prompt_logprobs=1, prompt="a longer question: "), chunk=chunk)
    assert found[0].prompt_logprobs == wanted[0].prompt_logprobs
    assert len(found[0].prompt_logprobs or ()) == found[0].n_prompt
    assert found[0].n_start == 0
    assert found[0].n_forced > 0, "once it was read, there is no reason to wait"


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {ONE_IDS[3]: float("-inf")}}, {"bad_words": ("and",)}, {"stop_token_ids": (ONE_IDS[3],)}],
    ids=["bias", "bad_words", "min_tokens"],
)
def test_what_is_forced_and_banned_is_an_error(params: dict[str, Any]) -> None:
    """min_tokens bans stop ids, one of which is forced here."""
    found, _ = both_ways(ask(ONE, min_tokens=20 if "stop_token_ids" in params else 0, **params))
    assert found[0].finish_reason == "error"
    assert "HR-CONSTRAINT-07" in str(found[0].error)


def test_a_slot_is_not_kept_by_those_that_end_before_their_first_step() -> None:
    engine = Setup(kv="slots", n_slots=1).engine()
    requests = [ask(ONE, id=f"r{i}") for i in range(5)] + [ask(BRANCHES, id="b")]
    found = run(engine, requests)
    assert all(output(found[req.id]) == plain(req) for req in requests)


class _Sometimes(_ToyMatcher):
    """Forces four tokens now and then in the middle of a free text."""

    def forced(self) -> list[int]:
        n = (len(self._states) - 1) % 7
        return [120] * (5 - n) if 1 <= n <= 4 else []

    def fill(self, bits: np.ndarray) -> None:
        super().fill(bits)
        if self.forced():
            bits[:] = 0
            bits[120 >> 5] = 1 << (120 & 31)


SOMETIMES = Grammar("charset", "axyz{12,20}")


@pytest.fixture
def sometimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_parts, "_ToyMatcher", _Sometimes)


@pytest.mark.usefixtures("sometimes")
@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("fail_at", ["forward", "sample", "collect"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_failed_step_takes_none_of_them_back(kv: str, fail_at: str, drafts: bool) -> None:
    """Every other step fails without blame, among them those that compute forced tokens."""
    requests = [ask(SOMETIMES, id=f"r{i}", prompt=f"prompt {i} ", temperature=1.2) for i in range(3)]
    wanted = {req.id: plain(req) for req in requests}
    n_steps = itertools.count()
    faults = {"fail": lambda plan: StepFailed("again") if next(n_steps) % 2 else None, "fail_at": fail_at}
    engine = Setup(kv=kv, faults=faults, drafter=oracle(wanted, requests) if drafts else None).engine()
    real = engine._failed

    def blameless(error: BaseException, rows: Any) -> None:
        engine._interrupted = True
        real(error, rows)

    engine._failed = blameless  # type: ignore[method-assign]
    found = run(engine, requests)
    assert engine.n_failed_steps > 2
    assert {id: output(seqs) for id, seqs in found.items()} == wanted
    assert all(seqs[0].n_forced for seqs in found.values())


@pytest.mark.usefixtures("sometimes")
def test_cancelled_with_some_of_them_to_compute() -> None:
    engine = Setup().engine()
    (seq,) = engine.add(ask(SOMETIMES))
    while len(seq.tokens) - seq.computed < 2 or not seq.computed:
        engine.step()
    text = seq.stream.text
    assert engine.cancel("r")
    drain(engine)
    assert seq.finish_reason == "abort"
    assert seq.stream.text == text
    assert engine.kv.used_ratio() == 0


@pytest.mark.usefixtures("sometimes")
@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_drafts_behind_forced_tokens(kv: str) -> None:
    """The row that computes forced tokens verifies drafts of what follows them."""
    req = ask(SOMETIMES)
    wanted = {"r": plain(req)}
    assert wanted["r"][1:5] == [120] * 4
    plans: list[StepPlan] = []
    engine = Setup(kv=kv, drafter=oracle(wanted, [req], p=1.0), faults={"on_forward": plans.append}).engine()
    assert output(run(engine, [req])["r"]) == wanted["r"]
    assert (9, 4) in [(plan.length[0], plan.n_draft[0]) for plan in plans[1:]]
    for drafter, chunk in itertools.product((None, oracle(wanted, [req], p=0.5)), (3, 64)):
        assert output(run(Setup(kv=kv, drafter=drafter, chunk=chunk).engine(), [req])["r"]) == wanted["r"]


def test_times_and_rates() -> None:
    """Forced tokens at the start are prefilled with the prompt; what comes after the first chosen token is decoded."""
    now = itertools.count(1.0)
    engine = Setup().engine()
    engine.clock = lambda: next(now)
    req = ask(BRANCHES, prompt="a question of some length? ")
    (seq,) = run(engine, [req])["r"]
    timings = build_output([seq], engine.executor.tokenizer, None).timings
    submitted, scheduled, first, finished, chosen = seq.times
    assert submitted < first < scheduled < chosen < finished
    assert timings.first_token_s == first - submitted
    assert timings.prefill_tokens_per_s == (seq.n_prompt + seq.n_start) / (chosen - scheduled)
    assert timings.decode_tokens_per_s == (seq.n_generated - seq.n_start - 1) / (finished - chosen)


# --- verdicts --------------------------------------------------------------------------------------------------------


class _Judged(_ToyMatcher):
    problem: Exception | None = RequestError("HR-CONSTRAINT-09", "the value is wrong")
    n_asked = 0

    def verdict(self) -> Any:
        type(self).n_asked += 1
        if not isinstance(self.problem, RequestError) and self.problem is not None:
            raise self.problem
        return self.problem


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> type[_Judged]:
    monkeypatch.setattr(toy_parts, "_ToyMatcher", _Judged)
    monkeypatch.setattr(_Judged, "n_asked", 0)
    return _Judged


@pytest.mark.parametrize("grammar", [ONE, BRANCHES, Grammar("charset", "ab{2,4}")])
def test_a_verdict_ends_the_request_and_keeps_its_text(judged: type[_Judged], grammar: Grammar) -> None:
    good = request("good", "other", SamplingParams(max_tokens=5))
    engine = Setup().engine()
    found = run(engine, [ask(grammar), good])
    (seq,) = found["r"]
    assert seq.finish_reason == "error"
    assert "HR-CONSTRAINT-09" in str(seq.error)
    assert seq.stream.text
    assert output([seq]) == plain(ask(grammar))
    assert judged.n_asked == 1
    assert output(found["good"]) == plain(good)
    assert build_output([seq], engine.executor.tokenizer, None).text == seq.stream.text


def test_no_verdict_on_what_was_cut(judged: type[_Judged]) -> None:
    for cut in ({"max_tokens": 4}, {"stop": ("d t",)}, {"stop_token_ids": (ONE_IDS[3],)}):
        (seq,) = run(Setup().engine(), [ask(ONE, **cut)])["r"]  # type: ignore[arg-type]
        assert seq.finish_reason == ("length" if "max_tokens" in cut else "stop")
        assert seq.error is None
    assert judged.n_asked == 0


def test_a_good_verdict_and_one_that_raises(judged: type[_Judged], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "problem", None)
    (seq,) = run(Setup().engine(), [ask(ONE)])["r"]
    assert (seq.finish_reason, seq.error) == ("stop", None)
    monkeypatch.setattr(judged, "problem", RuntimeError("boom"))
    (seq,) = run(Setup().engine(), [ask(ONE)])["r"]
    assert seq.finish_reason == "error"
    assert "HR-STEP-03" in str(seq.error)


# --- matchers that fail, and masks that leave nothing ----------------------------------------------------------------


def matched(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> Engine:
    """An engine whose matchers have these methods instead of their own."""
    for name, method in methods.items():
        monkeypatch.setattr(_ToyMatcher, name, method)
    return Setup().engine()


def boom(*args: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    "forced", [boom, lambda self: None, lambda self: ["x"], lambda self: [10**9], lambda self: [1]]
)
def test_a_matcher_that_forces_nonsense_ends_its_request(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = request("good", "other", SamplingParams(max_tokens=5))
    found = run(matched(monkeypatch, forced=forced), [ask(BRANCHES), good])
    assert found["r"][0].finish_reason == "error"
    assert "HR-STEP-03" in str(found["r"][0].error)
    assert output(found["good"]) == plain(good)


def test_an_empty_mask_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: _ToyMatcher, bits: np.ndarray) -> None:
        bits[:] = 0

    good = request("good", "other", SamplingParams(max_tokens=5))
    for temperature in (0.0, 1.0):
        engine = matched(monkeypatch, fill=fill)
        found = run(engine, [ask(Grammar("charset", "ab{2,4}"), temperature=temperature), good])
        assert found["r"][0].finish_reason == "error"
        assert "HR-CONSTRAINT-07" in str(found["r"][0].error)
        assert "0 generated" in str(found["r"][0].error)
        assert output(found["good"]) == plain(good)
        assert not engine.n_failed_steps


def test_a_mask_of_banned_tokens_is_an_error_of_its_request() -> None:
    for params in (
        {"logit_bias": {97: float("-inf"), 98: float("-inf")}},
        {"bad_words": ("a", "b")},
        {"min_tokens": 4, "stop_token_ids": (97, 98)},
    ):
        for drafter in (None, ngram()):
            engine = Setup(drafter=drafter).engine()
            (seq,) = run(engine, [ask(Grammar("charset", "ab{5,9}"), **params)])["r"]  # type: ignore[arg-type]
            assert seq.finish_reason == "error"
            assert "HR-CONSTRAINT-07" in str(seq.error)
            assert not output([seq])


def test_errors_of_ours_come_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = RequestError("HR-CONSTRAINT-04", "the grammar needs too long here")

    def fill(self: _ToyMatcher, bits: np.ndarray) -> None:
        raise limit

    (seq,) = run(matched(monkeypatch, fill=fill), [ask(Grammar("charset", "ab{2,4}"))])["r"]
    assert seq.error is limit


def test_marks_of_a_dialect_are_shown() -> None:
    """Special tokens among the text, by request; others stay hidden."""
    ids = (258, 104, 105, 257)

    class Fixed(Matcher):
        def __init__(self) -> None:
            self._n = 0

        def fill(self, bits: np.ndarray) -> None:
            bits[:] = 0
            bits[ids[self._n] >> 5] = 1 << (ids[self._n] & 31)

        def accept(self, token: int) -> bool:
            self._n += 1
            return True

        def rollback(self, n: int) -> None:
            self._n -= n

        def done(self) -> bool:
            return self._n == len(ids)

    class Always(Compiled):
        def start(self) -> Matcher:
            return Fixed()

    texts = []
    for shown in ({258}, set(), {257, 258}):
        engine = Setup().engine()
        engine.constraints.compile = lambda grammar, cancelled: Always()  # type: ignore[union-attr, method-assign]
        params = SamplingParams(max_tokens=9, constraint=Grammar("x", ""))
        (seq,) = run(engine, [request("r", "x", params, shown_ids=frozenset(shown))])["r"]
        texts.append(seq.stream.text)
    assert texts == ["<|im_start|>hi", "hi", "<|im_start|>hi<|bos|>"]
