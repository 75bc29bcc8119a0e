"""Which shapes schemas become: exact, few, and in the order written."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import pytest
from shape_values import belongs

from headrace_plugins.constraints.regex import ANY_TEXT
from headrace_plugins.constraints.schema.expressions import ALL, EVERY, NONE
from headrace_plugins.constraints.schema.formats import FORMATS
from headrace_plugins.constraints.schema.limits import SchemaLimits
from headrace_plugins.constraints.schema.reading import read_schema
from headrace_plugins.constraints.schema.shapes import Array, Boolean, Null, Number, Object, String


def root_of(schema, **options):
    table = read_schema(schema, **options)
    return table.union(table.root)


def is_valid(schema, value, **options):
    table = read_schema(schema, **options)
    return belongs(value, table.root, table)


def test_everyday_schemas_stay_small():
    assert root_of({"anyOf": [{"type": "string"}, {"type": "null"}]}) == (String(), Null())
    assert root_of({"type": ["integer", "null"], "minimum": 1}) == (Number(integer=True, low=Fraction(1)), Null())
    assert root_of({"enum": ["b", "a", 3, None, 3.0]}) == (
        String(values=("b", "a")), Number(values=(Fraction(3),)), Null(),
    )  # fmt: skip
    assert root_of({"oneOf": [{"const": "x"}, {"const": "y"}, {"const": "z"}]}) == (String(values=("x", "y", "z")),)
    assert root_of({"allOf": [{"type": "string"}, {"enum": ["a", 1]}]}) == (String(values=("a",)),)
    assert root_of({}) == root_of(True) == root_of({"title": "anything"}) == EVERY


def test_recursive_models_are_finite():
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            "left": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
        },
        "required": ["value"],
    }
    table = read_schema({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    (shape,) = table.union(table.root)
    children, left = (each.node for each in shape.properties if each.name != "value")
    assert table.union(children) == (Array(rest=table.root),)
    assert table.union(left) == (shape, Null())
    assert table.where(table.root) == "#/$defs/Node"


def test_dynamic_references_are_finite_and_few():
    table = read_schema({"$ref": "https://json-schema.org/draft/2020-12/schema"}, limits=SchemaLimits(nodes=400))
    assert belongs({"properties": {"a": {"items": {"minLength": 1}}}}, table.root, table)
    assert not belongs({"properties": {"a": {"items": {"minLength": -1}}}}, table.root, table)


def test_discriminated_unions_need_no_negation():
    def kind(name):
        return {"type": "object", "properties": {"kind": {"const": name}, name: {}}, "required": ["kind"]}

    shapes = root_of({"oneOf": [kind("a"), kind("b"), kind("c")]})
    assert shapes == root_of({"anyOf": [kind("a"), kind("b"), kind("c")]})
    assert len(shapes) == 3


def test_properties_keep_the_order_written():
    schema = {
        "type": "object",
        "required": ["z", "b"],
        "allOf": [{"properties": {"first": {}}}],
        "properties": {"b": {}, "a": {}},
    }
    (shape,) = root_of(schema)
    assert [each.name for each in shape.properties] == ["first", "b", "a", "z"]
    assert [each.required for each in shape.properties] == [False, True, False, True]


def test_no_type_means_every_other_type_too():
    shapes = root_of({"properties": {"a": {"type": "null"}}})
    assert [type(shape) for shape in shapes] == [Object, Array, String, Number, Boolean, Null]


def test_numbers_are_exact():
    assert root_of({"multipleOf": 0.1, "type": "number"}) == (Number(multiples=(Fraction(1, 10),)),)
    assert root_of({"multipleOf": Decimal("0.0001"), "maximum": 1e308, "type": "integer"}) == (
        Number(integer=True, high=Fraction(10) ** 308),
    )
    assert root_of({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 1}) == (Number(values=(Fraction(1),)),)
    assert root_of({"type": "number", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}) == (
        Number(integer=True, multiples=(Fraction(12),)),
    )
    assert root_of({"type": "integer", "exclusiveMinimum": 1}) == (Number(integer=True, low=Fraction(2)),)
    assert root_of({"type": "number", "not": {"exclusiveMaximum": 2}}) == (Number(low=Fraction(2)),)
    assert root_of({"type": "number", "not": {"minimum": 2}}) == (Number(high=Fraction(2), high_open=True),)
    assert root_of({"type": "integer", "not": {"multipleOf": 0.5}}) == ()
    assert root_of({"type": "number", "minimum": 2, "exclusiveMaximum": 2}) == ()


def test_classes_of_names_do_not_overlap():
    schema = {
        "type": "object",
        "properties": {"ab": {"minimum": 1}},
        "patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 5}},
        "additionalProperties": False,
    }
    (shape,) = root_of(schema)
    assert len(shape.others) == 3  # only ^a, only b$, both: without the name ab
    for value, valid in (
        ({"ab": 3}, True), ({"ab": 0}, False), ({"ab": 6}, False), ({"ab": 1.5}, False), ({"aXb": 0}, True),
        ({"aXb": 6}, False), ({"a": 6}, True), ({"b": 1.5}, True), ({"c": 1}, False),
    ):  # fmt: skip
        assert is_valid(schema, value) == valid, value


def test_what_can_not_be_is_empty():
    assert root_of(False) == ()
    assert root_of({"allOf": [{"type": "string"}, {"type": "null"}]}) == ()
    assert root_of({"type": "object", "required": ["a"], "additionalProperties": False}) == ()
    assert root_of({"type": "object", "properties": {"a": False}, "required": ["a"]}) == ()
    assert root_of({"type": "array", "minItems": 3, "maxItems": 2}) == ()
    assert root_of({"type": "string", "pattern": "^a$", "minLength": 2}) == ()
    assert root_of({"type": "array", "contains": {"type": "null"}, "items": {"type": "string"}}) == ()


def test_negation_of_objects_says_which_member_differs():
    schema = {"type": "object", "not": {"properties": {"a": {"type": "string"}}, "additionalProperties": False}}
    a_differs, another = root_of(schema)
    assert [(each.name, each.required) for each in a_differs.properties] == [("a", True)]
    (some,) = another.some
    assert some.node == ALL
    assert some.names != ANY_TEXT
    assert is_valid(schema, {"a": 1})
    assert is_valid(schema, {"b": 1})
    assert not is_valid(schema, {"a": "x"})
    assert not is_valid(schema, {})


def test_some_member_may_be_one_of_the_properties():
    schema = {"type": "object", "properties": {"a": {}}, "not": {"propertyNames": {"pattern": "b"}}}
    for value, valid in (({}, False), ({"b": 1}, False), ({"a": 1}, True), ({"b": 1, "c": 1}, True)):
        assert is_valid(schema, value) == valid, value


def test_an_element_behind_a_prefix_may_be_the_one_that_differs():
    schema = {"type": "array", "not": {"prefixItems": [{"type": "null"}], "items": {"type": "string"}}}
    for value, valid in (
        ([None, "a"], False), ([None, 1], True), ([1], True), ([], False), (["a", "b"], True), (["a"], True),
        ([None], False), ([None, "a", 2], True),
    ):  # fmt: skip
        assert is_valid(schema, value) == valid, value


def test_lists_become_literal_shapes():
    value = {"a": [1, {"b": None}], "c": True}
    schema = {"const": value}
    assert is_valid(schema, {"c": True, "a": [1.0, {"b": None}]})
    for other in ({**value, "d": 1}, {"a": value["a"]}, {**value, "c": 1}, {**value, "a": [1]}):
        assert not is_valid(schema, other), json.dumps(other)


def test_unevaluated_members_see_through_every_branch():
    schema = {
        "type": "object",
        "properties": {"kind": {"type": "string"}},
        "if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
        "then": {"properties": {"x": {}}},
        "anyOf": [{"properties": {"p": {"type": "integer"}}}, {"patternProperties": {"^q": {}}}],
        "unevaluatedProperties": False,
    }
    for value, valid in (
        ({"kind": "a", "x": 1}, True), ({"kind": "b", "x": 1}, False), ({"p": 1, "q": 1}, True),
        ({"p": "no", "q1": 1}, False), ({"q1": 1}, True), ({"other": 1}, False),
    ):  # fmt: skip
        assert is_valid(schema, value) == valid, value


def test_a_draft_has_its_own_keywords():
    assert is_valid({"contains": {"type": "integer"}, "unevaluatedItems": False}, [1])
    assert not is_valid({"contains": {"type": "integer"}, "unevaluatedItems": False}, [1], draft="2019-09")
    assert is_valid({"if": True, "then": False}, 1, draft="6")
    assert not is_valid({"if": True, "then": False}, 1, draft="7")
    assert is_valid({"prefixItems": [False]}, [1], draft="2019-09")
    assert not is_valid({"prefixItems": [False]}, [1])
    assert is_valid({"$ref": "#/definitions/a", "type": "null", "definitions": {"a": {}}}, 1, draft="7")
    assert not is_valid({"$ref": "#/definitions/a", "type": "null", "definitions": {"a": {}}}, 1)
    assert not is_valid({"minimum": 1, "exclusiveMinimum": True}, 1, draft="4")
    assert not is_valid({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}, {"a": 1})


def test_documents_are_found_by_their_address():
    documents = {
        "http://example.com/a.json": {"$defs": {"n": {"$anchor": "num", "type": "integer"}}, "$ref": "b.json"},
        "http://example.com/b.json": {"$dynamicAnchor": "item", "type": "string"},
    }
    assert is_valid({"$ref": "http://example.com/a.json"}, "x", documents=documents)
    assert is_valid({"$ref": "http://example.com/a.json#num"}, 1, documents=documents)
    extended = {
        "$id": "http://example.com/root.json",
        "$ref": "list.json",
        "$defs": {
            "list": {
                "$id": "list.json",
                "items": {"$dynamicRef": "#item"},
                "$defs": {"any": {"$dynamicAnchor": "item"}},
            },
            "here": {"$dynamicAnchor": "item", "type": "null"},
        },
    }
    assert is_valid(extended, [None])
    assert not is_valid(extended, [1])


def test_a_recursive_reference_leads_to_the_outermost_schema():
    tree = {
        "$id": "http://example.com/tree",
        "$recursiveAnchor": True,
        "properties": {"value": {}, "child": {"$recursiveRef": "#"}},
    }
    strict = {
        "$id": "http://example.com/strict",
        "$recursiveAnchor": True,
        "$ref": "tree",
        "unevaluatedProperties": False,
    }
    options = {"draft": "2019-09", "documents": {"http://example.com/tree": tree}}
    assert is_valid(strict, {"child": {"value": 1}}, **options)
    assert not is_valid(strict, {"child": {"other": 1}}, **options)
    assert is_valid(tree, {"child": {"other": 1}}, **options)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-1"]),
        ("time", ["23:59:60Z", "08:30:06.283185-08:00"], ["22:59:60Z", "24:00:00Z", "08:30:06"]),
        ("date-time", ["1985-04-12t23:20:50.52z"], ["1985-04-12 23:20:50Z", "1985-04-31T00:00:00Z"]),
        ("duration", ["P4DT12H30M5S", "P2W", "PT36H"], ["P", "P1D2H", "PT1H5S", "P1Y2W"]),
        ("email", ["a.b+c@example.com", '"a b"@[127.0.0.1]'], ["a..b@example.com", "a@b@c", "a", "@x"]),
        ("hostname", ["a-b.example"], ["-a", "a-", "a..b", "a_b", "a" * 64, ".".join(["a" * 60] * 5)]),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::1", "1::", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8", "1::3:4:5:6:7:8"], ["1:2", "1::2::3", ":1::"]),
        ("uri", ["http://u@[::1]:80/a%20b?c#d", "urn:a:b"], ["/a", "http://a b", "a:%zz", "http://[:::]/"]),
        ("uri-reference", ["/a", "", "#f", "b/c:d"], ["\\a", "a b"]),
        ("uuid", ["2EB8AA08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
        ("json-pointer", ["", "/a~0b/~1"], ["a", "/~2"]),
    ],
)
def test_a_format_is_asserted_on_request(name, good, bad):
    schema = {"format": name}
    for text in (*good, *bad):
        assert is_valid(schema, text)
        assert is_valid(schema, text, assert_formats=True) == (text in good), text
    assert is_valid(schema, 1, assert_formats=True)


def test_every_format_is_tested():
    names = test_a_format_is_asserted_on_request.pytestmark[0].args[1]
    assert {name for name, *_ in names} == set(FORMATS)


def test_the_shapes_of_nothing_and_everything():
    assert (ALL, NONE) == (0, 1)
    assert root_of({"not": {}}) == ()
    assert root_of({"not": {"not": {"type": "boolean"}}}) == (Boolean((True, False)),)
