"""Shapes as grammar: every text that is allowed stands for a value of the schema, and every value has its texts."""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import byte_engines
import pytest
from grammar_texts import Recogniser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_gen import random_schema, random_value

from headrace.errors import HeadraceError, RequestError
from headrace_plugins.constraints.lexemes import _Survey
from headrace_plugins.constraints.schema.limits import SchemaLimits
from headrace_plugins.constraints.schema.reading import read_schema
from headrace_plugins.constraints.schema.writing import write_rules
from headrace_plugins.constraints.trimming import trimmed

FEW = SchemaLimits(steps=5_000)
STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"separators": (",", ":")},
    {"indent": 2},
    {"indent": "\t", "ensure_ascii": False},
)


def recogniser(schema: object, **options: Any) -> Recogniser:
    return Recogniser(write_rules(read_schema(schema), **options))


def orders(value: Any) -> list[Any]:
    """A value with the members of its objects in every order."""
    if isinstance(value, list):
        return [list(parts) for parts in product(*map(orders, value))]
    if isinstance(value, dict):
        rows = [permutations(value)] if value else [[()]]
        return [
            dict(zip(names, parts, strict=True))
            for names in rows[0]
            for parts in product(*(orders(value[name]) for name in names))
        ]
    return [value]


@pytest.mark.parametrize("draft", ["7", "2020-12"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False))
def test_texts_of_valid_values_and_no_others(draft, random):
    jsonschema = pytest.importorskip("jsonschema", reason="needs the jsonschema library as an oracle")
    schema = random_schema(random, 3, draft)
    oracle = {"7": jsonschema.Draft7Validator, "2020-12": jsonschema.Draft202012Validator}[draft](schema)
    try:
        table = read_schema(schema, draft=draft, limits=FEW)
        rules = Recogniser(write_rules(table, limits=FEW))
    except HeadraceError as error:
        assert error.code in ("HR-CONSTRAINT-03", "HR-CONSTRAINT-04"), f"{error}\n{json.dumps(schema)}"  # noqa: PT017
        return
    for _ in range(8):
        value = random_value(random)
        style = random.choice(STYLES)
        texts = [json.dumps(each, **style) for each in orders(value)]
        allowed = [text for text in texts if rules.accepts(text)]
        shown = f"{json.dumps(schema)}\n{texts[0]}"
        assert bool(allowed) == oracle.is_valid(value), shown
        text = spoilt(random.choice(texts), random)
        if rules.accepts(text):
            assert oracle.is_valid(json.loads(text)), f"{json.dumps(schema)}\n{text}"


def spoilt(text: str, random: Any) -> str:
    """With a part left out, doubled, or put elsewhere: also texts with a name that comes twice."""
    start, end = sorted(random.choices(range(len(text) + 1), k=2))
    part, at = text[start:end], random.randrange(len(text) + 1)
    return random.choice([text[:start] + text[end:], text[:at] + part + text[at:], text[:at] + "," + part + text[at:]])


MEMBERS = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("{}", True),
        ('{"b": 1}', True),
        ('{"a": true}', True),
        ('{"b": 1, "a": true}', True),
        ('{"a": true, "b": 1}', False),
        ('{"b": 1, "a": true, "z": null, "y": {}}', True),
        ('{"z": null, "b": 1}', False),
        ('{"z": null, "z": 1}', True),
        ('{"b": 1, "b": 2}', False),
        ('{"b": 1, "\\u0062": "x"}', False),
        ('{"\\u0062": "x"}', False),
        ('{"b": 1,}', False),
        ('{ "b":1 }', True),
        ('{\n"b":\n\n\t1\n}', True),
        ('{  "b":1}', False),
        ('{"b" :1}', False),
        ('{"b":1 ,"a":true}', False),
    ],
)
def test_members_come_as_written_and_never_twice(text, allowed):
    assert recogniser(MEMBERS).accepts(text) == allowed


def test_a_member_that_must_be_there():
    rules = recogniser(
        {**MEMBERS, "required": ["a", "c"], "additionalProperties": False, "patternProperties": {"c": {}}}
    )
    assert rules.accepts('{"b": 1, "a": true, "c": 0}')
    assert rules.accepts('{"a": true, "c": 0, "cc": 0}')
    assert not rules.accepts('{"b": 1, "a": true}')
    assert not rules.accepts('{"a": true, "cc": 0}')
    assert not rules.accepts('{"a": true, "c": 0, "d": 0}')


@pytest.mark.parametrize("whitespace", ["compact", "bounded", "any"])
def test_blanks(whitespace):
    rules = recogniser({"type": "array", "items": {"enum": [1, 2]}}, whitespace=whitespace)
    assert [rules.accepts(text) for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]", "[ \r\n 1,   2]", "[]", "[ ]")] == {
        "compact": [True, False, False, False, True, False],
        "bounded": [True, True, True, False, True, True],
        "any": [True] * 6,
    }[whitespace]


CONTAINS = {"type": "array", "contains": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (CONTAINS, ['["a"]', '[1, "a", 2]', '["a", "b"]'], ["[]", "[1]", "[1, 2]"]),
        ({**CONTAINS, "minContains": 2}, ['["a", "b"]', '["a", 1, "b", 2]'], ['["a"]', '[1, "a", 1]']),
        ({**CONTAINS, "maxContains": 1}, ['["a"]', '[1, "a"]'], ['["a", "b"]', "[]", '["a", 1, "b"]']),
        (
            {"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"enum": [1, "a"]}},
            ["[1]", "[null, 1, 2]"],
            ["[null]", '["a"]', '[1, "a"]'],
        ),
        ({**CONTAINS, "minContains": 0, "maxContains": 1}, ["[]", "[1, 2]", '["a"]'], ['["a", "b"]']),
        (
            {**CONTAINS, "minItems": 2, "maxItems": 3},
            ['["a", 1]', '[1, 1, "a"]'],
            ['["a"]', "[1, 1, 1]", '["a", 1, 1, 1]'],
        ),
        (
            {"type": "array", "allOf": [{"contains": {"const": 1}}, {"contains": {"minimum": 2}}]},
            ["[1, 2]", "[3, 1]", "[1, 0, 2]"],
            ["[1]", "[2]", "[]"],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": {"type": "boolean"}},
            ["[]", "[null]", "[null, 1]", "[null, 1, true, false]"],
            ["[1]", "[null, null]", "[null, 1, 2]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1},
            ["[1]", "[1, 2]"],
            ["[]", "[1, 2, 3]", "[2]"],
        ),
        (
            {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
            ["[]", '["b"]', '["b", 1, "a"]'],
            ['["a", "a"]', "[1, 1.0]", '["a", 1, "b", "a"]'],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "boolean"}] * 2, "items": False, "uniqueItems": True},
            ["[]", "[true]", "[true, false]"],
            ["[true, true]", "[false, false]"],
        ),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "not": {"uniqueItems": True}},
            ["[1, 1]", "[2, 1, 2]"],
            ["[]", "[1]", "[1, 2]"],
        ),
        (
            {"type": "array", "items": {"enum": [[1], [2], {"a": 1}, {"a": 1, "b": 2}]}, "uniqueItems": True},
            ["[[1], [2]]", '[{"a": 1}, {"a": 1, "b": 2}]'],
            ["[[1], [1]]", '[{"a": 1}, {"a": 1.0}]'],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            ["[1, 2]", "[1, 2, 3]"],
            ["[1]", "[1, 2, 3, 4]"],
        ),
    ],
)
def test_arrays(schema, good, bad):
    rules = recogniser(schema)
    assert [text for text in good if not rules.accepts(text)] == []
    assert [text for text in bad if rules.accepts(text)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minProperties": 1}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}"]),
        ({"maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}', '{"a": 1, "a": 2}']),
        (
            {"properties": {"a": {}, "b": {}}, "required": ["b"], "minProperties": 2},
            ['{"a": 1, "b": 1}', '{"b": 1, "c": 1}', '{"b": 1, "c": 1, "c": 1}'],
            ['{"b": 1}', '{"a": 1}', '{"a": 1, "c": 1}'],
        ),
        (
            {
                "properties": {name: {} for name in "abc"},
                "additionalProperties": False,
                "minProperties": 2,
                "maxProperties": 2,
            },
            ['{"a": 1, "c": 1}', '{"b": 1, "c": 1}'],
            ["{}", '{"a": 1}', '{"a": 1, "b": 1, "c": 1}'],
        ),
        (
            {"patternProperties": {"^a": {"const": 1}, "^b": {"const": 1}}, "additionalProperties": False},
            ['{"a": 1, "b": 1}', '{"bb": 1}'],
            ['{"a": 2}', '{"b": 2}', '{"c": 1}'],
        ),
        (
            {"not": {"propertyNames": {"pattern": "^a"}}},
            ['{"b": 1}', '{"a": 1, "b": 1}', '{"b": 1, "b": 2}'],
            ["{}", '{"a": 1}'],
        ),
    ],
)
def test_counted_members(schema, good, bad):
    rules = recogniser({"type": "object", **schema})
    assert [text for text in good if not rules.accepts(text)] == []
    assert [text for text in bad if rules.accepts(text)] == []


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"properties": {"x": {"type": "array", "uniqueItems": True}}}, "#/properties/x", "uniqueItems"),
        ({"type": "object", "minProperties": 2}, "#", "minProperties"),
        ({"type": "object", "not": {"additionalProperties": {"type": "string"}}}, "#", "not"),
        ({"multipleOf": 1.0000001}, "#", "multipleOf"),
        ({"type": "array", "minItems": 20_000, "contains": {"const": 1}}, "#", "contains"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema, pointer, keyword):
    with pytest.raises(RequestError) as caught:
        recogniser(schema)
    assert caught.value.code == "HR-CONSTRAINT-03"
    assert f"'{keyword}' at {pointer} " in caught.value.message


def test_many_members_of_any_name_are_counted_by_repetition():
    rules = write_rules(read_schema({"type": "object", "properties": {"a": {}}, "maxProperties": 50_000}))
    assert len(rules.rules) < 10
    assert Recogniser(rules).accepts('{"a": 1, "b": 2}')


def test_a_recursive_schema():
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    rules = recogniser(tree)
    assert rules.accepts('{"next": {"next": {}}}')
    assert not rules.accepts('{"next": {"next": 1}}')


def test_writing_can_be_cancelled():
    table = read_schema({"type": "array"})
    with pytest.raises(RequestError, match="HR-CONSTRAINT-06"):
        write_rules(table, cancelled=lambda: True)


def test_more_nodes_than_the_limit():
    table = read_schema({"properties": {str(i): {"const": [i]} for i in range(9)}})
    with pytest.raises(RequestError, match="HR-CONSTRAINT-04"):
        write_rules(table, limits=SchemaLimits(nodes=5))


EMPTY_OBJECTS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "anyOf": [
        {"prefixItems": [{"type": "object", "maxProperties": 1}, {"const": 1}]},
        {"prefixItems": [{"const": {}}, {"const": 2}]},
    ],
}


def test_printers_need_not_look_at_terminals_of_schemas():
    survey = _Survey(trimmed(write_rules(read_schema({**MEMBERS, "minProperties": 1}))))
    assert survey.conflicts() == {}
    assert survey._work == 0


ENGINE_CASES = [
    (EMPTY_OBJECTS, ["[{}, 1]", "[{}, 2]", '[{"a": 0}, 1]'], ['[{"a": 0}, 2]']),
    (MEMBERS, ["{}", '{"b": 1, "a": true, "z": [1.5e3, {}]}'], ['{"a": 1}', '{"b": 1, "\\u0062": 2}']),
    ({"type": "integer", "multipleOf": 7, "minimum": 100}, ["105", "700.0"], ["7", "106", "-105"]),
    (
        {"anyOf": [{"items": {"multipleOf": 13}}, {"items": {"minimum": 1000}}]},
        ["[26, 39]", "[1000.5]"],
        ["[26, 1002]"],
    ),
    ({"type": "string", "pattern": "^é+$", "maxLength": 2}, ['"é"', '"\\u00e9\\u00E9"'], ['"e"', '"ééé"', '""']),
    ({**CONTAINS, "maxContains": 1}, ['[1, "a"]'], ['["a", "b"]', "[]"]),
    ({"enum": ["a/b", 'q"', 1.5, None, {"k": []}]}, ['"a/b"', '"q\\""', "1.5", "null", '{"k": []}'], ['"a"', "1.51"]),
]


@pytest.mark.parametrize("name", byte_engines.ENGINES)
@pytest.mark.parametrize(("schema", "good", "bad"), ENGINE_CASES)
def test_engines_allow_the_same(name, schema, good, bad):
    accepts = byte_engines.engine(name, write_rules(read_schema(schema)))
    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []
