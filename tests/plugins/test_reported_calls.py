"""Faults in tool calls that users of other engines reported, in every family."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_texts import WRITERS

from headrace.dialogue import CallDelta
from headrace_plugins.dialects.detect import family_named


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = [tool("f"), tool("shell")]


def read(name: str, text: str, size: int) -> tuple[dict[str, Any], dict[int, str]]:
    """(message, joined arguments of each call) of an answer that comes in pieces."""
    parser = family_named(name).make().parser(TOOLS)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    joined: dict[int, str] = {}
    for call in (delta.call for delta in deltas if delta.call is not None):
        assert isinstance(call, CallDelta)
        joined[call.index] = joined.get(call.index, "") + call.arguments
    return parser.message(), joined


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_that_end_with_a_number_a_boolean_or_an_object(name: str) -> None:
    """tool_calls-01, and -02: the same at every cut."""
    for arguments in ({"a": {"b": {"c": 1}}}, {"x": True}, {}, {"n": 3}, {"n": None}, {"a": [{}]}):
        text = WRITERS[name]([("f", arguments)])
        for size in (1, 2, 3, len(text) // 3 + 1, len(text)):
            message, joined = read(name, text, size)
            assert [json.loads(each) for each in joined.values()] == [arguments], (arguments, size)
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == arguments


@pytest.mark.parametrize("name", WRITERS)
def test_braces_in_arguments(name: str) -> None:
    """tool_calls-04"""
    arguments = {"cmd": "mkdir -p test/{test1,test2"}
    text = WRITERS[name]([("shell", arguments)])
    for size in (1, 5, len(text)):
        assert [json.loads(each) for each in read(name, text, size)[1].values()] == [arguments]


@pytest.mark.parametrize("name", WRITERS)
def test_a_mark_without_a_call_is_content(name: str) -> None:
    """tool_calls-03"""
    family = family_named(name).make()
    for trigger in family.triggers:
        if name == "gpt-oss":  # marks there are of messages, not of calls
            continue
        text = f"{trigger}garbage that is no call"
        for size in (1, len(text)):
            message, joined = read(name, text, size)
            assert not joined
            assert not message.get("tool_calls")
            assert message["content"] == text, trigger
