"""Grammars put together from texts, special tokens, regexes and schemas."""

from __future__ import annotations

import byte_engines
import pytest
from grammar_texts import Recogniser

from headrace.errors import RequestError
from headrace_plugins.constraints.expression import read_expression
from headrace_plugins.constraints.grammar import Special

TOOL = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SHORT = {"type": ["string", "integer"], "maxLength": 5}
CASES: list[tuple[object, list[str], list[str]]] = [
    ("a b", ["a b"], ["", "a", "a bb"]),
    ({"regex": "[ab]{2}|c"}, ["ab", "c"], ["a", "cc", "abc"]),
    ({"seq": ["a", {"opt": "b"}, "c"]}, ["abc", "ac"], ["ab", "abbc"]),
    ({"any": ["a", {"seq": ["a", "b"]}, ""]}, ["a", "ab", ""], ["b", "aa"]),
    ({"many": {"any": ["a", "b"]}, "min": 1, "max": 2}, ["a", "bb"], ["", "aaa"]),
    ({"many": "a", "between": ", "}, ["", "a", "a, a, a"], ["a,a", "a, ", ", a"]),
    ({"many": "a", "between": ",", "min": 2, "max": 3}, ["a,a", "a,a,a"], ["", "a", "aa", "a,a,a,a"]),
    ({"many": "a", "max": 0, "between": ","}, [""], ["a"]),
    (
        {"seq": ["<p>", {"until": "</p>"}, "</p>"]},
        ["<p></p>", "<p>a<b</p</p>", "<p>\n☃</p>"],
        ["<p>", "<p></p></p>", "<p>a"],
    ),
    ({"seq": [{"until": "abab"}, "abab"]}, ["abab", "aabab", "aaabab"], ["ababab", "ababababab", "abab "]),
    (
        {"seq": ["<c>", {"schema": TOOL}, "</c>"]},
        ['<c>{"n": 1}</c>', '<c>{\n  "n": -2.0\n}</c>'],
        ["<c>{}</c>", '<c>{"n": "1"}</c>', '<c>{"n": 1}'],
    ),
    (
        {"many": {"seq": ["f(", {"schema": TOOL, "notation": "python-call"}, ")"]}, "between": ", ", "min": 1},
        ["f(n=1)", "f(n=1), f(n=2)"],
        ["f()", "f(n=1),f(n=2)", "f(n='1')"],
    ),
    (
        {"seq": ["<a>", {"schema": SHORT, "notation": "raw", "until": "</a>"}, "</a>"]},
        ["<a>12</a>", "<a>a<b\n</a>", "<a></a>", "<a>123456</a>"],
        ["<a>a</a></a>", "<a>a", "<a>abcdef</a>"],
    ),
    ({"seq": [{"special": "<tool>"}, {"schema": {"const": 1}}]}, ["<tool>1"], ["1", "<tool>2", "<tool>"]),
]


@pytest.mark.parametrize(("document", "good", "bad"), CASES)
def test_texts(document, good, bad):
    rules = Recogniser(read_expression(document))
    assert [text for text in good if not rules.accepts(text)] == []
    assert [text for text in bad if rules.accepts(text)] == []


@pytest.mark.parametrize("engine", byte_engines.ENGINES)
@pytest.mark.parametrize(("document", "good", "bad"), CASES[:-1])
def test_engines_allow_the_same(engine, document, good, bad):
    accepts = byte_engines.engine(engine, read_expression(document))
    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []


def test_a_special_token_is_not_its_text():
    accepts = byte_engines.engine("llguidance", read_expression({"seq": [{"special": "<tool>"}, "1"]}))
    assert accepts([byte_engines.TOOL, ord("1")])
    assert not accepts("<tool>1")


def test_equal_schemas_are_written_once():
    rules = read_expression({"any": [{"seq": [name, {"schema": TOOL}]} for name in "abc"]})
    assert sum("root" in name for name in rules.rules) == 1
    assert Recogniser(rules).accepts('b{"n": 1}')


def test_special_tokens_keep_their_names():
    assert read_expression({"special": "<|tool|>"}).rules["start"] == Special("<|tool|>")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "invalid at #: None is neither a text nor an object"),
        ({}, "invalid at #: an object needs one of special, regex"),
        ({"seqq": []}, "invalid at #: an object needs one of"),
        ({"seq": ["a", {"any": []}]}, "invalid at #/seq/1/any: there is nothing to choose from"),
        ({"seq": "a"}, "invalid at #/seq: 'a' is no array"),
        ({"many": "a", "min": -1}, "invalid at #/min: -1 is no whole number"),
        ({"many": "a", "max": True}, "invalid at #/max: True is no whole number"),
        ({"many": "a", "min": 2, "max": 1}, "invalid at #: min 2 is more than max 1"),
        ({"many": "a", "most": 1}, "invalid at #: 'most' does not go with 'many'"),
        ({"opt": {"until": ""}}, "invalid at #/opt/until: the text is empty"),
        ({"special": 3}, "invalid at #/special: 3 is no text"),
        ("\ud800", "invalid at #: '\\ud800' holds half of a surrogate pair"),
        ({"any": [{"regex": "("}]}, "(in the grammar at #/any/0/regex)"),
        ({"seq": [{"schema": {"type": "strin"}}]}, "(in the grammar at #/seq/0)"),
        ({"schema": {}, "until": "x"}, "invalid at #/until: only strings of notation"),
        ({"schema": {}, "notation": "yaml"}, "notation 'yaml' is unknown (in the grammar at #)"),
    ],
)
def test_what_is_wrong_is_said_with_its_path(document, message):
    with pytest.raises(RequestError) as caught:
        read_expression(document)
    assert caught.value.code == "HR-CONSTRAINT-02"
    assert message in caught.value.message


def test_a_keyword_that_cannot_be_kept_is_named_with_both_paths():
    with pytest.raises(RequestError, match=r"'uniqueItems' at #/x .*in the grammar at #/opt") as caught:
        read_expression({"opt": {"schema": {"$ref": "#/x", "x": {"type": "array", "uniqueItems": True}}}})
    assert caught.value.code == "HR-CONSTRAINT-03"


def test_depth_is_bounded():
    document: object = "a"
    for _ in range(5_000):
        document = {"opt": document}
    with pytest.raises(RequestError, match="HR-CONSTRAINT-04"):
        read_expression(document)
