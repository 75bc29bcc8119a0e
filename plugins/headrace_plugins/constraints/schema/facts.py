"""Keywords that say something of values of one type, as shapes; with `type`, `enum` and `const`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace_plugins.constraints.regex import ANY_CHAR, ANY_TEXT, NOTHING, Regex, both, complement, either, repeat
from headrace_plugins.constraints.schema.arrays import tidy_array
from headrace_plugins.constraints.schema.expressions import (
    ALL,
    ANY_ARRAY,
    ANY_BOOLEAN,
    ANY_OBJECT,
    NONE,
    Evaluated,
)
from headrace_plugins.constraints.schema.formats import NARROW, format_of
from headrace_plugins.constraints.schema.located import Schema
from headrace_plugins.constraints.schema.objects import class_of, split_classes, tidy_object
from headrace_plugins.constraints.schema.scalars import fraction, meet_languages, tidy_number, words
from headrace_plugins.constraints.schema.shapes import (
    Array,
    Contains,
    Node,
    Null,
    Number,
    Object,
    Property,
    Shape,
    String,
)
from headrace_plugins.constraints.schema.values import shapes_of

_TYPES = ("object", "array", "string", "number", "boolean", "null")


def base_facts(schema: Schema) -> Node:
    """What a schema says without other schemas for the same value."""
    table = schema.table
    types = schema.get("type", _TYPES)
    types = [types] if isinstance(types, str) else types
    shapes: list[Shape] = []
    evaluated = Evaluated()
    for name in dict.fromkeys("number" if name == "integer" and "number" in types else name for name in types):
        if name == "array":
            more, items, matching = _arrays(schema)
            shapes += more
            evaluated |= Evaluated(NOTHING, items, matching)
        elif name == "object":
            objects, names = _objects(schema)
            shapes += objects
            evaluated |= Evaluated(names)
        else:
            shapes += _SCALARS[name](schema)
    parts = [table.fact(tuple(shapes), evaluated, schema.where())]
    if "const" in schema:
        where = schema.where("const")
        parts.append(table.fact(shapes_of([schema["const"]], table, where), where=where))
    if "enum" in schema:
        table.budget.list(len(schema["enum"]))
        where = schema.where("enum")
        parts.append(table.fact(shapes_of(schema["enum"], table, where), where=where))
    # Values first: what is left of the other facts is then only looked up.
    return table.both(*reversed(parts))


def _numbers(schema: Schema) -> list[Shape]:
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum", upper=False)
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum", upper=True)
    multiples = (fraction(schema["multipleOf"]),) if "multipleOf" in schema else ()
    types = schema.get("type", ())
    integer = True if "integer" in types and "number" not in types and types != "number" else None
    shape = tidy_number(
        Number(integer=integer, low=low, low_open=low_open, high=high, high_open=high_open, multiples=multiples)
    )
    return [] if shape is None else [shape]


def _bound(schema: Schema, keyword: str, exclusive: str, *, upper: bool):  # type: ignore[no-untyped-def]
    bound = fraction(schema[keyword]) if keyword in schema else None
    strict = schema.get(exclusive)
    if strict is None or isinstance(strict, bool):
        return bound, bool(strict) and bound is not None
    strict = fraction(strict)
    if bound is None or (strict <= bound if upper else strict >= bound):
        return strict, True
    return bound, False


def _strings(schema: Schema) -> list[Shape]:
    least = int(schema.get("minLength", 0))
    most = int(schema["maxLength"]) if "maxLength" in schema else None
    if most is not None and least > most:
        return []
    language = repeat(ANY_CHAR, least, most)
    if "pattern" in schema:
        language = meet_languages(language, schema.pattern(schema["pattern"], "pattern") or ANY_TEXT)
    if "format" in schema and (schema.reader.assert_formats or schema.draft.asserts_format):
        language = meet_languages(language, _format(schema))
    return [] if schema.table.languages.is_empty(language) else [String(language=language)]


def _format(schema: Schema) -> Regex:
    found = format_of(schema["format"])
    if found is None:
        schema.drop("format", f"the format {schema['format']!r} is not one that can be asserted")
        return ANY_TEXT
    if schema["format"] in NARROW:
        schema.table.narrow()
    return found


def _constant(shape: Shape) -> Callable[[Schema], list[Shape]]:
    return lambda schema: [shape]


_SCALARS: Mapping[str, Callable[[Schema], list[Shape]]] = {
    "number": _numbers,
    "integer": _numbers,
    "string": _strings,
    "boolean": _constant(ANY_BOOLEAN),
    "null": _constant(Null()),
}


def _arrays(schema: Schema) -> tuple[list[Shape], int | None, tuple[Node, ...]]:
    """The shapes, how many first elements are evaluated (None: all), and which others."""
    prefix: list[Node] = []
    rest, evaluated = ALL, 0
    keyword = "prefixItems" if "prefixItems" in schema else "items"
    if isinstance(schema.get(keyword), list):
        prefix = [schema.inner(inner, keyword, i) for i, inner in enumerate(schema[keyword])]
        evaluated = len(prefix)
        keyword = "items" if keyword == "prefixItems" else "additionalItems"
    all_evaluated = keyword in schema and keyword != "prefixItems"
    if all_evaluated:
        value = schema[keyword]
        rest = schema.inner(value, keyword) if not isinstance(value, bool) else ALL if value else NONE
    contains: tuple[Contains, ...] = ()
    matching: tuple[Node, ...] = ()
    if "contains" in schema:
        node = schema.inner(schema["contains"], "contains")
        least = int(schema.get("minContains", 1))
        most = int(schema["maxContains"]) if "maxContains" in schema else None
        if most and not schema.table.counts and node > NONE:
            # Where more or less counts than should, too few or too many elements would be allowed.
            schema.drop("maxContains", "elements can't be counted while formats are asserted or keywords dropped")
            most = None
        contains = (Contains(node, least, most),)
        matching = (node,) if schema.draft.contains_evaluates else ()
    shape = Array(
        prefix=tuple(prefix), rest=rest,
        least=int(schema.get("minItems", 0)), most=int(schema["maxItems"]) if "maxItems" in schema else None,
        contains=contains, unique=schema.get("uniqueItems", False),
    )  # fmt: skip
    tidied = ANY_ARRAY if shape == ANY_ARRAY else tidy_array(shape, schema.table)
    return [] if tidied is None else [tidied], None if all_evaluated else evaluated, matching


def _objects(schema: Schema) -> tuple[list[Shape], Regex]:
    """The shapes, and the names of evaluated members."""
    table = schema.table
    properties = {name: schema.inner(inner, "properties", name) for name, inner in schema.get("properties", {}).items()}
    patterns: list[tuple[Regex, Node]] = []
    dropped = False
    for text, inner in schema.get("patternProperties", {}).items():
        language = schema.pattern(text, "patternProperties", text)
        if language is None:
            dropped = True
        else:
            patterns.append((language, schema.inner(inner, "patternProperties", text)))
    named = either(words(properties), *(language for language, _ in patterns))
    additional = _additional(schema) if not dropped else ALL
    others = ANY_OBJECT.others
    if additional != ALL and patterns:
        matched = either(*(language for language, _ in patterns))
        others = ((matched, ALL), *(((complement(matched), additional),) if additional != NONE else ()))
    elif additional != ALL:
        others = ((ANY_TEXT, additional),) if additional != NONE else ()
    for language, node in patterns:
        others = split_classes(others, language, node, table)
        for name in properties:
            if table.languages.matches(language, name):
                properties[name] = table.both(properties[name], node)
    if "propertyNames" in schema:
        allowed = _names(schema)
        others = tuple((both(names, allowed), node) for names, node in others)
        for name in properties:
            if not table.languages.matches(allowed, name):
                properties[name] = NONE
    required = set(schema.get("required", ())) if "required" in schema else set()
    for name in schema.get("required", ()):
        properties.setdefault(name, class_of(others, name, table))
    shape = Object(
        properties=tuple(Property(name, node, name in required) for name, node in properties.items()),
        others=others,
        least=int(schema.get("minProperties", 0)),
        most=int(schema["maxProperties"]) if "maxProperties" in schema else None,
    )
    tidied = [ANY_OBJECT] if shape == ANY_OBJECT else tidy_object(shape, table)
    return list(tidied), ANY_TEXT if dropped or "additionalProperties" in schema else named


def _additional(schema: Schema) -> Node:
    value = schema.get("additionalProperties", True)
    if isinstance(value, bool):
        return ALL if value else NONE
    return schema.inner(value, "additionalProperties")


def _names(schema: Schema) -> Regex:
    """The names that `propertyNames` allows."""
    shapes = schema.table.work_out_apart(schema.inner(schema["propertyNames"], "propertyNames"))
    strings = [shape for shape in shapes if isinstance(shape, String)]
    return either(*(words(shape.values) if shape.values is not None else shape.language for shape in strings))
