"""Messages changed so that a template takes them: tried only when it refused them as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import combinations

from headrace.dialogue import Message
from headrace_plugins.dialects.generic import as_plain, text_of

MEANINGS: Mapping[str, str] = {
    "tools": "tool calls and results are written into plain messages",
    "system": "the system message is written into the first user message",
    "merge": "messages of one role that follow each other are written as one",
}


def tries(messages: Seq[Message]) -> Iterator[tuple[tuple[str, ...], list[Message]]]:
    """(repairs, the messages after them): single ones first, then several at once."""
    for n_repairs in range(1, len(_REPAIRS) + 1):
        for names in combinations(_REPAIRS, n_repairs):
            repaired: Seq[Message] | None = messages
            for name in names:
                repaired = _REPAIRS[name](repaired) if repaired is not None else None
            if repaired is not None:
                yield names, list(repaired)


# Each gives None where there is nothing to repair.


def _plain_tools(messages: Seq[Message]) -> list[Message] | None:
    if not any(message.get("role") == "tool" or message.get("tool_calls") for message in messages):
        return None
    return as_plain(messages)


def _system_into_user(messages: Seq[Message]) -> list[Message] | None:
    told = [text_of(message) for message in messages if message.get("role") == "system"]
    others = [dict(message) for message in messages if message.get("role") != "system"]
    first = next((i for i, message in enumerate(others) if message.get("role") == "user"), None)
    if not told:
        return None
    if first is None:
        return [{"role": "user", "content": "\n\n".join(told)}, *others]
    others[first]["content"] = "\n\n".join([*told, text_of(others[first])])
    return others


def _merged(messages: Seq[Message]) -> list[Message] | None:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last.get("role") == message.get("role") and message.get("role") in ("user", "assistant", "system"):
            last["content"] = "\n\n".join(text for text in (text_of(last), text_of(message)) if text)
            if calls := [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]:
                last["tool_calls"] = calls
        else:
            merged.append(dict(message))
    return merged if len(merged) < len(messages) else None


_REPAIRS: Mapping[str, Callable[[Seq[Message]], list[Message] | None]] = {
    "merge": _merged,
    "system": _system_into_user,
    "tools": _plain_tools,
}
