"""Compiled grammars are kept within a bound, and one that is asked for twice at once is made once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.contracts import Compiled, Matcher
from headrace.errors import RequestError
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints import cache as module
from headrace_plugins.constraints.cache import Cancelled, CompileCache, cancelled_error
from headrace_plugins.constraints.engines import SERVES
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.router import Constraints, auto


class Sized(Compiled):
    def __init__(self, size: int) -> None:
        self._size = size

    def start(self) -> Matcher:
        raise NotImplementedError

    def size_bytes(self) -> int:
        return self._size


def never() -> bool:
    return False


def make(cache: CompileCache[str], key: str, size: int = 10) -> Compiled:
    return cache.get(key, 1, lambda cancelled: Sized(size), never)


def test_the_least_recently_used_goes_first() -> None:
    cache: CompileCache[str] = CompileCache(33)
    kept = {key: make(cache, key) for key in "abc"}
    assert make(cache, "a") is kept["a"]
    make(cache, "d")
    assert cache.used_bytes == 33
    assert make(cache, "a") is kept["a"]
    assert make(cache, "c") is kept["c"]
    assert make(cache, "b") is not kept["b"]


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache: CompileCache[str] = CompileCache(30)
    kept = make(cache, "a")
    make(cache, "large", 30)
    assert len(cache) == 1
    assert make(cache, "a") is kept


def test_errors_are_not_kept() -> None:
    cache: CompileCache[str] = CompileCache(100)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", 1, lambda cancelled: 1 / 0, never)  # type: ignore[arg-type, return-value]
    assert make(cache, "a") is make(cache, "a")


def test_many_ask_and_one_compiles() -> None:
    cache: CompileCache[str] = CompileCache(100)
    begun, go = threading.Event(), threading.Event()
    made = []

    def slow(cancelled: Cancelled) -> Compiled:
        begun.set()
        assert go.wait(30)
        made.append(Sized(10))
        return made[-1]

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(cache.get, "a", 1, slow, never) for _ in range(6)]
        assert begun.wait(30)
        go.set()
        results = [future.result(30) for future in futures]
    assert len(made) == 1
    assert set(results) == set(made)


def test_a_waiter_gives_up_alone_and_the_last_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    cache: CompileCache[str] = CompileCache(100)
    begun, over, waiting, went_on = (threading.Event() for _ in range(4))
    gone = {"first": False, "second": False}

    def slow(cancelled: Cancelled) -> Compiled:
        begun.set()
        while not over.wait(0.001):
            alone = gone["second"]
            if cancelled():
                raise cancelled_error()
            if alone:
                went_on.set()
        return Sized(10)

    def second() -> bool:
        waiting.set()
        return gone["second"]

    with ThreadPoolExecutor(2) as pool:
        first_one = pool.submit(cache.get, "a", 1, slow, lambda: gone["first"])
        assert begun.wait(30)
        second_one = pool.submit(cache.get, "a", 1, slow, second)
        assert waiting.wait(30)
        gone["second"] = True
        with pytest.raises(RequestError) as refused:
            second_one.result(30)
        assert refused.value.code == "HR-CONSTRAINT-06"
        assert went_on.wait(30), "one of two still waits for it"
        gone["first"] = True
        with pytest.raises(RequestError):
            first_one.result(30)
        over.set()
    assert make(cache, "a") is make(cache, "a")


def test_who_joins_a_compile_that_was_given_up_makes_it_anew() -> None:
    cache: CompileCache[str] = CompileCache(100)
    begun, joined = threading.Event(), threading.Event()
    n_made = 0

    def given_up(cancelled: Cancelled) -> Compiled:
        nonlocal n_made
        n_made += 1
        if n_made > 1:
            return Sized(10)
        begun.set()
        assert joined.wait(30)
        raise cancelled_error()

    def second() -> bool:
        joined.set()
        return False

    with ThreadPoolExecutor(2) as pool:
        first_one = pool.submit(cache.get, "a", 1, given_up, never)
        assert begun.wait(30)
        second_one = pool.submit(cache.get, "a", 1, given_up, second)
        assert isinstance(second_one.result(30), Sized)
        with pytest.raises(RequestError):
            first_one.result(30)


# --- of the engines --------------------------------------------------------------------------------------------------


def test_same_grammar_is_the_same_object_and_all_of_it_counts() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    engine = auto(None, ToyTokenizer())
    grammars = [
        Grammar("regex", "ab"), Grammar("gbnf", 'root ::= "ab"'), Grammar("regex", "ab", trigger="x"),
        Grammar("regex", "ab", trigger="x", trigger_budget=3), Grammar("regex", "abc"),
    ]  # fmt: skip
    compiled = [engine.compile(grammar) for grammar in grammars]
    assert len(set(map(id, compiled))) == len(compiled)
    assert [engine.compile(Grammar(*fields(grammar))) for grammar in grammars] == compiled


def fields(grammar: Grammar) -> tuple[str, str, str | None, int | None]:
    return grammar.kind, grammar.text, grammar.trigger, grammar.trigger_budget


def test_memory_of_many_grammars_is_bounded() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    engine = Constraints(ConstraintOptions(cache_memory=1 << 20), ToyTokenizer())
    for i in range(60):
        engine.compile(Grammar("choice", f'["a{i}"]'))
    assert engine._cache.used_bytes <= 1 << 20
    assert 10 < len(engine._cache) < 60
    engine.close()
    assert not engine._cache.used_bytes
    assert engine.compile(Grammar("choice", '["a"]')).start() is not None


WRITES_NOTHING = """
import json, os, sys

def audit(event, args):
    if event == "open" and isinstance(args[0], str) and args[0] != os.devnull:
        assert not args[2] & (os.O_WRONLY | os.O_RDWR), args

from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints import compiling
from headrace_plugins.constraints.router import Constraints
import %s
sys.dont_write_bytecode = True
sys.addaudithook(audit)
if "%s" == "llguidance":  # the other one takes seconds to import
    compiling.TRIAL_WEIGHT = 0  # each goes through a child process too
engine = Constraints(None, ToyTokenizer(), ("%s",))
for grammar in (Grammar("json_schema", '{"type": "integer"}'), Grammar("regex", "a+"), Grammar("gbnf", 'root ::= "a"')):
    assert engine.compile(grammar) is engine.compile(grammar)
engine.close()
"""


@pytest.mark.parametrize("name", SERVES)
def test_nothing_is_written_to_disk(name: str, tmp_path: Path) -> None:
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HEADRACE_HOME"), str(tmp_path))
    environment = {**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"}
    program = WRITES_NOTHING % (SERVES[name].package, name, name)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*"))
