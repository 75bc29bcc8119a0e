"""The text of a grammar before any parser sees it: size, nesting, and what no grammar may hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

from headrace.errors import RequestError

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def check_text(kind: str, text: str, max_bytes: int) -> None:
    """Raises RequestError: HR-CONSTRAINT-02 for an empty text, NUL characters and half surrogate pairs, -04 for one
    that is too long."""
    if len(text) > max_bytes or len(_encoded(kind, text)) > max_bytes:
        raise RequestError(
            "HR-CONSTRAINT-04", f"the {kind} has {len(text):,} characters, max_text is {max_bytes:,} bytes",
            "shorten it, or raise max_text in [constraints]",
        )  # fmt: skip
    if not text.strip():
        raise RequestError("HR-CONSTRAINT-02", f"the {kind} is empty", "leave the constraint out to allow any text")
    if (at := text.find("\0")) >= 0:
        raise RequestError("HR-CONSTRAINT-02", f"the {kind} holds a NUL character at {at}", "remove it")


def _encoded(kind: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "HR-CONSTRAINT-02", f"the {kind} holds half of a surrogate pair at character {error.start}", "remove it"
        ) from None


def read_json(kind: str, text: str, max_nesting: int) -> Any:
    """The value of a JSON text; numbers with a point or an exponent are Decimal. Raises RequestError: HR-CONSTRAINT-02
    with the position, -04 beyond max_nesting."""
    depth = 0
    for found in _BRACKET.finditer(_STRING.sub(lambda string: " " * len(string[0]), text)):
        depth += 1 if found[0] in "[{" else -1
        if depth > max_nesting:
            raise RequestError(
                "HR-CONSTRAINT-04",
                f"the {kind} nests brackets deeper than max_nesting = {max_nesting} at character {found.start()}",
                "flatten it ($ref and $defs do that for schemas), or raise max_nesting in [constraints]",
            )
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        message = f"the {kind} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise RequestError("HR-CONSTRAINT-02", message, _near(text, error.pos)) from None
    except InvalidOperation:  # of Decimal
        raise RequestError("HR-CONSTRAINT-02", f"the {kind} has a number whose exponent is too large", "") from None
    except ValueError as error:  # one of ours, or an integer of thousands of digits
        raise RequestError("HR-CONSTRAINT-02", f"the {kind} can't be read: {error}", "") from None


def _near(text: str, at: int) -> str:
    around = text[max(0, at - 20) : at + 20].strip()
    return f"look near {around!r}" if around else ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"the name {name!r} occurs twice in one object")
        made[name] = value
    return made
