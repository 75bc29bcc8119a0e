"""Spellings of numbers, against exact fractions."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import Language
from headrace_plugins.constraints.dfa import Dfa
from headrace_plugins.constraints.schema.numbers import number_language
from headrace_plugins.constraints.schema.scalars import has_number
from headrace_plugins.constraints.schema.shapes import Number

POINTS = (
    "0",
    "1",
    "-1",
    "0.5",
    "-0.5",
    "2.5",
    "9",
    "10",
    "99",
    "100",
    "1000",
    "100.25",
    "-100.25",
    "0.05",
    "12.305",
    "-3",
    "7",
    "1e16",
    "1e20",
    "9.5e19",
    "1.5e-7",
    "-2e-9",
    "123.456",
    "1e308",
    "0.0001",
    "-1e17",
)
FRACTIONS = [Fraction(point) for point in POINTS]
STEPS = [Fraction(step) for step in ("2", "0.5", "0.01", "3", "0.75", "7", "10", "1")]
NO_NUMBERS = ("", "-", "01", "1.", "+1", ".5", "1e", "--1", "00", "-01", "1 ", "0x1", "1_0", "NaN", "1.e5", "٣")


def matcher(shape):
    language = number_language(shape, "#")
    return language.matches if isinstance(language, Dfa) else Language(language).matches


def bound():
    return st.one_of(st.none(), st.sampled_from(FRACTIONS))


shapes = st.builds(
    Number,
    integer=st.sampled_from([None, None, True, False]),
    low=bound(),
    low_open=st.booleans(),
    high=bound(),
    high_open=st.booleans(),
    multiples=st.one_of(st.just(()), st.just(()), st.tuples(st.sampled_from(STEPS))),
    not_multiples=st.one_of(st.just(()), st.just(()), st.just(()), st.tuples(st.sampled_from(STEPS))),
    excluded=st.one_of(st.just(()), st.lists(st.sampled_from(FRACTIONS), max_size=2).map(tuple)),
)


def texts_near(points: list[Fraction]) -> set[str]:
    """Spellings of numbers at and about these, as people and as `json.dumps` write them."""
    texts = set()
    for point in points:
        for near in (point, point + 1, point - 1, point + Fraction("0.001"), point * 10, point / 8, -point):
            if abs(near) < 10**308:
                texts |= {json.dumps(float(near)), f"{float(near):.3f}", f"{float(near):.2f}0"}
            if near.denominator == 1:
                texts |= {str(near), f"{near}.0"}
    return texts


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes, more=st.lists(st.decimals(-1000, 1000, places=2).map(Fraction), max_size=8))
def test_a_spelling_is_allowed_exactly_when_its_number_is(shape, more):
    allows = matcher(shape)
    bounds = [each for each in (shape.low, shape.high, *shape.excluded) if each is not None]
    for text in texts_near([*bounds, *more, Fraction(0), Fraction(12)]) | {"-0", "-0.0", "0.00", "1.60e-7", "9.99E19"}:
        is_one = has_number(shape, Fraction(text))
        if is_one and "e" in text.lower() and (shape.integer or shape.multiples or shape.not_multiples):
            continue  # written plainly, as digits
        if is_one and text.endswith("0") and "." in text[:-2]:
            continue  # zeros at the end say nothing, and a model could write them for ever
        assert allows(text) == is_one, text
    assert not any(map(allows, NO_NUMBERS))


@pytest.mark.parametrize("text", ["0", "-0", "12.50", "1e5", "-1.5E+300", "0e0", "1E-07", "100"])
def test_without_facts_all_of_json_is_allowed(text):
    assert matcher(Number())(text)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_without_facts_nothing_but_json_is_allowed(text):
    assert not matcher(Number())(text)


@pytest.mark.parametrize(
    "shape", [Number(low=Fraction(0), low_open=True), Number(low=Fraction(0)), Number(integer=False)]
)
def test_what_a_double_reads_as_0_or_infinity_is_not_between_bounds(shape):
    allows = matcher(shape)
    assert [text for text in ("5e-324", "2.5e-323", "1e-300") if not allows(text)] == []
    assert [text for text in ("2e-324", "1e-400", "9.9e-1000", "1e309", "1.8e308", "1.5e999") if allows(text)] == []
    huge = ["1e308", "1.7976931348623157e+308", "1e16"]
    assert [text for text in huge if allows(text)] == ([] if shape.integer is False else huge)


@pytest.mark.parametrize("value", [1, 0, -3, 1.5, 1e308, 1e-8, 1.25e-7, -2e16, 123456789012345678901234567890])
def test_listed_values_in_every_usual_spelling(value):
    allows = matcher(Number(values=(Fraction(repr(value)) if isinstance(value, float) else Fraction(value),)))
    assert allows(json.dumps(value))
    assert allows(json.dumps(float(value)).replace("e", "E")) or value == 123456789012345678901234567890
    assert not allows("2")
    assert not allows(json.dumps(value) + "5")


def test_equal_spellings_of_one():
    allows = matcher(Number(values=(Fraction(1),)))
    assert [allows(text) for text in ("1", "1.0", "1.00", "1e0", "01", "-1")] == [True, True, *[False] * 4]


@pytest.mark.parametrize("shape", [Number(integer=True), Number(integer=True, low=Fraction(3), high=Fraction(5))])
def test_whole_numbers_end(shape):
    """A model that has written 3.0 can't go on with zeros."""
    allows = matcher(shape)
    assert [allows(text) for text in ("3", "3.0", "3.00", "3.000000")] == [True, True, False, False]


def test_no_spelling_of_an_excluded_number_is_left():
    allows = matcher(Number(integer=None, low=Fraction(0), high=Fraction(5), excluded=(Fraction(3),)))
    assert [allows(text) for text in ("2", "3", "3.0", "3.000", "3.5")] == [True, False, False, False, True]


@pytest.mark.parametrize("step", [97, 24, 11])
def test_multiples_that_no_small_regex_holds(step):
    allows = matcher(Number(integer=True, multiples=(Fraction(step),)))
    assert [number for number in range(-300, 1300) if allows(str(number)) != (number % step == 0)] == []
    assert allows(f"-{step}00.0")


def test_whole_numbers_that_are_multiples_of_a_half():
    allows = matcher(Number(integer=True, multiples=(Fraction(1, 2),)))
    assert [allows(text) for text in ("3", "3.0", "1.5", "-0.5")] == [True, True, False, False]


def test_more_remainders_than_can_be_kept_apart():
    with pytest.raises(
        RequestError, match="'multipleOf' at #/a can't be enforced: 123457 needs more than 1000"
    ) as caught:
        number_language(Number(multiples=(Fraction(123457),)), "#/a")
    assert caught.value.code == "HR-CONSTRAINT-03"


def test_few_multiples_between_bounds_are_listed_however_fine_they_are():
    allows = matcher(Number(multiples=(Fraction(123457),), low=Fraction(1), high=Fraction(400_000)))
    assert [allows(text) for text in ("123457", "370371", "493828", "0", "123458")] == [True, True, False, False, False]


def test_bounds_of_more_digits_than_a_double():
    with pytest.raises(RequestError, match="'minimum or maximum' at # can't be enforced"):
        number_language(Number(low=Fraction(10) ** 500), "#")
