"""`headrace constraint check`: who serves a grammar and what is enforced, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import EXIT_CHECK, EXIT_OK, EXIT_REQUEST, EXIT_USAGE

PERSON = {
    "title": "a person",
    "type": "object",
    "properties": {"name": {"type": "string", "format": "date"}, "tags": {"items": {"type": "string"}}},
    "required": ["name"],
    "if": {"required": ["tags"]},
    "then": {"minProperties": 2},
}


@pytest.fixture(autouse=True)
def llguidance() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def check(name: str, text: str, *options: str) -> tuple[int, str]:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        code = main(["constraint", "check", str(file), *options])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return check


def test_what_is_enforced_is_counted(check: Any) -> None:
    code, printed = check("person.json", json.dumps(PERSON))
    assert code == EXIT_OK
    lines = printed.splitlines()
    assert lines[0].endswith("person.json: json_schema, served by llguidance")
    rows = [line.split(maxsplit=2) for line in lines]
    assert ["type", "3", "#/type, #/properties/name/type, #/properties/tags/items/type"] in rows
    assert ["required", "2", "#/required, #/if/required"] in rows
    assert ["minProperties", "1", "#/then/minProperties"] in rows
    silent = lines[lines.index("says nothing:") :]
    assert [line.split()[0] for line in silent[1:]] == ["title", "format"]


def test_formats_count_when_they_have_to_hold(check: Any) -> None:
    _, printed = check("person.json", json.dumps(PERSON), "--assert-format", "--json")
    found = json.loads(printed)
    assert found["engine"] == "llguidance"
    assert found["enforced"]["format"] == ["#/properties/name/format"]
    assert set(found["annotations"]) == {"title"}
    assert found["error"] is None
    assert found["size_bytes"] > 0


def test_conflicts_are_named(check: Any) -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"pattern": "(?<=a)b"}}}
    code, printed = check("list.json", json.dumps(schema), "--json")
    assert code == EXIT_CHECK
    found = json.loads(printed)
    assert found["engine"] == ""
    assert found["error"]["code"] == "HR-CONSTRAINT-03"
    assert {each["keyword"] for each in found["conflicts"]} == {"uniqueItems", "pattern"}
    assert any(each["pointer"].startswith("#/properties/a") for each in found["conflicts"])
    assert "pattern" not in found["enforced"]
    code, printed = check("list.json", json.dumps(schema))
    assert code == EXIT_CHECK
    assert "refused" in printed.splitlines()[0]
    assert "HR-CONSTRAINT-03" in printed


def test_drafts(check: Any) -> None:
    tuples = json.dumps({"items": [{"type": "integer"}]})
    assert check("tuple.json", tuples)[0] == EXIT_CHECK
    code, printed = check("tuple.json", tuples, "--draft", "7")
    assert code == EXIT_OK
    assert "#/items/0/type" in printed
    code, printed = check("tuple.json", tuples, "--draft", "9")
    assert code == EXIT_USAGE
    assert "2020-12" in printed


@pytest.mark.parametrize(
    ("name", "text", "options", "kind"),
    [
        ("a.gbnf", 'root ::= "a"', (), "gbnf"),
        ("a.ebnf", 'root ::= "a"', (), "ebnf"),
        ("a.lark", 'start: "a"', (), "lark"),
        ("a.regex", "a+", (), "regex"),
        ("a.txt", "a+", ("--kind", "regex"), "regex"),
        ("a.json", '["yes", "no"]', ("--kind", "choice"), "choice"),
    ],
)
def test_kinds(check: Any, name: str, text: str, options: tuple[str, ...], kind: str) -> None:
    code, printed = check(name, text, *options)
    assert code == EXIT_OK
    assert printed.strip().endswith(f"{name}: {kind}, served by llguidance")


def test_what_is_wrong_with_the_file(check: Any, tmp_path: Path) -> None:
    code, printed = check("a.gbnf", 'root ::= "a"\nb ::= missing\nroot2 ::= b')
    assert (code, "line 2" in printed) == (EXIT_CHECK, True)
    assert check("a.doc", "x")[0] == EXIT_USAGE
    assert main(["constraint", "check", str(tmp_path / "none.json")]) == EXIT_REQUEST
    assert check("a.lark", 'start: "a"', "--engine", "xgrammar")[0] == EXIT_CHECK
