"""Calls that every family's models write, read back whatever the cut, and cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis (pip install 'headrace[dev]')")

from call_texts import WRITERS, calls_of, family, read_answer, tool
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from headrace_plugins.dialects.parameters import TYPES, json_of

WITHOUT_QUOTES = ("qwen-xml", "glm", "glm-compact", "minimax")
TOOLS = [
    tool("f", a={"type": "string"}, b={"type": "integer"}),
    tool("weather.get-now", city={"type": "string"}, days={"type": "number"}),
    tool("ping"),
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"a": "mkdir -p test/{test1,test2 \"q\" 's' é日🙂\\ \n\t</x> []", "b": -3}),
    ("weather.get-now", {"city": "", "days": 1.5e-05}),
    ("ping", {}),
    ("f", {"a": "[TOOL] {'x': 1}, <|im_end|> ```", "more": {"x": [1, {"y z": None}, [], {}], "t": True, "f": False}}),
]
every_family = pytest.mark.parametrize("name", WRITERS)


@every_family
def test_calls_of_one_answer_come_back(name: str) -> None:
    message = read_answer(family(name), WRITERS[name](CALLS), TOOLS)
    assert calls_of(message) == CALLS
    assert message["content"] == ""


@every_family
def test_text_before_calls_is_content(name: str) -> None:
    text = "Let me look. {x}" + ("\n\n" if "deepseek" in name else "")
    if name == "gpt-oss":
        text = "<|channel|>final<|message|>Let me look. {x}<|end|><|start|>assistant"
    message = read_answer(family(name), text + WRITERS[name](CALLS[:2]), TOOLS)
    if name in ("llama3", "llama-pythonic"):  # their calls have no mark: they are the whole answer
        assert message["content"].startswith("Let me look. {x}")
        return
    assert message["content"] == "Let me look. {x}"
    assert calls_of(message) == CALLS[:2]


@every_family
def test_a_cut_inside_of_a_string_is_incomplete(name: str) -> None:
    text = WRITERS[name]([("f", {"a": "some text that is cut"})])
    message = read_answer(family(name), text[: text.index(" is cut")], TOOLS)
    (call,) = message["tool_calls"]
    assert call["incomplete"]
    assert call["function"]["name"] == "f"
    assert call["function"]["arguments"].endswith("some text that")
    assert message["content"] == ""


@every_family
def test_any_beginning_of_an_answer_is_read(name: str) -> None:
    """Nothing raises, and no call has other arguments than it was written with."""
    made, text = family(name), WRITERS[name](CALLS[:3])
    for n in range(len(text)):
        parser = made.parser(TOOLS)
        parser.push(text[:n])
        parser.finish()
        complete = [call for call in calls_of(parser.message()) if isinstance(call[1], dict)]
        assert complete == CALLS[: len(complete)]


_CHARS = some.characters(blacklist_categories=("Cs", "Cc")) | some.sampled_from("\n\"'\\{}[]()<,:=｜")
_TEXTS = some.text(_CHARS, max_size=9)
_KEYS = some.from_regex("[a-z_][a-z0-9_]{0,5}", fullmatch=True)
_NUMBERS = some.integers(-(2**63), 2**63) | some.floats(allow_nan=False, allow_infinity=False)
_SCALARS = some.none() | some.booleans() | _NUMBERS
_VALUES = some.recursive(
    _SCALARS | _TEXTS,
    lambda each: some.lists(each, max_size=3) | some.dictionaries(_KEYS, each, max_size=3),
    max_leaves=6,
)


@every_family
@settings(max_examples=25, deadline=None)
@given(some.data())
def test_any_arguments_come_back(name: str, data: some.DataObject) -> None:
    arguments = data.draw(some.dictionaries(_KEYS, _VALUES, max_size=3))
    if name in WITHOUT_QUOTES:  # text that looks like another value is that value, where no schema tells them apart
        assume(all(json.loads(json_of(each, TYPES)) == each for each in arguments.values() if isinstance(each, str)))
    written = WRITERS[name]([("ping", arguments), ("f", {"a": "x"})])
    cuts = data.draw(some.lists(some.integers(0, len(written)), max_size=6).map(sorted))
    parser = family(name).parser(TOOLS)
    for start, stop in zip([0, *cuts], [*cuts, len(written)], strict=True):
        parser.push(written[start:stop])
    parser.finish()
    assert calls_of(parser.message()) == [("ping", arguments), ("f", {"a": "x"})]


@every_family
@settings(max_examples=25, deadline=None)
@given(some.data())
def test_any_text_is_read(name: str, data: some.DataObject) -> None:
    """Parts of calls in any order: an answer is never an error, and never depends on its cuts."""
    whole = WRITERS[name](CALLS[:2])
    places = some.integers(0, len(whole))
    pieces = some.lists(some.tuples(places, places).map(lambda span: whole[slice(*span)]) | _TEXTS, max_size=4)
    read_answer(family(name), "".join(data.draw(pieces)), TOOLS)


# --- BFCL ------------------------------------------------------------------------------------------------------------


def _expected() -> Iterator[tuple[str, dict[str, Any], list[tuple[str, dict[str, Any]]]]]:
    folder = Path(os.environ["HEADRACE_CASES"]) / "bfcl"
    for path in sorted(folder.glob("*.jsonl")):
        answers = (folder / "possible_answer" / path.name).read_text(encoding="utf-8").splitlines()
        truths = {each["id"]: each["ground_truth"] for each in map(json.loads, answers)}
        for case in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            calls = [(name, _first(given)) for truth in truths[case["id"]] for name, given in truth.items()]
            yield case["id"], case["function"][0], calls


def _first(given: dict[str, list[Any]]) -> dict[str, Any]:
    """One of the answers that are right; "" stands for an argument that may be left out."""
    return {key: _value(values[0]) for key, values in given.items() if values and values[0] != ""}


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _value(each[0] if isinstance(each, list) and each else each) for key, each in value.items()}
    return [_value(each) for each in value] if isinstance(value, list) else value


@every_family
def test_bfcl_calls_come_back(name: str) -> None:
    if not os.environ.get("HEADRACE_CASES"):
        pytest.skip("HEADRACE_CASES names no folder with bfcl/")
    made = family(name)
    for case, function, calls in _expected():
        tools = [{"type": "function", "function": function}]
        found = calls_of(read_answer(made, WRITERS[name](calls), tools))
        assert found == calls, case
