"""Mistral, Ministral, Magistral, Devstral: calls behind [TOOL_CALLS], in three forms.

Formats: mistral-common's tokenizer versions 3 to 7, 11, and 13 and later, and the templates of the models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.expressions import json_list
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated, with_objects
from headrace_plugins.dialects.history import with_ids
from headrace_plugins.dialects.lists import read_list
from headrace_plugins.dialects.reading import Broken, CallReader, Steps
from headrace_plugins.dialects.values import scalar

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_PATTERN = "[a-zA-Z0-9]{9}"

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Mistral(Family):
    """form "list": [TOOL_CALLS][{"name", "arguments", "id"?}, ...]. "id": [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...} for
    each call. "plain": the same without ids. All three are read, whatever the form.

    thinking: reasoning stands between special tokens; else, if at all, between <think> and </think>.
    """

    name = "mistral"
    triggers = (CALLS,)
    shown = (CALLS, ID, ARGUMENTS, "[THINK]", "[/THINK]")
    ends = ("</s>",)

    def __init__(self, form: Literal["list", "id", "plain"] = "list", *, thinking: bool = False) -> None:
        self._form = form
        self.name = "mistral" if form == "list" else f"mistral-{form}"
        self.think = ("[THINK]", "[/THINK]") if thinking else ("<think>", "</think>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        if self._form == "list":
            id = {"seq": [', "id": "', {"regex": ID_PATTERN}, '"']}
            return {"seq": [{"special": CALLS}, {"opt": " "}, json_list(tools, choice, behind={"opt": id})]}
        bodies = [_call(*function_of(tool), with_id=self._form == "id") for tool in tools]
        return repeated(any_of(bodies), choice)

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return MistralCalls()

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Templates refuse ids that are not 9 letters and digits."""
        return with_ids([with_objects(message) for message in messages], lambda old, _, number: short_id(old, number))

    def call_id(self, seed: str, index: int, name: str) -> str:
        return short_id(f"{seed}\0{index}\0{name}", index)


class MistralCalls(CallReader):
    """What follows one [TOOL_CALLS]: a list of calls, or one of them."""

    end = (CALLS,)

    def read(self) -> Steps[None]:
        yield from self.cursor.expect(CALLS)
        if (yield from self.cursor.blanks()) == "[":
            yield from read_list(self, {})
            return
        name = (yield from scalar(self.cursor, "[{")).strip()
        if not name:
            raise Broken
        mark = yield from self.cursor.take(ID, ARGUMENTS)
        id = ""
        if mark == ID:
            id = (yield from scalar(self.cursor, "[{")).strip()
            mark = yield from self.cursor.take(ARGUMENTS)
        if not mark and (yield from self.cursor.peek()) != "{":  # some models forget [ARGS]
            raise Broken
        self.call(name, id)
        yield from self.cursor.json(self.write)
        self.close()


def _call(name: str, schema: dict[str, Any], *, with_id: bool) -> Expression:
    id = [{"special": ID}, {"regex": ID_PATTERN}] if with_id else []
    return {"seq": [{"special": CALLS}, name, *id, {"special": ARGUMENTS}, {"schema": schema}]}


def short_id(id: str, number: int) -> str:
    """An id of Mistral's form: itself, or one made from it."""
    if re.fullmatch(ID_PATTERN, id):
        return id
    left = int.from_bytes(hashlib.sha256((id or str(number)).encode("utf-8", "replace")).digest()[:8])
    digits = ""
    for _ in range(9):
        left, digit = divmod(left, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits
