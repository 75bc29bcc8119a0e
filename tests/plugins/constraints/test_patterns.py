"""Patterns become the languages that ECMA-262, or Python's re, say they are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import Language, matches
from headrace_plugins.constraints.patterns import PatternLimits, parse_pattern

ALPHABET = "abAB01_- \n"
_atoms = st.sampled_from(
    ["a", "b", "A", "0", "_", "-", " ", ".", r"\d", r"\w", r"\s", r"\W", "[ab]", "[^a0]", "[A-B_]"]
)
_anchors = st.sampled_from(["^", "$", r"\b", r"\B"])
_counts = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "*?", "+?"])


def _patterns() -> st.SearchStrategy[str]:
    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        counted = st.tuples(st.one_of(_atoms, inner.map("({})".format)), _counts).map("".join)
        ahead = st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda pair: f"{pair[0]}{pair[1]})")
        return st.one_of(
            st.lists(st.one_of(inner, counted, _anchors, ahead), min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
        )

    return st.recursive(_atoms, extend, max_leaves=6)


@settings(max_examples=200, deadline=None)
@given(_patterns(), st.lists(st.text(ALPHABET, max_size=6), min_size=1, max_size=12))
def test_as_python_finds_it(pattern: str, texts: list[str]) -> None:
    try:
        found = Language(parse_pattern(pattern, search=True, dialect="python"))
        whole = Language(parse_pattern(pattern, search=False, dialect="python"))
    except RequestError as error:
        if error.code == "HR-CONSTRAINT-03" and "repetition" in error.message:
            return
        raise
    compiled = re.compile(pattern, re.ASCII)
    for text in texts:
        if not text and r"\B" in pattern:
            continue  # before 3.14, Python's re finds no \B in the empty text
        assert found.matches(text) == bool(compiled.search(text)), (pattern, text)
        # fullmatch gives `$` and lookahead the end of the text, as the whole match has
        assert whole.matches(text) == bool(compiled.fullmatch(text)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^a|b$", ["a", "ab", "xb", "axx"], ["xa", "bx", ""]),
        ("(^a|b)c", ["ac", "xbc", "acx"], ["xac", "c"]),
        ("^(?=.*[A-Z])(?!.*x).{4,}$", ["abcD", "Dabcd"], ["abcd", "aDcx", "aBc"]),
        ("^((^|, )(red|blue))+$", ["red", "red, blue", ", red"], ["redblue", "red,blue", ""]),
        ("^((?!foo).)*$", ["", "fo", "barfo"], ["foo", "xfooy"]),
        ("^(a$|b)*$", ["a", "bba", "b", ""], ["ab", "aa"]),
        ("(^)*a(?:$)?$", ["a", "xa"], ["ab"]),
        ("(a|^)*b", ["b", "xab"], ["a"]),
        (r"^\d+$", ["0", "42"], ["", "\u0664", "4 2"]),
        (r"^\s$", [" ", "\ufeff", "\u2028", "\u00a0", "\v"], ["\u200b", "\x1c", "\u180e"]),
        (r"^\S$", ["\x1c"], ["\ufeff"]),
        ("^.$", ["a", "\u0085", "\U0001f4a9"], ["\n", "\r", "\u2028", "\u2029", ""]),
        (r"^\cA\x41\u0042\u{1F4A9}\0$", ["\x01AB\U0001f4a9\0"], ["AAB\U0001f4a9\0"]),
        (r"^\uD83D\uDCA9$", ["\U0001f4a9"], ["\ud83d"]),
        (r"^[\uD83D\uDCA9-\u{1F4AB}]$", ["\U0001f4aa"], ["\U0001f4ac"]),
        (r"^\p{Lu}\p{Letter}\P{L}$", ["\u00c9a1"], ["\u00e9a1", "Aaa"]),
        (r"^\p{General_Category=Nd}+$", ["\u0664"], ["a"]),
        (r"^\p{Script=Greek}+$", ["\u03b1\u03a9"], ["a", "\u0430"]),
        (r"^[^]$", ["\n"], [""]),
        ("^[]$", [], ["", "a"]),
        (r"^[\b-]$", ["\b", "-"], ["b"]),
        (r"^\!\-\_\@$", ["!-_@"], []),
        ("^{}]$", ["{}]"], []),
        ("^a{,2}$", ["a{,2}"], ["a"]),
        ("^(?<year>[0-9]{4})$", ["1999"], ["199"]),
        ("^(?i:k)$", ["k", "K", "\u212a"], ["j"]),
        ("^(?i:0x?[_-]k)$", ["0X_K", "0-k"], ["0"]),
        (r"\bcat\b", ["cat", "a cat.", "cat-x"], ["cats", "_cat"]),
        (r"^(?:a{2,3}?){2}$", ["aaaa", "aaaaaa"], ["aaa"]),
        ("", ["", "anything"], []),
    ],
)
def test_ecma(pattern: str, yes: list[str], no: list[str]) -> None:
    language = Language(parse_pattern(pattern, search=True))
    assert [text for text in yes if not language.matches(text)] == []
    assert [text for text in no if language.matches(text)] == []


def test_whole_match_ignores_anchors_at_the_ends() -> None:
    assert matches(parse_pattern("^ab$", search=False), "ab")
    assert not matches(parse_pattern("b", search=False), "ab")
    assert not matches(parse_pattern("a$", search=False, dialect="python"), "a\n")


@pytest.mark.parametrize(
    ("pattern", "code", "at"),
    [
        ("a(", "02", 1),
        ("a)", "02", 1),
        ("ab[c", "02", 2),
        ("*a", "02", 0),
        ("a**", "02", 2),
        ("^*", "02", 1),
        ("(?=a)*", "02", 5),
        ("a{3,2}", "02", 1),
        ("[b-a]", "02", 0),
        (r"[a-\d]", "02", 0),
        (r"a\a", "02", 1),
        (r"\x4", "02", 0),
        (r"\u{110000}", "02", 0),
        ("\\", "02", 0),
        (r"\p{}", "02", 0),
        (r"\c1", "02", 0),
        ("(?<1>a)", "02", 0),
        (r"(a)\1", "03", 3),
        (r"(?<n>a)\k<n>", "03", 7),
        ("x(?<=a)", "03", 1),
        ("x(?<!a)", "03", 1),
        (r"\p{Script=Klingon}", "03", 0),
        (r"x(\ba|b(?=c))*d", "03", 1),
        ("a{10001}", "04", 1),
        ("a{99999999999999999999}", "04", 1),
    ],
)
def test_refused_with_its_place(pattern: str, code: str, at: int) -> None:
    with pytest.raises(RequestError) as caught:
        parse_pattern(pattern, search=True)
    assert caught.value.code == f"HR-CONSTRAINT-{code}"
    assert f"character {at}" in caught.value.message, caught.value.message


@pytest.mark.parametrize("pattern", ["(?>a)", "a++", r"(?P<n>a)(?P=n)", "(a)?(?(1)b|c)", "(?m)^a"])
def test_python_only_forms_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"possessive|atomic|backreference|depends|flag") as caught:
        parse_pattern(pattern, search=False, dialect="python")
    assert caught.value.code == "HR-CONSTRAINT-03"


@pytest.mark.parametrize("text", ["(" * 50_000, "(" * 50_000 + ")" * 50_000, "(?:" * 20_000, "a" * 70_000])
def test_hostile_size_is_a_typed_error(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_pattern(text, search=True)
    assert caught.value.code == "HR-CONSTRAINT-04"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "pattern", [r"(\b|a\B|-)" * 60, "(?:" * 4 + "(?!a)b" + "){64}" * 4, "(?:" * 20 + "(?=a)" + "){64}" * 20]
)
def test_assertions_that_multiply_are_limited(pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_pattern(pattern, search=False)
    assert caught.value.code == "HR-CONSTRAINT-04"


def test_limits_are_the_callers() -> None:
    limits = PatternLimits(length=4, nesting=1, repetitions=2)
    parse_pattern("(a)", search=True, limits=limits)
    for text in ("aaaaa", "((a", "a{3}"):
        with pytest.raises(RequestError) as caught:
            parse_pattern(text, search=True, limits=limits)
        assert caught.value.code == "HR-CONSTRAINT-04"


def test_classes_of_the_python_dialect_are_ascii() -> None:
    """Who asks a model for digits wants 0 to 9, not those of every script."""
    for pattern, yes, no in ((r"\d", "7", "\u0667"), (r"\w", "a", "\u00e9"), (r"\s", "\t", "\u00a0")):
        regex = parse_pattern(pattern, search=False, dialect="python")
        assert matches(regex, yes)
        assert not matches(regex, no)
