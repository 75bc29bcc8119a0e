"""What templates want to know of earlier calls and results: names of tools, and ids of their own form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message


def called_names(messages: Seq[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each message, and for the result of a tool the name of that tool."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id") or ""] = call["function"]["name"]
        name = ""
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id") or "", "unknown")
        yield message, name


def with_ids(messages: Seq[Message], made: Callable[[str, str, int], str]) -> list[Message]:
    """Messages with other ids: made(id, name of the tool, number of the call in the conversation)."""
    ids: dict[str, str] = {}
    n_calls = 0
    adapted: list[Message] = []
    for message in messages:
        changed = dict(message)
        if changed.get("tool_calls"):
            calls = []
            for call in changed["tool_calls"]:
                old = call.get("id") or ""
                ids[old] = made(old, call["function"]["name"], n_calls)
                n_calls += 1
                calls.append({**call, "id": ids[old]})
            changed["tool_calls"] = calls
        elif changed.get("tool_call_id") is not None:
            old = changed["tool_call_id"]
            changed["tool_call_id"] = ids.get(old, old)
        adapted.append(changed)
    return adapted


def one_call_each(messages: Seq[Message]) -> list[Message]:
    """Messages with at most one call: where there are several, each gets a message of its own, and its result comes
    right behind it."""
    split: list[Message] = []
    moved: set[Any] = set()
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            split += [] if message.get("tool_call_id") in moved else [message]
        elif len(calls) < 2:
            split.append(message)
            moved = set()
        else:
            results = _results(messages[i + 1 :])
            moved = {call.get("id") for call in calls}
            for n, call in enumerate(calls):
                shown = message if n == 0 else {"role": message["role"], "content": ""}
                split += [{**shown, "tool_calls": [call]}, *results.get(call.get("id"), [])]
    return split


def _results(messages: Seq[Message]) -> dict[Any, list[Message]]:
    """Results right behind a message with calls, by id."""
    found: dict[Any, list[Message]] = {}
    for message in messages:
        if message["role"] != "tool":
            break
        found.setdefault(message.get("tool_call_id"), []).append(message)
    return found
