"""Grammars compile beside the engine; those that nobody waits for any more are given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_harness import Setup, drain, output, plain, request, run

from headrace.contracts import Compiled
from headrace.engine import Engine
from headrace.errors import RequestError
from headrace.testing.toy import ToyConstraint
from headrace.types import Grammar, Request, SamplingParams, Sequence

ENDLESS = Grammar("endless", "")
GOOD = Grammar("charset", "abc{2,5}")


class Slow(ToyConstraint):
    """Compiles the kind "endless" until nobody wants it; fails if that takes too long."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.executor.tokenizer)
        self.started = threading.Semaphore(0)
        self.ended: list[str] = []
        self.n_closed = 0

    def compile(self, grammar: Grammar, cancelled: Callable[[], bool] = lambda: False) -> Compiled:
        if grammar.kind != "endless":
            return super().compile(grammar, cancelled)
        self.started.release()
        patience = threading.Event()
        for _ in range(30_000):
            if cancelled():
                self.ended.append(grammar.text)
                raise RequestError("HR-CONSTRAINT-06", "nobody waits for this grammar")
            patience.wait(0.001)
        raise AssertionError("it was never cancelled")

    def close(self) -> None:
        self.n_closed += 1


@pytest.fixture
def slow() -> tuple[Engine, Slow]:
    engine = Setup().engine()
    constraints = Slow(engine)
    engine.constraints = constraints
    assert engine._grammars is not None
    engine._grammars._constraints = constraints
    return engine, constraints


def ask(grammar: Grammar, id: str, **params: Any) -> Request:
    return request(id, f"prompt of {id}", SamplingParams(max_tokens=8, temperature=0.8, constraint=grammar, **params))


def endless(slow: tuple[Engine, Slow], n: int, **params: Any) -> list[Sequence]:
    """n requests whose grammars compile now."""
    engine, constraints = slow
    seqs = [engine.add(ask(ENDLESS, f"endless {i}", **params))[0] for i in range(n)]
    for _ in range(min(n, 2)):
        assert constraints.started.acquire(timeout=30)
    return seqs


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headrace-compile"]


def test_cancelled_grammars_free_their_threads(slow: tuple[Engine, Slow]) -> None:
    """Two that never end hold both threads; once they are cancelled, the next grammar compiles."""
    engine, constraints = slow
    stuck = endless(slow, 2)
    good = ask(GOOD, "good")
    (seq,) = engine.add(good)
    for _ in range(3):
        engine.step()
    assert seq.status == "compiling"
    for i in range(2):
        assert engine.cancel(f"endless {i}")
    drain(engine)
    assert [each.finish_reason for each in stuck] == ["abort", "abort"]
    assert output([seq]) == plain(good)
    working = threads()
    engine.close()
    for thread in working:  # one of the two may just be about to see that nobody waits
        thread.join(timeout=30)
    assert len(constraints.ended) == 2


def test_a_grammar_is_wanted_until_all_its_samples_have_ended(slow: tuple[Engine, Slow]) -> None:
    engine, constraints = slow
    first, second = engine.add(ask(ENDLESS, "two", n=2))
    assert constraints.started.acquire(timeout=30)
    engine._finish(first, "abort")
    engine.step()
    assert not constraints.ended
    engine._finish(second, "abort")
    engine.close()
    with pytest.raises(RequestError, match="HR-CONSTRAINT-06"):
        second.compiled.result(timeout=30)


def test_a_grammar_that_did_not_start_never_does(slow: tuple[Engine, Slow]) -> None:
    engine, constraints = slow
    endless(slow, 2)
    (third,) = engine.add(ask(ENDLESS, "third"))
    assert engine.cancel("third")
    engine.step()
    assert third.compiled.cancelled()
    for i in range(2):
        engine.cancel(f"endless {i}")
    drain(engine)
    assert not constraints.started.acquire(blocking=False)
    engine.close()


def test_the_deadline_of_a_request_that_compiles(slow: tuple[Engine, Slow]) -> None:
    engine, _ = slow
    now = [0.0]
    engine.clock = lambda: now[0]
    (seq,) = endless(slow, 1, deadline_s=5.0)
    engine.step()
    assert seq.finish_reason is None
    now[0] = 6.0
    drain(engine)
    assert seq.finish_reason == "deadline"
    with pytest.raises(RequestError, match="HR-CONSTRAINT-06"):
        seq.compiled.result(timeout=30)


def test_other_requests_go_on_meanwhile(slow: tuple[Engine, Slow]) -> None:
    engine, _ = slow
    endless(slow, 2)
    free = request("free", "not constrained", SamplingParams(max_tokens=6, temperature=0.5))
    (seq,) = engine.add(free)
    while seq.finish_reason is None:
        engine.step()
    assert output([seq]) == plain(free)
    engine.close()


def test_close_gives_everything_up(slow: tuple[Engine, Slow]) -> None:
    engine, constraints = slow
    before = threads()
    stuck = endless(slow, 2)
    (waiting,) = engine.add(ask(ENDLESS, "waiting"))
    running = [thread for thread in threads() if thread not in before]
    assert len(running) == 2
    engine.close()
    engine.close()
    assert constraints.n_closed == 2
    for thread in running:
        thread.join(30)
        assert not thread.is_alive()
    assert all(seq.finish_reason == "abort" for seq in [*stuck, waiting])
    assert waiting.compiled.cancelled()


def test_close_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Setup().engine()

    def close() -> None:
        raise OSError("the child is gone")

    engine.constraints.close = close  # type: ignore[union-attr, method-assign]
    engine.close()
    assert "the child is gone" in caplog.text


def test_refused_grammars_end_all_their_samples() -> None:
    engine = Setup().engine()
    found = run(engine, [ask(Grammar("charset", "none"), "bad", n=3), ask(GOOD, "good")])
    assert [seq.finish_reason for seq in found["bad"]] == ["error"] * 3
    assert all("HR-CONSTRAINT-02" in str(seq.error) for seq in found["bad"])
    assert output(found["good"]) == plain(ask(GOOD, "good"))


def test_timed_out_compiles_leave_no_threads(slow: tuple[Engine, Slow]) -> None:
    """200 of them: two threads do all, and both end."""
    engine, constraints = slow
    before, now = threads(), [0.0]
    engine.clock = lambda: now[0]
    seqs = [engine.add(ask(ENDLESS, f"r{i}", deadline_s=1.0))[0] for i in range(200)]
    engine.step()
    mine = [thread for thread in threads() if thread not in before]
    assert len(mine) == 2
    now[0] = 2.0
    drain(engine)
    assert {seq.finish_reason for seq in seqs} == {"deadline"}
    assert sum(seq.compiled.cancelled() for seq in seqs) >= 198
    engine.close()
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()
    assert len(constraints.ended) <= 2
