"""Small random JSON schemas and values that often meet: few names, few numbers, short texts."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("a", "b", "ab", "")
PATTERNS = ("^a", "b", "^.$", "a$", "[ab]")
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
NUMBERS = (0, 1, 2, 3, -1, 0.5, 1.5, 1.0)


def random_value(random: Random, depth: int = 2) -> Any:
    kind = random.randrange(7 if depth else 5)
    if kind == 0:
        return random.choice([None, True, False])
    if kind < 5:
        return random.choice(NUMBERS if kind < 3 else ("", "a", "b", "ab", "abc", "ba"))
    if kind == 5:
        return [random_value(random, depth - 1) for _ in range(random.randrange(4))]
    names = random.sample((*NAMES, "c", "aa"), random.randrange(4))
    return {name: random_value(random, depth - 1) for name in names}


def random_schema(random: Random, depth: int, draft: str) -> Any:
    """A schema for draft 7 or 2020-12 (`draft`), whose `$ref`s go to two definitions that it holds."""
    whole = _schema(random, depth, draft)
    if isinstance(whole, bool):
        return whole
    inner = {"properties": {"a": {"$ref": "#/definitions/y"}, "b": _schema(random, 1, draft)}}
    return whole | {"definitions": {"x": _leaf(random, references=False), "y": inner}}


def _leaf(random: Random, references: bool = True) -> Any:
    kind = random.randrange(6 if references else 5)
    if kind == 0:
        return random.choice([True, True, False])
    if kind == 1:
        return {"type": random.choice(TYPES)}
    if kind == 2:
        return {"enum": [random_value(random, 1) for _ in range(random.randrange(1, 4))]}
    if kind == 3:
        return {"const": random_value(random, 1)}
    return {} if kind == 4 else {"$ref": random.choice(["#/definitions/x", "#/definitions/y"])}


def _schema(random: Random, depth: int, draft: str) -> Any:
    if depth <= 0 or random.random() < 0.12:
        return _leaf(random)
    schema: dict[str, Any] = {}
    makers = (_scalar_keyword, _array_keyword, _object_keyword, _object_keyword, _combining_keyword, _combining_keyword)
    for _ in range(random.choice([1, 2, 2, 3, 4])):
        schema |= random.choice(makers)(random, depth - 1, draft)
    if isinstance(schema.get("items"), bool):  # nothing follows such items, and jsonschema fails on the pair
        schema.pop("additionalItems", None)
    return schema


def _scalar_keyword(random: Random, depth: int, draft: str) -> dict[str, Any]:
    keyword = random.choice(
        ["type", "enum", "const", "minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern"]
    )
    lists = (["object", "null"], ["integer", "string"], ["number", "array", "object"])
    return {
        keyword: {
            "type": lambda: random.choice([*TYPES, *lists]),
            "enum": lambda: [random_value(random) for _ in range(random.randrange(1, 4))],
            "const": lambda: random_value(random),
            "minimum": lambda: random.choice(NUMBERS),
            "exclusiveMaximum": lambda: random.choice(NUMBERS),
            "multipleOf": lambda: random.choice([1, 2, 3, 0.5, 1.5]),
            "minLength": lambda: random.randrange(3),
            "maxLength": lambda: random.randrange(4),
            "pattern": lambda: random.choice(PATTERNS),
        }[keyword]()
    }


def _array_keyword(random: Random, depth: int, draft: str) -> dict[str, Any]:
    def inner() -> Any:
        return _schema(random, depth, draft)

    new = draft == "2020-12"
    keyword = random.choice(["items", "prefix", "contains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"])
    if keyword == "prefix":
        prefix = [inner() for _ in range(random.randrange(1, 3))]
        return {"prefixItems": prefix} if new else {"items": prefix, "additionalItems": inner()}
    if keyword == "contains":
        found = {"contains": inner()}
        if new and random.random() < 0.4:
            found["minContains"] = random.randrange(3)
        if new and random.random() < 0.4:
            found["maxContains"] = random.randrange(3)
        return found
    if keyword in ("minItems", "maxItems"):
        return {keyword: random.randrange(4)}
    if keyword == "uniqueItems":
        return {keyword: True}
    if keyword == "unevaluatedItems":
        return {keyword: random.choice([False, inner()])} if new else {}
    return {keyword: inner()}


def _object_keyword(random: Random, depth: int, draft: str) -> dict[str, Any]:
    def inner() -> Any:
        return _schema(random, depth, draft)

    def names() -> list[str]:
        return random.sample(NAMES, random.randrange(1, 3))

    keyword = random.choice(
        (
            "properties", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
            "maxProperties", "propertyNames", "dependencies", "unevaluatedProperties",
        )
    )  # fmt: skip
    if keyword in ("properties", "patternProperties"):
        keys = names() if keyword == "properties" else random.sample(PATTERNS, random.randrange(1, 3))
        return {keyword: {key: inner() for key in keys}}
    if keyword == "required":
        return {keyword: names()}
    if keyword in ("minProperties", "maxProperties"):
        return {keyword: random.randrange(4)}
    if keyword == "dependencies":
        listed, needed = {random.choice(NAMES): names()}, {random.choice(NAMES): inner()}
        return {"dependentRequired": listed, "dependentSchemas": needed} if draft == "2020-12" else {keyword: needed}
    if keyword == "unevaluatedProperties" and draft != "2020-12":
        return {}
    return {keyword: inner() if keyword == "propertyNames" else random.choice([False, inner()])}


def _combining_keyword(random: Random, depth: int, draft: str) -> dict[str, Any]:
    def inner() -> Any:
        return _schema(random, depth, draft)

    keyword = random.choice(["allOf", "anyOf", "anyOf", "oneOf", "oneOf", "not", "if", "$ref"])
    if keyword in ("allOf", "anyOf", "oneOf"):
        return {keyword: [inner() for _ in range(random.randrange(1, 4))]}
    if keyword == "if":
        return {key: inner() for key in ("if", *random.choice([("then",), ("else",), ("then", "else"), ()]))}
    return {"$ref": "#/definitions/x"} if keyword == "$ref" else {keyword: inner()}
