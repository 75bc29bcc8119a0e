"""Arrays: what two shapes have in common, and what a shape leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from headrace_plugins.constraints.schema.expressions import ALL, NONE
from headrace_plugins.constraints.schema.nodes import Nodes
from headrace_plugins.constraints.schema.shapes import Array, Contains, Node

MAX_SPREAD = 64
"""Shapes that one shape of arrays may leave out because an element behind a prefix is different."""


def element(shape: Array, index: int) -> Node:
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def meet_arrays(left: Array, right: Array, nodes: Nodes) -> Array | None:
    length = max(len(left.prefix), len(right.prefix))
    most = left.most if right.most is None else right.most if left.most is None else min(left.most, right.most)
    if most is not None:
        length = min(length, most)
    return tidy_array(
        Array(
            prefix=tuple(nodes.both(element(left, i), element(right, i)) for i in range(length)),
            rest=nodes.both(left.rest, right.rest),
            least=max(left.least, right.least),
            most=most,
            contains=left.contains + right.contains,
            unique=left.unique or right.unique,
            not_unique=left.not_unique or right.not_unique,
        ),
        nodes,
    )


def tidy_array(shape: Array, nodes: Nodes) -> Array | None:
    """The one way to write a shape; None: no array is of it."""
    prefix, rest, least, most = list(shape.prefix), shape.rest, shape.least, shape.most
    counts: dict[Node, tuple[int, int | None]] = {}
    for each in shape.contains:
        low, high = counts.get(each.node, (0, None))
        high = each.most if high is None else high if each.most is None else min(high, each.most)
        counts[each.node] = (max(low, each.least), high)
    contains = []
    for node, (low, high) in counts.items():
        if node == ALL:
            least, most = max(least, low), high if most is None else most if high is None else min(most, high)
        elif node == NONE:
            if low:
                return None
        elif high == 0:
            other = nodes.outside(node)
            prefix = [nodes.both(each, other) for each in prefix]
            rest = nodes.both(rest, other)
        elif low or high is not None:
            contains.append(Contains(node, low, high))
        if high is not None and low > high:
            return None
        least = max(least, low)
    if shape.unique and shape.not_unique:
        return None
    if shape.not_unique:
        least = max(least, 2)
    if NONE in prefix:
        most = prefix.index(NONE) if most is None else min(most, prefix.index(NONE))
    if rest == NONE:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None and most <= len(prefix):
        prefix, rest = prefix[:most], NONE
    while prefix and prefix[-1] == rest:
        prefix.pop()
    if most is not None and least > most:
        return None
    unique = shape.unique and (most is None or most > 1)
    return Array(
        prefix=tuple(prefix), rest=rest, least=least, most=most,
        contains=tuple(contains), unique=unique, not_unique=shape.not_unique,
    )  # fmt: skip


def is_hollow_array(shape: Array, nodes: Nodes) -> bool:
    """Whether surely no array is of a shape, as far as its elements tell."""
    for i in range(min(shape.least, len(shape.prefix) + 1)):
        if nodes.is_empty(element(shape, i)):
            return True
    places = {*shape.prefix, shape.rest}
    return any(
        each.least and all(nodes.is_empty(nodes.both(each.node, place)) for place in places) for each in shape.contains
    )


def outside_array(shape: Array, nodes: Nodes) -> Iterator[Array]:
    """Shapes that together are the arrays that are not of a shape."""
    anything = Array(rest=ALL)
    for i, node in enumerate(shape.prefix):
        if node != ALL:
            yield Array(prefix=(ALL,) * i + (nodes.outside(node),), rest=ALL, least=i + 1)
    if shape.rest != ALL and (shape.most is None or shape.most > len(shape.prefix)):
        yield from _different_behind(shape, nodes)
    if shape.least:
        yield Array(rest=ALL, most=shape.least - 1)
    if shape.most is not None:
        yield Array(rest=ALL, least=shape.most + 1)
    for each in shape.contains:
        if not nodes.counts and each.least > 1:
            nodes.give_up("elements can't be counted while formats are asserted or keywords dropped")
            yield anything
        elif each.least:
            yield replace(anything, contains=(Contains(each.node, 0, each.least - 1),))
        if each.most is not None:
            yield replace(anything, contains=(Contains(each.node, each.most + 1),))
    if shape.unique:
        yield replace(anything, not_unique=True)
    if shape.not_unique:
        yield replace(anything, unique=True)


def _different_behind(shape: Array, nodes: Nodes) -> Iterator[Array]:
    """An element behind the prefix is not of `rest`."""
    length, other = len(shape.prefix), nodes.outside(shape.rest)
    if not length:
        yield Array(rest=ALL, contains=(Contains(other),))
    elif shape.most is not None and shape.most - length <= MAX_SPREAD:
        for i in range(length, shape.most):
            yield Array(prefix=(ALL,) * i + (other,), rest=ALL, least=i + 1)
    elif 2**length <= MAX_SPREAD:
        # One more is different than in the prefix, whichever are different there.
        for prefix in product((shape.rest, other), repeat=length):
            count = sum(node == other for node in prefix)
            yield Array(prefix=prefix, rest=ALL, least=length + 1, contains=(Contains(other, count + 1),))
    else:
        nodes.give_up(f"that an element behind the first {length} is different can't be said")
        yield Array(rest=ALL)
