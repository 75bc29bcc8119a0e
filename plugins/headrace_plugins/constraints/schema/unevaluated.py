"""`unevaluatedProperties` and `unevaluatedItems`: which members and elements other keywords have looked at.

A case is a node with what is surely evaluated of its values. The cases of a schema together are the schema, and for
each of its values one of them says exactly what is evaluated. What `unevaluated...` demands only gets less when more is
evaluated, so it is enough that it holds in one case of a value: cases may overlap and nothing needs to be negated.
"""

from __future__ import annotations

from headrace_plugins.constraints.regex import ANY_TEXT, complement
from headrace_plugins.constraints.schema.expressions import (
    ALL,
    ANY_ARRAY,
    ANY_OBJECT,
    EVERY,
    NONE,
    NOTHING_EVALUATED,
    Both,
    Either,
    Evaluated,
    Fact,
    One,
    Outside,
)
from headrace_plugins.constraints.schema.limits import exceeded
from headrace_plugins.constraints.schema.located import Schema
from headrace_plugins.constraints.schema.shapes import Array, Node, Object, Shape
from headrace_plugins.constraints.schema.table import Table

Cases = dict[Evaluated, Node]


def with_unevaluated(schema: Schema, node: Node) -> Node:
    """`node` is what the other keywords of a schema mean; with its `unevaluated...` keywords."""
    table = schema.table
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if keyword not in schema:
            continue
        inner = schema.inner(schema[keyword], keyword)
        kept = []
        for evaluated, case in cases(table, node).items():
            if keyword == "unevaluatedProperties":
                shape, now = _objects(evaluated, inner), Evaluated(names=ANY_TEXT)
            else:
                shape, now = _arrays(table, evaluated, inner), Evaluated(items=None)
            rest = tuple(each for each in EVERY if type(each) is not type(shape))
            kept.append(table.both(case, table.fact((shape, *rest), now, schema.where(keyword))))
        node = table.either(kept)
    return node


def _objects(evaluated: Evaluated, inner: Node) -> Shape:
    if evaluated.names == ANY_TEXT or inner == ALL:
        return ANY_OBJECT
    classes = ((evaluated.names, ALL), (complement(evaluated.names), inner))
    return Object(others=tuple((names, node) for names, node in classes if node != NONE))


def _arrays(table: Table, evaluated: Evaluated, inner: Node) -> Shape:
    if evaluated.items is None or inner == ALL:
        return ANY_ARRAY
    rest = table.either((*evaluated.matching, inner))
    if rest == ALL:
        return ANY_ARRAY
    most = evaluated.items if rest == NONE else None
    return Array(prefix=(ALL,) * evaluated.items, rest=rest, most=most)


def cases(table: Table, node: Node) -> Cases:
    """The cases of a node, as a schema's keywords give them."""
    table.budget.step()
    with table.in_place(node):
        return _cases(table, table.expanded_fully(node))


def _cases(table: Table, node: Node) -> Cases:
    match table.expression(node):
        case Fact(_, evaluated):
            return {evaluated: node}
        case Both(parts):
            found: Cases = {NOTHING_EVALUATED: ALL}
            for part in parts:
                found = _together(table, found, cases(table, part))
            return found
        case Either(parts):
            return _any(table, [cases(table, part) for part in parts])
        case One(parts):
            whole: Cases = {}
            for part in parts:
                others = [table.node(Outside(other)) for other in parts if other != part]
                if parts.count(part) == 1:
                    _add(table, whole, _together(table, cases(table, part), {NOTHING_EVALUATED: table.both(*others)}))
            return whole
    return {NOTHING_EVALUATED: node}


def _together(table: Table, left: Cases, right: Cases) -> Cases:
    """The cases of values that are in both."""
    found: Cases = {}
    for evaluated, node in left.items():
        for more, other in right.items():
            both = table.both(node, other)
            if both != NONE:
                _add(table, found, {evaluated | more: both})
    return found


def _any(table: Table, parts: list[Cases]) -> Cases:
    found: Cases = {}
    for part in parts:
        more: Cases = {}
        for evaluated, node in found.items():
            for other_evaluated, other in part.items():
                both = table.both(node, other)
                together = evaluated | other_evaluated
                # Where one of the two evaluates as much alone, it stands for both: it allows more.
                if both != NONE and together not in (evaluated, other_evaluated):
                    _add(table, more, {together: both})
        _add(table, found, part)
        _add(table, found, more)
    return found


def _add(table: Table, cases: Cases, more: Cases) -> None:
    for evaluated, node in more.items():
        cases[evaluated] = table.either((cases[evaluated], node)) if evaluated in cases else node
    most = table.budget.limits.cases
    if len(cases) > most:
        raise exceeded("leaves too many ways in which members are evaluated", "cases", most)
