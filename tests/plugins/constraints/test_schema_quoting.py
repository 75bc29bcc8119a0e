"""Spellings of strings, read back by `json` and by Python."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_plugins.constraints.automata import Language
from headrace_plugins.constraints.lark import rust
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import ANY_TEXT, both, complement, literal
from headrace_plugins.constraints.schema.quoting import JSON, PYTHON_DOUBLE, PYTHON_SINGLE, Quoting, Speller

LANGUAGES = {
    "any": ANY_TEXT,
    "length": parse_pattern("[^]{1,3}", search=False, dialect="ecma"),
    "pattern": parse_pattern("^[a-cé-ü😀-🙏]*$", search=True, dialect="ecma"),
    "not": complement(literal("ab")),
    "and": both(
        parse_pattern("a", search=True, dialect="ecma"), complement(parse_pattern("b|é", search=True, dialect="ecma"))
    ),
}
LETTERS = 'ab"\\/\b\n\t\x00\x1f\x7fé\u0800\uffff😀\U0010ffff'
texts = st.text(st.sampled_from(LETTERS), max_size=4)


def escaped(text: str, upper: bool) -> str:
    units = [text.encode("utf-16-be")[i : i + 2] for i in range(0, len(text.encode("utf-16-be")), 2)]
    return '"' + "".join(f"\\u{int.from_bytes(unit):04{'X' if upper else 'x'}}" for unit in units) + '"'


@pytest.mark.parametrize("name", LANGUAGES)
@settings(max_examples=80, deadline=None)
@given(text=texts, upper=st.booleans())
def test_every_spelling_of_json_stands_for_its_text(name, text, upper):
    language = LANGUAGES[name]
    spelled, is_one = Language(Speller(JSON).quoted(language)), Language(language).matches(text)
    spellings = (json.dumps(text), json.dumps(text, ensure_ascii=False), escaped(text, upper))
    assert [spelled.matches(each) for each in spellings] == [is_one] * 3


ALL = {"json": [JSON], "python": [PYTHON_DOUBLE, PYTHON_SINGLE]}
_LANGUAGES = {name: [Language(Speller(each).quoted(ANY_TEXT)) for each in quotings] for name, quotings in ALL.items()}
written = st.text(
    st.sampled_from(["\\", '"', "'", "u", "U", "x", "0", "d", "8", "n", "'", "\n", "\t", "a", "é", "😀", "\x7f"])
)


@settings(max_examples=600, deadline=None)
@given(inside=written, quote=st.sampled_from("\"'"))
def test_what_is_allowed_can_be_read(inside, quote):
    text = f"{quote}{inside}{quote}"
    try:
        value = json.loads(text)
        value.encode()
        readable = True
    except (ValueError, AttributeError):
        readable = False
    assert any(each.matches(text) for each in _LANGUAGES["json"]) == readable
    if any(each.matches(text) for each in _LANGUAGES["python"]):
        assert isinstance(ast.literal_eval(text), str)


@pytest.mark.parametrize("text", [r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d"', '"\n"', r'"\x41"', r'"\u12"', '"', "a"])
def test_no_spelling_of_a_text(text):
    assert not Language(Speller(JSON).quoted(ANY_TEXT)).matches(text)


@pytest.mark.parametrize("quoting", [JSON, PYTHON_DOUBLE, PYTHON_SINGLE])
@settings(max_examples=80, deadline=None)
@given(text=texts)
def test_one_text(quoting: Quoting, text: str):
    spelled = Language(Speller(quoting).quoted_text(text))
    plain = text.isascii() and text.isprintable() and not set(text) & set("\\\"'")
    if quoting is JSON:
        assert spelled.matches(json.dumps(text))
        assert spelled.matches(json.dumps(text, ensure_ascii=False))
        assert spelled.matches(escaped(text, True)) == (
            not any(" " <= char < "\x7f" and char not in '"\\' for char in text)
        )
    elif plain or quoting.quote == repr(text)[0]:
        assert spelled.matches(quoting.quote + repr(text)[1:-1] + quoting.quote)
    assert not spelled.matches(json.dumps(text + "a"))


def test_python_escapes():
    spelled = Language(Speller(PYTHON_SINGLE).quoted(literal("é\n'")))
    for text in (r"'é\n\''", r"'\xe9\x0a\x27'", r"'\u00E9\u000a\u0027'", r"'\U000000e9\n\x27'"):
        assert ast.literal_eval(text) == "é\n'"
        assert spelled.matches(text)
    assert not spelled.matches(r"'e\n\''")


def test_plain_strings_stay_small():
    unit = Speller(JSON).quoted(parse_pattern("[^]{1,100}", search=False, dialect="ecma"))
    assert rust(unit).endswith("{1,100}\\x{22}")
    assert len(rust(unit)) < 300
