"""Granite 3: a JSON array of calls behind one mark. Granite 4 is of the Hermes family.

Format: the templates of ibm-granite/granite-3.0 to 3.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.expressions import json_list
from headrace_plugins.dialects.family import Expression, Family, with_objects
from headrace_plugins.dialects.lists import read_list
from headrace_plugins.dialects.reading import CallReader, Steps

MARKS = ("<|tool_call|>", "<tool_call>")


class Granite(Family):
    """<|tool_call|>[{"name": NAME, "arguments": {...}}, ...]."""

    name = "granite"
    think = ("<think>", "</think>")
    triggers = MARKS
    shown = MARKS
    ends = ("<|end_of_text|>", "<|endoftext|>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return {"seq": [{"special": MARKS[0]}, json_list(tools, choice)]}

    def openings(self, tools: Seq[Tool]) -> tuple[str, ...]:
        return MARKS[:1]

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return GraniteCalls()

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """The templates write only content: calls stand in it."""
        return [_written(with_objects(message)) for message in messages]

    def switch(self, thinking: bool | None) -> dict[str, Any]:
        return {} if thinking is None else {"thinking": thinking}


class GraniteCalls(CallReader):
    end = MARKS

    def read(self) -> Steps[None]:
        yield from self.cursor.expect(*MARKS)
        yield from self.cursor.blanks()
        yield from read_list(self, {})


def _written(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [{key: call["function"][key] for key in ("name", "arguments")} for call in message["tool_calls"]]
    text = json.dumps(calls, ensure_ascii=False)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{message['content']}{MARKS[0]}{text}"}
