"""What a model family's chats look like beside its template: reasoning marks, the grammar of its calls, its reader."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import AnswerParser, Message, Tool, ToolChoice
from headrace_plugins.dialects.answer import Answer, default_call_id
from headrace_plugins.dialects.reading import CallReader

Expression = Any
"""EXPR of a "tagged" grammar: text, or an object with one of special, regex, schema, until, seq, any, opt, many."""


class Family(ABC):
    """A way of writing chats. Stateless; any thread."""

    name: str
    think: tuple[str, str] | None = None
    """Marks around reasoning."""
    trim: str = "\n"
    """Characters that the format puts between these marks and the text, on either side."""
    triggers: tuple[str, ...] = ()
    """Marks at which a block of calls begins."""
    before_prefill: str = ""
    """Text between the header of an answer and the beginning of its content."""
    first: tuple[str, ...] = ()
    """Texts at which it also begins, at the start of the content and nowhere else."""
    shown: tuple[str, ...] = ()
    """Marks of answers that may be special tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer beside the model's end tokens."""
    ends: tuple[str, ...] = ()
    """End-of-turn marks, which are no content at the end of an answer."""
    tools_in_template: bool = True
    """The template writes the tools, calls and results of a chat. False: `adapt` puts them into plain messages."""

    @abstractmethod
    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        """One or more calls (one, unless choice.parallel), beginning at a trigger. tools: those that may be called."""

    def only_calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        """An answer that is calls and nothing else, from behind any reasoning on."""
        return self.calls(tools, choice)

    def content(self, body: Expression) -> Expression:
        """An answer whose content is `body`, from behind any reasoning on."""
        return body

    def openings(self, tools: Seq[Tool]) -> tuple[str, ...]:
        """Texts at which `calls` begin in a text that is otherwise free: one of them is how each call begins."""
        return self.triggers

    @abstractmethod
    def reader(self, tools: Seq[Tool]) -> CallReader:
        """Reads one block of calls, from its trigger on."""

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """The messages as the family's templates want them. Default: arguments of calls as objects."""
        return [with_objects(message) for message in messages]

    def switch(self, thinking: bool | None) -> dict[str, Any]:
        """Template variables that turn reasoning on or off."""
        return {} if thinking is None else {"enable_thinking": thinking}

    def call_id(self, seed: str, index: int, name: str) -> str:
        """Id of a call whose format has none."""
        return default_call_id(seed, index, name)

    def parser(
        self, tools: Seq[Tool], *, opened: bool = False, calls: bool = True, prefill: str = "", seed: str = ""
    ) -> AnswerParser:
        """Reads one answer; see `Answer` for the arguments."""
        return Answer(self, tools, opened=opened, calls=calls, prefill=prefill, seed=seed)


def function_of(tool: Tool) -> tuple[str, dict[str, Any]]:
    """(name, schema of the arguments) of a tool; a tool without parameters takes none."""
    function = tool["function"]
    schema = function.get("parameters")
    return function["name"], schema if schema else {"type": "object", "properties": {}, "additionalProperties": False}


def with_objects(message: Mapping[str, Any]) -> Message:
    """The message with the arguments of its calls as objects where they are JSON text of one, and content as text."""
    adapted = dict(message)
    if adapted.get("content") is None:
        adapted["content"] = ""
    if adapted.get("tool_calls"):
        adapted["tool_calls"] = [_with_object(call) for call in adapted["tool_calls"]]
    return adapted


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):  # a call that was cut off: the text is all there is
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def repeated(call: Expression, choice: ToolChoice, between: str = "") -> Expression:
    """The call, or where the choice allows several, one or more of it."""
    if not choice.parallel:
        return call
    return {"many": call, **({"between": between} if between else {}), "min": 1, "max": None}


def any_of(expressions: Seq[Expression]) -> Expression:
    """One of these."""
    return expressions[0] if len(expressions) == 1 else {"any": list(expressions)}
