"""What is wrong, what can't be kept, and what costs too much: each a typed error that names where and why."""

from __future__ import annotations

import pytest
from shape_values import belongs

from headrace.errors import RequestError
from headrace_plugins.constraints.schema.limits import SchemaLimits
from headrace_plugins.constraints.schema.reading import read_schema


def fault(schema, **options):
    with pytest.raises(RequestError) as caught:
        read_whole(schema, **options)
    return caught.value


def read_whole(schema, **options):
    """Every node of a schema is worked out."""
    table = read_schema(schema, **options)
    waiting, seen = [table.root], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            for shape in table.union(node):
                waiting += [each.node for each in getattr(shape, "properties", ())]
                waiting += [node for _, node in getattr(shape, "others", ())]
                waiting += getattr(shape, "prefix", ())


@pytest.mark.parametrize(
    ("schema", "pointer", "part"),
    [
        ({"type": "notatype"}, "#/type", "'notatype'"),
        ({"properties": {"a/b": {"minimum": "x"}}}, "#/properties/a~1b/minimum", "'x' is not a number"),
        ({"items": 3}, "#/items", "a schema is an object or a boolean, not 3"),
        ({"items": [{}]}, "#/items", "a schema is an object or a boolean"),
        ({"allOf": []}, "#/allOf", "a non-empty array of schemas"),
        ({"minLength": -1}, "#/minLength", "a whole number >= 0"),
        ({"multipleOf": 0}, "#/multipleOf", "a number > 0"),
        ({"required": "a"}, "#/required", "an array of strings"),
        ({"$ref": "#/$defs/missing"}, "#/$ref", "no '$defs' in #"),
        ({"$ref": "http://example.com/x.json"}, "#/$ref", "unknown document http://example.com/x.json"),
        ({"$ref": "#nowhere"}, "#/$ref", "an anchor"),
        ({"$schema": "http://example.com/mine"}, "#/$schema", "no known draft"),
        ({"properties": {"a": {"pattern": "(x"}}}, "#/properties/a/pattern", "'(x'"),
        ({"const": float("nan")}, "#", "nan is no JSON value"),
        ({"const": "\ud800"}, "#/const", "surrogate"),
        (3, "#", "a schema is an object or a boolean, not 3"),
    ],
)
def test_a_wrong_schema_is_named_with_its_place(schema, pointer, part):
    error = fault(schema)
    assert error.code == "HR-CONSTRAINT-02"
    assert f"at {pointer}:" in error.message or f"at {pointer})" in error.message
    assert part in error.message


def test_an_unknown_draft_is_named():
    assert "known: 4, 6, 7, 2019-09, 2020-12" in fault({}, draft="3").help


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"type": "null"}, {"not": {"$ref": "#"}}]},
        {"unevaluatedProperties": False, "allOf": [{"$ref": "#"}]},
        {"propertyNames": {"$ref": "#"}},
    ],
)
def test_a_schema_that_is_a_part_of_itself_is_refused(schema):
    error = fault(schema)
    assert error.code == "HR-CONSTRAINT-02"
    assert "refers to" in error.message


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword", "lost"),
    [
        ({"properties": {"a": {"pattern": "(?<=a)b"}}}, "#/properties/a", "pattern", {"a": "ab"}),
        ({"patternProperties": {"(a)\\1": {"type": "null"}}}, "#", "patternProperties", {"x": 1, "aa": None}),
        ({"format": "idn-email"}, "#", "format", "a@b"),
        ({"not": {"format": "hostname"}}, "#", "not", "-"),
        ({"not": {"prefixItems": [{}] * 9, "items": {"type": "null"}}}, "#", "not", [1] * 12),
    ],
)
def test_what_can_not_be_kept_is_refused_or_listed(schema, pointer, keyword, lost):
    error = fault(schema, assert_formats=True)
    assert error.code == "HR-CONSTRAINT-03"
    assert f"'{keyword}' at {pointer} " in error.message
    table = read_schema(schema, assert_formats=True, lenient=True)
    assert belongs(lost, table.root, table)
    assert [(where, name) for where, name, _ in table.problems] == [(pointer, keyword)]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"anyOf": [{"pattern": "(?<=a)b"}, {"type": "null"}]}},
        {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"pattern": "(?<=a)b"}]}}},
        {"properties": {"a": {"not": {"pattern": "(?<=a)b"}}}},
        {"not": {"unevaluatedItems": False, "anyOf": [{"pattern": "(?<=a)b"}]}},
    ],
)
def test_what_was_dropped_is_not_taken_away_elsewhere(schema):
    table = read_schema(schema, lenient=True)
    assert belongs("b", table.root, table)
    assert belongs({"a": "b"}, table.root, table)
    assert [keyword for _, keyword, _ in table.problems] == ["pattern"]


def test_a_format_of_another_type_can_be_told_apart():
    table = read_schema({"oneOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}, assert_formats=True)
    assert len(table.union(table.root)) == 2


def nested(depth):
    schema: dict = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("limit", "schema"),
    [
        ("depth", nested(5_000)),
        ("depth", {"$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(2_000)} | {"2000": {}},
                   "$ref": "#/$defs/0"}),
        ("enum_entries", {"enum": list(range(200))}),
        ("size", {"required": ["a"] * 5_000}),
        ("shapes", {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]}),
        ("classes", {"patternProperties": {f"{a}.*{b}": {"minimum": ord(b)} for a in "abcd" for b in "efgh"}}),
        ("cases", {"anyOf": [{"properties": {f"a{i}": {}}, "required": [f"a{i}"]} for i in range(30)],
                   "unevaluatedProperties": False}),
        ("nodes", {"properties": {str(i): {"minimum": i} for i in range(1_200)}}),
        ("steps", {"properties": {str(i): {"minimum": i, "not": {"multipleOf": 7}} for i in range(900)}}),
    ],
)  # fmt: skip
def test_what_costs_too_much_names_its_limit(limit, schema):
    small = {"enum_entries": 100, "size": 4_500, "nodes": 1_000, "steps": 3_000}
    error = fault(schema, limits=SchemaLimits(**{name: most for name, most in small.items() if name == limit}))
    assert error.code == "HR-CONSTRAINT-04"
    option = "max_nesting" if limit == "depth" else f"schema_{limit}"
    assert f"({option})" in error.message
    assert f"constraints.{option}" in error.help


def test_reading_ends_when_cancelled():
    schema = {"allOf": [{"oneOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(9)]}
    assert fault(schema, cancelled=lambda: True).code == "HR-CONSTRAINT-06"


def test_large_schemas_are_read():
    words = [f"value-{i}" for i in range(50_000)]
    table = read_schema({"type": "string", "enum": words})
    assert table.union(table.root)[0].values == tuple(words)
    tools = [
        {
            "type": "object",
            "properties": {"name": {"const": f"tool_{i}"}, "arguments": {"properties": {"a": {"type": "integer"}}}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i in range(60)
    ]
    table = read_schema({"oneOf": tools})
    assert len(table.union(table.root)) == 60
