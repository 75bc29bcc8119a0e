"""Kimi K2: a section of calls whose ids carry the names. Format: the templates of moonshotai/Kimi-K2-Instruct to K2.6
and docs/tool_call_guidance.md there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated, with_objects
from headrace_plugins.dialects.history import with_ids
from headrace_plugins.dialects.reading import Broken, CallReader, Steps

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::[0-9]+)?", re.DOTALL)


class KimiK2(Family):
    """In a section: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>."""

    name = "kimi-k2"
    think = ("<think>", "</think>")
    triggers = (SECTION,)
    shown = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END, "<think>", "</think>")
    ends = ("<|im_end|>", "[EOS]")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        bodies: list[Expression] = []
        for name, schema in map(function_of, tools):
            number = {"regex": "[0-9]{1,3}"}
            bodies.append(
                {"seq": [{"special": CALL}, f"functions.{name}:", number, {"special": ARGUMENTS}, {"schema": schema}]}
            )
        call = {"seq": [any_of(bodies), {"special": CALL_END}]}
        return {"seq": [{"special": SECTION}, repeated(call, choice), {"special": SECTION_END}]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return KimiCalls()

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Ids are functions.NAME:N, where N counts the calls of the conversation."""
        return with_ids(
            [with_objects(message) for message in messages], lambda _, name, number: f"functions.{name}:{number}"
        )

    def switch(self, thinking: bool | None) -> dict[str, Any]:
        return {} if thinking is None else {"thinking": thinking}


class KimiCalls(CallReader):
    end = (SECTION_END,)

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.expect(SECTION)
        while True:
            yield from cursor.blanks()
            if (yield from cursor.expect(CALL, SECTION_END)) == SECTION_END:
                return
            id, _ = yield from cursor.name(ARGUMENTS)
            found = _ID.fullmatch(id)
            if found is None:
                raise Broken
            self.call(found["name"], id)
            yield from cursor.json(self.write)
            self.close()
            yield from cursor.blanks()
            yield from cursor.expect(CALL_END)
