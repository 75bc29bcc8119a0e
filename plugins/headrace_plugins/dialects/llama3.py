"""Llama 3.x and 4: calls that are the whole answer, as one JSON object or as a Python list.

Formats: the prompt formats in meta-llama/llama-models (llama3_1 to llama3_3, llama4), and the models' templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.expressions import json_call, python_list
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, with_objects
from headrace_plugins.dialects.history import one_call_each
from headrace_plugins.dialects.lists import read_list, read_python_call
from headrace_plugins.dialects.reading import Broken, CallReader, Steps
from headrace_plugins.dialects.values import scalar

TAG = "<|python_tag|>"


class Llama3(Family):
    """{"name": NAME, "parameters": {...}}, one in an answer."""

    name = "llama3"
    triggers = (TAG,)
    first = ("{", "[")
    shown = (TAG,)
    ends = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return any_of([json_call(*function_of(tool), arguments="parameters") for tool in tools])

    def openings(self, tools: Seq[Tool]) -> tuple[str, ...]:
        return tuple(
            f'{{"name": {json.dumps(function_of(tool)[0], ensure_ascii=False)}, "parameters": ' for tool in tools
        )

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return LlamaCalls(tools)

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """The templates refuse messages with several calls: each call gets a message of its own, and its result comes
        at once."""
        return one_call_each([with_objects(message) for message in messages])


class LlamaPythonic(Llama3):
    """[f(a="x", b=1), g()]: Llama 4, and small models of 3.2 whose template asks for it."""

    name = "llama-pythonic"

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return python_list(tools, choice)

    def openings(self, tools: Seq[Tool]) -> tuple[str, ...]:
        return tuple(f"[{function_of(tool)[0]}(" for tool in tools)

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        return [with_objects(message) for message in messages]


class LlamaCalls(CallReader):
    """Calls of known tools, in either form; any other JSON or list is content."""

    def __init__(self, tools: Seq[Tool]) -> None:
        super().__init__()
        self._schemas = dict(map(function_of, tools))

    def read(self) -> Steps[None]:
        cursor = self.cursor
        tagged = yield from cursor.take(TAG)
        first = yield from cursor.blanks()
        if first == "[":
            yield from read_list(self, self._schemas, known=True)
        elif first == "{":
            yield from self._objects()
        elif tagged:
            name = (yield from scalar(cursor, "([]{}'\"=,\n")).strip().removesuffix(".call")
            if name not in self._schemas:
                raise Broken
            yield from read_python_call(self, name, self._schemas[name])
        else:
            raise Broken

    def _objects(self) -> Steps[None]:
        """One object after the other, with or without ";" between them."""
        while True:
            yield from self._object()
            if (yield from self.cursor.blanks()) == ";":
                yield from self.cursor.take(";")
                yield from self.cursor.blanks()
            if (yield from self.cursor.peek()) != "{":
                return

    def _object(self) -> Steps[None]:
        """{"type": "function", "name": NAME, "parameters": {...}}: a call once the name of a tool and arguments are."""
        cursor = self.cursor
        yield from cursor.expect("{")
        name, early = "", ""
        opened = False
        going = (yield from cursor.blanks()) != "}"
        while going:
            yield from cursor.blanks()
            key = yield from cursor.json_text()
            yield from cursor.blanks()
            yield from cursor.expect(":")
            if key == '"name"' and not opened:
                name = yield from self._tool_name()
            elif key == '"type"' and not opened:
                yield from cursor.json_text()
            elif key in ('"parameters"', '"arguments"') and not opened and not name:
                early = yield from cursor.json_text()
            elif key in ('"parameters"', '"arguments"') and not opened:
                self.call(name)
                opened = True
                yield from self._arguments()
            else:
                raise Broken
            yield from cursor.blanks()
            going = (yield from cursor.expect(",", "}")) == ","
        if name and early and not opened:
            self.call(name)
            self.write(early)
        elif not opened:
            raise Broken
        self.close()

    def _arguments(self) -> Steps[None]:
        if (yield from self.cursor.blanks()) != "{":
            raise Broken
        yield from self.cursor.json(self.write)

    def _tool_name(self) -> Steps[str]:
        try:
            name = json.loads((yield from self.cursor.json_text()))
        except ValueError:
            raise Broken from None
        if not isinstance(name, str) or name not in self._schemas:
            raise Broken
        return name
