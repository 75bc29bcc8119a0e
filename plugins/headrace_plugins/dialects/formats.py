"""Chats by template: messages, tools and what else a turn asks for to a prompt and its grammar, and answers back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from headrace.dialogue import AnswerParser, Message, Prompt, Tool, Turn
from headrace.errors import HeadraceError, RequestError
from headrace_plugins.dialects import repairs
from headrace_plugins.dialects.family import Family
from headrace_plugins.dialects.generic import Generic
from headrace_plugins.dialects.grammars import constraint_of, think_of
from headrace_plugins.dialects.reading import BLANKS
from headrace_plugins.templates import ChatTemplate, PromptEncoder, special_texts

if TYPE_CHECKING:
    from headrace.contracts import Tokenizer

log = logging.getLogger(__name__)

PLAIN = Turn()

HEADERS: Mapping[str, str] = {
    "<|im_start|>": "<|im_start|>assistant\n",
    "<|start_header_id|>": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|start_of_role|>": "<|start_of_role|>assistant<|end_of_role|>",
    "<start_of_turn>": "<start_of_turn>model\n",
    "<|turn>": "<|turn>model\n",
    "<|assistant|>": "<|assistant|>\n",
}
"""How an answer begins, by a mark of the template, for templates that have no word about add_generation_prompt."""


class TemplateFormat:
    """A `ChatFormat`: the template of a model, and the family that its answers are written like. Thread-safe.

    What messages, tools, prefill and arguments hold is plain text in the prompt, whatever tokens it names: before
    rendering, the names of special tokens in it are broken up by a private character, see `PromptEncoder`. A template
    that changes letters (`lower`) could put such a name together; none is known that does so with contents.

    A template that refuses messages is tried again with the messages repaired (`repairs`); the first time that it
    helps, a warning in the log says so.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, family: Family | None = None) -> None:
        self.template = template
        self.family = family or Generic()
        self.name = self.family.name
        told = "tools" in template.names or not self.family.tools_in_template
        self._caller = self.family if told else Generic()
        self._encoder = PromptEncoder(tokenizer)
        self._specials = special_texts(tokenizer)
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def prompt(self, messages: Seq[Mapping[str, Any]], turn: Turn = PLAIN) -> Prompt:
        """See `ChatFormat.prompt`. HR-CHAT-08: thinking was asked of a family that has none."""
        if turn.thinking and self.family.think is None:
            message = f"thinking = True: answers of the family '{self.family.name}' have no reasoning"
            raise RequestError("HR-CHAT-08", message, "leave thinking out, or name the model's family: [chat] dialect")
        tools = offered(turn)
        adapted = self._caller.adapt(messages, tools)
        own: dict[str, Any] = self.family.switch(turn.thinking)
        if tools and self._caller.tools_in_template:
            own["tools"] = [dict(tool) for tool in tools]
        parts = [adapted, dict(turn.arguments), own, turn.prefill]
        (shielded, arguments, own, prefill), mark = self._encoder.shield(parts)
        text = self._render(shielded, {**own, **self._specials}, arguments)
        text += self._closing(text, turn) + (self.family.before_prefill if prefill else "") + prefill
        ids = self._encoder.encode(text, mark)
        text = text.replace(mark, "") if mark else text
        state = self._thinking(text.removesuffix(turn.prefill) if turn.prefill else text)
        marked = any(mark.strip() in self.template.source for mark in self.family.think or ())
        think = think_of(self.family, turn, state, expected=marked)
        constraint = constraint_of(
            turn, tools, think, family=self.family, caller=self._caller, special=self._encoder.is_special
        )
        return Prompt(text, ids, constraint, shown=self._caller.shown, stop=self._caller.stop)

    def parser(self, prompt: Prompt, turn: Turn = PLAIN) -> AnswerParser:
        """Prefill is read first: its deltas come with those of the first push."""
        before = prompt.text.removesuffix(turn.prefill) if turn.prefill else prompt.text
        tools = offered(turn)
        return self._caller.parser(
            tools or tools_in(turn.arguments),
            opened=self._thinking(before) == "open",
            calls=turn.choice.mode != "none" and bool(tools or turn.arguments.get("tools")),
            prefill=turn.prefill,
            seed=prompt.text,
        )

    # --- prompt

    def _render(self, messages: Seq[Message], own: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        def render(messages: Seq[Message]) -> str:
            return self.template.render(messages, values=own, arguments=arguments)

        try:
            text = render(messages)
        except HeadraceError as refusal:
            if refusal.code not in ("HR-TEMPLATE-05", "HR-TEMPLATE-06"):
                raise
            names, text = self._repaired(messages, render)
            if not names:
                raise
            self._say(names, refusal)
        if "add_generation_prompt" in self.template.names:
            return text
        return text + self._header(text)

    def _header(self, text: str) -> str:
        """What a template leaves out that has no word about it: how an answer begins."""
        mark = next((mark for mark in HEADERS if mark in self.template.source), "")
        if not mark:
            return ""
        header, last = HEADERS[mark], text[text.rfind(mark) :]
        behind = last.removeprefix(header.rstrip())
        for each in self.family.think or ():
            behind = behind.replace(each.strip(), "")
        return "" if last.startswith(header.rstrip()) and not behind.strip() else header

    def _repaired(self, messages: Seq[Message], render: Callable[[Seq[Message]], str]) -> tuple[Seq[str], str]:
        """(what was repaired, the text); nothing, if nothing helps. Ends soon for templates that refuse slowly."""
        latest = time.monotonic() + self.template.limits.seconds
        for names, repaired in repairs.tries(messages):
            with contextlib.suppress(HeadraceError):
                return names, render(repaired)
            if time.monotonic() > latest:
                break
        return (), ""

    def _say(self, names: Seq[str], refusal: HeadraceError) -> None:
        with self._lock:
            new = [name for name in names if name not in self._said]
            self._said.update(new)
        if new:
            what = "; ".join(repairs.MEANINGS[name] for name in new)
            log.warning("%s; so for this and later chats: %s", refusal.message, what)

    def _closing(self, text: str, turn: Turn) -> str:
        """Ends reasoning that the template began, where the answer is to have none, or is to begin with `prefill`."""
        think = self.family.think
        wanted = turn.thinking is not False and (
            not turn.prefill or turn.thinking or (think and think[1] in turn.prefill)
        )
        if think is None or wanted or self._thinking(text) != "open":
            return ""
        gap = "\n" if text.endswith("\n") and self.family.trim else ""
        return f"{gap}{think[1]}{gap * 2}"

    def _thinking(self, text: str) -> str:
        """How a prompt leaves reasoning: "open" (the answer begins inside), "over", or "free" (it may begin)."""
        if self.family.think is None:
            return "over"
        end = text[-200:].rstrip(BLANKS)
        begin, over = (mark.rstrip(BLANKS) for mark in self.family.think)
        return "open" if end.endswith(begin) else "over" if end.endswith(over) else "free"


def offered(turn: Turn) -> tuple[Tool, ...]:
    """The tools that the answer may call."""
    return () if turn.choice.mode == "none" else turn.tools


def tools_in(arguments: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Tools that a caller gave the template itself, as far as they are tools."""
    given = arguments.get("tools")
    found = given if isinstance(given, list | tuple) else ()
    return tuple(tool for tool in found if isinstance(tool, Mapping) and _is_tool(tool))  # type: ignore[misc]


def _is_tool(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
