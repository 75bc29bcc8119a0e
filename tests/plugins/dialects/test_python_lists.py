"""Calls in Python's notation (LFM2, Llama 4), and Llama's JSON, which is the whole answer."""

from __future__ import annotations

from typing import Any

import pytest
from call_texts import calls_of, family, read_answer, tool

from headrace.dialogue import Turn
from headrace.testing.toy import ToyTokenizer
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

TOOLS = [tool("f", a={"type": "string"}, b={"type": "integer"}), tool("math.fac-t", n={"type": "number"})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(a='x', b=-1)", {"a": "x", "b": -1}),
        ('f( a = "x" , b = 1 , )', {"a": "x", "b": 1}),
        ("f('x', 2)", {"a": "x", "b": 2}),
        ("f('x', b=2)", {"a": "x", "b": 2}),
        ("f()", {}),
        (r"f(a='it\'s \"\\ \n\x41\u00e9\U0001f642\101\q')", {"a": "it's \"\\ \nA\u00e9\U0001f642A\\q"}),
        (r"f(a='\ud83d\ude42')", {"a": "\U0001f642"}),
        ("f(a='it's {here}, ok', b=1)", {"a": "it's {here}, ok", "b": 1}),
        ("f(a='''x'y\n''', c=\"\"\"z\"\"\", d='', e=\"\")", {"a": "x'y\n", "c": "z", "d": "", "e": ""}),
        ("f(a='x' \"y\"\n'z')", {"a": "xyz"}),
        (
            "f(l=[1, (2,), [], ()], d={'k': {'x y': None}, \"t\": True})",
            {"l": [1, [2], [], []], "d": {"k": {"x y": None}, "t": True}},
        ),
        ("f(a=true, b=null, c=False)", {"a": True, "b": None, "c": False}),
        ("f(a=1_000, b=.5, c=5., d=0x10, e=1e3, g=+3)", {"a": 1000, "b": 0.5, "c": 5.0, "d": 16, "e": 1000.0, "g": 3}),
        ("f(**{'a-b': 1, 'c': 'x'}, b=2)", {"a-b": 1, "c": "x", "b": 2}),
    ],
)
def test_literals(text: str, expected: dict[str, Any]) -> None:
    written = f"<|tool_call_start|>[{text}, math.fac-t(n=2.5)]<|tool_call_end|>Done."
    message = read_answer(family("lfm2"), written, TOOLS)
    assert calls_of(message) == [("f", expected), ("math.fac-t", {"n": 2.5})]
    assert message["content"] == "Done."


@pytest.mark.parametrize(
    "value", ["os.system", "nan", "1 + 2", "f'x'", "{1, 2}", "{1: 2}", "[1", "'x", "lambda: 1", "[" * 300]
)
def test_what_is_no_literal_is_incomplete(value: str) -> None:
    message = read_answer(family("lfm2"), f"<|tool_call_start|>[f(a={value})]<|tool_call_end|> x", TOOLS)
    assert [call["incomplete"] for call in message["tool_calls"]] == [True]


def test_json_in_the_block_is_read_too() -> None:
    text = '<|tool_call_start|>[{"name": "f", "arguments": {"a": "x"}}]<|tool_call_end|>'
    assert calls_of(read_answer(family("lfm2"), text, TOOLS)) == [("f", {"a": "x"})]


def test_blocks_without_calls_are_content() -> None:
    for text in ("<|tool_call_start|>[nothing]<|tool_call_end|>", "<|tool_call_start|>Hm.", "<|tool_call_start|>[]"):
        assert read_answer(family("lfm2"), text, TOOLS)["content"].startswith(text[:20])


def test_reasoning_of_the_history_is_thinking() -> None:
    history = [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]
    assert family("lfm2").adapt(history, ())[0]["thinking"] == "hm"


# --- Llama -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"a": "x"}}<|eot_id|>', [("f", {"a": "x"})]),
        (
            '<|python_tag|>{\n  "type": "function",\n  "name": "f",\n  "parameters": {"b": 10}\n}<|eom_id|>',
            [("f", {"b": 10})],
        ),
        ('{"parameters": {"b": 1}, "name": "f"}', [("f", {"b": 1})]),
        ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 1}}', [("f", {}), ("f", {"b": 1})]),
        ('{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {"b": 1}}', [("f", {}), ("f", {"b": 1})]),
        ('<|python_tag|>f.call(a="x")<|eom_id|>', [("f", {"a": "x"})]),
        ("[f(a='x'), math.fac-t(n=1)]<|eot|>", [("f", {"a": "x"}), ("math.fac-t", {"n": 1})]),
    ],
)
@pytest.mark.parametrize("name", ["llama3", "llama-pythonic"])
def test_calls_that_are_the_whole_answer(name: str, text: str, expected: Any) -> None:
    message = read_answer(family(name), text, TOOLS)
    assert calls_of(message) == expected
    assert message["content"] == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "parameters": {"a": 1}}',
        '{"name": "f"}',
        '{"name": "f", "age": 3}',
        '{"a": 1} and more',
        "[1, 2, 3]",
        "[f(x) is a function]",
        "[g(a=1)]",
        "{",
        '{"name": "f", "parameters": "x"}',
        'Use {"name": "f", "parameters": {}} for it.',
        "<|python_tag|>print(1)",
    ],
)
@pytest.mark.parametrize("name", ["llama3", "llama-pythonic"])
def test_other_json_and_lists_are_content(name: str, text: str) -> None:
    message = read_answer(family(name), text, TOOLS)
    assert not [call for call in message.get("tool_calls", ()) if not call.get("incomplete")]
    if "tool_calls" not in message:
        assert message["content"] == text


LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def test_calls_of_the_history_get_a_message_each() -> None:
    form = TemplateFormat(ChatTemplate(LLAMA), ToyTokenizer(300), family("llama3"))
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": f'{{"b": {i}}}'}} for i in range(2)
    ]
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
        {"role": "tool", "tool_call_id": "0", "content": "zero"},
        {"role": "assistant", "content": "Done."},
    ]
    text = form.prompt(history, Turn(tools=tuple(TOOLS))).text
    order = ['{"b": 0}', "zero", '{"b": 1}', "first", "Done."]
    assert sorted(order, key=text.index) == order
    assert [text.count(each) for each in order] == [1] * 5
