"""Gemma 4 and FunctionGemma: call:NAME{key:value,...} with bare keys and strings between marks.

Formats: the chat templates of google/gemma-4-31B-it and google/functiongemma-270m-it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated, with_objects
from headrace_plugins.dialects.history import called_names
from headrace_plugins.dialects.reading import CallReader, Steps
from headrace_plugins.dialects.values import marked_members


class MarkedCalls(CallReader):
    """One call between marks, with strings between `quote` marks."""

    def __init__(self, tools: Seq[Tool], begin: str, end: str, quote: str) -> None:
        super().__init__()
        self.end = (end,)
        self._begin, self._quote = begin, quote
        self._schemas = dict(map(function_of, tools))

    def read(self) -> Steps[None]:
        yield from self.cursor.expect(self._begin)
        yield from self.cursor.blanks()
        yield from self.cursor.expect("call:")
        name, _ = yield from self.cursor.name("{")
        self.call(name)
        yield from marked_members(self.cursor, self.write, self._quote, self._schemas.get(name))
        self.close()
        yield from self.cursor.blanks()
        yield from self.cursor.expect(*self.end)


class Gemma4(Family):
    """<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>, one block a call; reasoning in a channel."""

    name = "gemma4"
    think = ("<|channel>thought\n", "<channel|>")
    triggers = ("<|tool_call>",)
    shown = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>", "<turn|>")
    stop = ("<|tool_response>", "<turn|>")
    ends = ("<turn|>", "<|tool_response>", "<eos>", "<end_of_turn>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return repeated(_call(tools, "<|tool_call>", "<tool_call|>", "gemma"), choice)

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return MarkedCalls(tools, "<|tool_call>", "<tool_call|>", '<|"|>')

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Results stand in the turn of their calls, and an answer behind them too: all Gemma 4 templates write
        `tool_responses` of a message, not all of them read messages of tools."""
        adapted: list[Message] = []
        for message, name in called_names(messages):
            last = adapted[-1] if adapted else {}
            if message["role"] == "tool" and last.get("tool_calls"):
                last.setdefault("tool_responses", []).append({"name": name, "response": message.get("content") or ""})
            elif _only_content(message) and last.get("tool_responses") and not last["content"]:
                last["content"] = message["content"]
            else:
                adapted.append(with_objects(message))
        return adapted


class FunctionGemma(Family):
    """<start_function_call>call:NAME{key:<escape>text<escape>,n:1}<end_function_call>, one block a call."""

    name = "functiongemma"
    triggers = ("<start_function_call>",)
    shown = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>", "<end_of_turn>")
    stop = ("<start_function_response>", "<end_of_turn>")
    ends = ("<end_of_turn>", "<start_function_response>", "<eos>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return repeated(_call(tools, "<start_function_call>", "<end_function_call>", "functiongemma"), choice)

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return MarkedCalls(tools, "<start_function_call>", "<end_function_call>", "<escape>")

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Results are objects that carry their tool's name."""
        adapted: list[Message] = []
        for message, name in called_names(messages):
            told = with_objects(message)
            if message["role"] == "tool":
                told |= {"name": name, "content": {"name": name, "response": {"value": message.get("content") or ""}}}
            adapted.append(told)
        return adapted


def _call(tools: Seq[Tool], begin: str, end: str, notation: str) -> Expression:
    bodies: list[Expression] = []
    for name, schema in map(function_of, tools):
        bodies.append({"seq": [f"call:{name}", {"schema": schema, "notation": notation}]})
    return {"seq": [{"special": begin}, any_of(bodies), {"special": end}]}


def _only_content(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message.get("content")) and not message.get("tool_calls")
