"""The values of a node, where they are few: what `uniqueItems` can be decided for."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING

from headrace_plugins.constraints.grammar import Alt, Expr, Rx, Seq
from headrace_plugins.constraints.schema.numbers import spellings
from headrace_plugins.constraints.schema.scalars import has_number
from headrace_plugins.constraints.schema.shapes import Array, Boolean, Node, Null, Number, Object, Shape, String

if TYPE_CHECKING:
    from headrace_plugins.constraints.schema.writing import Frame, Writer

MAX_DEPTH = 4
Value = tuple[object, ...]
"""A type and what tells its values apart: equal for equal JSON values."""


def finite_values(writer: Writer, node: Node, most: int, depth: int = 0) -> dict[Value, Expr] | None:
    """Every value of a node with its texts; None where there may be more than `most`."""
    found: dict[Value, Expr] = {}
    if depth > MAX_DEPTH:
        return None
    for shape in writer.table.union(node):
        values = _values(writer, shape, most, depth)
        if values is None:
            return None
        for value, written in values:
            known = found.get(value)
            found[value] = written if known is None or known == written else Alt((known, written))
            if len(found) > most:
                return None
    return found


def _values(writer: Writer, shape: Shape, most: int, depth: int) -> Iterator[tuple[Value, Expr]] | None:
    match shape:
        case Null():
            return iter([(("null",), writer.word(None))])
        case Boolean(values):
            return iter([(("boolean", value), writer.word(value)) for value in values])
        case Number():
            numbers = _numbers(shape, most)
            return (
                None if numbers is None else ((("number", value), Rx(spellings(value), sure=True)) for value in numbers)
            )
        case String(values=texts):
            if texts is None or len(texts) > most:
                return None
            return ((("string", text), writer.text(text)) for text in texts)
        case Array():
            return _arrays(writer, shape, most, depth)
        case Object():
            return _objects(writer, shape, most, depth)


def _numbers(shape: Number, most: int) -> list[Fraction] | None:
    if shape.values is not None:
        return list(shape.values)
    step = shape.multiples[0] if shape.multiples else Fraction(1) if shape.integer else None
    if step is None or shape.low is None or shape.high is None:
        return None
    first, last = ceil(shape.low / step), floor(shape.high / step)
    if last - first > most:
        return None
    return [value for value in (number * step for number in range(first, last + 1)) if has_number(shape, value)]


def _arrays(writer: Writer, shape: Array, most: int, depth: int) -> Iterator[tuple[Value, Expr]] | None:
    if shape.most is None or shape.most > len(shape.prefix) or shape.contains or shape.unique or shape.not_unique:
        return None
    places = [finite_values(writer, each, most, depth + 1) for each in shape.prefix[: shape.most]]
    found: list[tuple[Value, Expr]] = []
    rows: list[tuple[Value, tuple[Expr, ...]]] = [((), ())]
    for length in range(shape.most + 1):
        if length >= shape.least:
            found += [(("array", *values), _framed(writer.array, written)) for values, written in rows]
        if length == shape.most:
            break
        values_here = places[length]
        if values_here is None or len(rows) * len(values_here) > most:
            return None
        comma = (writer.comma,) if length else ()
        rows = [
            ((*values, value), (*written, *comma, text))
            for values, written in rows
            for value, text in values_here.items()
        ]
    return iter(found)


def _objects(writer: Writer, shape: Object, most: int, depth: int) -> Iterator[tuple[Value, Expr]] | None:
    if shape.others or shape.some or shape.least or shape.most is not None:
        return None
    rows: list[tuple[tuple[tuple[str, Value], ...], tuple[Expr, ...]]] = [((), ())]
    for each in shape.properties:
        values = finite_values(writer, each.node, most, depth + 1)
        if values is None or len(rows) * (len(values) + 1) > 2 * most:
            return None
        name = writer.name(each.name, each.node, writer.object)
        with_it = [
            ((*members, (each.name, value)), (*written, *((writer.comma,) if written else ()), name, text))
            for members, written in rows
            for value, text in values.items()
        ]
        rows = with_it if each.required else with_it + rows
    return ((("object", *sorted(members)), _framed(writer.object, written)) for members, written in rows)


def _framed(frame: Frame, written: tuple[Expr, ...]) -> Expr:
    return Seq((frame.open, *written, frame.close)) if written else frame.empty
