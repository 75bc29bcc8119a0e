"""Numbers, strings and booleans: what two shapes have in common, and what a shape leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from headrace_plugins.constraints.regex import (
    ANY_CHAR,
    ANY_TEXT,
    NOTHING,
    And,
    Regex,
    Repeat,
    both,
    complement,
    either,
    literal,
)
from headrace_plugins.constraints.schema.languages import Languages
from headrace_plugins.constraints.schema.shapes import Boolean, Number, String


def fraction(value: int | float | Decimal) -> Fraction:
    """The exact number that was written: 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def meet_booleans(left: Boolean, right: Boolean) -> Boolean | None:
    kept = tuple(value for value in left.values if value in right.values)
    return Boolean(kept) if kept else None


def outside_boolean(shape: Boolean) -> list[Boolean]:
    kept = tuple(value for value in (True, False) if value not in shape.values)
    return [Boolean(kept)] if kept else []


# numbers


def has_number(shape: Number, value: Fraction) -> bool:
    """Whether a number is of a shape."""
    if shape.values is not None:
        return value in shape.values
    if shape.integer is not None and (value.denominator == 1) != shape.integer:
        return False
    if shape.low is not None and (value < shape.low or (shape.low_open and value == shape.low)):
        return False
    if shape.high is not None and (value > shape.high or (shape.high_open and value == shape.high)):
        return False
    if value in shape.excluded or any((value / each).denominator == 1 for each in shape.not_multiples):
        return False
    return all((value / each).denominator == 1 for each in shape.multiples)


def meet_numbers(left: Number, right: Number) -> Number | None:
    for one, other in ((left, right), (right, left)):
        if one.values is not None:
            if other.values is not None:
                among = set(other.values)
                kept = tuple(value for value in one.values if value in among)
            else:
                kept = tuple(value for value in one.values if has_number(other, value))
            return Number(values=kept) if kept else None
    if left.integer is not None and right.integer is not None and left.integer != right.integer:
        return None
    low, low_open = _tighter(left.low, left.low_open, right.low, right.low_open, upper=False)
    high, high_open = _tighter(left.high, left.high_open, right.high, right.high_open, upper=True)
    return tidy_number(
        Number(
            integer=left.integer if left.integer is not None else right.integer,
            low=low, low_open=low_open, high=high, high_open=high_open,
            multiples=left.multiples + right.multiples,
            not_multiples=tuple(dict.fromkeys(left.not_multiples + right.not_multiples)),
            excluded=tuple(dict.fromkeys(left.excluded + right.excluded)),
        )
    )  # fmt: skip


def _tighter(
    one: Fraction | None, one_open: bool, other: Fraction | None, other_open: bool, *, upper: bool
) -> tuple[Fraction | None, bool]:
    if one is None or other is None:
        return (other, other_open) if one is None else (one, one_open)
    if one == other:
        return one, one_open or other_open
    return (one, one_open) if (one < other) == upper else (other, other_open)


def tidy_number(shape: Number) -> Number | None:
    """The one way to write a shape; None: no number is of it."""
    integer, step = shape.integer, _common_step(shape.multiples)
    if integer and step is not None:
        step = _common_step((step, Fraction(1)))
    if step is not None and step.denominator == 1:
        if integer is False:
            return None
        integer = True
    if integer and step == 1:
        step = None
    grid = step if step is not None else Fraction(1) if integer else None
    if grid is not None and any((grid / each).denominator == 1 for each in shape.not_multiples):
        return None
    low, low_open, high, high_open = shape.low, shape.low_open, shape.high, shape.high_open
    if grid is not None:
        # The bounds of a grid are points of it.
        if low is not None:
            point = math.ceil(low / grid) * grid
            low, low_open = point + grid if low_open and point == low else point, False
        if high is not None:
            point = math.floor(high / grid) * grid
            high, high_open = point - grid if high_open and point == high else point, False
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        return None
    tidied = Number(
        integer=integer, low=low, low_open=low_open, high=high, high_open=high_open,
        multiples=() if step is None else (step,), not_multiples=shape.not_multiples,
    )  # fmt: skip
    excluded = tuple(value for value in shape.excluded if has_number(tidied, value))
    points = None
    if low is not None and high is not None:
        points = 1 if low == high else (high - low) // grid + 1 if grid is not None else None
    if points is not None and points <= len(excluded) + 1:
        assert low is not None
        values = [low + i * (grid or Fraction(1)) for i in range(int(points))]
        kept = tuple(value for value in values if has_number(tidied, value) and value not in excluded)
        return Number(values=kept) if kept else None
    return replace(tidied, excluded=excluded) if excluded else tidied


def _common_step(multiples: Iterable[Fraction]) -> Fraction | None:
    """The least common multiple of fractions."""
    step: Fraction | None = None
    for each in multiples:
        if step is None:
            step = each
        else:
            step = Fraction(math.lcm(step.numerator, each.numerator), math.gcd(step.denominator, each.denominator))
    return step


def outside_number(shape: Number) -> Iterator[Number]:
    if shape.values is not None:
        yield Number(excluded=shape.values)
        return
    if shape.integer is not None:
        yield Number(integer=not shape.integer)
    if shape.low is not None:
        yield Number(high=shape.low, high_open=not shape.low_open)
    if shape.high is not None:
        yield Number(low=shape.high, low_open=not shape.high_open)
    for each in shape.multiples:
        yield Number(not_multiples=(each,))
    for each in shape.not_multiples:
        tidied = tidy_number(Number(multiples=(each,)))
        assert tidied is not None
        yield tidied
    if shape.excluded:
        yield Number(values=shape.excluded)


# strings


def meet_strings(left: String, right: String, languages: Languages) -> String | None:
    for one, other in ((left, right), (right, left)):
        if one.values is not None:
            if other.values is not None:
                among = set(other.values)
                kept = tuple(value for value in one.values if value in among)
            else:
                kept = tuple(value for value in one.values if languages.matches(other.language, value))
            return String(values=kept) if kept else None
    language = meet_languages(left.language, right.language)
    return None if languages.is_empty(language) else String(language=language)


def meet_languages(left: Regex, right: Regex) -> Regex:
    """Both, with bounds of the length in one."""
    parts = [
        *(left.parts if isinstance(left, And) else (left,)),
        *(right.parts if isinstance(right, And) else (right,)),
    ]
    least, most = 0, None
    kept = []
    for part in parts:
        if isinstance(part, Repeat) and part.body == ANY_CHAR:
            least = max(least, part.least)
            most = part.most if most is None else most if part.most is None else min(most, part.most)
        else:
            kept.append(part)
    if most is not None and least > most:
        return NOTHING
    length = Repeat(ANY_CHAR, least, most)
    return both(*kept) if length == ANY_TEXT else both(length, *kept)


def outside_string(shape: String) -> list[String]:
    language = shape.language if shape.values is None else words(shape.values)
    if isinstance(language, Repeat) and language.body == ANY_CHAR:
        pieces = []
        if language.least:
            pieces.append(String(language=Repeat(ANY_CHAR, 0, language.least - 1)))
        if language.most is not None:
            pieces.append(String(language=Repeat(ANY_CHAR, language.most + 1, None)))
        return pieces
    if isinstance(language, And):
        return [piece for part in language.parts for piece in outside_string(String(language=part))]
    return [String(language=complement(language))]


def words(texts: Iterable[str]) -> Regex:
    """These texts."""
    return either(*map(literal, texts))
