"""What a chat and its dialect say to each other: messages, tools, pieces of an answer.

A dialect (hook `headrace_dialects`) knows how a model family writes conversations. Its `ChatFormat` makes prompts,
gives the grammar that holds tool calls to their schemas, and reads answers while they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headrace.types import Grammar

Message = dict[str, Any]
"""A message of the Chat Completions API: role, content, and where it has them reasoning_content, tool_calls (each with
id, type "function" and function {name, arguments: JSON text}), tool_call_id, name."""

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """May, must or must not the answer call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """With "required": this tool."""
    parallel: bool = True
    """More than one call in one answer."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. Joined, the `arguments` of one index are a JSON object, unless the call was cut off."""

    index: int
    name: str = ""
    """In the first delta of a call only."""
    id: str = ""
    """In the first delta of a call only."""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer as its dialect reads it: one of the three."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class AnswerParser(Protocol):
    """Reads one answer. The result does not depend on how the text is cut; marks of the format are never content."""

    def push(self, text: str) -> list[Delta]:
        """What this piece of the answer says; what may still become a mark is held back."""
        ...

    def finish(self) -> list[Delta]:
        """The answer is over: whatever was held back. Called once, last."""
        ...

    def message(self) -> Message:
        """The assistant message so far (after `finish`: all of it). A tool call that was cut off, or whose arguments
        are no JSON object, has "incomplete": True. Marks without a call stay in the content as they are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the next answer is asked for, beside the messages."""

    prefill: str = ""
    """How the answer begins; the model goes on from there."""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    thinking: bool | None = None
    """True, False, or the family's own default."""
    thinking_budget: int | None = None
    """Most tokens of reasoning; then its end is forced."""
    schema: Grammar | None = None
    """What the content of the answer must be, after any reasoning."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other template variables."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that asks for an answer, and what goes with the answer."""

    text: str
    ids: list[int]
    constraint: Grammar | None = None
    """Tool grammar, schema and reasoning in one; None: free text."""
    shown: tuple[str, ...] = ()
    """Marks of the answer that may be special tokens, by name: they are kept in the text for the parser."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer beside the model's own end tokens."""


class ChatFormat(Protocol):
    """Made by a dialect, see `headrace.hooks.DialectSpec`. Any thread, several at once."""

    name: str
    """Of the dialect, for `config explain`."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], turn: Turn = Turn()) -> Prompt:
        """Raises RequestError for messages, tools or arguments that the format does not allow (HR-CHAT-*, HR-TOOL-*),
        ModelError for a bad template."""
        ...

    def parser(self, prompt: Prompt, turn: Turn = Turn()) -> AnswerParser:
        """A parser of the answer to that prompt. It is fed what follows the prefill."""
        ...


def read_answer(parser: AnswerParser, text: str) -> Message:
    """The message of a whole answer."""
    parser.push(text)
    parser.finish()
    return parser.message()
