"""Questions about regular languages: answered exactly, in bounded time and stack."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import automaton, begins, is_empty, matches, overlap
from headrace_plugins.constraints.dfa import minimised, regex_of, rules_of
from headrace_plugins.constraints.grammar import Alt, Expr, Ref, Rules, Rx, Seq
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    And,
    Chars,
    Not,
    Or,
    Regex,
    both,
    cat,
    chars,
    complement,
    either,
    literal,
    repeat,
)
from headrace_plugins.constraints.trimming import some

_letters = st.sampled_from([chars([(97, 97)]), chars([(98, 99)]), chars([(97, 98)]), EMPTY, chars([(0x61, 0x10FFFF)])])


def _regexes() -> st.SearchStrategy[Regex]:
    def extend(inner: st.SearchStrategy[Regex]) -> st.SearchStrategy[Regex]:
        pairs = st.tuples(inner, inner)
        counted = st.tuples(inner, st.integers(0, 2), st.sampled_from([None, 2, 3]))
        return st.one_of(
            pairs.map(lambda pair: cat(*pair)),
            pairs.map(lambda pair: either(*pair)),
            pairs.map(lambda pair: both(*pair)),
            inner.map(complement),
            counted.map(lambda each: repeat(each[0], each[1], each[2])),
        )

    return st.recursive(_letters, extend, max_leaves=7)


def _means(regex: Regex, text: str) -> bool:
    """By definition: every way to cut the text is tried."""
    match regex:
        case Chars(ranges):
            return len(text) == 1 and any(low <= ord(text) <= high for low, high in ranges)
        case And(parts):
            return all(_means(part, text) for part in parts)
        case Or(choices):
            return any(_means(choice, text) for choice in choices)
        case Not(body):
            return not _means(body, text)
    ends = {0}
    if hasattr(regex, "parts"):
        for part in regex.parts:
            ends = {end for start in ends for end in range(start, len(text) + 1) if _means(part, text[start:end])}
        return len(text) in ends
    found = regex.least == 0 and not text
    times = regex.least + len(text) + 1 if regex.most is None else regex.most
    for count in range(1, times + 1):
        ends = {e for s in ends for e in range(s, len(text) + 1) if _means(regex.body, text[s:e])}
        found = found or (count >= regex.least and len(text) in ends)
    return found


_texts = st.lists(st.text("abcd", max_size=4), max_size=8)


@settings(max_examples=150, deadline=None)
@given(_regexes(), _texts)
def test_every_form_of_a_language_is_the_same(regex: Regex, texts: list[str]) -> None:
    dfa = automaton(regex)
    plain = regex_of(dfa)
    for text in ["", *texts]:
        expected = _means(regex, text)
        assert matches(regex, text) == expected
        assert dfa.matches(text) == expected
        assert plain is None or matches(plain, text) == expected
        assert matches(some(regex), text) == (expected and text != "")
        for left in (False, True):
            assert _derives(rules_of(dfa, "s", left=left), text) == expected
    assert is_empty(regex) == (not any(dfa.accepting))
    assert not overlap(regex, complement(regex))
    assert len(minimised(dfa.accepting, dfa.edges).edges) == len(dfa.edges)


def _derives(rules: Rules, text: str) -> bool:
    """For rules of one character and one reference each, in either order."""

    def last(name: str, left: str) -> bool:
        body: Expr = rules.rules[name]
        for choice in body.choices if isinstance(body, Alt) else (body,):
            match choice:
                case Seq(()):
                    if not left:
                        return True
                case Ref(other):
                    if last(other, left):
                        return True
                case Seq((Rx(over), Ref(other))):
                    if left and matches(over, left[0]) and last(other, left[1:]):
                        return True
                case Seq((Ref(other), Rx(over))):
                    if left and matches(over, left[-1]) and last(other, left[:-1]):
                        return True
        return False

    return last(rules.start, text)


def test_smallest_automaton() -> None:
    # one of the last three characters is an a: the smallest automaton remembers three characters
    dfa = automaton(parse_pattern("a[ab]{0,2}$", search=True))
    assert len(dfa.edges) == len(automaton(parse_pattern("(a|a[ab]|a[ab][ab])$", search=True)).edges) == 4
    assert automaton(NOTHING).edges == ((),)
    assert len(automaton(ANY_TEXT).edges) == 1


def test_sets_of_languages() -> None:
    word, number = parse_pattern(r"\w+", search=False), parse_pattern(r"\d+", search=False)
    assert is_empty(both(number, complement(word)))
    assert not is_empty(both(word, complement(number)))
    assert overlap(word, number)
    assert not overlap(both(word, complement(number)), number)
    assert is_empty(both(literal("a"), literal("b")))
    assert not is_empty(complement(literal("a")))
    assert begins(word, "ab")
    assert not begins(number, "4b")


def test_characters_beyond_the_first_plane_and_no_surrogates() -> None:
    others = automaton(complement(literal("\U0001f4a9")))
    assert others.matches("a")
    assert others.matches("\U0001f4aa")
    assert not others.matches("\U0001f4a9")
    for row in others.edges:
        assert not any(low <= 0xDFFF and high >= 0xD800 for low, high, _ in row)


def test_time_and_stack_do_not_grow_with_the_text() -> None:
    assert matches(parse_pattern("(ab|c)*d?", search=False), "abc" * 50_000)
    assert matches(cat(*[repeat(literal("a"), 0, 1)] * 3_000), "a" * 3_000)
    assert matches(cat(*[repeat(literal(chr(number)), 0, 1) for number in range(32, 5_000)]), "AZaz")
    assert matches(parse_pattern("a{0,10000}", search=False), "a" * 10_000)
    assert matches(literal("x" * 20_000), "x" * 20_000)


def test_a_large_choice() -> None:
    names = either(*(literal(f"name{number}") for number in range(5_000)))
    assert matches(names, "name4999")
    assert not matches(names, "name5000")


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){24}", ".*a.{200}b.{200}"])
def test_a_language_that_is_too_big_is_a_typed_error(pattern: str) -> None:
    with pytest.raises(RequestError, match="states") as caught:
        automaton(parse_pattern(pattern, search=False), 2_000)
    assert caught.value.code == "HR-CONSTRAINT-04"


def test_the_emptiness_of_what_has_no_operators_needs_no_states() -> None:
    assert not is_empty(parse_pattern("(a|b)*a(a|b){10000}", search=False), limit=2)


@settings(max_examples=100, deadline=None)
@given(st.text("ab|*()", max_size=8), _texts)
def test_regex_of_an_automaton_is_as_python_reads_it(pattern: str, texts: list[str]) -> None:
    try:
        compiled, regex = re.compile(pattern), parse_pattern(pattern, search=False, dialect="python")
    except (re.error, RequestError):
        return
    plain = regex_of(automaton(regex))
    assert plain is not None
    for text in texts:
        assert matches(plain, text) == bool(compiled.fullmatch(text))
