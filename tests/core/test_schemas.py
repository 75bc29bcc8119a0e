"""Answers with a schema: from a type to its grammar, and back to an object; on a model of random logits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field, field_validator

from headrace import LLM, Chat, Grammar
from headrace.errors import AnswerError, RequestError
from headrace.schemas import expected, value_of
from headrace.types import Completion, Output, SamplingParams, Timings, Usage

LONG = SamplingParams(max_tokens=400)


class Place(BaseModel):
    name: Literal["Rome", "Oslo"]
    days: Annotated[int, Field(ge=1, le=30)]
    tags: list[bool] = Field(max_length=2)


@dataclass
class Pair:
    left: Literal["a", "b"]
    right: bool


class Bag(TypedDict):
    sure: bool


class Even(BaseModel):
    n: Literal[1, 2]

    @field_validator("n")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("n is odd")
        return value


def output(text: str, reason: Any = "stop", error: Exception | None = None) -> Output:
    completion = Completion(index=0, text=text, token_ids=(), finish_reason=reason, error=error)
    return Output(
        request_id="r",
        prompt=None,
        prompt_token_ids=(),
        completions=(completion,),
        usage=Usage(0, 0, 0),
        timings=Timings(0.0, 0.0, 0.0, 0.0, 0.0),
    )


@pytest.mark.parametrize(
    ("schema", "written", "text", "value"),
    [
        (
            Pair,
            '{"properties": {"left": {"enum": ["a", "b"], "type": "string"}, "right": {"type": "boolean"}}, '
            '"required": ["left", "right"], "type": "object", "additionalProperties": false}',
            '{"left": "a", "right": true}',
            Pair("a", True),
        ),
        (list[int], '{"items": {"type": "integer"}, "type": "array"}', "[1, 2.0]", [1, 2]),
        (int | None, '{"anyOf": [{"type": "integer"}, {"type": "null"}]}', "null", None),
        ({"const": "é"}, '{"const": "é"}', '"é"', "é"),
        ('{"type":  "null"}', '{"type":  "null"}', "null", None),
        (True, "true", "[1]", [1]),
    ],
)
def test_types_and_schemas(schema: Any, written: str, text: str, value: Any) -> None:
    wanted = expected(schema)
    assert wanted.grammar == Grammar("json_schema", written)
    assert value_of(wanted, text, output(text)) == value


def test_grammars_are_schemas_too() -> None:
    assert value_of(expected(Grammar.choice("yes", "no")), "yes", output("yes")) == "yes"
    assert value_of(expected(Grammar("json_object", "")), '{"a": 1}', output("")) == {"a": 1}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (object(), "is no type that a JSON schema can be made of"),
        (open, "is no type that a JSON schema can be made of"),
        ({"const": {1}}, "is no JSON"),
        ({"const": float("inf")}, "is no JSON"),
    ],
)
def test_what_is_no_schema(schema: Any, text: str) -> None:
    with pytest.raises(RequestError, match=f"HR-CONSTRAINT-02: .*{text}"):
        expected(schema)


@pytest.mark.parametrize(
    ("text", "reason", "code", "message"),
    [
        ('{"n": 2', "length", "HR-CONSTRAINT-10", "before its value was complete"),
        ('{"n": 2', "deadline", "HR-CONSTRAINT-10", r"\(deadline\)"),
        ('{"n": 1}', "stop", "HR-CONSTRAINT-09", "n: Value error, n is odd"),
        ('{"n": 2', "stop", "HR-CONSTRAINT-10", "the answer is no JSON"),
    ],
)
def test_answers_without_a_value(text: str, reason: str, code: str, message: str) -> None:
    found = output(text, reason)
    with pytest.raises(AnswerError, match=f"{code}: .*{message}") as raised:
        value_of(expected(Even), text, found)
    assert raised.value.output is found
    with pytest.raises(AnswerError, match="HR-CONSTRAINT-10"):
        value_of(expected({"type": "object"}), "{", output("{"))


# --- with an engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    pytest.importorskip("llguidance", reason="the constraint engine llguidance is not installed")
    with LLM("toy://vocab=300,seed=3,context=4096", engine={"max_sequences": 4}) as llm:
        yield llm


def test_generate_gives_objects(llm: LLM) -> None:
    places = llm.generate(["a", "b", "c"], LONG, schema=Place)
    assert all(isinstance(place, Place) for place in places)
    assert len({place.model_dump_json() for place in places}) > 1
    pair = llm.generate("a", {"max_tokens": 400}, schema=Pair)
    assert isinstance(pair, Pair)
    assert set(llm.generate("a", LONG, schema=Bag)) == {"sure"}
    schema = {"type": "object", "properties": {"x": {"enum": [1, "a"]}}, "required": ["x"], "maxProperties": 1}
    assert llm.generate([1, 2], LONG, schema=schema)["x"] in (1, "a")
    assert llm.generate("a", LONG, schema=json.dumps(schema)) == llm.generate("a", LONG, schema=schema)
    found = asyncio.run(llm.agenerate(["a", "b"], LONG, schema=Pair))
    assert found == llm.generate(["a", "b"], LONG, schema=Pair)


def test_cut_answers_are_named_and_the_others_finish(llm: LLM) -> None:
    few = SamplingParams(max_tokens=3)
    with pytest.raises(AnswerError, match=r"HR-CONSTRAINT-10: the answer ended .*\(length\)") as one:
        llm.generate("a", few, schema=Place)
    assert one.value.output.finish_reason == "length"
    with pytest.raises(AnswerError, match="HR-CONSTRAINT-10: prompt 1: the answer ended") as several:
        llm.generate(["a", "b", "c"], [LONG, few, LONG], schema=Place)
    reasons = [each.finish_reason for each in several.value.outputs]
    assert reasons == ["stop", "length", "stop"]
    assert several.value.output is several.value.outputs[1]
    Place.model_validate_json(several.value.outputs[2].text)
    with pytest.raises(AnswerError, match="HR-CONSTRAINT-10: prompt 0") as all_cut:
        asyncio.run(llm.agenerate(["a", "b"], few, schema=Place))
    assert len(all_cut.value.outputs) == 2


def test_a_type_that_asks_for_more_than_its_schema(llm: LLM) -> None:
    seen: set[Any] = set()
    for seed in range(12):
        try:
            seen.add(llm.generate("a", {"max_tokens": 60, "seed": seed, "temperature": 5.0}, schema=Even).n)
        except AnswerError as error:
            seen.add(f"{error.code}: {error.message}")
    assert seen == {2, "HR-CONSTRAINT-09: the type refuses the answer: n: Value error, n is odd"}


def test_a_value_that_breaks_what_masks_can_not_enforce() -> None:
    """on_unsupported = "validate", from the config to the error: most runs hold, the others say what they break."""
    pytest.importorskip("llguidance", reason="the constraint engine llguidance is not installed")
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    item = {"type": "string", "pattern": "^[ab]$|^[ab]c+$"}
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": 2, "maxItems": 3}
    held: list[Any] = []
    broken: list[AnswerError] = []
    tables: dict[str, Any] = {"constraints": {"use": "auto", "on_unsupported": "validate"}}
    with LLM("toy://vocab=300,seed=3,context=4096", **tables) as llm:
        for seed in range(16):
            try:
                held.append(
                    llm.generate("x", SamplingParams(max_tokens=400, seed=seed, temperature=1.0), schema=schema)
                )
            except AnswerError as error:
                broken.append(error)
    assert held
    assert all(len(set(value)) == len(value) for value in held)
    assert broken
    for error in broken:
        assert str(error).startswith("HR-CONSTRAINT-09: the finished value breaks 'uniqueItems' at #")
        assert error.output.finish_reason == "error"
        value = json.loads(error.output.text)
        assert len(set(value)) < len(value)
    with (
        LLM("toy://vocab=300,seed=3") as llm,
        pytest.raises(RequestError, match="HR-CONSTRAINT-03: 'uniqueItems' at #"),
    ):
        llm.generate("x", LONG, schema=schema)


def test_what_does_not_go_with_a_schema(llm: LLM) -> None:
    for options, code in (
        ({"echo": True}, "HR-REQUEST-18"),
        ({"params": {"n": 2}}, "HR-REQUEST-18"),
        ({"params": {"constraint": Grammar.regex("a")}}, "HR-CONSTRAINT-11"),
        ({"schema": {"type": "notatype"}}, "HR-CONSTRAINT-02"),
        ({"schema": "{"}, "HR-CONSTRAINT-02"),
    ):
        with pytest.raises(RequestError, match=code):
            llm.generate("a", **{"schema": Place, **options})  # type: ignore[arg-type]
    assert llm.generate("a", {"max_tokens": 2}).finish_reason == "length"


def test_a_chats_answer_is_parsed(llm: LLM) -> None:
    chat = Chat(llm)
    reply = chat.ask("Where?", LONG, schema=Place)
    assert isinstance(reply.parsed, Place)
    assert chat.history[-1]["content"] == reply.text
