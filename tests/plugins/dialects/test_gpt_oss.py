"""gpt-oss: channels, recipients, and what templates want of the history."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_texts import calls_of, family, read, read_answer, tool

from headrace.dialogue import ToolChoice, Turn
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.dialects.detect import detect
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

TOOLS = [tool("f", a={"type": "string"}), tool("g.h-i")]
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)


def gpt_oss(text: str, **more: Any) -> dict[str, Any]:
    return read_answer(family("gpt-oss"), text, TOOLS, **more)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        "<|channel|>analysis to=functions.f code",
    ],
)
@pytest.mark.parametrize("before", ["", ANALYSIS])
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
def test_every_header_of_a_call(header: str, before: str, end: str) -> None:
    message = gpt_oss(f'{before}{header}<|message|>{{"a": "x<|call|>"}}{end}')
    assert calls_of(message) == [("f", {"a": "x<|call|>"})]
    assert message["content"] == ""
    assert message.get("reasoning_content") == ("Hm." if before else None)


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is {1} <b>.<|return|>"
    )
    message = gpt_oss(text)
    assert message["content"] == "I look.\n\nIt is {1} <b>."
    assert message["reasoning_content"] == "A\n\nB"


def test_calls_after_each_other() -> None:
    text = (
        "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant<|channel|>commentary "
        "to=functions.g.h-i<|message|><|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    message = gpt_oss(text)
    assert calls_of(message) == [("f", {}), ("g.h-i", {})]
    assert message["content"] == "Done."


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("plain text", "plain text"),
        ("<|channel|>?? odd text<|end|>", "?? odd text"),
        ("<|channel|>comment<|message|>hi<|end|>", "hi"),
        ("<|message|>hi<|return|>", "hi"),
        ("<|channel|>comm", ""),
        ("<|start|>assistant", ""),
        ("<|end|>", ""),
    ],
)
def test_malformed_headers_lose_no_text(text: str, content: str) -> None:
    assert gpt_oss(text)["content"] == content


def test_calls_that_break_off() -> None:
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    message = gpt_oss(f"{head}{{broken}}<|call|><|start|>assistant<|channel|>final<|message|>x")
    assert [call["incomplete"] for call in message["tool_calls"]] == [True]
    assert message["content"] == "x"
    assert gpt_oss(f'{head}{{"a": "cu')["tool_calls"][0]["incomplete"]


def test_without_tools_nothing_is_a_call() -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'
    message = read_answer(family("gpt-oss"), text, calls=False)
    assert message == {"role": "assistant", "content": '{"a": 1}'}


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def form() -> TemplateFormat:
    known, _ = detect(TEMPLATE)
    assert known.name == "gpt-oss"
    return TemplateFormat(ChatTemplate(TEMPLATE), ToyTokenizer(300), known.make())


def test_the_history(form: TemplateFormat) -> None:
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": '{"a": "é"}'}}
        for id, name in (("1", "f"), ("2", "g.h-i"))
    ]
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]
    text = form.prompt(history, Turn(tools=tuple(TOOLS), thinking=False)).text
    assert "Reasoning: low" in text
    order = [
        "analysis<|message|>Hm.\n\nI look.<|end|>",
        "to=functions.f<",
        '{"a": "é"}',
        "one",
        "to=functions.g.h-i<",
        "two",
    ]
    assert sorted(order, key=text.index) == order


def test_a_prefill_begins_the_content(form: TemplateFormat) -> None:
    turn = Turn(prefill="It is")
    prompt = form.prompt([{"role": "user", "content": "hi"}], turn)
    assert prompt.text.endswith("<|start|>assistant<|channel|>final<|message|>It is")
    assert read(lambda: form.parser(prompt, turn), " 4.<|return|>")["content"] == "It is 4."


def test_a_schema_is_of_the_final_channel(form: TemplateFormat) -> None:
    prompt = form.prompt(
        [{"role": "user", "content": "hi"}], Turn(schema=Grammar("json_schema", '{"type": "integer"}'))
    )
    assert prompt.constraint is not None
    document = json.loads(prompt.constraint.text)
    assert document["think"]["begin"] == "<|channel|>analysis<|message|>"
    assert {"schema": {"type": "integer"}} in document["body"]["seq"]
    assert (
        read(lambda: form.parser(prompt), "<|channel|>final <|constrain|>json<|message|>4<|return|>")["content"] == "4"
    )


def test_what_an_answer_is_held_to(form: TemplateFormat) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance (pip install 'headrace[constraints]')")
    from call_grammars import Bytes, compiled, walked

    names = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]
    tokenizer = Bytes(names)
    form = TemplateFormat(form.template, tokenizer, form.family)

    def accepts(turn: Turn, text: str) -> bool:
        constraint = form.prompt([{"role": "user", "content": "hi"}], turn).constraint
        assert constraint is not None
        return walked(compiled(json.loads(constraint.text), tokenizer), tokenizer.encode(text, parse_special=True))

    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}'
    final = "<|channel|>final<|message|>4"
    required = Turn(tools=tuple(TOOLS), choice=ToolChoice("required"))
    schema = Turn(schema=Grammar("json_schema", '{"type": "integer"}'))
    auto = Turn(tools=tuple(TOOLS))
    for before in ("", ANALYSIS):
        assert accepts(required, before + call)
        assert not accepts(required, before + final)
        assert not accepts(required, before + call.replace('"x"', "3"))
        assert accepts(schema, before + final)
        assert not accepts(schema, before + final.replace("4", "four"))
        assert accepts(auto, before + call)
        assert accepts(auto, before + final)
        assert not accepts(auto, before + call.replace('"x"', "3"))
