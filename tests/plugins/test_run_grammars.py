"""`headrace run` with a schema, a regular expression, a grammar or choices; reasoning on and off; on random logits."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, Grammar
from headrace.cli import main
from headrace.errors import EXIT_CONFIG, EXIT_OK, EXIT_REQUEST, EXIT_USAGE, RequestError

TOY = "toy://vocab=300,seed=3,context=2048"
Outcome = tuple[int, str, str]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Rome", "Oslo"]}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}


@pytest.fixture
def headrace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)

    def call(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        code = main(["run", TOY, "-q", "--max-tokens", "400", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def engine() -> None:
    pytest.importorskip("llguidance", reason="the constraint engine llguidance is not installed")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("form", ["--raw", "--chat"])
def test_every_kind_holds(headrace: Any, form: str) -> None:
    Path("s.json").write_text(json.dumps(SCHEMA))
    Path("g.lark").write_text('start: "<" /[ab]{3}/ ">"')
    Path("g.gbnf").write_text('root ::= "<" [ab]+ ">"')
    Path("g.EBNF").write_text('root ::= "<" [ab] [ab] ">"')
    for options, pattern in (
        (("--schema", "s.json"), r'\{\s*"name":\s*"(Rome|Oslo)",\s*"sure":\s*(true|false)\s*\}'),
        (("--regex", r"\d{3}-[xy]+z"), r"\d{3}-[xy]+z"),
        (("--grammar", "g.lark"), "<[ab]{3}>"),
        (("--grammar", "g.gbnf"), "<[ab]+>"),
        (("--grammar", "g.EBNF"), "<[ab]{2}>"),
        (("--choice", "yes,no"), "yes|no"),
        (("--choice", '["a, b", "c"]'), "a, b|c"),
    ):
        code, out, err = headrace("hello", form, *options)
        assert (code, err) == (EXIT_OK, ""), options
        assert re.fullmatch(pattern, out.removesuffix("\n")), (options, out)
        record = json.loads(headrace("hello", form, "--json", *options)[1])
        assert (record["text"], record["finish_reason"]) == (out.removesuffix("\n"), "stop")


@pytest.mark.usefixtures("engine")
def test_batches(headrace: Any) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "own", "prompt": "a", "constraint": {"kind": "regex", "text": "x{4}"}},
        {"id": "json", "prompt": "a", "constraint": {"kind": "json_schema", "text": SCHEMA}},
        {"id": "all", "prompt": "a"},
        {"id": "odd", "prompt": "a", "constraint": {"kind": "xml", "text": ""}},
        {"id": "lost", "prompt": "a", "constraint": {"text": "x"}},
        {"id": "bad", "prompt": "a", "constraint": {"kind": "regex", "text": "x("}},
    ]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--raw", "--batch", "in.jsonl", "--out", "out.jsonl")
    assert headrace(*options, "--choice", "yes,no")[0] == EXIT_REQUEST
    found = {record["id"]: record for record in map(json.loads, Path("out.jsonl").read_text().splitlines())}
    assert found["own"]["text"] == "xxxx"
    assert list(json.loads(found["json"]["text"])) == ["name", "sure"]
    assert found["all"]["text"] in ("yes", "no")
    assert found["odd"]["error"]["code"] == "HR-CONSTRAINT-01"
    assert found["lost"]["error"]["code"] == "HR-BATCH-02"
    assert "kind" in found["lost"]["error"]["message"]
    assert found["bad"]["error"]["code"] == "HR-CONSTRAINT-02"
    code, _, err = headrace(*options, "--choice", "up,down")
    assert code == EXIT_REQUEST
    assert "HR-BATCH-03" in err


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--regex", "a", "--choice", "b"), EXIT_USAGE, "not allowed with argument"),
        (("--grammar", "g.txt"), EXIT_USAGE, "the suffix '.txt' tells no kind of grammar\nhelp: known suffixes: ."),
        (("--grammar", "grammar"), EXIT_USAGE, "the suffix '' tells no kind"),
        (("--grammar", "s.json"), EXIT_USAGE, "the suffix '.json' tells no kind"),
        (("--grammar", "nowhere.lark"), EXIT_REQUEST, "--grammar nowhere.lark can't be read: No such file"),
        (("--schema", "nowhere.json"), EXIT_REQUEST, "--schema nowhere.json can't be read: No such file"),
        (("--schema", "."), EXIT_REQUEST, "--schema . can't be read"),
        (("--schema", "broken.json"), EXIT_REQUEST, "broken.json is no JSON: Expecting value in line 2, column 7"),
        (("--schema", "deep.json"), EXIT_REQUEST, "--schema deep.json is no JSON that can be read"),
        (("--schema", "latin.json"), EXIT_REQUEST, "--schema latin.json can't be read: 'utf-8' codec"),
        (("--choice", "["), EXIT_USAGE, "is no JSON list"),
        (("--choice", "[1]"), EXIT_USAGE, "is no list of texts"),
        (("--raw", "--thinking"), EXIT_USAGE, "need a chat template"),
        (("--thinking-budget", "-1"), EXIT_REQUEST, "thinking_budget = -1 is not allowed"),
        (("--dialect", "nonsense"), EXIT_CONFIG, "nonsense"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(headrace: Any, options: tuple[str, ...], code: int, text: str) -> None:
    Path("g.txt").write_text("x")
    Path("broken.json").write_text('{"type":\n      nothing}')
    Path("deep.json").write_text("[" * 100_000)
    Path("latin.json").write_bytes(b'{"const": "\xe9"}')
    found = headrace("hello", *options)
    assert found[0] == code, found
    assert text in found[2]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--regex", "a("), "HR-CONSTRAINT-02", ""),
        (("--regex", r"a(?<=b)c"), "HR-CONSTRAINT-0", ""),
        (("--schema", "s.json"), "HR-CONSTRAINT-02", "/properties/a/type"),
        (("--grammar", "e.lark"), "HR-CONSTRAINT-02", ""),
        (("--grammar", "e.gbnf"), "HR-CONSTRAINT-02", ""),
    ],
)
def test_what_the_engine_refuses(headrace: Any, options: tuple[str, ...], code: str, text: str) -> None:
    Path("s.json").write_text('{"properties": {"a": {"type": "notatype"}}}')
    Path("e.lark").write_text("")
    Path("e.gbnf").write_text('root ::= "a')
    found = headrace("hello", "--raw", *options)
    assert found[0] == EXIT_REQUEST
    assert code in found[2]
    assert text in found[2]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "notatype"}'),
        ("json_schema", '{"properties": {"a": {"type": "string", "pattern": "["}}}'),
        ("json_schema", "{"),
        ("json_schema", ""),
        ("regex", "["),
        ("regex", "(?P<"),
        ("regex", "\\"),
        ("regex", "*"),
        ("regex", "(?<=a+)b"),
    ],
)
def test_hostile_grammars_end_their_request_alone(kind: str, text: str) -> None:
    """security-8, security-9: who asks with nonsense gets an error, and nobody else notices."""
    with LLM(TOY) as llm:
        outputs = llm.generate(["a", "b"], [{"max_tokens": 5}, {"max_tokens": 5, "constraint": Grammar(kind, text)}])
        assert [output.finish_reason for output in outputs] == ["length", "error"]
        assert isinstance(outputs[1].error, RequestError)
        assert outputs[1].error.code in ("HR-CONSTRAINT-02", "HR-CONSTRAINT-03")
        assert outputs[0].text == llm.generate("a", {"max_tokens": 5}).text
