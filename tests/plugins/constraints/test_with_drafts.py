"""Real grammars under drafts: drafters that are always wrong, that go on behind the end, and marks in a window.

Each is a fault that users of other engines reported (tests/core/test_public_reports.py says which).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from engine_harness import Setup, output, request, run

from headrace.contracts import Drafter
from headrace.engine import Engine
from headrace.runner import Runner
from headrace.types import DraftView, Grammar, Output, Proposal, Request, SamplingParams, StepPlan
from headrace_plugins.constraints.llguidance_engine import LLWalk
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.router import auto

pytest.importorskip("llguidance", reason="the grammars here compile with llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["x", "yy", "zzz"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


CHOICE = Grammar("choice", '["yes", "no"]')


class Always(Drafter):
    """Proposes the same tokens, over and over, whatever the text is."""

    def __init__(self, tokens: Seq[int], most: int = 5) -> None:
        self._tokens, self.max_draft = tuple(tokens), most
        self.n_accepted = 0

    def propose(self, views: Seq[DraftView]) -> Seq[Proposal]:
        return [Proposal((self._tokens * self.max_draft)[: view.max_draft]) for view in views]

    def observe(self, index: int, proposed: int, accepted: int) -> None:
        self.n_accepted += accepted


class Told(Drafter):
    """Proposes what a known answer goes on with."""

    def __init__(self, prompt: Seq[int], answer: Seq[int], most: int) -> None:
        self._whole, self.max_draft = [*prompt, *answer], most

    def propose(self, views: Seq[DraftView]) -> Seq[Proposal]:
        return [Proposal(tuple(self._whole[len(view.tokens) :][: view.max_draft])) for view in views]


def make(
    drafter: Drafter | None = None,
    *,
    jumps: bool = True,
    options: ConstraintOptions | None = None,
    max_sequences: int = 16,
    faults: dict[str, Any] | None = None,
) -> Engine:
    engine = Setup(drafter=drafter, options={"max_sequences": max_sequences}, faults=faults or {}).engine()
    constraints = auto(options, engine.executor.tokenizer)
    engine = Engine(engine.executor, engine.kv, engine.options, drafter=drafter, constraints=constraints)
    engine.jumps = jumps
    return engine


def ask(grammar: Grammar, id: str = "r", **params: Any) -> Request:
    defaults = {"max_tokens": 400, "temperature": 1.0, "constraint": grammar}
    return request(id, f"prompt {id}", SamplingParams(**defaults | params))  # type: ignore[arg-type]


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "n"]
    assert value["name"] in ("x", "yy", "zzz")
    assert 0 <= value["n"] <= 99


def test_thirty_threads_and_a_drafter_that_is_always_wrong() -> None:
    drafter = Always(b"Hello", most=3)
    engine = make(drafter, max_sequences=8)
    runner = Runner(engine)
    outputs: dict[int, Output] = {}

    def client(i: int) -> None:
        outputs[i] = runner.submit(ask(schema(SCHEMA), id=f"client {i}", seed=i)).result()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert len(outputs) == 30
        assert {out.finish_reason for out in outputs.values()} == {"stop"}
        for out in outputs.values():
            check(out.text)
        assert engine.n_drafted > 0
        assert engine.n_accepted == drafter.n_accepted == 0
        assert runner.submit(ask(Grammar("choice", '["yes", "no"]'))).result().text in ("yes", "no")
    finally:
        runner.close()


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("drafts", [b"b", b"babab", b"\0"])
def test_drafts_behind_the_end(jumps: bool, drafts: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is asked for once the text is over."""
    real = LLWalk.fill

    def fill(self: LLWalk, bits: Any) -> None:
        assert not self.done()
        real(self, bits)

    monkeypatch.setattr(LLWalk, "fill", fill)
    for pattern, texts in (("ab", {"ab"}), ("(a|b)(a|b)", {"aa", "ab", "ba", "bb"})):
        engine = make(Always(drafts), jumps=jumps)
        (seq,) = run(engine, [ask(Grammar("regex", pattern))])["r"]
        assert (seq.finish_reason, seq.error) == ("stop", None)
        assert seq.stream.text in texts
        assert bytes(output([seq])).decode() == seq.stream.text


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("gamma", range(1, 6))
def test_the_end_of_reasoning_inside_a_window(gamma: int, jumps: bool) -> None:
    think = {"begin": None, "end": "</think>", "budget": 6}
    document = {"think": think, "start": "body", "body": {"schema": SCHEMA}}
    req = ask(Grammar("tagged", json.dumps(document)))
    (seq,) = run(make(jumps=jumps), [req])["r"]
    answer = output([seq])
    plans: list[StepPlan] = []
    drafter = Told(req.prompt_ids, answer, gamma)
    engine = make(drafter, jumps=jumps, faults={"on_forward": plans.append})
    (drafted,) = run(engine, [req])["r"]
    assert output([drafted]) == answer
    thought, _, text = drafted.stream.text.partition("</think>")
    assert len(thought) <= 6
    check(text)
    assert engine.n_accepted > 0
    if not jumps:
        windows = [plan.tokens[-int(plan.n_draft[0]) - 1 :].tolist() for plan in plans[1:]]
        assert any(ord(">") in window[: gamma + 1] for window in windows)


@pytest.mark.parametrize("jumps", [True, False])
def test_a_grammar_that_completes_inside_a_window(jumps: bool) -> None:
    for seed in range(6):
        engine = make(Always(b"yes"), jumps=jumps)
        (seq,) = run(engine, [ask(schema({"enum": ["yes", "no"]}), seed=seed), ask(CHOICE, "c", seed=seed)])["c"]
        assert seq.stream.text in ("yes", "no")
        assert seq.finish_reason == "stop"
        assert seq.n_generated == len(seq.stream.text)
        assert not engine.has_work()


def test_compiles_that_time_out_leave_nothing() -> None:
    """Each is an error of its request, and the threads are back."""
    before = [thread for thread in threading.enumerate() if thread.name == "headrace-compile"]
    engine = make(options=ConstraintOptions(compile_timeout=0.0001))
    found = run(engine, [ask(schema({"const": f"text {i}" * 40}), f"r{i}") for i in range(200)])
    assert {seqs[0].finish_reason for seqs in found.values()} == {"error"}
    assert all("HR-CONSTRAINT-05" in str(seqs[0].error) for seqs in found.values())
    mine = [t for t in threading.enumerate() if t.name == "headrace-compile" and t not in before]
    assert len(mine) <= 2
    engine.close()
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


def test_a_draft_that_is_refused_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """A raw newline inside a JSON string: it costs no steps, and at most one line of the log."""
    caplog.set_level(logging.DEBUG)
    (seq,) = run(engine := make(Always(b"\n")), [ask(schema({"type": "string", "maxLength": 30}))])["r"]
    assert seq.finish_reason == "stop"
    assert isinstance(json.loads(seq.stream.text), str)
    assert engine.n_drafted > 0
    assert engine.n_steps <= seq.n_generated + 1
    assert len([record for record in caplog.records if record.name.startswith("headrace")]) <= 1


def test_empty_grammars() -> None:
    """Refused or served, each by itself; the engine goes on."""
    empty = [
        Grammar("regex", ""), Grammar("ebnf", ""), Grammar("gbnf", ""), Grammar("lark", ""), Grammar("json_schema", ""),
        Grammar("choice", "[]"), Grammar("choice", ""), Grammar("tagged", ""), Grammar("tagged", "{}"),
        Grammar("json_schema", "{}"), Grammar("json_object", ""), Grammar("regex", "", "<|im_start|>"), Grammar("", ""),
    ]  # fmt: skip
    engine = make(Always(b"ab"))
    free = request("free", "not constrained", SamplingParams(max_tokens=8, temperature=0.5))
    wanted = output(run(Setup().engine(), [free])["free"])
    found = run(engine, [*(ask(grammar, f"r{i}", max_tokens=8) for i, grammar in enumerate(empty)), free])
    assert output(found["free"]) == wanted
    for i, grammar in enumerate(empty):
        (seq,) = found[f"r{i}"]
        if grammar.text == "{}" or grammar.kind == "json_object":
            assert seq.finish_reason in ("stop", "length")
        else:
            assert seq.finish_reason == "error", grammar
            assert getattr(seq.error, "code", "").startswith("HR-CONSTRAINT-"), seq.error
    assert not engine.n_failed_steps
