"""Strings as text: a language over characters, turned into the language of its spellings.

A spelling stands for one text, so unions, repetitions, intersections and complements (among legal spellings) of
languages are those of their spellings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace_plugins.constraints.characters import common, holds, inverted
from headrace_plugins.constraints.regex import (
    ANY_TEXT,
    NOTHING,
    And,
    Cat,
    Chars,
    Not,
    Or,
    Ranges,
    Regex,
    Repeat,
    both,
    cat,
    chars,
    complement,
    either,
    literal,
    repeat,
)

HEX = chars([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
BMP, ASTRAL = (0, 0xFFFF), (0x10000, 0x10FFFF)


@dataclass(frozen=True, slots=True)
class Quoting:
    """How strings are written between quotes."""

    quote: str
    raw: Chars
    """Characters that may stand for themselves."""
    short: tuple[tuple[str, str], ...]
    """Character -> the letter behind a backslash."""
    numbers: Literal["json", "python"]
    r"""json: \uXXXX, and a surrogate pair beyond the basic plane. python: \xXX, \uXXXX, \UXXXXXXXX."""


def _raw(without: str, also: str = "") -> Chars:
    above = common(inverted(chars([(0, 0x1F)])), inverted(chars((ord(char), ord(char)) for char in without)))
    return chars([*above.ranges, *((ord(char), ord(char)) for char in also)])


JSON = Quoting('"', _raw('"\\'), tuple(zip('"\\/\b\f\n\r\t', '"\\/bfnrt', strict=True)), "json")  # RFC 8259, section 7
_PYTHON_SHORT = tuple(zip("'\"\\\a\b\f\n\r\t\v", "'\"\\abfnrtv", strict=True))
PYTHON_DOUBLE = Quoting('"', _raw('"\\', "\t"), _PYTHON_SHORT, "python")
PYTHON_SINGLE = Quoting("'", _raw("'\\", "\t"), _PYTHON_SHORT, "python")


@dataclass(slots=True)
class Speller:
    """Writes strings in one quoting; what it has written once it knows."""

    quoting: Quoting
    _sets: dict[Chars, Regex] = field(default_factory=dict)
    _plain: dict[str, tuple[Regex, ...]] = field(default_factory=dict)

    def quoted(self, language: Regex) -> Regex:
        """Every spelling of every text of a language."""
        quote = literal(self.quoting.quote)
        return cat(quote, self.spelled(language), quote)

    def quoted_text(self, text: str) -> Regex:
        """The spellings that writers of JSON use for one text: ASCII that needs no escape is written as it is, so that
        what must come is one text; all else in any way."""
        quote = literal(self.quoting.quote)
        return cat(quote, *(part for char in text for part in self._spelled_plain(char)), quote)

    def spelled(self, language: Regex) -> Regex:
        """Without quotes."""
        match language:
            case Chars():
                return self._spelled_set(language)
            case Cat(parts):
                return cat(*map(self.spelled, parts))
            case Or(choices):
                return either(*map(self.spelled, choices))
            case Repeat(body, least, most):
                return repeat(self.spelled(body), least, most)
            case Not(body):
                return both(self.spelled(ANY_TEXT), complement(self.spelled(body)))
            case And(parts):
                wanted = [self.spelled(part) for part in parts if not isinstance(part, Not)]
                unwanted = [complement(self.spelled(part.body)) for part in parts if isinstance(part, Not)]
                return both(*(wanted or [self.spelled(ANY_TEXT)]), *unwanted)

    def _spelled_plain(self, char: str) -> tuple[Regex, ...]:
        known = self._plain.get(char)
        if known is None:
            point = ord(char)
            one = Chars(((point, point),))
            spelled = one if 0x20 <= point < 0x7F and common(one, self.quoting.raw) == one else self._spelled_set(one)
            known = self._plain[char] = spelled.parts if isinstance(spelled, Cat) else (spelled,)
        return known

    def _spelled_set(self, of: Chars) -> Regex:
        known = self._sets.get(of)
        if known is None:
            known = self._sets[of] = self._spell_set(of)
        return known

    def _spell_set(self, of: Chars) -> Regex:
        if not of.ranges:
            return NOTHING
        letters = [letter for char, letter in self.quoting.short if holds(of, char)]
        numbers = _json_numbers(of) if self.quoting.numbers == "json" else _python_numbers(of)
        short = chars((ord(letter), ord(letter)) for letter in letters)
        return either(common(of, self.quoting.raw), cat(literal("\\"), either(short, numbers)))


def _json_numbers(of: Chars) -> Regex:
    basic = cat(literal("u"), _hex(_clipped(of.ranges, *BMP), 4))
    pairs: dict[Ranges, list[tuple[int, int]]] = {}
    for low, high in _clipped(of.ranges, *ASTRAL):
        for first, second in _pairs(low - 0x10000, high - 0x10000):
            pairs.setdefault(second, []).append(first)
    # Characters of different ranges may share a first half.
    astral = [
        cat(literal("u"), _hex(_merged(firsts), 4), literal("\\u"), _hex(second, 4)) for second, firsts in pairs.items()
    ]
    return either(basic, *astral)


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Merged ranges; unlike `chars`, of surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _pairs(low: int, high: int) -> list[tuple[tuple[int, int], Ranges]]:
    """(first halves, second halves) of the surrogate pairs of offsets in [low, high]."""
    first, last = low >> 10, high >> 10
    start, end = 0xDC00 + (low & 0x3FF), 0xDC00 + (high & 0x3FF)
    if first == last:
        return [((0xD800 + first, 0xD800 + first), ((start, end),))]
    pieces: list[tuple[tuple[int, int], Ranges]] = []
    if start != 0xDC00:
        pieces.append(((0xD800 + first, 0xD800 + first), ((start, 0xDFFF),)))
        first += 1
    if end != 0xDFFF:
        pieces.append(((0xD800 + last, 0xD800 + last), ((0xDC00, end),)))
        last -= 1
    if first <= last:
        pieces.append(((0xD800 + first, 0xD800 + last), ((0xDC00, 0xDFFF),)))
    return pieces


def _python_numbers(of: Chars) -> Regex:
    return either(
        cat(literal("x"), _hex(_clipped(of.ranges, 0, 0xFF), 2)),
        cat(literal("u"), _hex(_clipped(of.ranges, *BMP), 4)),
        cat(literal("U"), _hex(of.ranges, 8)),
    )


def _clipped(ranges: Ranges, low: int, high: int) -> Ranges:
    return tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)


def _hex(ranges: Ranges, places: int) -> Regex:
    """Numbers of the ranges in so many hexadecimal digits of either case."""
    if not ranges:
        return NOTHING
    if ranges == ((0, 16**places - 1),):
        return repeat(HEX, places, places)
    size = 16 ** (places - 1)
    groups: dict[Ranges, list[int]] = {}
    for first in range(16):
        inside = _clipped(ranges, first * size, (first + 1) * size - 1)
        if inside:
            moved = tuple((low - first * size, high - first * size) for low, high in inside)
            groups.setdefault(moved, []).append(first)
    return either(*(cat(_hex_digit(firsts), _hex(moved, places - 1)) for moved, firsts in groups.items()))


def _hex_digit(values: Sequence[int]) -> Chars:
    points = [ord(form) for value in values for form in {f"{value:x}", f"{value:X}"}]
    return chars((point, point) for point in points)
