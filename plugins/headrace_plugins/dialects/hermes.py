"""Hermes and Qwen: each call is JSON between marks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headrace.dialogue import Tool, ToolChoice
from headrace_plugins.dialects.expressions import json_call
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated
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
        bodies = any_of([json_call(*function_of(tool)) for tool in tools])
        return repeated({"seq": [{"special": BEGIN}, "\n", bodies, "\n", {"special": END}]}, choice, "\n")

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
