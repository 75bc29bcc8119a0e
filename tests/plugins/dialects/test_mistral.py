"""Mistral's three forms of calls, and ids of nine letters and digits."""

from __future__ import annotations

import re
from typing import Any

import pytest
from call_texts import WRITERS, calls_of, family, read_answer, tool

from headrace.dialogue import Turn
from headrace.testing.toy import ToyTokenizer
from headrace_plugins.dialects.detect import detect
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

TOOLS = [tool("f", a={"type": "string"}, name={"type": "string"})]
TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("form", ["mistral", "mistral-plain", "mistral-id"])
def test_every_form_is_read_by_all(form: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"a": "]"}), ("f", {"name": "x"})]
    for written in ("mistral", "mistral-plain", "mistral-id"):
        message = read_answer(family(form), WRITERS[written](calls) + "</s>", TOOLS)
        assert calls_of(message) == calls
        assert message["content"] == ""
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in message["tool_calls"])
    assert [call["id"] for call in message["tool_calls"]] == ["abcDEF120", "abcDEF121"]


def test_forms_that_models_drift_to() -> None:
    made = family("mistral")
    assert calls_of(read_answer(made, '[TOOL_CALLS]f{"a": "x"}', TOOLS)) == [("f", {"a": "x"})]
    text = '[TOOL_CALLS] [{"arguments": {"a": "x"}, "name": "f"}]'
    assert calls_of(read_answer(made, text, TOOLS)) == [("f", {"a": "x"})]
    text = '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}]'
    assert calls_of(read_answer(made, text, TOOLS)) == [("f", {"a": "x"})]
    for text in ("[TOOL_CALLS]", "[TOOL_CALLS]no call", "[TOOL_CALLS] [1]", "[TOOL_CALLS][]"):
        assert read_answer(made, text, TOOLS)["content"] == text


def test_text_behind_the_calls_is_content() -> None:
    message = read_answer(family("mistral-plain"), '[TOOL_CALLS]f[ARGS]{"a": "x"} and more', TOOLS)
    assert calls_of(message) == [("f", {"a": "x"})]
    assert message["content"] == "and more"


def test_reasoning() -> None:
    text = "[THINK]Hm.[/THINK]Well.[TOOL_CALLS]f[ARGS]{}"
    message = read_answer(family("mistral-thinking"), text, TOOLS)
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "Well."
    assert calls_of(message) == [("f", {})]


def test_ids_of_the_history_are_made_to_fit() -> None:
    known, _ = detect(TEMPLATE)
    assert known.name == "mistral"
    form = TemplateFormat(ChatTemplate(TEMPLATE), ToyTokenizer(300), known.make())
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
        for id in ("call_1", "abcDEF123")
    ]
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "abcDEF123", "content": "two"},
    ]
    text = form.prompt(history, Turn(tools=tuple(TOOLS))).text
    first, second = re.findall(r'"id": "(.{9})"', text)
    assert second == "abcDEF123"
    assert f"[TOOL_RESULTS]{first} one" in text
    assert "[TOOL_RESULTS]abcDEF123 two" in text
    written = text[text.index("[TOOL_CALLS]") : text.index("[TOOL_RESULTS]")].removesuffix("<|eos|>")
    assert calls_of(read_answer(family("mistral"), written, TOOLS)) == [("f", {"a": "é"})] * 2
