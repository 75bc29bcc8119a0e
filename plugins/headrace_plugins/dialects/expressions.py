"""Pieces of tool grammars that several families have."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Tool, ToolChoice
from headrace_plugins.dialects.family import Expression, any_of, function_of, repeated


def json_call(
    name: str, schema: dict[str, Any], *, arguments: str = "arguments", behind: Expression | None = None
) -> Expression:
    """{"name": NAME, "arguments": {...}} as `json.dumps` writes it; behind: what may come before its end."""
    start = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '
    return {"seq": [start, {"schema": schema}, *([] if behind is None else [behind]), "}"]}


def json_list(tools: Seq[Tool], choice: ToolChoice, *, behind: Expression | None = None) -> Expression:
    """A JSON array of calls."""
    items = any_of([json_call(*function_of(tool), behind=behind) for tool in tools])
    return {"seq": ["[", repeated(items, choice, ", "), "]"]}


def python_list(tools: Seq[Tool], choice: ToolChoice) -> Expression:
    """A Python list of calls with keyword arguments: [f(a="x", b=1), g()]."""
    calls: list[Expression] = []
    for name, schema in map(function_of, tools):
        calls.append({"seq": [f"{name}(", {"schema": schema, "notation": "python-call"}, ")"]})
    return {"seq": ["[", repeated(any_of(calls), choice, ", "), "]"]}
