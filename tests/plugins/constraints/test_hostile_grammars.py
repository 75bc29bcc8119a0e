"""Grammars that are made to hurt end in a clear error, or work; neither takes long, nor much memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints import compiling
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.router import Constraints, auto


def nested(n: int, before: str, after: str, core: str = "{}") -> str:
    return before * n + core + after * n


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
EACH_OTHER = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}},
    },
}
COMBINED = {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(16)]}


@pytest.fixture
def engine() -> Constraints:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    return auto(None, ToyTokenizer())


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


REFUSED = {
    "schema nests": (Grammar("json_schema", nested(5_000, '{"items":', "}")), "HR-CONSTRAINT-04", "max_nesting = 128"),
    "brackets": (Grammar("json_schema", "[" * 100_000), "HR-CONSTRAINT-04", "max_nesting = 128"),
    "choice nests": (Grammar("choice", nested(5_000, "[", "]", "")), "HR-CONSTRAINT-04", "max_nesting"),
    "tagged nests": (Grammar("tagged", '{"body":' + '{"seq":[' * 5_000), "HR-CONSTRAINT-04", "max_nesting"),
    "schema is long": (schema({"description": "a" * (1 << 20)}), "HR-CONSTRAINT-04", "max_text is 1,048,576"),
    "long in bytes": (schema({"description": "é" * (1 << 19)}), "HR-CONSTRAINT-04", "max_text"),
    "enum of 50,000": (schema({"enum": [f"{i * 7919:020x}" for i in range(50_000)]}), "HR-CONSTRAINT-04", "max_text"),
    "enum of too many": (schema({"enum": [*range(100_001)]}), "HR-CONSTRAINT-04", "schema_enum_entries"),
    "parentheses": (Grammar("regex", "(" * 50_000), "HR-CONSTRAINT-04", "60"),
    "gbnf parentheses": (Grammar("gbnf", "root ::= " + "(" * 50_000), "HR-CONSTRAINT-04", "nest"),
    "references itself": (schema(LOOP), "HR-CONSTRAINT-02", "#/$defs/a"),
    "rules without end": (Grammar("gbnf", "root ::= a\na ::= b\nb ::= a"), "HR-CONSTRAINT-07", "root"),
    "repeats repeat": (Grammar("regex", "((a{1000}){1000}){1000}"), "HR-CONSTRAINT-04", "states"),
    "groups repeat": (Grammar("gbnf", 'root ::= (("a"{1000}){1000}){1000}'), "HR-CONSTRAINT-04", "states"),
    "combinations": (schema(COMBINED), "HR-CONSTRAINT-04", "limit"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(engine: Constraints, name: str) -> None:
    grammar, code, said = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        engine.compile(grammar)
    assert refused.value.code == code
    assert said in refused.value.message
    assert len(refused.value.message) < 500, "a message does not repeat the text"


WORKING = {
    "references each other": (schema(EACH_OTHER), '{"b": {"a": {}}}'),
    "deep, but not too deep": (Grammar("json_schema", nested(100, '{"items":', "}")), "[[[1]]]"),
    "long texts": (schema({"type": "string", "maxLength": 20_000}), '"ab"'),
    "left recursion": (Grammar("gbnf", 'root ::= root "a" | "b"'), "baa"),
    "brackets in texts": (schema({"const": "[" * 300}), json.dumps("[" * 300)),
    "many stars": (Grammar("regex", "(.*a.*){50}"), "a" * 50),
}


@pytest.mark.parametrize("name", WORKING)
def test_works(engine: Constraints, name: str) -> None:
    grammar, text = WORKING[name]
    matcher, rest = engine.compile(grammar).start(), text.encode()
    while rest:
        forced = matcher.forced()
        token = forced[0] if forced else rest[0]
        assert matcher.accept(token)
        rest = rest[len(ToyTokenizer().token_bytes(token)) :]
    assert matcher.done() or matcher.accept(256)


def test_a_large_enum_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    monkeypatch.setattr(compiling, "TRIAL_WEIGHT", 1 << 40)  # the same without a child, which has its own tests
    engine = auto(None, ToyTokenizer())
    matcher = engine.compile(schema({"enum": [f"{i:x}" for i in range(5_000)]})).start()
    for byte in b'"fa7"':
        assert matcher.accept(byte)
    assert matcher.done()


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is not counted here")
def test_grammars_without_end_stay_within_the_caches_memory() -> None:
    """security-11: each is another small schema; kept, they would take 40 MB."""
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    engine = Constraints(ConstraintOptions(cache_memory=1 << 20), ToyTokenizer())

    def compile_one(i: int) -> None:
        assert engine.compile(schema({"const": f"text {i}"})).start()

    compile_one(0)
    before = _resident_bytes()
    for i in range(1, 1_000):
        compile_one(i)
    assert engine._cache.used_bytes <= 1 << 20
    assert _resident_bytes() - before <= 20 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_limits_are_options() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    options = ConstraintOptions(max_text=100, max_nesting=4, schema_enum_entries=3, schema_size=20)
    engine = Constraints(options, ToyTokenizer())
    for grammar, named in (
        (Grammar("regex", "a" * 101), "max_text"),
        (Grammar("json_schema", nested(5, '{"items":', "}")), "max_nesting"),
        (schema({"enum": [1, 2, 3, 4]}), "schema_enum_entries"),
        (schema({"enum": [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]}), "schema_size"),
    ):
        with pytest.raises(RequestError) as refused:
            engine.compile(grammar)
        assert refused.value.code == "HR-CONSTRAINT-04"
        assert named in str(refused.value)
    assert engine.compile(schema({"enum": [1, 2, 3]})).start() is not None
