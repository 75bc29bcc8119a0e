"""Admission, budgets, priorities, preemption, failure: what happens to whom. Toy executors, no clocks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from engine_harness import MODEL, Setup, drain, oracle, output, plain, request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contracts import Compiled, Matcher
from headrace.engine import Engine
from headrace.errors import Busy, Fatal, RequestError, StepFailed
from headrace.testing.toy import ToyModel, ToyObserver
from headrace.types import (
    WANT_PROMPT_LOGITS,
    DraftView,
    Grammar,
    Proposal,
    Request,
    SamplingParams,
    Sequence,
    StepPlan,
)

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def steps(engine: Engine, n: int) -> None:
    for _ in range(n):
        engine.step()
        engine.kv.check(engine.scheduler.running)


def test_the_budget_bounds_every_step_and_nobody_starves() -> None:
    engine = Setup(options={"max_batch_tokens": 24, "prefill_chunk_tokens": 16}).engine()
    seen: list[int] = []
    engine.executor.on_forward = lambda plan: seen.append(int(plan.offset[-1]))  # type: ignore[attr-defined]
    early = engine.add(request("early", "go on and on", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)))[
        0
    ]
    engine.step()
    engine.add(request("long", "a very long prompt " * 12, GREEDY))
    before = early.n_generated
    steps(engine, 5)
    assert early.n_generated == before + 5, "a long prompt must not hold up a running sequence"
    drain(engine)
    assert max(seen) <= 24


def test_one_token_budget_still_ends() -> None:
    engine = Setup(options={"max_batch_tokens": 1}).engine()
    reqs = [request(str(i), "abc" * (i + 1), GREEDY) for i in range(4)]
    found = run(engine, reqs)
    assert all(output(found[req.id]) == plain(req) for req in reqs)


def lengths_of(engine: Engine, req: Request) -> list[int]:
    """How many tokens each step fed of this request, alone."""
    seen: list[int] = []
    engine.executor.on_forward = lambda plan: seen.extend(plan.length.tolist())  # type: ignore[attr-defined]
    assert output(run(engine, [req])[req.id]) == plain(req)
    return seen


def test_a_request_may_have_smaller_chunks() -> None:
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    engine = Setup(chunk=12, prefix_cache=False).engine()
    assert lengths_of(engine, request("a", "x" * 29, params)) == [12, 12, 5, 1]
    assert lengths_of(engine, request("b", "x" * 29, params, prefill_chunk_tokens=9)) == [9, 9, 9, 2, 1]
    assert lengths_of(engine, request("c", "x" * 29, params, prefill_chunk_tokens=100)) == [12, 12, 5, 1]


@pytest.mark.parametrize(
    ("own", "n_snapshots", "wanted"),
    [(None, 8, [8, 8, 8, 5, 1]), (10, 8, [10, 6, 10, 3, 1]), (None, 0, [12, 12, 5, 1])],
)
def test_chunks_end_at_blocks_whose_rings_are_kept(own: int | None, n_snapshots: int, wanted: list[int]) -> None:
    """Blocks of 8, slack of 2: a chunk of 12 ends at 8, 16, 24; those that would end at 10 or 26 need no cut."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    rings = {"window": 5, "slack": 2, "n_snapshots": n_snapshots}
    engine = Setup(chunk=12, block_tokens=8, rings=rings).engine()
    assert lengths_of(engine, request("a", "x" * 29, params, prefill_chunk_tokens=own)) == wanted


def test_drafts_never_exceed_what_rings_can_take_back() -> None:
    req = request("a", "abcabcabc", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    wanted = plain(req)
    for slack in (1, 3):
        engine = Setup(rings={"window": 4, "slack": slack}, drafter=oracle({"a": wanted}, [req], p=1.0)).engine()
        seen: list[int] = []
        engine.executor.on_forward = lambda plan, seen=seen: seen.extend(plan.n_draft.tolist())  # type: ignore[attr-defined]
        assert output(run(engine, [req])["a"]) == wanted
        assert max(seen) == slack
    assert not Setup(rings={"window": 4, "slack": 0}).engine().executor.caps.drafts


def test_plans_carry_what_the_executor_asks_for() -> None:
    """Tokens before the row, nearest first, and the length of the prompt."""
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    req = request("a", [5, 6, 7, 8, 9], params)
    rings = {"window": 3, "history_tokens": 3, "rerun_tokens": 1}
    engine = Setup(chunk=2, rings=rings).engine()
    seen: list[tuple[list[int], list[int]]] = []
    engine.executor.on_forward = lambda plan: seen.append((plan.history[0].tolist(), plan.n_prompt.tolist()))  # type: ignore[attr-defined]
    one, two, _ = output(run(engine, [req])["a"])
    assert [history for history, _ in seen] == [[-1, -1, -1], [6, 5, -1], [8, 7, 6], [9, 8, 7], [one, 9, 8]]
    assert all(n_prompt == [5] for _, n_prompt in seen)
    plans: list[StepPlan] = []
    bare = Setup(chunk=2).engine()
    bare.executor.on_forward = plans.append  # type: ignore[attr-defined]
    run(bare, [req])
    assert all(plan.history is plan.n_prompt is plan.write_from is None for plan in plans)
    assert two >= 0


def test_priority_goes_first_and_may_preempt() -> None:
    engine = Setup(kv="slots", n_slots=2).engine()
    low = [
        engine.add(
            request(f"low{i}", "aaaa", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True), priority=5)
        )
        for i in range(2)
    ]
    steps(engine, 3)
    high = engine.add(request("high", "bbbb", GREEDY, priority=0))[0]
    steps(engine, 10)
    assert high.finish_reason == "length"
    drain(engine)
    assert sum(seqs[0].preemptions for seqs in low) == 1
    for seqs in low:
        assert output(seqs) == plain(seqs[0].request)


def test_a_big_head_does_not_block_small_ones_and_still_runs() -> None:
    """scheduler-01"""
    engine = Setup(n_blocks=100, block_tokens=4, options={"aging_skips": 24}).engine()
    for i in range(2):
        engine.add(request(f"busy{i}", f"{i}" * 40, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
    steps(engine, 2)
    big = engine.add(request("big", "z" * 330, GREEDY))[0]
    tiny = [engine.add(request(f"tiny{i}", f"t{i}", SamplingParams(max_tokens=2, temperature=0)))[0] for i in range(20)]
    while not all(seq.finish_reason for seq in tiny):
        engine.step()
        assert big.status == "waiting"
    drain(engine)
    assert big.finish_reason == "length"


def test_an_overtaken_request_is_served_after_a_bounded_number_of_skips() -> None:
    engine = Setup(n_blocks=40, block_tokens=4, options={"aging_skips": 6}).engine()
    engine.add(request("busy", "b" * 30, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    engine.step()
    big = engine.add(request("big", "z" * 120, GREEDY))[0]
    overtakers = []
    for i in range(60):
        if big.finish_reason is None:
            overtakers.append(engine.add(request(f"t{i}", f"t{i}", SamplingParams(max_tokens=3, temperature=0)))[0])
        engine.step()
    drain(engine)
    assert big.finish_reason == "length"
    assert big.skipped <= 6


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_random_schedules_keep_every_invariant(data: st.DataObject) -> None:
    """scheduler-02: tight pool, random priorities, arrivals and cancellations; survivors get the right tokens."""
    kv = data.draw(st.sampled_from(["paged", "slots"]))
    engine = Setup(
        kv=kv, n_blocks=30, block_tokens=4, n_slots=2, options={"max_sequences": 2 if kv == "slots" else 5}
    ).engine()
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    seqs: list[Sequence] = []
    for i in range(data.draw(st.integers(3, 9))):
        params = SamplingParams(max_tokens=rng.randint(1, 14), temperature=rng.choice([0, 0.9]), ignore_eos=True)
        prompt = rng.choice(["shared start ", ""]) + "xyz"[: rng.randint(1, 3)] * rng.randint(1, 12)
        seqs += engine.add(request(f"r{i}", prompt, params, priority=rng.randint(0, 2)))
        steps(engine, rng.randint(0, 3))
        if rng.random() < 0.2:
            engine.cancel(rng.choice(seqs).request.id)
    drain(engine)
    for seq in seqs:
        tokens, wanted = output([seq]), plain(seq.request)
        assert seq.finish_reason in ("length", "abort")
        assert tokens == wanted[: len(tokens)]
        assert seq.finish_reason == "abort" or tokens == wanted
    assert engine.kv.used_ratio() == 0


def test_preemption_does_not_redo_prompts_forever() -> None:
    """scheduler-03: no prefix cache, three requests that outgrow the pool together."""
    engine = Setup(n_blocks=275, block_tokens=4, prefix_cache=False, chunk=64).engine()
    fed = 0

    def count(plan) -> None:  # type: ignore[no-untyped-def]
        nonlocal fed
        fed += int(plan.length[plan.length > 1].sum())

    engine.executor.on_forward = count  # type: ignore[attr-defined]
    model = ToyModel(vocab=270, seed=3)
    assert model.context >= 1000
    for i in range(3):
        engine.add(request(f"r{i}", f"{i}" * 300, SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)))
    drain(engine)
    assert engine.scheduler.n_preemptions > 0
    assert fed <= 3 * 900


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    """scheduler-05"""
    engine = Setup(n_blocks=10, block_tokens=4).engine()
    with pytest.raises(RequestError, match="exceed the context of 40") as refused:
        engine.add(request("huge", "abc", SamplingParams(max_tokens=500, temperature=0)))
    assert refused.value.code == "HR-REQUEST-04"
    with pytest.raises(RequestError, match="has 60 tokens, the context holds 40"):
        engine.add(request("long", "a" * 60, SamplingParams(temperature=0)))
    reqs = [request(f"r{i}", "abc", GREEDY) for i in range(5)]
    found = run(engine, reqs)
    assert all(output(found[req.id]) == plain(req) for req in reqs)


def test_a_missing_block_preempts_one_sequence() -> None:
    """scheduler-06"""
    engine = Setup(n_blocks=64, block_tokens=4, prefix_cache=False, options={"max_sequences": 16}).engine()
    reqs = [
        request(f"r{i}", "abcdefg", SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)) for i in range(16)
    ]
    for req in reqs:
        engine.add(req)
    before, n_running = 0, 0
    while engine.has_work():
        engine.step()
        lost = engine.scheduler.n_preemptions - before
        assert lost <= max(1, n_running // 4)
        before, n_running = engine.scheduler.n_preemptions, len(engine.scheduler.running)
    assert before > 0


def test_thirty_requests_with_room_for_three() -> None:
    """scheduler-07"""
    engine = Setup(n_blocks=15, block_tokens=4).engine()
    reqs = [request(f"r{i}", f"p{i:02d}xxxx", GREEDY) for i in range(30)]
    found = run(engine, reqs)
    assert all(output(found[req.id]) == plain(req) for req in reqs)
    assert engine.n_steps < 2 * 30 * 9


def test_a_full_queue_says_busy_and_keeps_nothing() -> None:
    engine = Setup(options={"max_waiting": 3}).engine()
    for i in range(3):
        engine.add(request(f"r{i}", "abc", GREEDY))
    with pytest.raises(Busy):
        engine.add(request("late", "abc", GREEDY))
    drain(engine)
    assert output(engine.add(request("late", "abc", GREEDY))) == []
    drain(engine)


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_cancel_between_and_within_steps(kv: str) -> None:
    engine = Setup(kv=kv, chunk=8).engine()
    gone = engine.add(request("gone", "some long prompt " * 4, GREEDY))[0]
    stays = request("stays", "another prompt", GREEDY)
    kept = engine.add(stays)[0]
    steps(engine, 2)

    def stop(plan) -> None:  # type: ignore[no-untyped-def]
        engine.executor.on_forward = None  # type: ignore[attr-defined]
        engine.cancel("gone")
        engine.interrupt()

    engine.executor.on_forward = stop  # type: ignore[attr-defined]
    drain(engine)
    assert gone.finish_reason == "abort"
    assert output([kept]) == plain(stays)
    assert not engine.cancel("gone")


def test_deadlines() -> None:
    engine = Setup().engine()
    now = 0.0
    engine.clock = lambda: now
    slow = engine.add(
        request("slow", "abc", SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, deadline_s=3))
    )[0]
    for _ in range(5):
        engine.step()
        now += 1.0
    assert slow.finish_reason == "deadline"
    assert 0 < slow.n_generated < 50


# --- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fail_at", ["forward", "sample", "collect"])
@pytest.mark.parametrize("partial_trim", [True, False])
def test_a_failing_row_ends_alone(kv: str, named: bool, fail_at: str, partial_trim: bool) -> None:
    culprit = ord("!")

    def fail(plan):  # type: ignore[no-untyped-def]
        for r in range(len(plan.seq)):
            if culprit in plan.tokens[plan.offset[r] : plan.offset[r + 1]]:
                return StepFailed("boom", [r] if named else [])
        return None

    engine = Setup(kv=kv, partial_trim=partial_trim, faults={"fail": fail, "fail_at": fail_at}).engine()
    good = [request(f"g{i}", f"good prompt {i}", GREEDY) for i in range(5)]
    seqs = [engine.add(req)[0] for req in good[:3]]
    steps(engine, 3)
    bad = engine.add(request("bad", "this one fails!", GREEDY))[0]
    seqs += [engine.add(req)[0] for req in good[3:]]
    drain(engine)
    assert bad.finish_reason == "error"
    assert "boom" in str(bad.error)
    for seq in seqs:
        assert output([seq]) == plain(seq.request)


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_a_nan_row_ends_alone(kv: str) -> None:
    def nan(plan, row):  # type: ignore[no-untyped-def]
        return ord("!") in plan.tokens[plan.offset[row] : plan.offset[row + 1]]

    engine = Setup(kv=kv, faults={"nan": nan}).engine()
    reqs = [request("bad", "nan here!", GREEDY), *(request(f"g{i}", f"good {i}", GREEDY) for i in range(3))]
    found = run(engine, reqs)
    assert found["bad"][0].finish_reason == "error"
    assert "NaN" in str(found["bad"][0].error)
    assert all(output(found[req.id]) == plain(req) for req in reqs[1:])


@pytest.mark.parametrize("bug", [ZeroDivisionError("bug"), SystemExit("bug")])
def test_an_exception_that_is_no_stepfailed_is_contained_too(bug: BaseException) -> None:
    def fail(plan):  # type: ignore[no-untyped-def]
        return bug if (plan.tokens == ord("!")).any() else None

    engine = Setup(faults={"fail": fail}).engine()
    reqs = [request("bad", "x!", GREEDY), request("good", "hello", GREEDY)]
    found = run(engine, reqs)
    assert found["bad"][0].finish_reason == "error"
    assert output(found["good"]) == plain(reqs[1])


def test_a_lost_device_ends_what_runs_and_serves_what_waits() -> None:
    failures = iter([None, None, Fatal("device fell off")])
    engine = Setup(kv="slots", n_slots=2, faults={"fail": lambda plan: next(failures, None)}).engine()
    reqs = [request(f"r{i}", f"prompt {i}", GREEDY) for i in range(4)]
    found = run(engine, reqs)
    assert [found[f"r{i}"][0].finish_reason for i in range(4)] == ["error", "error", "length", "length"]
    assert found["r0"][0].error.code == "HR-DEVICE-01"  # type: ignore[union-attr]
    assert output(found["r3"]) == plain(reqs[3])


def test_a_device_that_can_not_be_reopened_refuses_everything() -> None:
    engine = Setup(kv="slots", n_slots=1, faults={"fail": lambda plan: Fatal("gone")}).engine()

    def broken() -> None:
        raise OSError("no device")

    engine.executor.open = broken  # type: ignore[method-assign]
    found = run(engine, [request("a", "x", GREEDY), request("b", "y", GREEDY)])
    assert {seqs[0].finish_reason for seqs in found.values()} == {"error"}
    with pytest.raises(Exception, match="HR-DEVICE-02"):
        engine.add(request("c", "z", GREEDY))


def test_a_device_may_cut_drafts_off() -> None:
    """It verified fewer drafts than the plan had, and says so in `processed`."""
    req = request("r", "hello there", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    wanted = plain(req)
    setup = Setup(kv="slots")
    setup.drafter = oracle({"r": wanted}, [req], p=1.0)
    engine = setup.engine()
    executor = engine.executor
    forward, collect = executor.forward, executor.collect
    cuts: list[int] = []

    def forward_less(plan):  # type: ignore[no-untyped-def]
        cut = np.minimum(plan.n_draft, 2)
        cuts.append(int(cut.sum()))
        plan.length, plan.n_draft, whole = plan.length - cut, plan.n_draft - cut, plan.tokens
        plan.tokens = whole[: len(whole) - int(cut.sum())]
        plan.offset = np.array([0, len(plan.tokens)], np.int32)
        return forward(plan)

    def collect_less(step):  # type: ignore[no-untyped-def]
        result = collect(step)
        result.processed = step.plan.length
        return result

    executor.forward, executor.collect = forward_less, collect_less  # type: ignore[method-assign]
    assert output(run(engine, [req])["r"]) == wanted
    assert max(cuts) == 2
    assert not engine.n_failed_steps


def test_drafts_made_on_the_device_are_verified_too() -> None:
    """A fused drafter's proposals come with the step's result: right, wrong, and too many of them."""
    engine = Setup().engine()
    req = request("r", "hello there", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    wanted = plain(req)
    collect = engine.executor.collect

    def with_proposals(step):  # type: ignore[no-untyped-def]
        result = collect(step)
        done = len(seq.tokens) - seq.n_prompt + len(result.tokens)
        guess = (*wanted[done : done + 3], 5, *wanted[done + 4 :]) if done % 2 else (10**9,)
        result.proposals = {0: Proposal(tuple(guess))}
        return result

    engine.executor.collect = with_proposals  # type: ignore[method-assign]
    seq = engine.add(req)[0]
    drain(engine)
    assert output([seq]) == wanted
    assert engine.n_accepted > 5
    assert engine.n_steps < 15


class BrokenDrafter:
    max_draft = 3

    def __init__(self, proposal: tuple[int, ...] | None) -> None:
        self.proposal = proposal

    def propose(self, views: list[DraftView]) -> list[Proposal]:
        if self.proposal is None:
            raise SystemExit("drafter bug")
        return [Proposal(self.proposal) for _ in views]

    def observe(self, index: int, proposed: int, accepted: int) -> None: ...

    def forget(self, index: int) -> None: ...


@pytest.mark.parametrize("proposal", [None, (-1, 5), (10**9,), (97,) * 50])
def test_a_bad_drafter_costs_speed_only(proposal: tuple[int, ...] | None) -> None:
    engine = Setup(drafter=BrokenDrafter(proposal)).engine()  # type: ignore[arg-type]
    req = request("r", "hello there", GREEDY)
    assert output(run(engine, [req])["r"]) == plain(req)


def test_a_bad_observer_is_removed() -> None:
    class Bad(ToyObserver):
        def on_step(self, stats) -> None:  # type: ignore[no-untyped-def]
            raise RuntimeError("observer bug")

    good = ToyObserver()
    engine = Setup().engine()
    engine.observers += [Bad(), good]
    req = request("r", "hello", GREEDY)
    assert output(run(engine, [req])["r"]) == plain(req)
    assert engine.observers == [good]
    assert good.finished[0].usage.completion_tokens == 8
    assert sum(stats.n_tokens for stats in good.steps) == 5 + 7


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ((), {}, "HR-REQUEST-02"),
        ((1, 2, 270), {}, "HR-REQUEST-05"),
        ((1, -1), {}, "HR-REQUEST-05"),
        ((1,), {"stop_token_ids": (999,)}, "HR-REQUEST-05"),
        ((1,), {"logit_bias": {999: 1.0}}, "HR-REQUEST-05"),
        ((1,), {"max_tokens": 2**31 - 1}, "HR-REQUEST-04"),
    ],
)
def test_bad_requests_have_their_own_error(prompt: tuple[int, ...], params: dict, code: str) -> None:
    engine = Setup().engine()
    with pytest.raises(RequestError) as refused:
        engine.add(request("r", prompt, SamplingParams(**params)))
    assert refused.value.code == code
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"top_k": 0}, {"top_k": 1}),
        ({"min_p": 0.0}, {"min_p": 1.0}),
        ({"top_p": 1.0}, {"top_p": 0.0}),
        ({"presence_penalty": 0.0}, {"presence_penalty": 1.0}),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.1}),
        ({"logit_bias": None}, {"logit_bias": {5: 1.0}}),
        ({"min_tokens": 0}, {"min_tokens": 1}),
    ],
)
def test_what_the_executor_can_not_honour_is_refused_when_asked_for(off: dict, on: dict) -> None:
    engine = Setup().engine()
    engine.executor.caps = replace(engine.executor.caps, refuses=dict.fromkeys(on, "not here"))
    engine.add(request("off", "x", SamplingParams(max_tokens=2, **off)))
    with pytest.raises(RequestError, match=r"HR-REQUEST-06: .* can't be honoured here: not here") as found:
        engine.add(request("on", "x", SamplingParams(max_tokens=2, **on)))
    assert found.value.help


def test_a_constraint_that_nobody_serves_is_refused_with_the_reason() -> None:
    engine = Setup().engine()
    asked = request("on", "x", SamplingParams(max_tokens=2, constraint=Grammar.choice("a", "b")))
    engine.constraints = None
    with pytest.raises(RequestError, match=r"HR-CONSTRAINT-01: .* no constraint engine is configured"):
        engine.add(asked)
    engine.executor.caps = replace(engine.executor.caps, masks=False)
    with pytest.raises(RequestError, match=r"HR-CONSTRAINT-01: .* this backend takes no token masks"):
        engine.add(asked)


def test_adapters_reach_a_device_that_has_one_per_row() -> None:
    engine = Setup().engine()
    seen: list[object] = []
    engine.executor.on_forward = lambda plan: seen.append(plan.adapters)  # type: ignore[attr-defined]
    for kind in ("none", "per_step"):
        engine.executor.caps = replace(engine.executor.caps, adapters=kind)
        with pytest.raises(RequestError, match="adapter 'tuned'"):
            engine.add(request("r", "x", GREEDY, adapter=("tuned", 0.5)))
    engine.executor.caps = replace(engine.executor.caps, adapters="per_row")
    run(engine, [request("plain", "x", GREEDY), request("tuned", "x", GREEDY, adapter=("tuned", 0.5))])
    assert seen[0] == (None, ("tuned", 0.5))


def test_an_id_in_use_is_refused() -> None:
    engine = Setup().engine()
    engine.add(request("r", "x", GREEDY))
    with pytest.raises(RequestError, match="HR-REQUEST-09"):
        engine.add(request("r", "x", GREEDY))


def test_a_grammar_that_does_not_compile_ends_its_request() -> None:
    engine = Setup().engine()
    bad = request("bad", "x", SamplingParams(constraint=Grammar("choice", "not json")))
    good = request("good", "y", GREEDY)
    found = run(engine, [bad, good])
    assert found["bad"][0].finish_reason == "error"
    assert "HR-CONSTRAINT" in str(found["bad"][0].error)
    assert output(found["good"]) == plain(good)


@pytest.mark.parametrize("n", [1, 3])
def test_a_grammar_of_the_empty_text_stops_at_once(n: int) -> None:
    class Done(Matcher):
        def fill(self, bits) -> None:  # type: ignore[no-untyped-def]
            raise AssertionError("a matcher that is done was asked for a mask")

        def accept(self, token: int) -> bool:
            return False

        def rollback(self, n: int) -> None: ...

        def done(self) -> bool:
            return True

    class Empty(Compiled):
        def start(self) -> Matcher:
            return Done()

    engine = Setup().engine()
    engine.constraints.compile = lambda grammar, cancelled: Empty()  # type: ignore[union-attr, method-assign, assignment]
    params = SamplingParams(constraint=Grammar("regex", ""), n=n)
    found = run(engine, [request("empty", "x", params), request("good", "y", GREEDY)])
    assert [seq.finish_reason for seq in found["empty"]] == ["stop"] * n
    assert [output([seq]) for seq in found["empty"]] == [[]] * n
    assert output(found["good"]) == plain(request("good", "y", GREEDY))


def test_stop_conditions() -> None:
    free = plain(request("r", "count: ", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    text = bytes(t for t in free if t < 256).decode()
    stop = text[10:13]
    found = run(
        Setup().engine(),
        [request("r", "count: ", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=(stop,)))],
    )
    seq = found["r"][0]
    assert seq.finish_reason == "stop"
    assert seq.stop_reason == stop
    assert seq.stream.text == text[: text.index(stop)]
    token = free[6]
    found = run(
        Setup().engine(),
        [
            request(
                "r", "count: ", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=(token,))
            )
        ],
    )
    assert output(found["r"]) == free[: free.index(token) + 1]
    assert found["r"][0].stop_reason == token


def test_min_tokens_bans_the_end_and_bad_words_never_appear() -> None:
    eos = next(iter(MODEL.spec().eos_ids))
    params = SamplingParams(max_tokens=30, temperature=0, min_tokens=12, logit_bias={eos: 50.0})
    for kv in ("paged", "slots"):
        seq = run(Setup(kv=kv).engine(), [request("r", "abc", params)])["r"][0]
        assert output([seq]).index(eos) == 12
    free = plain(request("r", "count: ", GREEDY))
    word = bytes(free[2:4]).decode()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, bad_words=(word,))
    seq = run(Setup().engine(), [request("r", "count: ", params)])["r"][0]
    assert word not in seq.stream.text
    assert output([seq])[:3] == free[:3]


def test_prompt_logprobs_cover_the_prompt_once_whatever_the_chunking() -> None:
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=1)
    seen = []
    for kv, chunk, preempt in (("paged", 64, 0), ("paged", 3, 6), ("slots", 5, 0)):
        engine = Setup(kv=kv, chunk=chunk).engine()
        run(engine, [request("warm", "hello prompt", GREEDY)])
        seq = run(engine, [request("r", "hello prompt", params)], preempt)["r"][0]
        assert seq.prompt_logprobs is not None
        assert len(seq.prompt_logprobs) == 12
        assert seq.prompt_logprobs[0] is None
        assert seq.cached == 0, "a prefix hit would leave positions without logits"
        assert seq.logprobs is not None
        assert len(seq.logprobs) == 3
        seen.append((seq.prompt_logprobs, seq.logprobs))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("fail_at", ["forward", "sample", "collect"])
def test_logits_of_a_prompt_come_once_whatever_is_run_again(kv: str, fail_at: str) -> None:
    """Chunks, preemption in the middle, failed steps and samples of one request beside it."""
    rng = random.Random(5)
    faults = {"fail": lambda plan: StepFailed("now and then") if rng.random() < 0.2 else None, "fail_at": fail_at}
    engine = Setup(kv=kv, chunk=3, faults=faults).engine()
    prompt = "hello prompt"
    run(engine, [request("warm", prompt, GREEDY)])
    wanted = [request(f"r{i}", prompt, replace(GREEDY, n=2), want_logits=True) for i in range(2)]
    seen: list[list[int]] = []
    engine.executor.on_forward = lambda plan: seen.append(plan.wants.tolist())  # type: ignore[attr-defined]
    found = run(engine, [*wanted, request("other", "something else", GREEDY)], 4)
    expected = MODEL.logits_from(MODEL.cells(list(prompt.encode()), 0), 0)
    n_complete = 0
    for req in wanted:
        first, second = found[req.id]
        assert first.prompt_logits is not None
        assert second.prompt_logits is None
        if first.error is None:  # a row that is alone in a failing step ends
            n_complete += 1
            np.testing.assert_array_equal(first.prompt_logits.values, expected)
            assert output([first]) == plain(request(req.id, prompt, GREEDY))
            assert not first.wants & WANT_PROMPT_LOGITS, "steps after the prompt compute no more than they must"
    assert n_complete
    assert any(wants & WANT_PROMPT_LOGITS for row in seen for wants in row)


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_logits_of_a_prompt_that_is_preempted_half_way(kv: str) -> None:
    """What runs again is cut otherwise than the first time, and overlaps what is there."""
    engine = Setup(kv=kv, prefix_cache=False).engine()
    prompt = "a prompt of some length, read in pieces"
    wanted = request("r", prompt, GREEDY, want_logits=True, prefill_chunk_tokens=5)
    (seq,) = engine.add(wanted)
    for n_steps, next_budget in ((3, 4), (2, 3), (1, 64)):
        steps(engine, n_steps)
        assert 0 < seq.computed < seq.n_prompt
        engine.scheduler._preempt(engine.scheduler.running.pop(), engine._ops)
        engine.scheduler.max_batch_tokens = next_budget
    drain(engine)
    assert seq.preemptions == 3
    assert seq.prompt_logits is not None
    expected = MODEL.logits_from(MODEL.cells(list(prompt.encode()), 0), 0)
    np.testing.assert_array_equal(seq.prompt_logits.values, expected)
    assert output([seq]) == plain(wanted)


def test_max_tokens_zero_reads_the_prompt_only() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    seq = run(Setup().engine(), [request("r", "just read", params)])["r"][0]
    assert seq.finish_reason == "length"
    assert output([seq]) == []
    assert len(seq.prompt_logprobs or []) == 9


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_cold_warm_and_flushed_are_equal_and_the_cache_is_used(kv: str) -> None:
    """prefix_cache-02, -03"""
    engine = Setup(kv=kv).engine()
    shared = "a system prompt that everybody shares. "
    rounds = []
    for turn in range(3):
        reqs = [request(f"{turn}-{i}", shared + f"question {i}", GREEDY) for i in range(6)]
        found = run(engine, reqs)
        rounds.append([output(found[req.id]) for req in reqs])
        if turn == 0:
            assert rounds[0] == [plain(req) for req in reqs]
        if turn == 1:
            assert sum(seqs[0].cached for seqs in found.values()) > 100
            engine.kv.reset(engine._ops)
    assert rounds[0] == rounds[1] == rounds[2]


def test_the_pool_balances_when_idle() -> None:
    """prefix_cache-04"""
    engine = Setup(n_blocks=64).engine()
    for i in range(50):
        engine.add(request(f"r{i}", ["alpha " * 5, "beta " * 5, "gamma " * 5][i % 3], GREEDY))
    drain(engine)
    engine.kv.check([])
    assert engine.kv.used_ratio() == 0


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_turns_of_a_chat_find_all_of_the_last_turn(kv: str) -> None:
    """prefix_cache-06"""
    engine = Setup(kv=kv, block_tokens=1).engine()
    text, before = list(b"user: hi bot: "), 0
    for turn in range(3):
        seq = run(engine, [request(f"t{turn}", text, GREEDY)])[f"t{turn}"][0]
        assert seq.cached >= before - 1
        before = len(seq.tokens)
        text = [*seq.tokens, *b" user: more bot: "]


@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("salt", ["a/b", "", "x" * 10_000, "\0", "..", "@", "\ud800"])
def test_salts_keep_tenants_apart(kv: str, salt: str) -> None:
    """security 14, 16: another salt never hits, an odd one is served."""
    engine = Setup(kv=kv).engine()
    prompt = "a prompt of one tenant, long enough for blocks"
    run(engine, [request("mine", prompt, GREEDY, cache_salt=salt)])
    other = run(engine, [request("other", prompt, GREEDY, cache_salt=salt + "!")])["other"][0]
    again = run(engine, [request("again", prompt, GREEDY, cache_salt=salt)])["again"][0]
    assert other.cached == 0
    assert again.cached > 20
    assert output([other]) == output([again])


# --- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_company_does_not_change_a_request(kv: str, temperature: float) -> None:
    """determinism-01, -02, -05, -06"""
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=42)
    seen = set()
    for n in (1, 3, 7, 13):
        engine = Setup(kv=kv, n_slots=14, n_blocks=600).engine()
        reqs = [request("me", "Name three primary colours.", params)]
        reqs += [request(f"o{i}", f"{i} unrelated " * 3, params) for i in range(n)]
        reqs += [request("copy", "Name three primary colours.", params)]
        found = run(engine, reqs)
        seen |= {tuple(output(found["me"])), tuple(output(found["copy"]))}
    assert len(seen) == 1
