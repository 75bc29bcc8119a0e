"""Numbers, marks, references and fields that go beyond what can be: an error that names the place and is short."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints.llguidance_engine import LLGuidance
from headrace_plugins.constraints.router import Constraints, auto
from headrace_plugins.constraints.vocabulary import Vocabulary


@pytest.fixture
def engine() -> Constraints:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    return auto(None, ToyTokenizer())


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def tagged(**changed: Any) -> Grammar:
    return Grammar("tagged", json.dumps({"start": "free", "triggers": ["a"], "body": "a"} | changed))


DOUBLING = Grammar(
    "gbnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"'
)

REFUSED = {
    "doubles 60 times": (DOUBLING, "HR-CONSTRAINT-04", "no end within 1,048,576 characters"),
    "doubles behind a choice": (
        Grammar("gbnf", DOUBLING.text.replace("root ::= r0", 'root ::= "b" | "c" r0')), "HR-CONSTRAINT-04", "no end",
    ),
    "huge step": (Grammar("json_schema", '{"multipleOf": 1e400}'), "HR-CONSTRAINT-03", "multipleOf"),
    "endless exponent": (Grammar("json_schema", '{"minimum": 1e99999999999999999999}'), "HR-CONSTRAINT-02", "exponent"),
    "counts to 1e3999": (Grammar("json_schema", '{"minItems": 1e3999}'), "HR-CONSTRAINT-04", "states"),
    "more digits than print": (Grammar("json_schema", '{"enum": [1e4500]}'), "HR-CONSTRAINT-02", "4000 digits"),
    "long place": (schema({"allOf": [{}], "$ref": "#/allOf/" + "9" * 5000}), "HR-CONSTRAINT-02", "#/$ref"),
    "no URI": (schema({"$id": "http://a/b", "$ref": "//[c"}), "HR-CONSTRAINT-02", "no URI reference"),
    "no URI as id": (schema({"properties": {"a": {"$id": "//[c"}}, "$id": "http://a/b"}), "HR-CONSTRAINT-02", "/a/$id"),
    "long reference": (schema({"$ref": "#" + "/a" * 100_000}), "HR-CONSTRAINT-02", "refers to nothing"),
    "long mark": (tagged(triggers=["<a>" + "b" * 900_000]), "HR-CONSTRAINT-04", "/triggers/0"),
    "many marks": (tagged(triggers=[f"<{i}>" for i in range(10_000)]), "HR-CONSTRAINT-04", "10,000 triggers"),
    "long end": (tagged(body={"seq": ["a", {"until": "ab" * 100_000}]}), "HR-CONSTRAINT-04", "#/seq/1/until"),
    "two triggers": (Grammar("tagged", tagged().text, trigger="b"), "HR-CONSTRAINT-02", "trigger"),
    "long trigger": (Grammar("regex", "a", trigger="b" * 1_000_000), "HR-CONSTRAINT-04", "1,000,000 bytes"),
    "half a trigger": (Grammar("regex", "a", trigger="\ud800"), "HR-CONSTRAINT-02", "surrogate"),
    "long line of Lark": (Grammar("lark", "start: " + "(" * 50_000), "HR-CONSTRAINT-02", "nested"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(engine: Constraints, name: str) -> None:
    grammar, code, said = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        engine.compile(grammar)
    engine.close()
    assert refused.value.code == code
    assert said in refused.value.message
    assert len(str(refused.value)) < 900, "an error does not repeat the text"


def test_what_the_library_gives_up_on_is_a_limit() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    wide = "start: " + " ".join(f"r{i}?" for i in range(4_000)) + "".join(f'\nr{i}: "<{i}>" r0?' for i in range(4_000))
    with pytest.raises(RequestError) as refused:
        LLGuidance(Vocabulary(ToyTokenizer())).compile_text(wide)
    assert refused.value.code == "HR-CONSTRAINT-04", "so another engine may serve it"


def test_a_long_text_is_forced_in_pieces(engine: Constraints) -> None:
    text = "ab" * 5_000
    matcher, n_asked = engine.compile(Grammar("choice", json.dumps([text]))).start(), 0
    written = b""
    while not matcher.done():
        forced = matcher.forced()
        assert 0 < len(forced) <= 4_096
        n_asked += 1
        for token in forced:
            assert matcher.accept(token)
            written += ToyTokenizer().token_bytes(token)
        if len(written) == len(text):
            matcher.accept(256)
    assert written.decode() == text
    assert n_asked <= 5


@pytest.mark.parametrize("schema_", [{"a": object()}, {"a": {1}}])
def test_schemas_that_are_no_json(schema_: Any) -> None:
    with pytest.raises(RequestError, match="HR-CONSTRAINT-02"):
        Grammar.json_schema(schema_)


def test_schemas_that_hold_themselves() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"items": deep}
    deep_within: dict[str, Any] = {}
    deep_within["items"] = deep_within
    for each in (deep, deep_within):
        with pytest.raises(RequestError, match="HR-CONSTRAINT-02"):
            Grammar.json_schema(each)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": None, "text": "a"}, "constraint.kind"),
        ({"kind": "regex", "text": b"a"}, "constraint.text"),
        ({"kind": "regex", "text": "a", "trigger": ["b"]}, "constraint.trigger"),
        ({"kind": "regex", "text": "a", "trigger": ""}, "constraint.trigger"),
        ({"kind": "regex", "text": "a", "trigger": "b", "trigger_budget": -1}, "constraint.trigger_budget"),
        ({"kind": "regex", "text": "a", "trigger": "b", "trigger_budget": True}, "constraint.trigger_budget"),
        ({"kind": "regex", "text": "a", "trigger_budget": 1}, "constraint.trigger_budget"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Grammar(**fields)
