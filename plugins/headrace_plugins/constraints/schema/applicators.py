"""Keywords that apply schemas to the same value: references, and, or, not, if, dependencies."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_plugins.constraints.schema.expressions import ALL, ANY_OBJECT, EVERY, NONE, One, Outside
from headrace_plugins.constraints.schema.located import Schema
from headrace_plugins.constraints.schema.shapes import Node, Object, Property


def in_place(schema: Schema, keyword: str) -> list[Node]:
    """What a keyword demands of the value itself, through other schemas; empty for keywords of other kinds."""
    table = schema.table
    match keyword:
        case "$ref" | "$dynamicRef" | "$recursiveRef":
            return [target_of(schema, keyword)]
        case "allOf":
            return _listed(schema, keyword)
        case "anyOf":
            return [table.either(_listed(schema, keyword))]
        case "oneOf":
            parts = _listed(schema, keyword)
            return [table.node(One(tuple(parts)), schema.where(keyword)) if len(parts) > 1 else parts[0]]
        case "not":
            # Not table.outside: what is negated twice evaluates nothing.
            body = schema.inner(schema[keyword], keyword)
            return [table.node(Outside(body), schema.where(keyword)) if body > NONE else table.outside(body)]
        case "if":
            return [_if(schema)]
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return [_dependency(schema, keyword, name) for name in schema[keyword]]
    return []


def target_of(schema: Schema, keyword: str) -> Node:
    """The node that a reference points at."""
    library, here = schema.reader.library, schema.at.place.resource
    place, anchor = library.resolve(schema[keyword], here, schema.where(keyword))
    if keyword == "$recursiveRef":
        anchor = "" if "" in place.resource.dynamic and place is place.resource.dynamic[""] else None
    if keyword != "$ref" and anchor is not None:
        outermost = next((each for each in schema.at.scope if anchor in each.dynamic), None)
        if outermost is not None:
            place = outermost.dynamic[anchor]
    return schema.reader.node_of(place, schema.at.scope)


def _listed(schema: Schema, keyword: str) -> list[Node]:
    return [schema.inner(inner, keyword, i) for i, inner in enumerate(schema[keyword])]


def _if(schema: Schema) -> Node:
    table = schema.table
    condition = schema.inner(schema["if"], "if")
    then = schema.inner(schema["then"], "then") if "then" in schema else ALL
    otherwise = schema.inner(schema["else"], "else") if "else" in schema else ALL
    fails = table.node(Outside(condition), schema.where("if")) if condition > NONE else table.outside(condition)
    return table.either((table.both(condition, then), table.both(fails, otherwise)))


def _dependency(schema: Schema, keyword: str, name: str) -> Node:
    table = schema.table
    needed = schema[keyword][name]
    if isinstance(needed, list):
        also = _having(schema, needed, keyword)
    else:
        also = schema.inner(needed, keyword, name)
    missing = Object(properties=(Property(name, NONE, False),), others=ANY_OBJECT.others)
    absent = table.fact((missing, *EVERY[1:]), where=schema.where(keyword))
    return table.either((absent, table.both(_having(schema, [name], keyword), also)))


def _having(schema: Schema, names: Iterable[str], keyword: str) -> Node:
    """Objects with these members."""
    properties = tuple(Property(name, ALL, True) for name in dict.fromkeys(names))
    shape = Object(properties=properties, others=ANY_OBJECT.others)
    return schema.table.fact((shape,), where=schema.where(keyword))
