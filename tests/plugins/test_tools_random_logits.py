"""tool_choice="required" on random logits: whatever the model wants, its call is valid, in every family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import Field

from headrace import LLM, Chat, Tool
from headrace.errors import RequestError
from headrace.types import SamplingParams
from headrace_plugins.dialects.detect import FAMILIES, family_named
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

pytest.importorskip("llguidance", reason="the constraint engine llguidance is not installed")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n"
    "{% endfor %}{% if tools %}{{ tools | length }} tools\n{% endif %}assistant: "
)


class Where(TypedDict):
    city: Literal["Rome", "San José"]
    zip: Annotated[int, Field(ge=0, le=99)] | None


def weather(where: Where, days: Annotated[int, Field(ge=1, le=5)] = 1, sure: bool = True) -> str:
    """The weather."""
    return ""


def search(words: Annotated[list[Literal['a "b"', "c\\d", "{x}"]], Field(max_length=2)]) -> str:
    """Finds."""
    return ""


TOOLS = {made.name: made for made in (Tool.of(weather), Tool.of(search))}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy://vocab=300,seed=3,context=8192", engine={"max_sequences": 4}) as llm:
        yield llm


def outside(llm: LLM, family: str, **options: Any) -> Chat:
    """A chat that hands its calls to the caller."""
    chat = Chat(llm, template=TEMPLATE, **{"tools": [made.schema for made in TOOLS.values()], **options})
    chat._format = TemplateFormat(ChatTemplate(TEMPLATE), llm.tokenizer, family_named(family).make())
    return chat


@pytest.mark.parametrize("family", [known.name for known in FAMILIES])
def test_every_required_call_is_valid(llm: LLM, family: str) -> None:
    called = set()
    for seed in range(4):
        for choice, parallel in (("required", True), ("weather", False), ("search", False)):
            chat = outside(llm, family, tool_choice=choice, parallel=parallel, thinking_budget=8)
            params = SamplingParams(max_tokens=1500, seed=seed, temperature=1.5)
            reply = chat.ask("go", params)
            calls = reply.tool_calls
            if parallel and reply.finish_reason == "length":  # it never stops calling
                calls = [call for call in calls if "incomplete" not in call]
                assert len(calls) > 1
            else:
                assert reply.finish_reason == "tool_calls", (choice, seed, reply.text[:80])
                assert parallel or len(calls) == 1
            for call in calls:
                name = call["function"]["name"]
                assert choice in ("required", name)
                assert "incomplete" not in call
                assert TOOLS[name].bind(call["function"]["arguments"])() == ""
                called.add(name)
            assert len({call["id"] for call in reply.tool_calls}) == len(reply.tool_calls)
    assert called == {"weather", "search"}


@pytest.mark.parametrize("family", ["hermes", "qwen-xml", "gpt-oss"])
def test_required_calls_are_streamed(llm: LLM, family: str) -> None:
    """tool_calls-05: what a client adds up are valid calls."""
    chat = outside(llm, family, tool_choice="required", parallel=False, thinking_budget=8)
    for seed in range(3):
        stream = chat.stream("go", SamplingParams(max_tokens=1500, seed=seed, temperature=1.5))
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for delta in (delta for chunk in stream for delta in chunk.calls):
            names[delta.index] = names.get(delta.index, "") + delta.name
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
        assert stream.result().finish_reason == "tool_calls"
        assert len(names) == 1
        assert TOOLS[names[0]].bind(arguments[0])() == ""
        chat.history = []


def test_a_run_of_required_calls_is_run(llm: LLM) -> None:
    seen: list[Any] = []

    def note(city: Literal["Rome", "Oslo"]) -> str:
        seen.append(city)
        return "noted"

    chat = Chat(llm, tools=[note], tool_choice="note", parallel=False, max_tool_rounds=1)
    answer = chat.stream("go", SamplingParams(max_tokens=120, temperature=1.0))
    results = next(chunk.results for chunk in answer if chunk.results)
    answer.cancel()
    answer.result()
    assert [result.content for result in results] == ["noted"]
    assert seen
    assert set(seen) <= {"Rome", "Oslo"}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}, "pattern"),
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": "3"}}}, "minimum"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "nowhere"),
    ],
)
def test_a_tool_whose_schema_can_not_be_read(llm: LLM, parameters: Any, text: str) -> None:
    """security-10: the request is refused with the tool's name, and the next one runs."""
    fine = {"type": "function", "function": {"name": "fine"}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    chat = Chat(llm, tools=[fine, bad], tool_choice="required")
    with pytest.raises(RequestError, match="HR-TOOL-02: the tool 'bad'") as raised:
        chat.ask("go", SamplingParams(max_tokens=5))
    assert text in raised.value.message
    assert chat.history == []
    assert Chat(llm).ask("hi", SamplingParams(max_tokens=3)).text


def test_many_tools(llm: LLM) -> None:
    """tool_calls-07: 60 tools, 120 KB of schemas."""
    tools = []
    for i in range(60):
        properties = {
            f"field_{i}_{j}": {"type": "string", "enum": [f"value {j}.{k} of tool {i}" for k in range(8)]}
            | {"description": "what the field says " * 4}
            for j in range(7)
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:3]}
        tools.append({"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}})
    assert len(json.dumps(tools)) > 120_000
    chat = outside(llm, "hermes", tools=tools, tool_choice="required", parallel=False)
    reply = chat.ask("go", SamplingParams(max_tokens=2000, temperature=1.0))
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.tool_calls
    assert json.loads(call["function"]["arguments"])
