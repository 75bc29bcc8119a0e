"""Notations other than JSON: the same values, written as Python and as model families do."""

from __future__ import annotations

import ast
import json

import byte_engines
import pytest
from grammar_texts import Recogniser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_gen import random_value

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Rules
from headrace_plugins.constraints.schema.notation import NOTATIONS
from headrace_plugins.constraints.schema.reading import read_schema
from headrace_plugins.constraints.schema.writing import write_rules

ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Zß]"},
        "days": {"type": "integer", "minimum": 1},
        "units": {"enum": ["metric", "us", None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def rules_of(schema: object, notation: str, **options: str) -> Rules:
    return write_rules(read_schema(schema), notation=notation, **options)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False))
def test_python_literals(random):
    value, other = random_value(random), random_value(random)
    rules = Recogniser(rules_of({"const": value}, "python"))
    assert rules.accepts(repr(value))
    same = json.dumps(other, sort_keys=True) == json.dumps(value, sort_keys=True)
    assert same or other == value or not rules.accepts(repr(other))


CALLS = [
    ("""city="Paris", days=3, units=None, tags=['a', "b"], deep={'on': True}""", True),
    ("city='ßa'", True),
    ("city='\\xdfa', days=1", True),
    ("city='paris'", False),
    ("days=3", False),
    ("city='A', days=0", False),
    ("city='A', units=null", False),
    ("city='A', units=\"us\"", True),
    ("city='A', deep={'on': true}", False),
    ("city: 'A'", False),
    ("{'city': 'A'}", False),
    ("", False),
]


@pytest.mark.parametrize(("text", "allowed"), CALLS)
def test_keyword_arguments(text, allowed):
    assert Recogniser(rules_of(ARGUMENTS, "python-call")).accepts(text) == allowed
    if allowed:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        assert {each.arg for each in call.keywords} <= set(ARGUMENTS["properties"])


def test_a_call_without_arguments():
    rules = Recogniser(rules_of({"type": "object", "maxProperties": 0}, "python-call"))
    assert rules.accepts("")
    assert not rules.accepts("a=1")


def test_other_keyword_arguments_are_identifiers():
    rules = Recogniser(rules_of({"type": "object", "properties": {"a": {}}}, "python-call"))
    assert rules.accepts("a=1, b_2=[None]")
    assert not rules.accepts("b c=1")
    assert not rules.accepts("b=1, a=2")


def test_keyword_arguments_in_any_language():
    schema = {"type": "object", "properties": {"año": {"type": "integer"}}, "required": ["año"]}
    assert Recogniser(rules_of(schema, "python-call")).accepts("año=3")
    with pytest.raises(RequestError, match="'a-b' can't be the name of a keyword argument"):
        rules_of({"type": "object", "properties": {"a-b": {}}}, "python-call")


MARKS = [("gemma", '<|"|>'), ("functiongemma", "<escape>")]


@pytest.mark.parametrize(("notation", "mark"), MARKS)
def test_marks_instead_of_quotes(notation, mark):
    rules = Recogniser(rules_of(ARGUMENTS, notation))
    for text, allowed in [
        ('{city:~Par"is\\n\n~,days:3,units:~us~,tags:[~a~,~b,{c}~],deep:{on:true}}', True),
        ("{city:~P~}", True),
        ("{city:~p~}", False),
        ("{city:~P~, days:3}", False),
        ('{"city":~P~}', False),
        ("{city:P}", False),
        ("{city:~P~,units:null}", True),
        ("{city:~P~,deep:{}}", True),
        ("{days:3}", False),
    ]:
        assert rules.accepts(text.replace("~", mark)) == allowed, text
    assert not rules.accepts(f"{{city:{mark}P{mark}Q{mark}}}")


@pytest.mark.parametrize(("notation", "mark"), MARKS)
def test_bare_names(notation, mark):
    rules = Recogniser(rules_of({"type": "object"}, notation))
    assert rules.accepts("{a-b.c:1,é:2}")
    for text in ("{a b:1}", "{:1}", "{a:b:1}", '{"a":1}', "{a,b:1}", "{a=b:1}", "{\u3000a:1}"):
        assert not rules.accepts(text)
    with pytest.raises(RequestError, match="'a:b' can't be a name"):
        rules_of({"properties": {"a:b": {}}}, notation)
    with pytest.raises(RequestError, match="'enum' at #/properties/a can't be enforced"):
        rules_of({"properties": {"a": {"enum": [f"x{mark}"]}}}, notation)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("a b", True),
        ("", True),
        ("a</p", True),
        ("a</p>", False),
        ("12", True),
        ('["a</p"]', True),
        ('["a</p>"]', False),
        ('["a<\\/p>"]', True),
        ('[{"a</p>": 1}]', False),
        ('[{"a\\u003c/p>": 1}]', True),
        ("A", False),
        ('"a"', False),
    ],
)
def test_raw_strings(text, allowed):
    schema = {"anyOf": [{"type": "string", "pattern": "^[a-z </>]*$"}, {"type": "integer"}, {"type": "array"}]}
    assert Recogniser(rules_of(schema, "raw", until="</p>")).accepts(text) == allowed


def test_a_raw_enum_that_holds_its_end():
    with pytest.raises(RequestError, match="HR-CONSTRAINT-03"):
        rules_of({"enum": ["a</p>b"]}, "raw", until="</p>")


def test_unknown_names():
    with pytest.raises(RequestError, match="notation 'yaml' is unknown"):
        rules_of({}, "yaml")
    with pytest.raises(RequestError, match="whitespace 'lots' is unknown"):
        rules_of({}, "json", whitespace="lots")
    with pytest.raises(RequestError, match="keyword arguments are an object"):
        rules_of({"type": "array"}, "python-call")


@pytest.mark.parametrize("engine", byte_engines.ENGINES)
@pytest.mark.parametrize("notation", [name for name in NOTATIONS if name != "raw"])
def test_engines_allow_the_same(engine, notation):
    rules = rules_of(ARGUMENTS, notation)
    accepts, exact = byte_engines.engine(engine, rules), Recogniser(rules)
    texts = [text for text, _ in CALLS]
    for quote in ('"', "'", '<|"|>', "<escape>"):
        for text in ("{city:~P~,days:3}", "{~city~:~P~,~days~:3}", "{~city~:~P~Q~}", "{city:~P<~}", "{city:~p~}"):
            texts.append(text.replace("~", quote))
    assert [text for text in texts if accepts(text) != exact.accepts(text)] == []
