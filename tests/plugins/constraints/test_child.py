"""Compiles that run away do so in a child process, which ends with its request."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints import child as module
from headrace_plugins.constraints.child import Children
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.router import Constraints, auto
from headrace_plugins.constraints.vocabulary import Vocabulary

ENDLESS = Grammar("lark", "start: /((a{1000}){1000}){1000}/")
"""Keeps llguidance busy for minutes."""
DEADLY = Grammar("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(50_000)) + '\nr50000: "a"')
"""Overflows llguidance's stack."""
GOOD = Grammar("lark", 'start: "a" /[0-9]+/')


@pytest.fixture(autouse=True)
def llguidance() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every child that was started; all have ended when the test is over."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", start)
    yield started
    for each in started:
        assert each.returncode is not None, "a child outlives its engine"


def code_of(engine: Constraints, grammar: Grammar, **kwargs: Any) -> str:
    with pytest.raises(RequestError) as refused:
        engine.compile(grammar, **kwargs)
    return refused.value.code


def test_out_of_time(processes: list[subprocess.Popen[bytes]]) -> None:
    engine = auto(ConstraintOptions(compile_timeout=0.3), ToyTokenizer())
    assert code_of(engine, ENDLESS) == "HR-CONSTRAINT-05"
    assert [each.poll() is not None for each in processes] == [True]
    engine.close()


def test_cancelled(processes: list[subprocess.Popen[bytes]]) -> None:
    engine = auto(None, ToyTokenizer())
    assert code_of(engine, ENDLESS, cancelled=lambda: bool(processes)) == "HR-CONSTRAINT-06"
    assert [each.poll() is not None for each in processes] == [True]
    engine.close()


def test_a_crash_is_an_error_and_the_engine_goes_on() -> None:
    engine = auto(None, ToyTokenizer())
    assert code_of(engine, DEADLY) == "HR-CONSTRAINT-08"
    assert engine.compile(GOOD).start().accept(ord("a"))
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="how much memory a process has is read from /proc")
def test_out_of_memory() -> None:
    children = Children("llguidance", Vocabulary(ToyTokenizer()), memory_bytes=1 << 20)
    with pytest.raises(RequestError) as refused:
        children.try_compile('start: "' + "a" * 500_000 + '"', lambda: None)
    assert refused.value.code == "HR-CONSTRAINT-08"
    children.close()


def test_one_child_serves_many_grammars(processes: list[subprocess.Popen[bytes]]) -> None:
    engine = auto(None, ToyTokenizer())
    for i in range(5):
        engine.compile(Grammar("lark", f'start: "{i}"'))
    assert code_of(engine, Grammar("lark", "start: missing")) == "HR-CONSTRAINT-02"
    engine.compile(GOOD)
    assert len(processes) == 1
    engine.close()
    engine.close()


def test_a_child_that_died_while_it_waited_is_replaced(processes: list[subprocess.Popen[bytes]]) -> None:
    engine = auto(None, ToyTokenizer())
    engine.compile(GOOD)
    processes[0].kill()
    assert engine.compile(Grammar("lark", 'start: "b"')).start().accept(ord("b"))
    assert len(processes) == 2
    assert code_of(engine, DEADLY) == "HR-CONSTRAINT-08", "in the first one and in a fresh one"
    assert len(processes) == 3
    engine.close()


def test_close_ends_a_running_compile(processes: list[subprocess.Popen[bytes]]) -> None:
    engine, codes = auto(None, ToyTokenizer()), []
    begun = threading.Event()

    def asked() -> bool:
        if processes:
            begun.set()
        return False

    worker = threading.Thread(target=lambda: codes.append(code_of(engine, ENDLESS, cancelled=asked)))
    worker.start()
    assert begun.wait(60)
    while worker.is_alive():
        engine.close()
        worker.join(0.05)
    assert codes == ["HR-CONSTRAINT-08"]


def test_many_endless_grammars_leave_nothing_behind(processes: list[subprocess.Popen[bytes]]) -> None:
    engine = auto(None, ToyTokenizer())
    n_threads = threading.active_count()
    for i in range(12):
        grammar = Grammar("lark", f"{ENDLESS.text} | /b{i}/")
        n_before = len(processes)
        assert code_of(engine, grammar, cancelled=lambda n=n_before: len(processes) > n) == "HR-CONSTRAINT-06"
    assert len(processes) == 12
    assert all(each.poll() is not None for each in processes)
    assert threading.active_count() == n_threads
    engine.close()


def test_small_grammars_need_no_child(processes: list[subprocess.Popen[bytes]]) -> None:
    engine = auto(None, ToyTokenizer())
    engine.compile(Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}'))
    engine.compile(Grammar("regex", "[a-z]{1,30}"))
    assert not processes
    engine.compile(Grammar("choice", '["' + "a" * 25_000 + '"]'))
    assert len(processes) == 1
    engine.close()


def test_the_protocol_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_limit_memory", lambda memory_bytes: None)  # this process is no child
    vocabulary = Vocabulary(ToyTokenizer())
    sent = module._vocabulary_message(vocabulary)
    for text in ('start: "a"', "start: missing"):
        sent += module._message({"grammar": text})
    answers = io.BytesIO()
    module.serve("llguidance", 1 << 40, io.BytesIO(sent), answers)
    answers.seek(0)
    assert module._read_json(answers) == {}
    refusal = module._read_json(answers)
    assert refusal is not None
    assert refusal["code"] == "HR-CONSTRAINT-02"
    assert module._read_json(answers) is None
