"""A real model that answers with objects and calls tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("llguidance", reason="the constraint engine llguidance is not installed")

from headrace import LLM, Chat
from headrace.types import SamplingParams

pytestmark = pytest.mark.gguf

GREEDY = SamplingParams(max_tokens=200, temperature=0)


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]
    kind: Literal["capital", "town"]


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    backend: dict[str, Any] = {"use": "gguf", "context_tokens": 1024, "slots": 2, "trial_load": False}
    with LLM(smollm2, backend=backend) as llm:
        yield llm


def test_a_schema_gives_an_object(llm: LLM) -> None:
    city = llm.generate("Facts about Paris in JSON: ", GREEDY, schema=City)
    assert isinstance(city, City)
    reply = Chat(llm).ask("Tell me about Paris as JSON with name, country and kind.", GREEDY, schema=City)
    assert isinstance(reply.parsed, City)
    assert "Paris" in (city.name, reply.parsed.name)


def test_a_required_tool_is_called(llm: LLM) -> None:
    asked: list[Any] = []

    def weather(city: Annotated[str, Field(max_length=30)], unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
        """The weather in a city.

        Args:
            city: its name
            unit: of the temperature
        """
        asked.append((city, unit))
        return "sunny, 21 degrees"

    chat = Chat(llm, tools=[weather], tool_choice="required", parallel=False)
    answer = chat.stream("What is the weather in Paris?", GREEDY)
    calls, result = [], None
    for chunk in answer:
        calls += chunk.calls
        if chunk.results:
            (result,) = chunk.results
        elif result is not None and chunk.text:  # it goes on with the result; what it says is not tested
            break
    answer.cancel()
    assert result is not None
    assert (result.content, result.error) == ("sunny, 21 degrees", None)
    assert calls[0].name == "weather"
    assert set(json.loads("".join(each.arguments for each in calls if each.index == 0))) <= {"city", "unit"}
    assert asked[0][1] in ("celsius", "fahrenheit")
