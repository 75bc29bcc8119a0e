"""Lists of calls: a JSON array of them, and Python's [f(a="x", b=1), g()]."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace_plugins.dialects.reading import BLANKS, Broken, CallReader, Steps, read_json_call
from headrace_plugins.dialects.values import python_scalar, python_value, scalar, separator

_NAME_ENDS = "()[]{}'\"=,"


def read_list(reader: CallReader, schemas: Mapping[str, Mapping[str, Any]], *, known: bool = False) -> Steps[None]:
    """A list of calls up to its end, each in either notation. known: only calls of tools are calls."""
    cursor = reader.cursor
    yield from cursor.expect("[")
    going = (yield from cursor.blanks()) != "]"
    while going:
        if (yield from cursor.peek()) == "{":
            yield from read_json_call(reader)
        else:
            name = (yield from scalar(cursor, _NAME_ENDS)).strip(BLANKS)
            if not name or (known and name not in schemas):
                raise Broken
            yield from read_python_call(reader, name, schemas.get(name, {}))
        going = yield from separator(cursor, "]")
    yield from cursor.take("]")


def read_python_call(reader: CallReader, name: str, schema: Mapping[str, Any]) -> Steps[None]:
    """(a="x", b=1) behind a name. Arguments without a keyword get the names of the schema, in its order; **{...} adds
    arguments whose names are none in Python."""
    cursor = reader.cursor
    yield from cursor.expect("(")
    properties = schema.get("properties")
    unnamed = list(properties) if isinstance(properties, Mapping) else []
    going = (yield from cursor.blanks()) != ")"
    start = "{"  # the call is one when its first argument is

    def begin(text: str) -> None:
        nonlocal start
        if start == "{":
            reader.call(name)
        reader.write(start + text)
        start = ", "

    while going:
        word = (yield from scalar(cursor, _NAME_ENDS)).strip(BLANKS)
        following = yield from cursor.peek()
        if word and following == "=":
            yield from cursor.take("=")
            begin(f"{json.dumps(word, ensure_ascii=False)}: ")
            yield from python_value(cursor, reader.write)
        else:
            value = yield from _unnamed_value(reader, "" if word == "**" else word)
            if word == "**" and following == "{":
                begin(value[1:-1])
            elif unnamed:
                begin(f"{json.dumps(unnamed.pop(0), ensure_ascii=False)}: {value}")
            else:
                raise Broken
        going = yield from separator(cursor, ")")
    yield from cursor.take(")")
    if start == "{":
        reader.call(name)
        reader.write("{")
    reader.write("}")
    reader.close()


def _unnamed_value(reader: CallReader, word: str) -> Steps[str]:
    if word:
        return python_scalar(word)
    pieces: list[str] = []
    yield from python_value(reader.cursor, pieces.append)
    return "".join(pieces)
