"""on_unsupported = "validate": what masks can't enforce is checked when the value is finished."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.contracts import Matcher
from headrace.errors import HeadraceError, RequestError
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints.loosening import without
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.router import auto

UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LOOKBEHIND = {"type": "string", "pattern": "(?<=a)b$"}


@pytest.fixture(autouse=True)
def packages() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")


def start(schema: Any, **options: Any) -> Matcher:
    engine = auto(ConstraintOptions(on_unsupported="validate", **options), ToyTokenizer())
    return engine.compile(Grammar("json_schema", json.dumps(schema))).start()


def say(matcher: Matcher, text: str) -> bool:
    rest = text.encode()
    while rest:
        forced = matcher.forced()
        token = forced[0] if forced else rest[0]
        if matcher.done() or not matcher.accept(token):
            return False
        rest = rest[len(ToyTokenizer().token_bytes(token)) :]
    return True


def verdict(schema: Any, value: Any, **options: Any) -> HeadraceError | None:
    matcher = start(schema, **options)
    assert say(matcher, json.dumps(value)), "the masks refuse it"
    return matcher.verdict()


def test_what_breaks_the_schema_is_named() -> None:
    assert verdict(UNIQUE, ["a", "b"]) is None
    error = verdict({"type": "object", "properties": {"a/b": UNIQUE}}, {"a/b": ["a", "a"]})
    assert isinstance(error, RequestError)
    assert error.code == "HR-CONSTRAINT-09"
    assert "'uniqueItems' at #/a~1b" in error.message


def test_the_rest_is_still_enforced() -> None:
    assert not say(start(UNIQUE), "[1]")
    assert not say(start({**LOOKBEHIND, "maxLength": 2}), '"abb"')
    assert verdict(LOOKBEHIND, "ab") is None
    assert verdict(LOOKBEHIND, "b") is not None


def test_rolled_back_text_does_not_count() -> None:
    matcher = start(UNIQUE)
    assert say(matcher, '["a", "a"]')
    assert matcher.verdict() is not None
    matcher.rollback(3)
    assert say(matcher, 'b"]')
    assert matcher.verdict() is None


def test_documents_and_drafts_are_those_of_the_masks() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://x.test/u"}}, "required": ["a"]}
    documents = {"http://x.test/u": LOOKBEHIND}
    assert verdict(schema, {"a": "ab"}, documents=documents) is None
    assert verdict(schema, {"a": "b"}, documents=documents) is not None
    old = {"type": "array", "items": [{"type": "string"}], "not": LOOKBEHIND, "uniqueItems": True}
    assert verdict(old, ["a", 1], draft="7") is None


def test_formats_hold_where_they_are_asserted() -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "date"}, "uniqueItems": True}
    assert verdict(schema, ["no date"]) is None
    matcher = start(schema, format="assertion")
    assert not say(matcher, '["no date"]') or matcher.verdict() is not None


def test_in_the_middle_of_reasoning() -> None:
    engine = auto(ConstraintOptions(on_unsupported="validate"), ToyTokenizer())
    matcher = engine.compile(Grammar("json_schema", json.dumps(UNIQUE), trigger="</think>")).start()
    assert say(matcher, 'so ["a", "a"]</think>["a", "b"]')
    assert matcher.verdict() is None
    matcher = engine.compile(Grammar("json_schema", json.dumps(UNIQUE), trigger="</think>")).start()
    assert say(matcher, '</think>["a", "a"]')
    assert matcher.verdict() is not None


def test_tagged_grammars_say_that_their_schemas_hold_in_full() -> None:
    """The option that is set already is no help there."""
    body = {"start": "body", "body": {"schema": {"type": "array", "uniqueItems": True}}}
    engine = auto(ConstraintOptions(on_unsupported="validate"), ToyTokenizer(320))
    with pytest.raises(RequestError) as caught:
        engine.compile(Grammar("tagged", json.dumps(body)))
    assert caught.value.code == "HR-CONSTRAINT-03"
    assert "uniqueItems" in caught.value.message
    assert "in full" in caught.value.help


def test_without_jsonschema_the_pip_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    with pytest.raises(RequestError) as refused:
        start(UNIQUE)
    assert refused.value.code == "HR-CONSTRAINT-01"
    assert "headrace[constraints]" in refused.value.help


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword", "left"),
    [
        ({"a": 1, "uniqueItems": True}, "#", "uniqueItems", {"a": 1}),
        ({"minimum": 1, "maximum": 2, "type": "number"}, "#", "minimum or maximum", {"type": "number"}),
        ({"items": [{}, {"x": 1}]}, "#/items/1", "x", {"items": [{}, {}]}),
        ({"properties": {"a/b": {"x": 1}}}, "#/properties/a~1b", "x", {"properties": {"a/b": {}}}),
        # inside what turns its meaning around, that goes as a whole
        ({"type": "array", "not": {"uniqueItems": True}}, "#/not", "uniqueItems", {"type": "array"}),
        ({"oneOf": [{"items": {"x": 1}}, {}], "y": 2}, "#/oneOf/0/items", "x", {"y": 2}),
        # where it can't be told, nothing goes
        ({"a": 1}, "#", "uniqueItems", None),
        ({"a": 1}, "http://x.test/#", "a", None),
        ({"x": 1, "unevaluatedItems": False}, "#", "x", None),
        ({"$defs": {"a": {"x": 1}}, "not": {"$ref": "#/$defs/a"}}, "#/$defs/a", "x", None),
        ({"$defs": {"a": {"x": 1}}, "$ref": "#/$defs/a"}, "#/$defs/a", "x", {"$defs": {"a": {}}, "$ref": "#/$defs/a"}),
    ],
)  # fmt: skip
def test_what_is_left_allows_more(schema: Any, pointer: str, keyword: str, left: Any) -> None:
    before = json.dumps(schema)
    assert without(schema, pointer, keyword) == left
    assert json.dumps(schema) == before
