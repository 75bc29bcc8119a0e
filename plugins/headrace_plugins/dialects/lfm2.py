"""LFM2: a Python list of calls between marks. Format: the templates of LiquidAI/LFM2-1.2B and LFM2.5."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.expressions import python_list
from headrace_plugins.dialects.family import Expression, Family, function_of, with_objects
from headrace_plugins.dialects.lists import read_list
from headrace_plugins.dialects.reading import CallReader, Steps

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(Family):
    """<|tool_call_start|>[f(a="x", b=1)]<|tool_call_end|>, one block for all calls."""

    name = "lfm2"
    think = ("<think>", "</think>")
    triggers = (BEGIN,)
    shown = (BEGIN, END, "<think>", "</think>")
    ends = ("<|im_end|>", "<|endoftext|>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return {"seq": [{"special": BEGIN}, python_list(tools, choice), {"special": END}]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return Lfm2Calls(tools)

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Reasoning is `thinking`."""
        return [_with_thinking(with_objects(message)) for message in messages]


class Lfm2Calls(CallReader):
    """A block of calls; asked for it in the system prompt, the models write a JSON array into it too."""

    end = (END,)

    def __init__(self, tools: Seq[Tool]) -> None:
        super().__init__()
        self._schemas = dict(map(function_of, tools))

    def read(self) -> Steps[None]:
        yield from self.cursor.expect(BEGIN)
        yield from self.cursor.blanks()
        yield from read_list(self, self._schemas)
        yield from self.cursor.blanks()
        yield from self.cursor.expect(END)


def _with_thinking(message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    return {**message, "thinking": reasoning} if reasoning else message
