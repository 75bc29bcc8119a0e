"""Granite, Kimi K2, and DeepSeek from V3 to V4.1: calls between marks of sections."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_texts import WRITERS, calls_of, family, read_answer, tool

from headrace.dialogue import Turn
from headrace.testing.toy import ToyTokenizer
from headrace_plugins.dialects.detect import detect
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

TOOLS = [tool("f", a={"type": "string"}, b={"type": "integer"})]
CALL = {"id": "call_9", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_9", "content": "42"},
]


def rendered(template: str, name: str, **turn: Any) -> str:
    known, _ = detect(template)
    assert known.name == name
    form = TemplateFormat(ChatTemplate(template), ToyTokenizer(300), known.make())
    return form.prompt(HISTORY, Turn(tools=tuple(TOOLS), **turn)).text


# --- Granite ---------------------------------------------------------------------------------------------------------

GRANITE = (
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "<|start_of_role|>assistant<|end_of_role|>"
)


def test_granite_calls_of_the_history_are_content() -> None:
    text = rendered(GRANITE, "granite")
    assert f"<|end_of_role|>{WRITERS['granite']([('f', {'a': 'é'})])}<|end_of_text|>" in text


def test_granite_calls() -> None:
    made = family("granite")
    text = '<|tool_call|> [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"b": 1}}]<|end_of_text|>'
    assert calls_of(read_answer(made, text, TOOLS)) == [("f", {}), ("f", {"b": 1})]
    assert calls_of(read_answer(made, '<tool_call>[{"name": "f", "arguments": {}}]', TOOLS)) == [("f", {})]
    message = read_answer(made, "<think>hm</think>Well.", TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("hm", "Well.")


# --- Kimi K2 ---------------------------------------------------------------------------------------------------------

KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}<|im_end|>"
    "{% endfor %}<|im_assistant|>assistant<|im_middle|>"
)


def test_kimi_ids_carry_the_names() -> None:
    text = rendered(KIMI, "kimi-k2")
    assert "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" in text
    assert "42 of functions.f:0<|im_end|>" in text
    written = text[text.index("<|tool_calls_section_begin|>") :].partition("<|im_end|>")[0]
    message = read_answer(family("kimi-k2"), written, TOOLS)
    assert calls_of(message) == [("f", {"a": "é"})]
    assert message["tool_calls"][0]["id"] == "functions.f:0"


@pytest.mark.parametrize(("id", "name"), [("functions.a.b-c:12", "a.b-c"), ("f:0", "f"), (" functions.f:3 ", "f")])
def test_kimi_names(id: str, name: str) -> None:
    written = WRITERS["kimi-k2"]([("f", {})]).replace("functions.f:0", id)
    assert calls_of(read_answer(family("kimi-k2"), written, TOOLS)) == [(name, {})]


def test_kimi_marks_in_strings_are_text() -> None:
    calls = [("f", {"a": "<|tool_call_end|><|tool_calls_section_end|>"})]
    assert calls_of(read_answer(family("kimi-k2"), WRITERS["kimi-k2"](calls), TOOLS)) == calls


# --- DeepSeek --------------------------------------------------------------------------------------------------------

V31 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.tool_calls %}"
    "<｜Assistant｜></think>{% if m.content is not none %}{{ m.content }}{% endif %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}{% set f = c.function %}<｜tool▁call▁begin｜>"
    "{{ f.name + '<｜tool▁sep｜>' + f.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% elif m.role == 'tool' %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}"
)
V3 = V31.replace(
    "{{ f.name + '<｜tool▁sep｜>' + f.arguments }}",
    "{{ c.type + '<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments + '\\n```' }}",
)


@pytest.mark.parametrize(("template", "name"), [(V31, "deepseek-v3.1"), (V3, "deepseek-v3")])
def test_deepseek_history_and_tools(template: str, name: str) -> None:
    """The templates write arguments as text, and know nothing of tools: the system message tells of them."""
    text = rendered(template, name, thinking=False)
    assert json.dumps(TOOLS[0]["function"]) in text
    assert text.endswith("<｜Assistant｜></think>")
    assert rendered(template, name, thinking=True).endswith("<think>")
    written = text[text.rindex("<｜tool▁calls▁begin｜>") :].partition("<｜tool▁output▁begin｜>")[0]
    assert written.replace("\\n", "\n") == WRITERS[name]([("f", {"a": "é"})]).replace("\\u00e9", "é")
    assert calls_of(read_answer(family(name), written, TOOLS)) == [("f", {"a": "é"})]


def test_a_template_that_writes_tools_is_left_to_it() -> None:
    known, _ = detect(V31 + "{% if tools %}{{ tools | tojson }}{% endif %}")
    assert known.name == "deepseek-v3.1-tools"
    assert known.make().adapt(HISTORY, TOOLS)[0] == HISTORY[0]


def test_garbage_behind_the_mark_of_calls_is_content() -> None:
    text = "<｜tool▁calls▁begin｜>garbage"
    for name in ("deepseek-v3", "deepseek-v3.1"):
        assert read_answer(family(name), text, TOOLS) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ('<｜DSML｜ parameter name="a" string="true">x "q" </div>\n{</｜DSML｜ parameter>', {"a": 'x "q" </div>\n{'}),
        ('<｜DSML｜ parameter name="a" string="true">3</｜DSML｜ parameter>', {"a": "3"}),
        (
            '<｜DSML｜ parameter name="b" string="false"> {"x": [1, null]} </｜DSML｜ parameter>',
            {"b": {"x": [1, None]}},
        ),
        ('<｜DSML｜ parameter name="a">3</｜DSML｜ parameter>', {"a": "3"}),
        ('<｜DSML｜ parameter name="b">3</｜DSML｜ parameter>', {"b": 3}),
        ('<｜DSML｜ parameter name="a" string="true">x', {"a": "x\n"}),
        ('<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>', {"a": "x"}),
        ("", {}),
        ("\n", {}),
    ],
)
def test_dsml(inner: str, expected: dict[str, Any]) -> None:
    text = f'Well.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{inner}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    message = read_answer(family("deepseek-v4.1"), text, TOOLS)
    assert calls_of(message) == [("f", expected)]
    assert message["content"] == "Well."


def test_dsml_that_breaks_off() -> None:
    broken = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="b" string="false">nope!'
    message = read_answer(family("deepseek-v4.1"), f"{broken}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>Well.", TOOLS)
    assert [call["incomplete"] for call in message["tool_calls"]] == [True]
    for text in ("<｜DSML｜ calls>\nHm.", "<｜DSML｜ calls>"):
        assert read_answer(family("deepseek-v4.1"), text, TOOLS)["content"] == text
