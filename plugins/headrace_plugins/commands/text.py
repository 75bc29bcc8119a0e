"""Tables for terminals."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Columns as wide as their widest cell, the last one unpadded."""
    lines = [header, *rows] if header else list(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
    return "\n".join(
        "  ".join(cell if i == len(widths) - 1 else cell.ljust(widths[i]) for i, cell in enumerate(line)).rstrip()
        for line in lines
    )


def as_json(value: Any) -> str:
    """JSON of anything: what JSON has no form for becomes text, and NaN or an infinity null."""
    return dumps(value, indent=2)


def dumps(value: Any, indent: int | None = None) -> str:
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")  # then what it can't print has to be escaped
    return json.dumps(_plain(value), indent=indent, ensure_ascii=plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def shown(value: Any) -> str:
    """A fact as a person reads it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(shown, value)) or "none"
    text = str(value)
    return text if text.isprintable() else repr(text)
