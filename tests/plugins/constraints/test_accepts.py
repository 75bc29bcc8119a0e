"""headrace.testing.constraint_accepts: a text and a grammar, without a model."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from headrace.catalog import Catalog
from headrace.errors import HeadraceError, PluginError, RequestError
from headrace.hooks import ConstraintSpec, hookimpl
from headrace.testing import constraint_accepts
from headrace.testing.accepts import END, ByteTokenizer
from headrace_plugins.constraints.engines import SERVES

SHARED = {"http://x.test/count": {"type": "integer", "minimum": 0}}


@pytest.fixture(autouse=True)
def llguidance() -> None:
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")


@pytest.mark.parametrize("engine", ["auto", *SERVES])
def test_every_kind(engine: str) -> None:
    for name in SERVES if engine == "auto" else (engine,):
        pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    for kind, text, good, bad in (
        ("json_schema", '{"type": "integer"}', b"12", b'"12"'),
        ("json_schema", '{"const": "\u00e9"}', b'"\\u00e9"', b'"e"'),
        ("json_object", "{}", b'{"a": 1}', b"1"),
        ("regex", "[a-z]+", b"ab", b"aB"),
        ("choice", '["yes", "no"]', b"no", b"n"),
        ("gbnf", 'root ::= "x"+', b"xx", b""),
        ("ebnf", 'root ::= "x"{2}', b"xx", b"xxx"),
        ("tagged", '{"triggers": ["<t>"], "body": {"seq": ["<t>", {"regex": "[0-9]"}]}}', b"a <t>1", b"<t>a"),
    ):
        assert constraint_accepts(kind, text, good, engine=engine), (kind, good)
        assert not constraint_accepts(kind, text, bad, engine=engine), (kind, bad)
        if kind != "tagged":  # free text is free
            assert not constraint_accepts(kind, text, good + b"\xff", engine=engine), kind


def test_draft_and_documents() -> None:
    tuples = json.dumps({"items": [{"type": "integer"}]})
    assert constraint_accepts("json_schema", tuples, b'[1, "a"]', draft="draft7")
    assert not constraint_accepts("json_schema", tuples, b'["a"]', draft="7")
    with pytest.raises(RequestError, match="items"):
        constraint_accepts("json_schema", tuples, b"[]")
    named = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]})
    assert not constraint_accepts("json_schema", named, b'["a"]', draft="2020-12"), "$schema says it"
    remote = json.dumps({"$ref": "http://x.test/count"})
    assert constraint_accepts("json_schema", remote, b"3", documents=SHARED)
    assert not constraint_accepts("json_schema", remote, b"-3", documents=SHARED)
    with pytest.raises(RequestError, match=r"http://x\.test/count"):
        constraint_accepts("json_schema", remote, b"3")


def test_files_may_be_documents(tmp_path: Any) -> None:
    remote = json.dumps({"$ref": "http://x.test/count"})
    file = tmp_path / "count.json"
    file.write_text(json.dumps(SHARED["http://x.test/count"]))
    assert not constraint_accepts("json_schema", remote, b"-3", documents={"http://x.test/count": str(file)})
    for text in ("{", None):
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        with pytest.raises(RequestError) as refused:
            constraint_accepts("json_schema", remote, b"3", documents={"http://x.test/count": str(file)})
        assert refused.value.code == "HR-CONSTRAINT-02"
        assert "http://x.test/count" in refused.value.message


def test_what_is_wrong_is_raised() -> None:
    with pytest.raises(PluginError, match="nope"):
        constraint_accepts("regex", "a", b"a", engine="nope")
    with pytest.raises(RequestError, match="draft"):
        constraint_accepts("json_schema", "{}", b"1", draft="9")
    with pytest.raises(HeadraceError) as refused:
        constraint_accepts("json_schema", '{"type": "array", "uniqueItems": true}', b"[]")
    assert refused.value.code == "HR-CONSTRAINT-03"


def test_engines_of_other_plugins() -> None:
    plugin = ModuleType("others")
    plugin.headrace_api = 1  # type: ignore[attr-defined]

    @hookimpl
    def headrace_constraints() -> Any:
        yield ConstraintSpec(name="toy", kinds=("charset",), factory="toys:make", summary="")

    toys = ModuleType("toys")
    toys.make = lambda options, tokenizer: __import__("headrace.testing.toy").testing.toy.ToyConstraint(tokenizer)  # type: ignore[attr-defined]
    plugin.headrace_constraints = headrace_constraints  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "toys", toys)
        catalog = Catalog.load(extra={"others": plugin})
        assert constraint_accepts("charset", "ab{2,3}", b"abb", engine="toy", catalog=catalog)
        assert not constraint_accepts("charset", "ab{2,3}", b"a", engine="toy", catalog=catalog)
        with pytest.raises(RequestError, match="draft"):
            constraint_accepts("charset", "ab{2,3}", b"a", engine="toy", draft="7", catalog=catalog)


def test_a_grammar_without_texts_accepts_none() -> None:
    assert not constraint_accepts("json_schema", "false", b"1")
    assert not constraint_accepts("gbnf", 'root ::= "a" root', b"a")


def test_bytes_are_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("é")] == [b"\xc3", b"\xa9"]
    assert [token for token in range(tokenizer.n_vocab) if tokenizer.is_special(token)] == [END]
    with pytest.raises(IndexError):
        tokenizer.token_bytes(257)
