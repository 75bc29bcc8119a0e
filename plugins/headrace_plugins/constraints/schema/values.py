"""`const` and `enum`: JSON values as shapes."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from headrace_plugins.constraints.schema.expressions import NONE, Union
from headrace_plugins.constraints.schema.limits import invalid
from headrace_plugins.constraints.schema.scalars import fraction
from headrace_plugins.constraints.schema.shapes import Array, Boolean, Null, Number, Object, Property, Shape, String
from headrace_plugins.constraints.schema.table import Table


def shapes_of(values: Iterable[Any], table: Table, where: str) -> Union:
    """The shapes of these values, in the order of the first of each type; 1 and 1.0 are one value."""
    texts: dict[str, None] = {}
    numbers: dict[Fraction, None] = {}
    flags: dict[bool, None] = {}
    rest: dict[Shape, None] = {}
    order: dict[object, None] = {}
    for value in values:
        if isinstance(value, str):
            texts[_encodable(value, where)] = None
            order[String] = None
        elif isinstance(value, bool):
            flags[value] = None
            order[Boolean] = None
        elif isinstance(value, (int, float, Decimal)):
            numbers[fraction(value)] = None
            order[Number] = None
        else:
            shape = _shape_of(value, table, where)
            rest[shape] = None
            order[shape] = None
    whole: dict[object, Shape] = {
        String: String(values=tuple(texts)), Number: Number(values=tuple(numbers)), Boolean: Boolean(tuple(flags)),
    }  # fmt: skip
    return tuple(whole.get(kind) or kind for kind in order)  # type: ignore[misc]


def _shape_of(value: Any, table: Table, where: str) -> Shape:
    if value is None:
        return Null()
    if isinstance(value, list):
        prefix = tuple(table.fact(shapes_of([each], table, where), where=where) for each in value)
        return Array(prefix=prefix, rest=NONE, least=len(prefix), most=len(prefix))
    return Object(
        properties=tuple(
            Property(_encodable(name, where), table.fact(shapes_of([each], table, where), where=where), True)
            for name, each in value.items()
        )
    )


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(where, f"{text!r} holds half of a surrogate pair, which is no text") from None
    return text
