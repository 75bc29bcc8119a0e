"""Gemma 4 and FunctionGemma: marked strings, bare keys, and results inside of the model's turn."""

from __future__ import annotations

from typing import Any

import pytest
from call_texts import QUOTE, calls_of, family, read_answer, tool

from headrace.dialogue import Turn
from headrace.testing.toy import ToyTokenizer
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

TOOLS = [tool("f", a={"type": "string"}, b={"type": "integer"}, l={"type": "array", "items": {"type": "string"}})]
TEMPLATE = (
    "{% if tools or enable_thinking %}<|turn>system\n{% if enable_thinking %}<|think|>{% endif %}"
    "{% for t in tools or [] %}<|tool>{{ t.function.name }}<tool|>{% endfor %}<turn|>\n{% endif %}"
    '{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% endmacro %}'
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ show(v) }}{{ '' if loop.last else ',' }}{% endfor %}"
    "{{ '}' }}<tool_call|>{% endfor %}"
    "{% for r in m.tool_responses or [] %}<|tool_response>response:{{ r.name + '{value:' }}{{ show(r.response) + '}' }}"
    "<tool_response|>{% endfor %}{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)


def call(name: str, arguments: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def gemma4(text: str) -> list[tuple[str, Any]]:
    return calls_of(read_answer(family("gemma4"), f"<|tool_call>call:f{text}<tool_call|>", TOOLS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{b:1.5e-05,c:-2,d:1e+21}", {"b": 1.5e-05, "c": -2, "d": 1e21}),
        (f'{{a:{QUOTE}x,y}} "q" {{:{QUOTE}}}', {"a": 'x,y} "q" {:'}),
        ("{key with space:true,no:null}", {"key with space": True, "no": None}),
        (f"{{o:{{B:[1,{QUOTE}t{QUOTE},{{}}],a:[]}}}}", {"o": {"B": [1, "t", {}], "a": []}}),
        (f"{{{QUOTE}a{QUOTE}:{QUOTE}x{QUOTE}, {QUOTE}b{QUOTE} : 2 }}", {"a": "x", "b": 2}),
        ('{"a": "x\\n\\u00e9", "b": 2}', {"a": "x\n\u00e9", "b": 2}),
        ("{a=hello,b=3}", {"a": "hello", "b": 3}),
        ("{a:123,b:123,l:[1,two]}", {"a": "123", "b": 123, "l": ["1", "two"]}),
        ("{}", {}),
    ],
)
def test_values(text: str, expected: dict[str, Any]) -> None:
    """Also those of models that forget marks: then the schema says what a bare text is."""
    assert gemma4(text) == [("f", expected)]


@pytest.mark.parametrize("text", ["{a:1", "{a}", f"{{a:{QUOTE}x{QUOTE} {QUOTE}y{QUOTE}}}", "{:1}", "{a:[1}", "{" * 500])
def test_what_is_no_object_is_incomplete(text: str) -> None:
    message = read_answer(family("gemma4"), f"<|tool_call>call:f{text}<tool_call|> Well.", TOOLS)
    assert [call.get("incomplete") for call in message["tool_calls"]] == [True]
    if "[" not in text and "{{" not in text:
        assert message["content"] == "Well."


def test_text_that_only_looks_like_a_call_is_content() -> None:
    for text in ("<|tool_call>garbage", "<|tool_call>call:", "<|tool_call>call:two words", "call:f{a:1}"):
        assert read_answer(family("gemma4"), text, TOOLS) == {"role": "assistant", "content": text}


def test_reasoning_and_marks_of_turns() -> None:
    text = f"<|channel>thought\nHm.\n<channel|>Well.<|tool_call>call:f{{a:{QUOTE}x{QUOTE}}}<tool_call|><|tool_response>"
    message = read_answer(family("gemma4"), text, TOOLS)
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "Well."
    assert calls_of(message) == [("f", {"a": "x"})]
    assert read_answer(family("gemma4"), "It is 4.<turn|>")["content"] == "It is 4."


def test_results_stand_in_the_turn_of_their_calls() -> None:
    form = TemplateFormat(ChatTemplate(TEMPLATE), ToyTokenizer(300), family("gemma4"))
    calls = [call("f", '{"b": 2, "a": "x"}', "1"), call("f", "{}", "2")]
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "and?"},
    ]
    text = form.prompt(history, Turn(tools=tuple(TOOLS))).text
    written = f"<|tool_call>call:f{{a:{QUOTE}x{QUOTE},b:2}}<tool_call|><|tool_call>call:f{{}}<tool_call|>"
    results = "".join(
        f"<|tool_response>response:f{{value:{QUOTE}{each}{QUOTE}}}<tool_response|>" for each in ("one", "two")
    )
    assert f"<|turn>model\n{written}{results}Done.<turn|>\n<|turn>user\nand?" in text
    assert calls_of(read_answer(family("gemma4"), written, TOOLS)) == [("f", {"a": "x", "b": 2}), ("f", {})]


def test_functiongemma_results_carry_names() -> None:
    history: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call("f", "{}", "1")]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]
    _, result = family("functiongemma").adapt(history, TOOLS)
    assert result["content"] == {"name": "f", "response": {"value": "one"}}
    assert result["name"] == "f"
