"""Models whose template knows no tools, and MiniMax-M1: calls as JSON, one a line or in tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.expressions import json_call
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated
from headrace_plugins.dialects.hermes import BEGIN, END, Hermes
from headrace_plugins.dialects.reading import CallReader, Steps, read_json_call


class Generic(Hermes):
    """Tools are told to the model in the system message; it calls them as Hermes models do."""

    name = "generic"
    ends = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<end_of_turn>")
    tools_in_template = False

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Calls and results become text of plain messages, the tools part of the system message."""
        adapted = as_plain(messages)
        if tools:
            told = instructions(tools)
            if adapted and adapted[0].get("role") == "system":
                adapted[0] = {**adapted[0], "content": f"{text_of(adapted[0])}\n\n{told}".lstrip()}
            else:
                adapted.insert(0, {"role": "system", "content": told})
        return adapted


def as_plain(messages: Seq[Mapping[str, Any]]) -> list[Message]:
    """Calls and results of tools as text of assistant's and user's messages."""
    plain: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            _add_result(plain, message)
        else:
            plain.append(_with_calls(message))
    return plain


def instructions(tools: Seq[Tool]) -> str:
    """What a model is told of its tools."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    form = f'{BEGIN}\n{{"name": "the tool\'s name", "arguments": {{"argument": "value"}}}}\n{END}'
    return (
        "These tools are at hand, each with a JSON schema of its arguments:\n\n"
        + "\n".join(lines)
        + f"\n\nTo use one, answer with a call in this form, and nothing behind it:\n\n{form}\n\n"
        "Several calls may follow each other. Results come back in <tool_response> tags. Answer as usual if no tool is "
        "needed."
    )


def text_of(message: Mapping[str, Any]) -> str:
    """The content as text; parts of a list of parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in parts)


def _add_result(messages: list[Message], result: Mapping[str, Any]) -> None:
    text = f"<tool_response>\n{text_of(result)}\n</tool_response>"
    if messages and messages[-1].get("role") == "user" and str(messages[-1]["content"]).endswith("</tool_response>"):
        messages[-1]["content"] += f"\n{text}"
    else:
        messages.append({"role": "user", "content": text})


def _with_calls(message: Mapping[str, Any]) -> Message:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    texts = [text_of(message)] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        arguments = call["function"].get("arguments") or "{}"
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(f'{BEGIN}\n{{"name": {name}, "arguments": {written}}}\n{END}')
    if message.get("tool_calls") or message.get("content") is None:
        plain["content"] = "\n".join(texts)
    return plain


class MiniMaxM1(Family):
    """All calls in one block, each JSON on a line of its own.

    <tool_calls>
    {"name": NAME, "arguments": {...}}
    </tool_calls>
    """

    name = "minimax-m1"
    think = ("<think>", "</think>")
    triggers = ("<tool_calls>",)
    shown = ("<tool_calls>", "</tool_calls>", "<think>", "</think>")
    ends = ("<end_of_sentence>",)

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        lines = {"seq": [any_of([json_call(*function_of(tool)) for tool in tools]), "\n"]}
        return {"seq": [{"special": "<tool_calls>"}, "\n", repeated(lines, choice), {"special": "</tool_calls>"}]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return MiniMaxM1Calls()


class MiniMaxM1Calls(CallReader):
    end = ("</tool_calls>",)

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.expect("<tool_calls>")
        while (yield from cursor.blanks()) == "{":
            yield from read_json_call(self)
        yield from cursor.expect("</tool_calls>")
