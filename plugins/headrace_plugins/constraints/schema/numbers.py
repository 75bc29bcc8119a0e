"""Numbers as text: the decimal spellings of the numbers of a shape.

Where nothing is set, all of JSON's grammar is allowed. Otherwise numbers are written plainly (`-12.50`), `1.0` is a
whole number, and `-0` is 0; between bounds, what is tiny or huge may also be written as `json.dumps` writes it
(`1e-07`, `1.5e+300`), as far as doubles go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from headrace_plugins.constraints.automata import automaton
from headrace_plugins.constraints.dfa import Dfa, minimised, regex_of
from headrace_plugins.constraints.regex import (
    EMPTY,
    NOTHING,
    Regex,
    both,
    cat,
    chars,
    complement,
    either,
    literal,
    repeat,
)
from headrace_plugins.constraints.schema import digits
from headrace_plugins.constraints.schema.digits import DIGIT, POSITIVE, ZEROS, between_fractions, whole
from headrace_plugins.constraints.schema.limits import Refusal
from headrace_plugins.constraints.schema.scalars import has_number
from headrace_plugins.constraints.schema.shapes import Number

MAX_MODULUS = 1_000
"""Of the remainders that an automaton for `multipleOf` keeps apart."""
MAX_LISTED = 256
"""Multiples between two bounds that are listed one by one."""
MAX_DIGITS = 400
"""Of a bound: more than any double has before the point, or needs behind it where people write one."""
MAX_STATES = 20_000
REGEX_STATES, REGEX_PARTS = 12, 400
"""Up to so many states, and parts of the result, an automaton is written as one regex, which lexers read at once."""

MINUS = repeat(literal("-"), 0, 1)
POINT = literal(".")
NO_FRACTION = repeat(cat(POINT, repeat(literal("0"), 1)), 0, 1)
ANY_FRACTION = repeat(cat(POINT, repeat(DIGIT, 1)), 0, 1)
ANY_WHOLE = whole(0, None)
SIGN = repeat(chars([(0x2B, 0x2B), (0x2D, 0x2D)]), 0, 1)
MARK = chars([(0x45, 0x45), (0x65, 0x65)])
ANY_NUMBER = cat(MINUS, ANY_WHOLE, ANY_FRACTION, repeat(cat(MARK, SIGN, repeat(DIGIT, 1)), 0, 1))
POINT_ZERO = repeat(literal(".0"), 0, 1)
"""What may stand behind a whole number that is asked for: a model must not be able to write zeros without end."""
INTEGER = cat(MINUS, ANY_WHOLE, POINT_ZERO)
TINY, HUGE = -5, 16
"""From these exponents on, `json.dumps` writes a float with an exponent."""

LEAST, MOST = Fraction("5e-324"), Fraction("1.7976931348623157e308")
"""The least and the largest double above 0, as they are written."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of magnitudes, low >= 0; high None: no bound."""

    low: Fraction
    low_open: bool
    high: Fraction | None
    high_open: bool

    @property
    def empty(self) -> bool:
        if self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))


def number_language(shape: Number, where: str) -> Regex | Dfa:
    """The spellings of the numbers of a shape, as an automaton where a regex would be too big.

    where: JSON pointer of the schema, for error texts. Raises RequestError HR-CONSTRAINT-03 for multiples and bounds
    that are too fine.
    """
    if shape.values is not None:
        return either(*map(_written, shape.values))
    listed = _listed(shape)
    if listed is not None:
        return either(*map(_written, listed))
    base = _between(shape, where)
    if shape.excluded:
        base = both(base, *(complement(spellings(value)) for value in shape.excluded))
    if not shape.multiples and not shape.not_multiples:
        return base
    # Whole numbers that are multiples of 3/2 are those of 3.
    wanted = [Fraction(step.numerator) if shape.integer else step for step in shape.multiples]
    steps = [(_multiples(step, where), True) for step in wanted]
    steps += [(_multiples(step, where), False) for step in shape.not_multiples]
    return _all_of(base, steps, where)


def _written(value: Fraction) -> Regex:
    """The spellings of a number that is asked for: no zeros at the end but that of `1.0`."""
    return spellings(value, POINT_ZERO, EMPTY)


def spellings(value: Fraction, no_fraction: Regex = NO_FRACTION, zeros: Regex = ZEROS) -> Regex:
    """Of one number: `1`, `1.0`, and with an exponent what `json.dumps` writes so."""
    sign = literal("-") if value < 0 else MINUS if value == 0 else EMPTY
    value = abs(value)
    shown = digits.of_fraction(value - int(value))
    if shown is None:
        return NOTHING  # a third has no decimal spelling
    plain = cat(literal(str(int(value))), cat(POINT, literal(shown), zeros) if shown else no_fraction)
    exponent = _exponent(value) if value else 0
    if TINY < exponent < HUGE:
        return cat(sign, plain)
    scaled = value / Fraction(10) ** exponent
    shown = digits.of_fraction(scaled - int(scaled)) or ""
    mantissa = cat(literal(str(int(scaled))), cat(POINT, literal(shown), zeros) if shown else no_fraction)
    return cat(sign, either(plain, cat(mantissa, MARK, _power(exponent, exponent))))


def _exponent(value: Fraction) -> int:
    """Of a number > 0 that is written with one digit before the point."""
    exponent = len(str(value.numerator)) - len(str(value.denominator))
    return exponent if Fraction(10) ** exponent <= value else exponent - 1


def _power(low: int | None, high: int | None) -> Regex:
    """An exponent in [low, high], neither of which may be on the other side of 0."""
    zeros = repeat(literal("0"))
    if (low is not None and low > 0) or (low == high == 0):
        assert low is not None
        return cat(repeat(literal("+"), 0, 1), zeros, whole(low, high))
    assert high is not None
    return cat(literal("-"), zeros, whole(-high, None if low is None else -low))


# between bounds


def _between(shape: Number, where: str) -> Regex:
    if shape == Number():
        return ANY_NUMBER
    above, below = _sides(shape, where)
    integer = shape.integer is True
    upper = NOTHING if above.empty else _magnitudes(above, integer, _is_stepped(shape))
    lower = NOTHING if below.empty else _magnitudes(below, integer, _is_stepped(shape))
    result = cat(MINUS, upper) if above == below else either(upper, cat(literal("-"), lower))
    if shape.integer is False:
        broken = cat(MINUS, ANY_WHOLE, POINT, repeat(DIGIT), POSITIVE, repeat(DIGIT))
        result = both(result, either(broken, cat(MINUS, _leading(), MARK, _power(None, TINY))))
    return result


def _is_stepped(shape: Number) -> bool:
    return bool(shape.multiples or shape.not_multiples)


def _sides(shape: Number, where: str) -> tuple[Bounds, Bounds]:
    """Magnitudes of the numbers >= 0 and of those <= 0."""
    zero = Fraction(0)
    low, high = shape.low, shape.high
    above = Bounds(low, shape.low_open, high, shape.high_open) if low is not None and low >= 0 else None
    if above is None:
        above = Bounds(zero, False, high, shape.high_open)
    below = Bounds(-high, shape.high_open, None if low is None else -low, shape.low_open) if high is not None else None
    if below is None or below.low < 0:
        below = Bounds(zero, False, None if low is None else -low, shape.low_open)
    for each in (above, below):
        for bound in (each.low, each.high or zero):
            if len(str(bound.numerator)) > MAX_DIGITS or len(str(bound.denominator)) > MAX_DIGITS:
                raise Refusal(where, "minimum or maximum", f"it has more than {MAX_DIGITS} digits")
    return above, below


def _magnitudes(bounds: Bounds, integer: bool, plain: bool) -> Regex:
    low, high = bounds.low, bounds.high
    if integer:
        least = math.floor(low) + 1 if bounds.low_open else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if bounds.high_open else math.floor(high)
        return cat(whole(least, most), POINT_ZERO)
    written = _decimals(bounds)
    if plain:
        return written
    held = _held(bounds)
    return either(written, _with_exponent(held, None, TINY), _with_exponent(held, HUGE, None))


def _held(bounds: Bounds) -> Bounds:
    """The part of which a double holds every number, if not exactly: beyond it, what is read as 0 or as infinity would
    break the bounds."""
    low, low_open, high, high_open = bounds.low, bounds.low_open, bounds.high, bounds.high_open
    if low < LEAST:
        low, low_open = LEAST, False
    if high is None or high > MOST:
        high, high_open = MOST, False
    return Bounds(low, low_open, high, high_open)


def _decimals(bounds: Bounds) -> Regex:
    """Without an exponent."""
    low, high = bounds.low, bounds.high
    first, start = int(low), low - int(low)
    if high is not None and int(high) == first:
        end = high - first
        return cat(literal(str(first)), between_fractions(start, bounds.low_open, end, bounds.high_open))
    pieces = []
    if start or bounds.low_open:
        pieces.append(cat(literal(str(first)), between_fractions(start, bounds.low_open, None, True)))
        first += 1
    if high is None:
        return either(*pieces, cat(whole(first, None), ANY_FRACTION))
    last = int(high)
    pieces.append(cat(whole(first, last - 1), ANY_FRACTION))
    pieces.append(cat(literal(str(last)), between_fractions(Fraction(0), False, high - last, bounds.high_open)))
    return either(*pieces)


def _leading() -> Regex:
    return cat(POSITIVE, ANY_FRACTION)


def _with_exponent(bounds: Bounds, low: int | None, high: int | None) -> Regex:
    """With one digit that is not 0 before the point, and an exponent in [low, high]; one of these is None."""
    pieces = []
    if bounds.low > 0:
        first = _exponent(bounds.low)
        if low is None or first >= low:
            low = first + 1
            if high is None or first <= high:
                pieces.append(_of_exponent(bounds, first))
    if bounds.high is not None:
        if bounds.high == 0:
            return NOTHING
        last = _exponent(bounds.high)
        if high is None or last <= high:
            high = last - 1
            if (low is None or last >= low) and not (bounds.low > 0 and last == _exponent(bounds.low)):
                pieces.append(_of_exponent(bounds, last))
    if low is None or high is None or low <= high:
        pieces.append(cat(_leading(), MARK, _power(low, high)))
    return either(*pieces)


def _of_exponent(bounds: Bounds, exponent: int) -> Regex:
    scale = Fraction(10) ** exponent
    mantissa = Bounds(Fraction(1), False, Fraction(10), True)
    low, high = bounds.low / scale, None if bounds.high is None else bounds.high / scale
    if low >= 1:
        mantissa = Bounds(low, bounds.low_open, mantissa.high, True)
    if high is not None and high < 10:
        mantissa = Bounds(mantissa.low, mantissa.low_open, high, bounds.high_open)
    if mantissa.empty:
        return NOTHING
    return cat(_decimals(mantissa), MARK, _power(exponent, exponent))


# multiples


def _listed(shape: Number) -> list[Fraction] | None:
    """The numbers of a shape, when they are few."""
    if not shape.multiples or shape.low is None or shape.high is None:
        return None
    step = shape.multiples[0]
    first, last = math.ceil(shape.low / step), math.floor(shape.high / step)
    if last - first >= MAX_LISTED:
        return None
    values = [number * step for number in range(first, last + 1)]
    return [value for value in values if has_number(shape, value)]


def _multiples(step: Fraction, where: str) -> Dfa:
    """The plain spellings of the multiples of a step: remainders of the digits read so far."""
    places = digits.places_of(step)
    modulus = int(step * 10**places)
    if modulus * (places + 1) > MAX_MODULUS * 4 or modulus > MAX_MODULUS:
        shown = f"{float(step):.17g}" if step < 10**300 else "a step beyond 1e300"
        raise Refusal(where, "multipleOf", f"{shown} needs more than {MAX_MODULUS} remainders")
    start, signed, zero, end = -1, -2, -3, 0
    numbers: dict[tuple[int, int], int] = {}
    order: list[tuple[int, int]] = []

    def number(state: tuple[int, int]) -> int:
        if state not in numbers:
            numbers[state] = len(order)
            order.append(state)
        return numbers[state]

    # (place, remainder); place: -1 at the start, -2 behind a sign, -3 behind a leading 0, 0 among whole digits, n with
    # n - 1 digits behind the point read.
    number((start, 0))
    accepting: list[bool] = []
    edges: list[list[tuple[int, int, int]]] = []
    for place, rest in order:  # grows while it is walked
        row: list[tuple[int, int, int]] = []
        done = max(place - 1, 0)
        if place == start:
            row.append((0x2D, 0x2D, number((signed, 0))))
        if place in (zero, end):
            row.append((0x2E, 0x2E, number((1, rest))))
        if place != zero:
            for digit in range(10):
                if place in (start, signed):
                    target = (end, digit % modulus) if digit else (zero, 0)
                elif place == end:
                    target = (end, (rest * 10 + digit) % modulus)
                elif done < places:
                    target = (place + 1, (rest * 10 + digit) % modulus)
                elif digit:
                    continue
                else:
                    target = (places + 2, rest)
                row.append((0x30 + digit, 0x30 + digit, number(target)))
        whole_read = place in (zero, end) or place > 1
        accepting.append(whole_read and rest * 10 ** max(places - done, 0) % modulus == 0)
        edges.append(sorted(row))
    return minimised(accepting, edges)


def _all_of(base: Regex, steps: list[tuple[Dfa, bool]], where: str) -> Regex | Dfa:
    """The spellings of base that each automaton takes (True) or refuses (False)."""
    if base == INTEGER and len(steps) == 1 and steps[0][1]:
        machine = steps[0][0]
    else:
        machine = _product([(automaton(base, MAX_STATES), True), *steps], where)
    regex = regex_of(machine, REGEX_PARTS) if len(machine.edges) <= REGEX_STATES else None
    return machine if regex is None else regex


def _product(machines: list[tuple[Dfa, bool]], where: str) -> Dfa:
    """One automaton of several over the characters of plain numbers. One that refuses may end early: state -1."""
    start = (0,) * len(machines)
    numbers, order = {start: 0}, [start]
    accepting, edges = [], []
    alphabet = [0x2D, 0x2E, *range(0x30, 0x3A)]
    for states in order:  # grows while it is walked
        ends = [state >= 0 and machine.accepting[state] for (machine, _), state in zip(machines, states, strict=True)]
        accepting.append(all(end == wanted for end, (_, wanted) in zip(ends, machines, strict=True)))
        row = []
        for point in alphabet:
            following = tuple(
                _step(machine, state, point) for (machine, _), state in zip(machines, states, strict=True)
            )
            if any(state < 0 and wanted for state, (_, wanted) in zip(following, machines, strict=True)):
                continue
            if following not in numbers:
                numbers[following] = len(order)
                order.append(following)
                if len(order) > MAX_STATES:
                    raise Refusal(where, "multipleOf", f"between these bounds it needs more than {MAX_STATES} states")
            row.append((point, point, numbers[following]))
        edges.append(row)
    return minimised(accepting, edges)


def _step(machine: Dfa, state: int, point: int) -> int:
    if state < 0:
        return -1
    return next((target for low, high, target in machine.edges[state] if low <= point <= high), -1)
