"""Unions of shapes: joined, met and taken from each other, type by type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

from headrace_plugins.constraints.schema.arrays import is_hollow_array, meet_arrays, outside_array
from headrace_plugins.constraints.schema.expressions import EVERY, Union
from headrace_plugins.constraints.schema.limits import Budget
from headrace_plugins.constraints.schema.nodes import Nodes
from headrace_plugins.constraints.schema.objects import is_hollow_object, meet_objects, outside_object
from headrace_plugins.constraints.schema.scalars import (
    meet_booleans,
    meet_numbers,
    meet_strings,
    outside_boolean,
    outside_number,
    outside_string,
)
from headrace_plugins.constraints.schema.shapes import Array, Boolean, Number, Object, Shape, String

MAX_COMPARED = 12
"""Shapes of one type of which those inside another are looked for: it costs each pair."""


def meet_shapes(left: Shape, right: Shape, nodes: Nodes) -> list[Shape]:
    """Shapes that together are what two shapes have in common."""
    if left == right:
        return [left]
    match left, right:
        case Boolean(), Boolean():
            found: Shape | None = meet_booleans(left, right)
        case Number(), Number():
            found = meet_numbers(left, right)
        case String(), String():
            found = meet_strings(left, right, nodes.languages)
        case Array(), Array():
            found = meet_arrays(left, right, nodes)
        case Object(), Object():
            return list(meet_objects(left, right, nodes))
        case _:
            return []
    return [] if found is None else [found]


def outside_shape(shape: Shape, nodes: Nodes) -> Iterator[Shape]:
    """Shapes of the same type that together are what a shape leaves out."""
    match shape:
        case Boolean():
            yield from outside_boolean(shape)
        case Number():
            yield from outside_number(shape)
        case String():
            yield from outside_string(shape)
        case Array():
            yield from outside_array(shape, nodes)
        case Object():
            yield from outside_object(shape, nodes)


def is_hollow(shape: Shape, nodes: Nodes) -> bool:
    """Whether surely no value is of a shape."""
    match shape:
        case Array():
            return is_hollow_array(shape, nodes)
        case Object():
            return is_hollow_object(shape, nodes)
    return False


def meet(left: Union, right: Union, nodes: Nodes, budget: Budget) -> Union:
    """What two unions have in common, in the order of the left one."""
    if left == EVERY or right == EVERY:
        return right if left == EVERY else left
    found: dict[Shape, None] = {}
    by_type: dict[type, list[Shape]] = {}
    for other in right:
        by_type.setdefault(type(other), []).append(other)
    for shape in left:
        for other in by_type.get(type(shape), ()):
            budget.step()
            for both in meet_shapes(shape, other, nodes):
                if both not in found and not is_hollow(both, nodes):
                    found[both] = None
                    budget.spread(len(found))
    return join([tuple(found)], nodes, budget)


def subtract(left: Union, right: Union, nodes: Nodes, budget: Budget) -> Union:
    """What of the left union is not in the right one."""
    shapes = left
    for taken in right:
        kept: dict[Shape, None] = {}
        changed = False
        for shape in shapes:
            if type(shape) is not type(taken):
                kept[shape] = None
                continue
            budget.step()
            if all(is_hollow(both, nodes) for both in meet_shapes(shape, taken, nodes)):
                kept[shape] = None  # nothing in common: it stays as it is, and small
                continue
            changed = True
            for piece in outside_shape(taken, nodes):
                budget.step()
                for part in meet_shapes(shape, piece, nodes):
                    if part not in kept and not is_hollow(part, nodes):
                        kept[part] = None
                        budget.spread(len(kept))
        shapes = join([tuple(kept)], nodes, budget) if changed else tuple(kept)
    return shapes


def join(unions: Iterable[Union], nodes: Nodes, budget: Budget) -> Union:
    """The values of any of these unions, without shapes that lie inside others."""
    shapes = list(dict.fromkeys(shape for union in unions for shape in union))
    if len(shapes) < 2:
        return tuple(shapes)
    shapes = _with_values_merged(shapes)
    by_type: dict[type, list[Shape]] = {}
    for shape in shapes:
        by_type.setdefault(type(shape), []).append(shape)
    dropped: set[Shape] = set()
    for every in EVERY:
        same = by_type.get(type(every), ())
        if len(same) < 2:
            continue
        if every in same:
            dropped |= {shape for shape in same if shape != every}
        elif len(same) <= MAX_COMPARED:
            dropped |= _inside_others(same, nodes, budget)
    return tuple(shape for shape in shapes if shape not in dropped)


def _inside_others(shapes: Iterable[Shape], nodes: Nodes, budget: Budget) -> set[Shape]:
    kept = list(shapes)
    dropped: set[Shape] = set()
    for shape in reversed(list(shapes)):
        for other in kept:
            if other != shape and other not in dropped:
                budget.step()
                if meet_shapes(shape, other, nodes) == [shape]:
                    dropped.add(shape)
                    break
    return dropped


def _with_values_merged(shapes: list[Shape]) -> list[Shape]:
    """One shape of strings that lists values, one of numbers, one of booleans: at the place of the first."""
    texts: dict[str, None] = {}
    numbers: dict[Fraction, None] = {}
    flags: dict[bool, None] = {}
    merged: list[Shape | None] = []
    places: dict[type, int] = {}
    for shape in shapes:
        if isinstance(shape, Boolean):
            flags |= dict.fromkeys(shape.values)
        elif isinstance(shape, String) and shape.values is not None:
            texts |= dict.fromkeys(shape.values)
        elif isinstance(shape, Number) and shape.values is not None:
            numbers |= dict.fromkeys(shape.values)
        else:
            merged.append(shape)
            continue
        if type(shape) not in places:
            places[type(shape)] = len(merged)
            merged.append(None)
    for kind, values in ((Boolean, flags), (String, texts), (Number, numbers)):
        if values:
            whole: Shape
            if kind is Boolean:
                whole = Boolean(tuple(flags))
            else:
                whole = String(values=tuple(texts)) if kind is String else Number(values=tuple(numbers))
            merged[places[kind]] = whole
    return [shape for shape in merged if shape is not None]


def exactly_one(unions: list[Union], nodes: Nodes, budget: Budget) -> Union:
    """The values of one of these unions and no other."""
    one: Union = ()
    seen: Union = ()
    for union in unions:
        one = join([subtract(one, union, nodes, budget), subtract(union, seen, nodes, budget)], nodes, budget)
        seen = join([seen, union], nodes, budget)
    return one
