"""Hermes and Qwen: each call is JSON between marks."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq

from headrace.dialogue import Tool, ToolChoice
from headrace_plugins.dialects.family import Expression, Family, function_of, repeated
from headrace_plugins.dialects.reading import CallReader, Steps, read_json_call

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Family):
    """<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>, one block a call."""

    name = "hermes"
    think = ("<think>", "</think>")
    triggers = (BEGIN,)
    shown = (BEGIN, END, "<think>", "</think>")
    ends: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return repeated(json_calls(tools, {"special": BEGIN}, {"special": END}), choice, "\n")

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return JsonCalls()


class JsonCalls(CallReader):
    """One call between marks."""

    end = (END,)

    def read(self) -> Steps[None]:
        yield from self.cursor.expect(BEGIN)
        yield from self.cursor.blanks()
        yield from read_json_call(self)
        yield from self.cursor.blanks()
        yield from self.cursor.expect(END)


def json_calls(tools: Seq[Tool], begin: Expression, end: Expression) -> Expression:
    """Any of the tools as {"name": ..., "arguments": ...} between marks, with line breaks inside them."""
    bodies = [json_call(tool) for tool in tools]
    return {"seq": [begin, "\n", bodies[0] if len(bodies) == 1 else {"any": bodies}, "\n", end]}


def json_call(tool: Tool, arguments: str = "arguments") -> Expression:
    """{"name": NAME, "arguments": {...}} as `json.dumps` writes it."""
    name, schema = function_of(tool)
    return {"seq": [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": ', {"schema": schema}, "}"]}
