"""Arguments that are written one by one: which a schema has, and what can't be said so."""

from __future__ import annotations

from typing import Any

import pytest
from call_texts import WRITERS, family, tool

from headrace.errors import RequestError
from headrace_plugins.dialects.parameters import (
    TYPES,
    Argument,
    arguments_expression,
    arguments_of,
    others_of,
    types_of,
)


def test_arguments_are_in_the_order_of_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "string"}, "a": True, "never": False},
        "required": ["a", "z"],
        "unknown keyword": 1,
    }
    assert arguments_of("f", schema) == [
        Argument("b", {"type": "string"}, False),
        Argument("a", {}, True),
        Argument("z", {}, True),
    ]


def test_references_are_followed() -> None:
    inner = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
    schema = {"$ref": "#/$defs/inner", "$defs": {"inner": inner, "n": {"type": "integer"}}}
    (argument,) = arguments_of("f", schema)
    assert (argument.name, argument.required) == ("x", True)
    assert types_of(argument.schema) == {"number"}


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("anyOf", [{"required": ["a"]}, {"required": ["b"]}]),
        ("not", {"required": ["a"]}),
        ("dependentRequired", {"a": ["b"]}),
        ("minProperties", 1),
        ("patternProperties", {"^a": {}}),
    ],
)
def test_more_than_a_list_of_arguments_is_refused(keyword: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"HR-CONSTRAINT-03: .*'f'.*#/{keyword}"):
        arguments_of("f", {"type": "object", "properties": {"a": {}}, keyword: value})
    with pytest.raises(RequestError, match="HR-CONSTRAINT-03"):
        arguments_of("f", {"type": "array"})


def test_tools_may_take_arguments_of_any_name() -> None:
    assert others_of({"type": "object"}) == {}
    assert others_of({"type": "object", "additionalProperties": {"type": "integer"}}) == {"type": "integer"}
    assert others_of({"type": "object", "properties": {}}) is None
    assert others_of({"type": "object", "properties": {"a": {}}}) is None


def test_unevaluated_arguments_are_the_others() -> None:
    assert others_of({"type": "object", "unevaluatedProperties": False}) is None
    assert others_of({"type": "object", "unevaluatedProperties": {"type": "null"}}) == {"type": "null"}
    (argument,) = arguments_of("f", {"required": ["a"], "unevaluatedProperties": {"type": "null"}})
    assert argument.schema == {"type": "null"}


def test_a_required_argument_without_a_value_is_kept() -> None:
    assert arguments_of("f", {"properties": {"a": False}, "required": ["a"]}) == [Argument("a", False, True)]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"maxProperties": 0}, "#/maxProperties"),
        ({"not": {"required": ["a"]}}, "#/not"),
        *(
            ({"properties": {name: {}}}, "could not be read back")
            for name in ("", "a>", 'a"', " a", "a\n", "<", "a" * 257)
        ),
    ],
)
def test_what_could_not_be_kept_is_no_expression(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"HR-CONSTRAINT-03: .*{said}"):
        arguments_expression("f", schema, lambda key, value: "")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, TYPES),
        (False, set()),
        ({"type": ["integer", "null"]}, {"number", "null"}),
        ({"enum": ["a", 1, None, True, [], {}]}, TYPES),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"const": None}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "array"]}]}, {"string"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, TYPES),
        ({"$ref": "http://elsewhere"}, TYPES),
        ({"type": "no type"}, TYPES),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize("name", ["qwen-xml", "glm", "minimax"])
def test_references_to_anywhere_hold_in_the_grammar(name: str) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance (pip install 'headrace[constraints]')")
    from call_grammars import ToolGrammar

    given = tool("f", ["a"], a={"type": "integer"}, b={"$ref": "#/properties/a"}, c={"$ref": "#/$defs/c"})
    given["function"]["parameters"]["$defs"] = {"c": {"enum": ["x", "y"]}}
    grammar = ToolGrammar(family(name), [given])
    assert grammar.accepts(WRITERS[name]([("f", {"a": 1, "b": 2, "c": "x"})]))
    for wrong in ({"a": 1, "b": "two"}, {"a": 1, "c": "z"}, {"b": 1}):
        assert not grammar.accepts(WRITERS[name]([("f", wrong)])), wrong


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("qwen-xml", "</parameter>"),
        ("glm", "</arg_value>"),
        ("glm-compact", "</arg_value>"),
        ("minimax", "</parameter>"),
    ],
)
def test_a_written_value_is_read_as_what_it_was_written_for(name: str, mark: str) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance (pip install 'headrace[constraints]')")
    from call_grammars import ToolGrammar

    large = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 100}]}
    marked = {"type": ["string", "array", "null"], "items": {"type": "string"}}
    given = tool("f", [], a=large, b=marked, c={"type": "string"}, d={"type": "object"})
    grammar = ToolGrammar(family(name), [given])
    right: list[dict[str, Any]] = [
        *({"a": value} for value in ("five", "5 of 6", "", "true", 100)),
        *({"b": value} for value in ("[", "1", ["x"], None, "a]")),
        *({"c": value} for value in ("5", "[1]", mark[:-1])),
        {"d": {"x": mark[:-1]}},
    ]
    assert [each for each in right if not grammar.accepts(WRITERS[name]([("f", each)]))] == []
    wrong: list[dict[str, Any]] = [
        *({"a": value} for value in ("5", " 5\n", "1.5", "1e2", 99)),
        *({"b": value} for value in ("[1]", " [1] ", "None", "x" + mark, [mark])),
        {"c": f"x{mark}y"},
        *({"d": value} for value in ({"x": mark}, {mark: 1}, {"x": [{"y": f"a{mark}"}]})),
    ]
    assert [each for each in wrong if grammar.accepts(WRITERS[name]([("f", each)]))] == []
