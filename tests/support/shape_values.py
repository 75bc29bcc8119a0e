"""Whether a value is of a node: an evaluator of shapes that shares no code with what works them out."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from headrace_plugins.constraints.regex import And, Cat, Chars, Not, Or, Regex, Repeat
from headrace_plugins.constraints.schema.shapes import Array, Boolean, Null, Number, Object, String


def belongs(value: object, node: int, table) -> bool:
    return any(is_of(value, shape, table) for shape in table.union(node))


def is_of(value, shape, table) -> bool:
    match shape:
        case Null():
            return value is None
        case Boolean(values):
            return isinstance(value, bool) and value in values
        case Number():
            return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and _number(value, shape)
        case String():
            if not isinstance(value, str):
                return False
            return value in shape.values if shape.values is not None else matches_whole(shape.language, value)
        case Array():
            return isinstance(value, list) and _array(value, shape, table)
        case Object():
            return isinstance(value, dict) and _object(value, shape, table)
    raise AssertionError(shape)


def _number(value, shape: Number) -> bool:
    number = Fraction(str(value))
    if shape.values is not None:
        return number in shape.values
    return (
        (shape.integer is None or shape.integer == (number.denominator == 1))
        and (shape.low is None or number > shape.low or (number == shape.low and not shape.low_open))
        and (shape.high is None or number < shape.high or (number == shape.high and not shape.high_open))
        and all(number % each == 0 for each in shape.multiples)
        and all(number % each != 0 for each in shape.not_multiples)
        and number not in shape.excluded
    )


def _array(value: list, shape: Array, table) -> bool:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    for i, each in enumerate(value):
        if not belongs(each, shape.prefix[i] if i < len(shape.prefix) else shape.rest, table):
            return False
    for fact in shape.contains:
        count = sum(belongs(each, fact.node, table) for each in value)
        if count < fact.least or (fact.most is not None and count > fact.most):
            return False
    repeated = any(same(one, other) for i, one in enumerate(value) for other in value[:i])
    return not (repeated and shape.unique) and (repeated or not shape.not_unique)


def _object(value: dict, shape: Object, table) -> bool:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    named = {each.name for each in shape.properties}
    for each in shape.properties:
        if each.name in value:
            if not belongs(value[each.name], each.node, table):
                return False
        elif each.required:
            return False
    for name in value:
        classes = [node for names, node in shape.others if matches_whole(names, name)]
        if name in named:
            assert not classes, "a class holds the name of a property"
        else:
            assert len(classes) < 2, "classes overlap"
            if not classes or not belongs(value[name], classes[0], table):
                return False
    return all(
        any(matches_whole(fact.names, name) and belongs(value[name], fact.node, table) for name in value)
        for fact in shape.some
    )


def same(one, other) -> bool:
    """Equal as JSON: 1 == 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, (int, float, Decimal)) and isinstance(other, (int, float, Decimal)):
        return Fraction(str(one)) == Fraction(str(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def matches_whole(regex: Regex, text: str) -> bool:
    return len(text) in _ends(regex, text, 0)


@lru_cache(maxsize=20_000)
def _ends(regex: Regex, text: str, start: int) -> frozenset[int]:
    """Where a match that begins at `start` may end."""
    match regex:
        case Chars(ranges):
            inside = start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges)
            return frozenset({start + 1} if inside else ())
        case Cat(parts):
            ends = {start}
            for part in parts:
                ends = {end for at in ends for end in _ends(part, text, at)}
            return frozenset(ends)
        case Or(choices):
            return frozenset(end for choice in choices for end in _ends(choice, text, start))
        case And(parts):
            return frozenset.intersection(*(_ends(part, text, start) for part in parts))
        case Not(body):
            return frozenset(range(start, len(text) + 1)) - _ends(body, text, start)
        case Repeat(body, least, most):
            at, found, times = {start}, set(), 0
            seen: set[int] = set()
            while at and (most is None or times <= most):
                if times >= least:
                    if at <= found:
                        break
                    found |= at
                at = {end for here in at for end in _ends(body, text, here)}
                times += 1
                if times > least + len(text) + 1 and at <= seen:
                    break
                seen |= at
            return frozenset(found)
    raise AssertionError(regex)
