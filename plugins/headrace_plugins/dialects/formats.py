"""Chats by template: messages, tools and what else a turn asks for to a prompt and its grammar, and answers back."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.dialogue import AnswerParser, Message, Prompt, Tool, ToolChoice, Turn
from headrace.errors import HeadraceError, RequestError
from headrace.types import Grammar
from headrace_plugins.dialects import repairs
from headrace_plugins.dialects.family import Expression, Family, any_of
from headrace_plugins.dialects.generic import Generic
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
        constraint = self._constraint(turn, tools, state)
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

    # --- grammar

    def _constraint(self, turn: Turn, tools: Seq[Tool], state: str) -> Grammar | None:
        think = self._think_of(turn, state)
        schema = _expression_of(turn.schema) if turn.schema is not None else None
        if turn.schema is not None and not tools:
            return self._schema_only(turn.schema, schema, think, turn)
        if turn.schema is not None and schema is None and turn.choice.mode == "auto":
            message = f"tools can't be offered beside a constraint of the kind '{turn.schema.kind}'"
            raise RequestError(
                "HR-CONSTRAINT-11", message, "use a json_schema, regex or choice, or leave the tools out"
            )
        caller, choice = self._caller, turn.choice
        if choice.mode == "required" and tools:
            return _body(think, caller.only_calls(chosen(tools, choice), choice))
        if schema is not None:
            return _body(think, any_of([caller.content(schema), caller.only_calls(tools, choice)]))
        if tools:
            body = caller.calls(tools, choice)
            if triggers := [mark for mark in caller.triggers if begins(body, mark)]:
                return _free(think, triggers, None if choice.parallel else 1, body)
        if turn.tools and not tools and caller.triggers:
            return _free(think, caller.triggers, 0)
        return _free(think, ()) if think is not None and turn.thinking_budget is not None else None

    def _schema_only(self, schema: Grammar, parsed: Expression, think: Mapping[str, Any] | None, turn: Turn) -> Grammar:
        plain = self.family.content({"plain": True}) == {"plain": True}
        if think is None and plain:
            return schema
        if parsed is not None:
            return _body(think, self.family.content(parsed))
        if think is not None and think["begin"] is None and plain:
            return replace(schema, trigger=think["end"], trigger_budget=turn.thinking_budget)
        return schema

    def _think_of(self, turn: Turn, state: str) -> dict[str, Any] | None:
        """The "think" of a tagged grammar. Reasoning that the template has no mark of is not expected."""
        think = self.family.think
        if think is None or state == "over" or turn.prefill:
            return None
        if state == "free" and (
            turn.thinking is False or not any(mark.strip() in self.template.source for mark in think)
        ):
            return None
        begin = None if state == "open" else think[0]
        return {"begin": begin, "end": think[1], "budget": turn.thinking_budget}


def offered(turn: Turn) -> tuple[Tool, ...]:
    """The tools that the answer may call."""
    return () if turn.choice.mode == "none" else turn.tools


def tools_in(arguments: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Tools that a caller gave the template itself, as far as they are tools."""
    given = arguments.get("tools")
    found = given if isinstance(given, list | tuple) else ()
    return tuple(tool for tool in found if isinstance(tool, Mapping) and _is_tool(tool))  # type: ignore[misc]


def chosen(tools: Seq[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that a required call may be of. Raises RequestError HR-TOOL-04 for an unknown name."""
    found = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise RequestError("HR-TOOL-04", f"tool_choice names an unknown tool: '{choice.name}'", f"known: {names}")
    return found


def _is_tool(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _expression_of(schema: Grammar) -> Expression | None:
    """A constraint as an expression of tagged grammars; None for kinds that have none."""
    try:
        if schema.kind == "json_schema":
            return {"schema": json.loads(schema.text)}
        if schema.kind == "choice":
            return any_of([str(each) for each in json.loads(schema.text)])
    except (ValueError, RecursionError, TypeError):
        return None  # the engine says what is wrong
    if schema.kind == "json_object":
        return {"schema": {"type": "object"}}
    return {"regex": schema.text} if schema.kind == "regex" else None


def begins(expression: Expression, mark: str) -> bool:
    """May texts of the expression begin with the mark?"""
    match expression:
        case str():
            return expression.startswith(mark)
        case {"special": name}:
            return bool(name == mark)
        case {"seq": [first, *rest]}:
            return begins(first, mark) or (_may_be_empty(first) and begins({"seq": rest}, mark))
        case {"any": each}:
            return any(begins(one, mark) for one in each)
        case {"many": body} | {"opt": body}:
            return begins(body, mark)
    return False


def _may_be_empty(expression: Expression) -> bool:
    return expression == "" or (isinstance(expression, Mapping) and "opt" in expression)


def _body(think: Mapping[str, Any] | None, body: Expression) -> Grammar:
    """Reasoning, then this and nothing else; between them the line breaks that models write there."""
    if think is not None and think["begin"] is None:
        body = {"seq": [{"regex": "\n{0,2}"}, body]}
    return _tagged(think, {"start": "body", "body": body})


def _free(think: Mapping[str, Any] | None, triggers: Seq[str], most: int | None = None, body: Any = None) -> Grammar:
    """Reasoning, then free text with bodies in it; most = 0: no trigger may come."""
    document = {"start": "free", "triggers": list(triggers), "most": most}
    return _tagged(think, document if body is None else document | {"body": body})


def _tagged(think: Mapping[str, Any] | None, document: dict[str, Any]) -> Grammar:
    return Grammar("tagged", json.dumps(document if think is None else {"think": think} | document, ensure_ascii=False))
