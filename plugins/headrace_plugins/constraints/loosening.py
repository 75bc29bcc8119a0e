"""A schema without a keyword that turned out to be beyond masks, for `on_unsupported = "validate"`.

What is left must allow everything that the schema allows. So a keyword inside one that turns meanings around (`not`)
goes with that one, and where that can't be told (behind a `$ref`, in another document) nothing goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_TURNING = ("not", "if", "oneOf", "contains")
"""Keywords whose schemas don't only narrow what is allowed."""
_COUNTING = ("unevaluatedItems", "unevaluatedProperties")
"""Keywords that ask what others have looked at."""
_SHARED = ("$defs", "definitions")


def without(schema: Any, pointer: str, keyword: str) -> Any | None:
    """A copy that allows more; None where the keyword can't simply go. keyword: a name, or several with " or "."""
    if not pointer.startswith("#"):
        return None
    keys = [unquote(key).replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    names = keyword.split(" or ")
    turning = next((i for i, key in enumerate(keys) if key in _TURNING), None)
    if turning is not None:
        keys, names = keys[:turning], [keys[turning]]
    used = set(_keys(schema))
    if used.intersection(_COUNTING) or (any(key in _SHARED for key in keys) and used.intersection(_TURNING)):
        return None
    return _cut(schema, keys, names)


def _cut(schema: Any, keys: list[str], names: list[str]) -> Any | None:
    if not keys:
        if not isinstance(schema, dict) or not any(name in schema for name in names):
            return None
        return {key: value for key, value in schema.items() if key not in names}
    key, *rest = keys
    if isinstance(schema, dict) and key in schema:
        inner = _cut(schema[key], rest, names)
        return None if inner is None else {**schema, key: inner}
    if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
        inner = _cut(schema[int(key)], rest, names)
        return None if inner is None else [*schema[: int(key)], inner, *schema[int(key) + 1 :]]
    return None


def _keys(value: Any) -> Iterator[str]:
    """Every key anywhere in it."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield from each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
