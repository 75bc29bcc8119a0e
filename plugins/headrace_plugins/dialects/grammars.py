"""The constraint of an answer: tools, a schema and reasoning in one grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from headrace.dialogue import Tool, ToolChoice, Turn
from headrace.errors import RequestError
from headrace.types import Grammar
from headrace_plugins.dialects.family import Expression, Family, any_of

Think = Mapping[str, Any]
"""The "think" of a tagged grammar."""


def think_of(family: Family, turn: Turn, state: str, *, expected: bool = True) -> Think | None:
    """Reasoning before the answer proper, if there may be some.

    state: how the prompt leaves it, "open" (the answer begins inside), "over" or "free" (it may begin). expected: the
    prompt's format knows of reasoning."""
    think = family.think
    if think is None or state == "over" or (turn.prefill and (state == "free" or think[1] in turn.prefill)):
        return None
    if state == "free" and (turn.thinking is False or not expected):
        return None
    begin = None if state == "open" else think[0]
    return {"begin": begin, "end": think[1], "budget": turn.thinking_budget}


def constraint_of(
    turn: Turn,
    tools: Seq[Tool],
    think: Think | None,
    *,
    family: Family,
    caller: Family,
    special: Callable[[str], bool] = bool,
) -> Grammar | None:
    """What an answer must be; None: anything. family: of the model, caller: whose calls the prompt asks for. special:
    is a special token of that name in the vocabulary?

    Raises RequestError HR-CONSTRAINT-11 for a schema that can't stand beside tools, HR-TOOL-04 for an unknown tool."""
    schema = _expression_of(turn.schema) if turn.schema is not None else None
    if turn.schema is not None and not tools:
        return _schema_only(turn.schema, schema, think, turn, family)
    choice = turn.choice
    if turn.schema is not None and schema is None and choice.mode == "auto":
        message = f"tools can't be offered beside a constraint of the kind '{turn.schema.kind}'"
        raise RequestError("HR-CONSTRAINT-11", message, "use a json_schema, regex or choice, or leave the tools out")
    if choice.mode == "required" and tools:
        return _body(think, spelled(caller.only_calls(chosen(tools, choice), choice), special))
    if schema is not None:
        return _body(think, spelled(any_of([caller.content(schema), caller.only_calls(tools, choice)]), special))
    if tools:
        body = spelled(caller.calls(tools, choice), special)
        if openings := [mark for mark in caller.openings(tools) if mark not in caller.triggers or begins(body, mark)]:
            return _free(think, openings, None if choice.parallel else 1, body)
    if turn.tools and not tools and caller.triggers:
        return _free(think, caller.triggers, 0)
    return _free(think, ()) if think is not None and turn.thinking_budget is not None else None


def _schema_only(schema: Grammar, parsed: Expression, think: Think | None, turn: Turn, family: Family) -> Grammar:
    plain = family.content({"plain": True}) == {"plain": True}
    if think is None and plain:
        return schema
    if parsed is not None:
        return _body(think, family.content(parsed))
    if think is not None and think["begin"] is None and plain:
        return replace(schema, trigger=think["end"], trigger_budget=turn.thinking_budget)
    if not plain:
        message = f"answers of the family '{family.name}' can't be held to a constraint of the kind '{schema.kind}'"
        raise RequestError("HR-CONSTRAINT-11", message, "use a json_schema, regex or choice")
    return schema


def chosen(tools: Seq[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that a required call may be of. Raises RequestError HR-TOOL-04 for an unknown name."""
    found = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise RequestError("HR-TOOL-04", f"tool_choice names an unknown tool: '{choice.name}'", f"known: {names}")
    return found


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


def spelled(expression: Expression, special: Callable[[str], bool]) -> Expression:
    """The expression with names that are no special token as text: as such, engines join it with the text beside it."""
    if isinstance(expression, str):
        return expression
    if "special" in expression:
        return expression if special(expression["special"]) else expression["special"]
    told = dict(expression)
    for key in ("seq", "any"):
        if key in told:
            told[key] = [spelled(each, special) for each in told[key]]
    for key in ("opt", "many", "between"):
        if told.get(key) is not None:
            told[key] = spelled(told[key], special)
    return told


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
