"""Tables for terminals."""

from __future__ import annotations

import json
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
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


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
