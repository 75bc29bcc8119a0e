"""Every engine on every kind of grammar: the conformance class, and what the table of engines promises."""

from __future__ import annotations

import json
import random

import pytest

from headrace.contracts import ConstraintEngine, Tokenizer
from headrace.errors import RequestError
from headrace.testing.conformance import ConstraintConformance
from headrace.testing.conformance.constraint import allowed, mask
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints.compiling import KINDS
from headrace_plugins.constraints.engines import SERVES
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.router import Constraints, auto

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "age": {"type": "integer", "minimum": 18}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
CALLS = json.dumps(
    {
        "start": "free",
        "triggers": ["<t>"],
        "body": {"seq": ["<t>", {"schema": {"enum": [1, "a"]}, "notation": "json"}, "</t>"]},
    }
)
SPECIAL = json.dumps({"start": "body", "body": {"seq": [{"special": "<|im_start|>"}, {"regex": "[ab]{2}"}]}})
CASES: list[tuple[Grammar, list[str], list[str]]] = [
    (Grammar("json_schema", PERSON), ['{"name": "bo"}', '{"name":"the","age":180}'], ['{"age": 20}', '{"name": "A"}']),
    (Grammar("json_object", ""), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{"]),
    (Grammar("regex", "(the end|é+)x?"), ["the end", "ééx"], ["the", "éy"]),
    (Grammar("gbnf", 'root ::= "a" b*\nb ::= "日本" | [0-9]'), ["a", "a日本7"], ["日本", "ab"]),
    (Grammar("ebnf", 'root ::= "<" root ">" | "x"{2,3}'), ["xx", "<<xxx>>"], ["x", "<xx"]),
    (Grammar("choice", '["yes", "no", "no way", "🙂"]'), ["yes", "no", "no way", "🙂"], ["n", "maybe"]),
    (Grammar("tagged", CALLS), ["free", "a <t>1</t> and <t>\"a\"</t> the"], ["<t>2", "so <t>1"]),
    (Grammar("regex", "[ab]+", trigger="</think>"), ["so</think>ab", "</think>a"], ["ab", "</think>", "</think>c"]),
]  # fmt: skip
LARK: tuple[Grammar, list[str], list[str]] = (
    Grammar("lark", 'start: "the " NAME\nNAME: /[a-z]{1,3}/'), ["the end", "the x"], ["the", "then"],
)  # fmt: skip


class Conformance(ConstraintConformance):
    engines: tuple[str, ...]

    def make(self, tokenizer: Tokenizer) -> ConstraintEngine:
        for name in self.engines:
            pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
        return Constraints(None, tokenizer, self.engines)

    def cases(self) -> list[tuple[Grammar, list[str], list[str]]]:
        return [*CASES, LARK] if "llguidance" in self.engines else CASES

    def bad_grammars(self) -> list[Grammar]:
        return [grammar for grammar, _ in REFUSED]


class TestLLGuidance(Conformance):
    engines = ("llguidance",)


class TestXGrammar(Conformance):
    engines = ("xgrammar",)


class TestBoth(Conformance):
    engines = tuple(SERVES)


def test_masks_are_the_same_without_jumps() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    tokenizer = ToyTokenizer()
    jumping, engine = auto(None, tokenizer), auto(ConstraintOptions(jump_forward=False), tokenizer)
    n_forced = 0
    for grammar, _, _ in [*CASES, LARK]:
        one, other = jumping.compile(grammar).start(), engine.compile(grammar).start()
        rng = random.Random(3)
        for _ in range(20):
            if one.done():
                break
            assert (mask(one, tokenizer) == mask(other, tokenizer)).all()
            assert not list(other.forced())
            n_forced += bool(one.forced())
            token = rng.choice(sorted(allowed(one, tokenizer)))
            assert one.accept(token)
            assert other.accept(token)
    assert n_forced > 10


REFUSED = [
    (Grammar("no-such-kind", "x"), "HR-CONSTRAINT-01"),
    *((Grammar(kind, " \n"), "HR-CONSTRAINT-02") for kind in KINDS if kind != "json_object"),
    *((Grammar(kind, "a\0b"), "HR-CONSTRAINT-02") for kind in KINDS),
    *((Grammar(kind, '"\ud800"'), "HR-CONSTRAINT-02") for kind in KINDS),
    (Grammar("json_schema", '{"type": "string"'), "HR-CONSTRAINT-02"),
    (Grammar("json_schema", '{"type": "text"}'), "HR-CONSTRAINT-02"),
    (Grammar("json_schema", '{"minimum": NaN}'), "HR-CONSTRAINT-02"),
    (Grammar("json_schema", '{"type": "string", "type": "null"}'), "HR-CONSTRAINT-02"),
    (Grammar("json_schema", "1" * 5000), "HR-CONSTRAINT-02"),
    (Grammar("json_schema", '{"type": "array", "items": {}, "uniqueItems": true}'), "HR-CONSTRAINT-03"),
    (Grammar("json_schema", '{"type": "string", "enum": [1]}'), "HR-CONSTRAINT-07"),
    (Grammar("json_object", '{"type": "string"}'), "HR-CONSTRAINT-02"),
    (Grammar("regex", "(a"), "HR-CONSTRAINT-02"),
    (Grammar("regex", "(?<=a)b"), "HR-CONSTRAINT-03"),
    (Grammar("gbnf", "root ::= missing"), "HR-CONSTRAINT-02"),
    (Grammar("ebnf", 'start ::= "a"'), "HR-CONSTRAINT-02"),
    (Grammar("gbnf", 'root ::= "a" root'), "HR-CONSTRAINT-07"),
    (Grammar("choice", "[]"), "HR-CONSTRAINT-02"),
    (Grammar("choice", '["a", 1]'), "HR-CONSTRAINT-02"),
    (Grammar("tagged", '{"start": "body"}'), "HR-CONSTRAINT-02"),
]


@pytest.mark.parametrize(("grammar", "code"), REFUSED, ids=lambda value: str(value)[:40].encode("ascii", "replace"))
def test_what_is_wrong_is_named(grammar: Grammar, code: str) -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    with pytest.raises(RequestError) as refused:
        auto(None, ToyTokenizer()).compile(grammar)
    assert refused.value.code == code
    assert refused.value.message


def test_messages_say_where() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    engine = auto(None, ToyTokenizer())
    for grammar, said in (
        (Grammar("json_schema", '{"a": 1,\n  b: 2}'), "line 2, column 3"),
        (Grammar("json_schema", '{"properties": {"x": {"type": "array", "uniqueItems": true}}}'), "#/properties/x"),
        (Grammar("lark", 'start: "a" b\nb: missing'), "2(4)"),
        (Grammar("regex", "ab[c"), "character 2"),
        (Grammar("gbnf", 'root ::= "a"\n x ::= ?'), "line 2"),
        (Grammar("jsonschema", "{}"), "jsonschema"),
    ):
        with pytest.raises(RequestError) as refused:
            engine.compile(grammar)
        assert said in refused.value.message
    assert "json_schema" in refused.value.help


# --- who serves what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_those_of_the_table(name: str, kind: str) -> None:
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    grammar = next(case[0] for case in [*CASES, LARK] if case[0].kind == kind and case[0].trigger is None)
    engine = Constraints(None, ToyTokenizer(), (name,))
    if kind in SERVES[name].kinds:
        assert engine.compile(grammar).start() is not None
        return
    with pytest.raises(RequestError) as refused:
        engine.compile(grammar)
    assert refused.value.code == "HR-CONSTRAINT-01"
    assert "llguidance" in refused.value.help


@pytest.mark.parametrize("name", SERVES)
def test_special_tokens_are_no_text(name: str) -> None:
    """Named, they are allowed; any text of any character does not let them through."""
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    tokenizer = ToyTokenizer()
    engine = Constraints(None, tokenizer, (name,))
    matcher = engine.compile(Grammar("tagged", SPECIAL)).start()
    assert allowed(matcher, tokenizer) == {258}
    assert matcher.accept(258)
    assert allowed(matcher, tokenizer) == {ord("a"), ord("b")}
    for text in ("(?s:.*)", "[^a]*", "<[|]im_start[|]>.*"):
        matcher = engine.compile(Grammar("regex", text)).start()
        for _ in range(13):
            assert not allowed(matcher, tokenizer) & {257, 258}
            assert not matcher.accept(258)
            assert matcher.accept(next(iter(allowed(matcher, tokenizer) - tokenizer.eos_ids)))


def test_complements_of_lark_let_no_special_tokens_through() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    tokenizer = ToyTokenizer()
    engine = auto(None, tokenizer)
    for text, special in (
        ("start: A\nA: ~/abc/", set()),
        ("start: A | b\nb: <|im_start|> A\nA: ~/abc/", {258}),
        ("start: A | b\nb: <[257-258]> A\nA: ~/abc/", {257, 258}),
        ("start: A | b\nb: <[*]> A\nA: ~/abc/", {257, 258}),
    ):
        matcher = engine.compile(Grammar("lark", text)).start()
        assert allowed(matcher, tokenizer) & {257, 258} == special, text
        assert {token for token in (257, 258) if matcher.accept(token) and matcher.rollback(1) is None} == special


@pytest.mark.parametrize("name", SERVES)
def test_complements_are_as_the_table_says(name: str) -> None:
    """A language whose automaton has too many states for one that needs one."""
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    engine = Constraints(None, ToyTokenizer(), (name,))
    small = Grammar("json_schema", '{"type": "string", "not": {"pattern": "ab"}}')
    assert engine.compile(small).start().accept(ord('"'))
    large = Grammar("json_schema", json.dumps({"type": "string", "not": {"pattern": "a.{14}$"}}))
    if SERVES[name].complements:
        assert engine.compile(large).start().accept(ord('"'))
        return
    with pytest.raises(RequestError) as refused:
        engine.compile(large)
    assert refused.value.code == "HR-CONSTRAINT-04"


@pytest.mark.parametrize("name", SERVES)
def test_nothing_leads_to_a_part_that_no_text_matches(name: str) -> None:
    """Behind a letter there is no edge of a word before another one."""
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    tokenizer = ToyTokenizer()
    matcher = Constraints(None, tokenizer, (name,)).compile(Grammar("regex", r"-?[\w.]\b\w")).start()
    assert allowed(matcher, tokenizer) == set(b"-.")


@pytest.mark.parametrize("name", SERVES)
@pytest.mark.parametrize(
    "grammar", [Grammar("choice", '[""]'), Grammar("gbnf", 'root ::= ""'), Grammar("regex", "(?=b)?")]
)
def test_a_grammar_of_the_empty_text_is_done(name: str, grammar: Grammar) -> None:
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    matcher = Constraints(None, ToyTokenizer(), (name,)).compile(grammar).start()
    assert matcher.done()
    assert not matcher.accept(ord("a"))


def test_what_one_engine_cannot_do_goes_to_the_next() -> None:
    pytest.importorskip("xgrammar", reason="the engine xgrammar is not installed")
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    tokenizer = ToyTokenizer()
    engine = Constraints(None, tokenizer, ("xgrammar", "llguidance"))
    large = Grammar("json_schema", json.dumps({"type": "string", "not": {"pattern": "a.{14}$"}}))
    assert engine.compile(large).start().accept(ord('"'))


def test_nothing_installed_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_plugins.constraints.compiling.installed", lambda name: False)
    with pytest.raises(RequestError) as refused:
        auto(None, ToyTokenizer()).compile(Grammar("regex", "a"))
    assert refused.value.code == "HR-CONSTRAINT-01"
    assert refused.value.help == "pip install 'headrace[constraints]'"
