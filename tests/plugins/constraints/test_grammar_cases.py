"""Recorded answers of llama.cpp, llguidance and xgrammar, where HEADRACE_CASES names a folder with constraints/."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_engines import ENGINES, engine, of_lark

from headrace.errors import RequestError
from headrace.testing.accepts import constraint_accepts
from headrace_plugins.constraints.gbnf import read_gbnf

ROOT = Path(os.environ.get("HEADRACE_CASES", "no-such-folder")) / "constraints"
DEVIATIONS = {
    "llamacpp-gi-012": "names tokens by numbers that the vocabulary of bytes does not have, and all tokens but one",
    "llamacpp-gi-014": "names tokens by numbers that the vocabulary of bytes does not have, and all tokens but one",
    "xgr-0006": "Regex(..., json_string=true): how xgrammar spells a pattern inside of JSON is not documented",
    "xgr-0014": "Regex(..., json_string=true): how xgrammar spells a pattern inside of JSON is not documented",
}
"""Refused with HR-CONSTRAINT-03."""
_ANY_LENGTH = "JSON Schema sets no limit to digits; llama.cpp writes numbers of 16"
SCHEMA_DEVIATIONS: dict[str, tuple[str, tuple[str, ...] | str]] = {
    "llamacpp-gi-000": (f"{_ANY_LENGTH}; -0 is 0", ("1" + "0" * 32, "-0")),
    "llamacpp-gi-001": (_ANY_LENGTH, ("12345678900000000",)),
    "llamacpp-gi-026": (
        "a list of items is no schema of draft 2020-12, which holds without $schema",
        "HR-CONSTRAINT-02",
    ),
    "llamacpp-gi-040": ("minItems and maxItems say nothing of what is no array", ("1",)),
    "llamacpp-gi-041": (
        "other properties are allowed unless the schema says they are not",
        ('{ "number": 1600, "street_name": "Pennsylvania", "street_type":"Avenue", "direction":"NW"}',),
    ),
    "llamacpp-gi-046": ("uniqueItems over any text is refused, where llama.cpp ignores it", "HR-CONSTRAINT-03"),
    "llamacpp-js2g-020": ("a list of items is no schema of draft 2020-12", "HR-CONSTRAINT-02"),
    "llamacpp-js2g-031": ("prefixItems is a list", "HR-CONSTRAINT-02"),
    "llamacpp-js2g-032": ("prefixItems is a list", "HR-CONSTRAINT-02"),
    "llamacpp-js2g-036": ("prefixItems is a list", "HR-CONSTRAINT-02"),
}
"""Why, and the texts on which we differ, or the code with which the schema is refused."""
SAMPLES = {
    "arithmetic": "(a +12)*b/c2=x\nz=z\n",
    "c": "int main(int x){int y = 3;foo (1, 2);if(x==y){return x+1;}else{z = 3;}// hi\n/* a*b */}",
    "chess": "1. e4 e5\n2. Nf3 Nc6\n3. Bb5 a6\n10. O-O Be7\n",
    "english": "Hello, World! 42",
    "japanese": "\u3053\u3093\u306b\u3061\u306f \u4e16\u754c",
    "json": '{"a": [1, -2.5e+1, "x\\n\\u00e9", {}], "b": {"c": null} }',
    "json_arr": '[\n1,\n{"a": true },\n"\u00e9"]',
    "list": "- a b\n- c \u00e9\n",
    "vllm-sql": "SELECTcol_1fromtable_2wherecol_2=1",
}
BROKEN = {
    "arithmetic": "(a +12*b=x\n",
    "c": "int main(int x){return x}",
    "chess": "1. e4 e5\n",
    "english": "Hello,  World",
    "japanese": "\u3053x",
    "json": '{"a": 01}',
    "json_arr": "[1]",
    "list": "- a\nb\n",
    "vllm-sql": "SELECTcol_3fromtable_2wherecol_2=1",
}

pytestmark = pytest.mark.skipif(not ROOT.is_dir(), reason="HEADRACE_CASES names no folder with constraints/")


def _cases(name: str) -> Iterator[dict]:
    path = ROOT / f"{name}.jsonl"
    if path.is_file():
        yield from map(json.loads, path.read_text().splitlines())


def _grammars() -> list[dict]:
    names = ("llamacpp_grammar_integration", "xgrammar_recorded_sample")
    return [case for name in names for case in _cases(name) if case["kind"] in ("gbnf", "ebnf")]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", _grammars(), ids=lambda case: case["id"])
def test_as_recorded(case: dict, name: str) -> None:
    if case["id"] in DEVIATIONS:
        with pytest.raises(RequestError) as caught:
            read_gbnf(case["source"], case["kind"])
        assert caught.value.code == "HR-CONSTRAINT-03"
        return
    accepts = engine(name, read_gbnf(case["source"], case["kind"]))
    assert [text for text in case["accept"] if not accepts(text)] == []
    assert [text for text in case["reject"] if accepts(text)] == []


def _schemas(name: str) -> list[dict]:
    return [case for case in _cases(name) if case["kind"] == "json_schema"]


@pytest.mark.parametrize("case", _schemas("llamacpp_grammar_integration"), ids=lambda case: case["id"])
def test_schemas_as_recorded(case: dict) -> None:
    pytest.importorskip("llguidance", reason="needs headrace[constraints]")
    recorded = dict.fromkeys(case["accept"], True) | dict.fromkeys(case["reject"], False)
    _, expected = SCHEMA_DEVIATIONS.get(case["id"], ("", ()))
    if isinstance(expected, str):
        with pytest.raises(RequestError) as caught:
            constraint_accepts("json_schema", case["source"], b"")
        assert caught.value.code == expected
        return
    differs = [
        text for text, accept in recorded.items()
        if constraint_accepts("json_schema", case["source"], text.encode()) != accept
    ]  # fmt: skip
    assert differs == list(expected)


@pytest.mark.parametrize("case", _schemas("llamacpp_json_schema_to_grammar"), ids=lambda case: case["id"])
def test_schemas_compile_as_recorded(case: dict) -> None:
    pytest.importorskip("llguidance", reason="needs headrace[constraints]")
    _, expected = SCHEMA_DEVIATIONS.get(case["id"], ("", ""))
    if not case["compile_error"] and not expected:
        constraint_accepts("json_schema", case["source"], b"")
        return
    with pytest.raises(RequestError) as caught:
        constraint_accepts("json_schema", case["source"], b"")
    assert not expected or caught.value.code == expected


@pytest.mark.parametrize("case", list(_cases("llguidance_lark_sample")), ids=lambda case: case["id"])
def test_lark_as_recorded(case: dict) -> None:
    if case.get("compile_error"):
        with pytest.raises(ValueError, match=re.escape(case.get("message_contains", ""))):
            of_lark(case["source"])
        return
    accepts = of_lark(case["source"])
    assert [text for text in case.get("accept", []) if not accepts(text)] == []
    rejected = [text.removeprefix("FINAL_REJECT:") for text in case.get("reject", [])]
    assert [text for text in rejected if accepts(text)] == []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.gbnf")), ids=lambda path: path.name)
def test_example_grammars(path: Path) -> None:
    rules = read_gbnf(path.read_text())
    first, second = (engine(name, rules) for name in ENGINES)
    assert first(SAMPLES[path.stem])
    assert second(SAMPLES[path.stem])
    assert not first(BROKEN[path.stem])
    assert not second(BROKEN[path.stem])
    data = SAMPLES[path.stem].encode()
    for index in range(len(data)):
        shorter = data[:index] + data[index + 1 :]
        assert first(shorter) == second(shorter), shorter


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.lark")), ids=lambda path: path.name)
def test_example_lark(path: Path) -> None:
    accepts = of_lark(path.read_text())
    sample = b"start: (a | B)+\n" if path.stem == "lark" else path.with_suffix(".xml").read_bytes()
    assert accepts(sample)
    end = sample.rindex(b")" if path.stem == "lark" else b">")
    assert not accepts(sample[:end] + sample[end + 1 :])
