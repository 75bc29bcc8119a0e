"""Argument values in notations other than JSON, turned into JSON text while they come: Python literals, and Gemma's
objects with bare keys and marked strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace_plugins.dialects.reading import BLANKS, NAME_CHARS, Broken, Cursor, Sink, Steps, quoted

DEEPEST = 64
"""Levels of nesting that are read: deeper values are no arguments of a tool."""

JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}

_SCALAR_CHARS = 400
"""Most characters of a number or a word."""


def scalar(cursor: Cursor, ends: str) -> Steps[str]:
    """Text before the first of these characters, which stays unread."""
    text = ""
    while (char := (yield from cursor.peek())) not in ends:
        text += yield from cursor.take(char)
        if len(text) > _SCALAR_CHARS:
            raise Broken
    return text


def separator(cursor: Cursor, end: str) -> Steps[bool]:
    """Read a comma, and give True; False where the end is right ahead, or follows the comma."""
    char = yield from cursor.blanks()
    if char == ",":
        yield from cursor.take(",")
        char = yield from cursor.blanks()
        return char != end
    if char != end:
        raise Broken
    return False


# --- Python literals -------------------------------------------------------------------------------------------------

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_BEHIND_STRING = ",)]}:"


def python_value(cursor: Cursor, sink: Sink, depth: int = 0) -> Steps[None]:
    """A Python literal: None, booleans, numbers, strings, lists, tuples, dicts with string keys. JSON's words too."""
    if depth > DEEPEST:
        raise Broken
    char = yield from cursor.blanks()
    if char in "'\"":
        yield from python_string(cursor, sink)
    elif char in "[(":
        yield from _python_list(cursor, sink, {"[": "]", "(": ")"}[char], depth)
    elif char == "{":
        yield from _python_dict(cursor, sink, depth)
    else:
        sink(python_scalar((yield from scalar(cursor, _BEHIND_STRING + BLANKS))))


def _python_list(cursor: Cursor, sink: Sink, end: str, depth: int) -> Steps[None]:
    yield from cursor.take("[", "(")
    sink("[")
    going = (yield from cursor.blanks()) != end
    while going:
        yield from python_value(cursor, sink, depth + 1)
        going = yield from separator(cursor, end)
        sink(", " if going else "")
    yield from cursor.take(end)
    sink("]")


def _python_dict(cursor: Cursor, sink: Sink, depth: int) -> Steps[None]:
    yield from cursor.take("{")
    sink("{")
    char = yield from cursor.blanks()
    going = char != "}"
    while going:
        if (yield from cursor.blanks()) not in "'\"":
            raise Broken
        yield from python_string(cursor, sink)
        yield from cursor.blanks()
        yield from cursor.expect(":")
        sink(": ")
        yield from python_value(cursor, sink, depth + 1)
        going = yield from separator(cursor, "}")
        sink(", " if going else "")
    yield from cursor.take("}")
    sink("}")


def python_string(cursor: Cursor, sink: Sink) -> Steps[None]:
    """A string literal, or several in a row, without prefixes.

    Some templates put quotes around a text without escaping it, so models write 'it's': a quote that neither a
    separator, a bracket nor another literal follows is part of the text. No literal of Python's is read differently.
    """
    mark = yield from cursor.expect("'''", '"""', "''", '""', "'", '"')
    sink('"')
    if len(mark) == 2:
        sink('"')
        return
    while True:
        found = yield from cursor.flow(lambda piece: sink(_inside(piece)), mark, "\\")
        if found == "\\":
            sink((yield from _python_escape(cursor)))
            continue
        blanks = ""
        while (char := (yield from cursor.peek())) in BLANKS:
            blanks += yield from cursor.take(char)
        if char in _BEHIND_STRING:
            sink('"')
            return
        if char in "'\"" and blanks:
            mark = yield from cursor.expect("'''", '"""', "'", '"')
        else:
            sink(_inside(found + blanks))


def _python_escape(cursor: Cursor) -> Steps[str]:
    char = yield from cursor.peek()
    yield from cursor.take(char)
    if char in _ESCAPES:
        return _inside(_ESCAPES[char])
    if char in _CODES or char in "01234567":
        digits, base, most = ("", 16, _CODES[char]) if char in _CODES else (char, 8, 3)
        while len(digits) < most and (yield from cursor.peek()) in "0123456789abcdefABCDEF"[: 8 if base == 8 else 22]:
            digits += yield from cursor.take((yield from cursor.peek()))
        code = int(digits, base) if digits else -1
        if (base == 16 and len(digits) < most) or not 0 <= code <= 0x10FFFF:
            raise Broken
        return _inside(chr(code))
    return _inside(char if char in "\\'\"" else "\\" + char)


def _inside(text: str) -> str:
    """The inside of a JSON string; lone surrogates as escapes: the JSON text must be writable as UTF-8."""
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found.group()):04x}", quoted(text))


def python_scalar(text: str) -> str:
    """A word or number of Python's as JSON writes it. Raises Broken for anything else."""
    if text in WORDS or JSON_NUMBER.fullmatch(text):
        return WORDS.get(text, text)
    for convert in (lambda: str(int(text, 0)), lambda: json.dumps(float(text), allow_nan=False)):
        try:
            return convert()
        except ValueError:
            continue
    raise Broken


# --- Gemma -----------------------------------------------------------------------------------------------------------


def marked_members(cursor: Cursor, sink: Sink, mark: str, schema: object = None, depth: int = 0) -> Steps[None]:
    """key:value,...} behind its opening bracket: bare keys, strings between two marks, in which nothing is escaped, and
    other values as in JSON.

    schema tells what a value is where the model forgot the marks. JSON's own strings are read too.
    """
    if depth > DEEPEST:
        raise Broken
    sink("{")
    going = (yield from cursor.blanks()) != "}"
    while going:
        key = yield from _marked_key(cursor, mark)
        sink(f'"{_inside(key)}": ')
        yield from _marked_value(cursor, sink, mark, _member(schema, key), depth)
        going = yield from separator(cursor, "}")
        sink(", " if going else "")
    yield from cursor.take("}")
    sink("}")


def _marked_key(cursor: Cursor, mark: str) -> Steps[str]:
    yield from cursor.blanks()
    if (yield from cursor.take(mark)):
        key, _ = yield from cursor.until(mark, most=NAME_CHARS)
        behind, _ = yield from cursor.until(":", "=", most=NAME_CHARS)
    elif (yield from cursor.peek()) == '"':
        try:
            key = str(json.loads((yield from cursor.json_text())))
        except ValueError:
            raise Broken from None
        behind, _ = yield from cursor.until(":", "=", most=NAME_CHARS)
    else:
        key, behind = (yield from scalar(cursor, ":={}[],<")).strip(), ""
        yield from cursor.expect(":", "=")
        if not key:
            raise Broken
    if behind.strip():
        raise Broken
    return key.strip()


def _marked_value(cursor: Cursor, sink: Sink, mark: str, schema: object, depth: int) -> Steps[None]:
    char = yield from cursor.blanks()
    if (yield from cursor.take(mark)):
        sink('"')
        yield from cursor.flow(lambda piece: sink(_inside(piece)), mark)
        sink('"')
    elif char == "{":
        yield from cursor.take("{")
        yield from marked_members(cursor, sink, mark, schema, depth + 1)
    elif char == "[":
        yield from _marked_list(cursor, sink, mark, schema, depth + 1)
    elif char == '"':
        yield from cursor.json(sink)
    else:
        sink(_bare((yield from scalar(cursor, ",{}[]<")).strip(), schema))


def _marked_list(cursor: Cursor, sink: Sink, mark: str, schema: object, depth: int) -> Steps[None]:
    if depth > DEEPEST:
        raise Broken
    yield from cursor.take("[")
    sink("[")
    items = schema.get("items") if isinstance(schema, Mapping) else None
    going = (yield from cursor.blanks()) != "]"
    while going:
        yield from _marked_value(cursor, sink, mark, items, depth)
        going = yield from separator(cursor, "]")
        sink(", " if going else "")
    yield from cursor.take("]")
    sink("]")


def _bare(text: str, schema: object) -> str:
    """A value without marks: a word or a number, unless the schema wants a string."""
    if not text:
        raise Broken
    wants_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    if not wants_text and (text in WORDS or JSON_NUMBER.fullmatch(text)):
        return WORDS.get(text, text)
    return f'"{_inside(text)}"'


def _member(schema: object, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None
