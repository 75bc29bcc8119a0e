"""Regexes of decimal digits: whole numbers and fractions between bounds."""

from __future__ import annotations

from fractions import Fraction

from headrace_plugins.constraints.automata import nullable
from headrace_plugins.constraints.regex import EMPTY, NOTHING, Chars, Regex, cat, chars, either, literal, repeat
from headrace_plugins.constraints.trimming import some

DIGIT = chars([(0x30, 0x39)])
POSITIVE = chars([(0x31, 0x39)])
ZEROS = repeat(literal("0"))


def digit(low: int, high: int) -> Chars:
    """One digit in [low, high]."""
    return chars([(0x30 + low, 0x30 + high)])


def of_fraction(value: Fraction) -> str | None:
    """The digits behind the point of a number in [0, 1), without zeros at the end; None: they never end."""
    places = _places(value)
    if places is None:
        return None
    return f"{int(value * 10**places):0{places}d}" if places else ""


def places_of(value: Fraction) -> int:
    """How many digits behind the point a number has that was written as a decimal."""
    places = _places(value)
    assert places is not None, value
    return places


def _places(value: Fraction) -> int | None:
    rest, places = value.denominator, 0
    twos = fives = 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    return places if rest == 1 else None


def whole(low: int, high: int | None) -> Regex:
    """Whole numbers in [low, high] without leading zeros, low >= 0."""
    if high is not None and low > high:
        return NOTHING
    if low == 0:
        return either(literal("0"), whole(1, high))
    first = len(str(low))
    if high is None:
        start = _as_long(str(low), "9" * first)
        if low == 10 ** (first - 1):
            return cat(POSITIVE, repeat(DIGIT, first - 1))
        return either(start, cat(POSITIVE, repeat(DIGIT, first)))
    last = len(str(high))
    if first == last:
        return _as_long(str(low), str(high))
    pieces = []
    shortest, longest = first, last
    if low != 10 ** (first - 1):
        pieces.append(_as_long(str(low), "9" * first))
        shortest += 1
    if high != 10**last - 1:
        pieces.append(_as_long("1" + "0" * (last - 1), str(high)))
        longest -= 1
    if shortest <= longest:
        pieces.insert(1 if shortest > first else 0, cat(POSITIVE, repeat(DIGIT, shortest - 1, longest - 1)))
    return either(*pieces)


def _as_long(low: str, high: str) -> Regex:
    """Digits between two that are as many. Flat, so that long bounds don't nest."""
    length = len(low)
    at = next((i for i in range(length) if low[i] != high[i]), length)
    prefix, rest = low[:at], length - at - 1
    if at == length:
        return literal(low)
    least, most = int(low[at]), int(high[at])
    pieces = []
    if set(low[at + 1 :]) - {"0"}:
        pieces.append(cat(literal(low[: at + 1]), _at_least(low[at + 1 :])))
        least += 1
    behind = None
    if set(high[at + 1 :]) - {"9"}:
        behind = cat(literal(high[: at + 1]), _at_most(high[at + 1 :]))
        most -= 1
    if least <= most:
        pieces.append(cat(literal(prefix), digit(least, most), repeat(DIGIT, rest, rest)))
    return either(*pieces, *([behind] if behind is not None else []))


def _at_least(low: str) -> Regex:
    kept = low.rstrip("0")
    free = len(low) - len(kept)
    pieces = [cat(literal(kept), repeat(DIGIT, free, free))]
    for i, char in enumerate(kept):
        if char != "9":
            rest = len(low) - i - 1
            pieces.append(cat(literal(kept[:i]), digit(int(char) + 1, 9), repeat(DIGIT, rest, rest)))
    return either(*pieces)


def _at_most(high: str) -> Regex:
    kept = high.rstrip("9")
    free = len(high) - len(kept)
    pieces = [cat(literal(kept), repeat(DIGIT, free, free))]
    for i, char in enumerate(kept):
        if char != "0":
            rest = len(high) - i - 1
            pieces.append(cat(literal(kept[:i]), digit(0, int(char) - 1), repeat(DIGIT, rest, rest)))
    return either(*pieces)


def between_fractions(low: Fraction, low_open: bool, high: Fraction | None, high_open: bool) -> Regex:
    """What may stand behind a whole number ("", ".25") so that the fraction is in the interval; high None: up to 1."""
    first = _digits(low)
    if high is None:
        tail = _tail_from(first, low_open)
    elif low == 0 and not low_open:
        tail = _tail_to(_digits(high), high_open)
    else:
        tail = _tail_between(first, low_open, _digits(high), high_open)
    if tail == NOTHING:
        return NOTHING
    written = cat(literal("."), some(tail))
    return either(EMPTY, written) if nullable(tail) else written


def _digits(value: Fraction) -> str:
    shown = of_fraction(value)
    assert shown is not None, value
    return shown


def _tail_from(low: str, is_open: bool) -> Regex:
    """Digits d that make 0.d at least 0.low, which has no zeros at its end."""
    any_more = cat(ZEROS, POSITIVE, repeat(DIGIT)) if is_open else repeat(DIGIT)
    pieces = [cat(literal(low), any_more)]
    for i, char in enumerate(low):
        if char != "9":
            pieces.append(cat(literal(low[:i]), digit(int(char) + 1, 9), repeat(DIGIT)))
    return either(*pieces)


def _tail_to(high: str, is_open: bool) -> Regex:
    """Digits d that make 0.d at most 0.high, which has no zeros at its end."""
    pieces = [] if is_open else [cat(literal(high), ZEROS)]
    for i, char in enumerate(high):
        below = repeat(cat(digit(0, int(char) - 1), repeat(DIGIT)), 0, 1) if char != "0" else EMPTY
        pieces.append(cat(literal(high[:i]), below))
    return either(*pieces)


def _tail_between(low: str, low_open: bool, high: str, high_open: bool) -> Regex:
    length = max(len(low), len(high))
    longer_low, longer_high = low.ljust(length, "0"), high.ljust(length, "0")
    at = next((i for i in range(length) if longer_low[i] != longer_high[i]), length)
    if at == length:  # one number, if any
        return NOTHING if low_open or high_open else cat(literal(low), ZEROS)
    prefix, least, most = longer_low[:at], int(longer_low[at]), int(longer_high[at])
    if least > most:
        return NOTHING
    pieces = []
    if least + 1 < most:
        pieces.append(cat(literal(prefix), digit(least + 1, most - 1), repeat(DIGIT)))
    pieces.append(cat(literal(prefix), digit(least, least), _tail_from(low[at + 1 :], low_open)))
    pieces.append(cat(literal(prefix), digit(most, most), _tail_to(high[at + 1 :], high_open)))
    if not low_open and len(low) <= at:
        pieces.append(cat(literal(low), repeat(literal("0"), 0, at - len(low))))
    return either(*pieces)
