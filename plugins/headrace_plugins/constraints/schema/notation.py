"""How values are written: as JSON, as Python, or the ways of model families. One writer, told by these parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headrace.errors import RequestError
from headrace_plugins.constraints.characters import ECMA_SPACE, inverted, joined
from headrace_plugins.constraints.regex import EMPTY, Chars, Regex, cat, chars, either, literal, repeat
from headrace_plugins.constraints.schema import quoting
from headrace_plugins.constraints.schema.quoting import Quoting

Whitespace = Literal["compact", "bounded", "any"]
"""Blanks behind `{` `[` `,` `:` and before `}` `]`. compact: none. bounded: none, one space, or one or two ends of
lines with up to 20 spaces or tabs, so that indented text passes. any: all that JSON allows."""

_TAB, _LINE, _SPACE = (0x09, 0x09), (0x0A, 0x0A), (0x20, 0x20)
MOST_INDENT = 20
BLANKS: Mapping[str, Regex] = MappingProxyType(
    {
        "compact": EMPTY,
        "bounded": either(
            EMPTY, literal(" "), cat(repeat(chars([_LINE]), 1, 2), repeat(chars([_TAB, _SPACE]), 0, MOST_INDENT))
        ),
        "any": repeat(chars([_TAB, _LINE, (0x0D, 0x0D), _SPACE])),
    }
)


@dataclass(frozen=True, slots=True)
class Notation:
    name: str
    null: str = "null"
    true: str = "true"
    false: str = "false"
    quotings: tuple[Quoting, ...] = (quoting.JSON,)
    """A string is written in one of these."""
    mark: str | None = None
    """Instead of quotes: the special token before and behind a string, which is written as it is and can't hold the
    mark."""
    bare_names: Chars | None = None
    """Instead of strings, names of members are written as they are, of these characters."""
    root: Literal["value", "keywords", "raw"] = "value"
    """keywords: the whole is an object, written as keyword arguments (`a=1, b=2`). raw: a whole that is a string is
    written as it is."""
    compact: bool = False
    """Never any blanks."""


_BARE = inverted(
    joined((chars([(0, 0x20), *((ord(char), ord(char)) for char in ":=,{}[]<>|\"'"), (0x7F, 0xA0)]), ECMA_SPACE))
)
"""Readers take `=` for `:`, and leave out blanks of any kind around a name."""
IDENTIFIER: Regex = cat(
    chars([(0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    repeat(chars([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])),
)
"""Names of keyword arguments: identifiers of Python in ASCII."""

_JSON = Notation("json")
_PYTHON = Notation(
    "python", "None", "True", "False", (quoting.PYTHON_DOUBLE, quoting.PYTHON_SINGLE)
)  # fmt: skip
NOTATIONS: Mapping[str, Notation] = MappingProxyType(
    {
        "json": _JSON,
        "python": _PYTHON,
        "python-call": Notation("python-call", "None", "True", "False", _PYTHON.quotings, root="keywords"),
        "gemma": Notation("gemma", mark='<|"|>', bare_names=_BARE, compact=True),
        "functiongemma": Notation("functiongemma", mark="<escape>", bare_names=_BARE, compact=True),
        "raw": Notation("raw", root="raw"),
    }
)


def notation_of(name: str) -> Notation:
    """Raises RequestError HR-CONSTRAINT-02 for an unknown name."""
    found = NOTATIONS.get(name)
    if found is None:
        raise RequestError("HR-CONSTRAINT-02", f"notation {name!r} is unknown", f"known: {', '.join(NOTATIONS)}")
    return found


def blanks_of(notation: Notation, whitespace: str) -> Regex:
    """Raises RequestError HR-CONSTRAINT-02 for an unknown name."""
    found = BLANKS.get(whitespace)
    if found is None:
        raise RequestError("HR-CONSTRAINT-02", f"whitespace {whitespace!r} is unknown", f"known: {', '.join(BLANKS)}")
    return EMPTY if notation.compact else found
