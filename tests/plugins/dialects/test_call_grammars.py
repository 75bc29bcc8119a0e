"""The grammar of every family holds calls to the schemas of their tools, and lets models write as they do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance (pip install 'headrace[constraints]')")

from call_grammars import Bytes, ToolGrammar, compiled, walked
from call_texts import WRITERS, Calls, family, tool

from headrace.dialogue import Tool, ToolChoice
from headrace.types import Grammar
from headrace_plugins.constraints.compiling import Compiler, Work
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.dialects.grammars import spelled

DEEP = {
    "type": "object",
    "properties": {"l": {"type": "array", "items": {"type": "string", "maxLength": 5}}, "t": {"type": "boolean"}},
    "required": ["l"],
    "additionalProperties": False,
}
TOOLS = [
    tool("f", ["a"], a={"type": "string"}, b={"type": "integer", "minimum": 0}),
    tool("weather.get-now", city={"enum": ["Oslo", "Bern"]}, days={"type": ["number", "null"]}),
    tool("ping"),
    tool("deep", x=DEEP),
]
RIGHT: Mapping[str, Calls] = {
    "any text in a string": [("f", {"a": 'mkdir -p {a,b "y" \'s é日🙂 \n\t\\ </x> []'})],
    "the empty string, and an integer": [("f", {"a": "", "b": 3})],
    "an enum, and a float": [("weather.get-now", {"city": "Oslo", "days": 1.5})],
    "null": [("weather.get-now", {"days": None})],
    "no arguments": [("ping", {})],
    "values in values": [("deep", {"x": {"l": ["ab", "c"], "t": True}})],
    "none of those that may be": [("deep", {})],
}
WRONG: Mapping[str, Calls] = {
    "an argument is missing": [("f", {"b": 1})],
    "out of bounds": [("f", {"a": "x", "b": -1})],
    "another type": [("weather.get-now", {"days": True})],
    "not in the enum": [("weather.get-now", {"city": "Rom"})],
    "an unknown tool": [("nope", {})],
    "an unknown argument": [("ping", {"x": 1})],
    "deep inside": [("deep", {"x": {"l": ["abcdef"]}})],
    "missing deep inside": [("deep", {"x": {"t": True}})],
}
every_family = pytest.mark.parametrize("name", WRITERS)
one_call_an_answer = ("llama3", "gpt-oss")


def written(name: str, calls: Calls) -> str:
    return WRITERS[name](calls).removesuffix("<|call|>")  # which is an end token of gpt-oss


def specials(name: str) -> list[str]:
    """Marks that are special tokens in vocabularies of the family."""
    made = family(name)
    return [mark for mark in made.shown if mark not in made.stop and mark != "｜DSML｜"]


@every_family
@pytest.mark.parametrize("tokens", ["marks are text", "marks are special tokens"])
def test_what_the_grammar_allows(name: str, tokens: str) -> None:
    grammar = ToolGrammar(family(name), TOOLS, specials=() if tokens == "marks are text" else specials(name))
    refused = [what for what, calls in RIGHT.items() if not grammar.accepts(written(name, calls))]
    assert not refused
    allowed = [what for what, calls in WRONG.items() if grammar.accepts(written(name, calls))]
    assert not allowed
    assert not grammar.accepts("")
    assert not grammar.accepts("Let me look.")
    assert not grammar.accepts(written(name, RIGHT["no arguments"])[:-1])


@every_family
def test_several_calls_where_the_choice_allows_them(name: str) -> None:
    two = written(name, [("ping", {}), ("f", {"a": "x"})])
    for parallel in (True, False):
        grammar = ToolGrammar(family(name), TOOLS, ToolChoice("required", parallel=parallel))
        assert grammar.accepts(two) == (parallel and name not in one_call_an_answer)
        assert grammar.accepts(written(name, [("ping", {})]))


@every_family
def test_calls_in_free_text_are_held_to_the_schemas(name: str) -> None:
    made = family(name)
    openings = made.openings(TOOLS)
    tokenizer = Bytes(specials(name))
    body = made.calls(TOOLS, ToolChoice())
    program = compiled({"start": "free", "triggers": list(openings), "body": body}, tokenizer)

    def accepts(text: str) -> bool:
        return walked(program, tokenizer.encode(text, parse_special=True))

    assert accepts("Nothing to call {here}. [1]")
    before = "<|channel|>final<|message|>Well.<|end|><|start|>assistant" if name == "gpt-oss" else "Well.\n\n"
    for calls in RIGHT.values():
        assert accepts(before + written(name, calls))
    for what, calls in WRONG.items():
        if what == "an unknown tool" and name.startswith("llama"):
            continue  # without the name of a tool, it is some list or object
        assert not accepts(before + written(name, calls)), what


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4", "deepseek-v4.1"])
def test_texts_and_json_are_told_apart(name: str) -> None:
    either: dict[str, Any] = {"type": ["string", "integer"]}
    grammar = ToolGrammar(family(name), [tool("g", v=either, w={"type": "string", "enum": ["3", "x"]})])
    for arguments in ({"v": "3"}, {"v": 3}, {"w": "3"}, {"v": "a <b> \n", "w": "x"}):
        assert grammar.accepts(WRITERS[name]([("g", arguments)])), arguments
    for arguments in ({"v": None}, {"w": 3}, {"w": "y"}):
        assert not grammar.accepts(WRITERS[name]([("g", arguments)])), arguments


# --- BFCL ------------------------------------------------------------------------------------------------------------

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None, "String": "string", "Boolean": "boolean"}


_PLAIN_NAME = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")


def _as_json_schema(schema: Any) -> Any:
    """BFCL's types by their names in JSON Schema."""
    if isinstance(schema, list):
        return [_as_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: _as_json_schema(value) for key, value in schema.items()}
    kind = told.get("type")
    if isinstance(kind, str):
        told["type"] = _TYPES.get(kind, kind)
    if kind == "array" and "enum" in told:  # in one of them: of its elements
        told["items"] = {**told.get("items", {}), "enum": told.pop("enum")}
    return {key: value for key, value in told.items() if key != "type" or value is not None}


def _bfcl_tools() -> list[Tool]:
    folder = Path(os.environ["HEADRACE_CASES"]) / "bfcl"
    lines = (line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines())
    functions = [function for line in lines for function in json.loads(line)["function"]]
    return [
        {"type": "function", "function": {**each, "parameters": _as_json_schema(each["parameters"])}}
        for each in functions
    ]


@every_family
def test_bfcl_schemas_compile(name: str) -> None:
    """Every schema for families of either kind; of the others, whose grammars are made alike, one in fifty and those
    whose arguments have names of their own kind."""
    if not os.environ.get("HEADRACE_CASES"):
        pytest.skip("HEADRACE_CASES names no folder with bfcl/")
    tools = _bfcl_tools()
    assert len(tools) > 600
    made = family(name)
    compiler = Compiler(ConstraintOptions(), Vocabulary(Bytes()), ("llguidance",))
    odd = [one for one in tools if not all(map(_PLAIN_NAME.fullmatch, one["function"]["parameters"]["properties"]))]
    assert odd
    for one in tools if name in ("hermes", "qwen-xml") else [*tools[::50], *odd]:
        body = spelled(made.only_calls([one], ToolChoice("required")), lambda _: False)
        compiler.compile(Grammar("tagged", json.dumps({"start": "body", "body": body})), Work(lambda: False, 60))
