"""What becomes of a grammar, without a model: who serves it, what is enforced, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.errors import HeadraceError, RequestError
from headrace.types import Grammar
from headrace_plugins.constraints.compiling import Compiler, Work, write_loosely
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.schema.documents import steps, subschemas
from headrace_plugins.constraints.schema.drafts import DRAFTS, Draft, draft_of, is_form
from headrace_plugins.constraints.texts import read_json
from headrace_plugins.constraints.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    kind: str
    engine: str = ""
    """Which one serves it; empty: none does."""
    size_bytes: int = 0
    enforced: Mapping[str, Seq[str]] = field(default_factory=dict)
    """Of a JSON schema: keyword -> where it stands, JSON pointers."""
    annotations: Mapping[str, Seq[str]] = field(default_factory=dict)
    """The same of those that constrain nothing."""
    conflicts: Seq[tuple[str, str, str]] = ()
    """(JSON pointer, keyword, why) of what masks can't enforce."""
    error: HeadraceError | None = None
    """Why the grammar is refused."""


def report(grammar: Grammar, options: ConstraintOptions, vocabulary: Vocabulary, engines: Seq[str]) -> Report:
    """Never raises a HeadraceError: it is in the report."""
    compiler = Compiler(options, vocabulary, engines)
    made, error = None, None
    try:
        made = compiler.compile(grammar, _work(options))
    except RequestError as refused:
        error = refused
    finally:
        compiler.close()
    conflicts: Seq[tuple[str, str, str]] = ()
    enforced: dict[str, list[str]] = {}
    annotations: dict[str, list[str]] = {}
    if grammar.kind == "json_schema" and (error is None or error.code not in _UNREADABLE):
        schema = read_json(grammar.kind, grammar.text, options.max_nesting)
        conflicts = _conflicts(schema, options)
        dropped = {f"{pointer}/{keyword}" for pointer, keyword, _ in conflicts} | {each[0] for each in conflicts}
        for keyword, pointer, constrains in _keywords(schema, options):
            if pointer not in dropped:
                (enforced if constrains else annotations).setdefault(keyword, []).append(pointer)
    return Report(
        kind=grammar.kind, engine=made.engine if made else "", size_bytes=made.program.size_bytes() if made else 0,
        enforced=enforced, annotations=annotations, conflicts=conflicts, error=error,
    )  # fmt: skip


_UNREADABLE = ("HR-CONSTRAINT-01", "HR-CONSTRAINT-02")


def _work(options: ConstraintOptions) -> Work:
    return Work(lambda: False, options.compile_timeout)


def _conflicts(schema: object, options: ConstraintOptions) -> Seq[tuple[str, str, str]]:
    """Everything in the schema that can't be enforced; none where it can't even be read without that."""
    try:
        return write_loosely(schema, options, _work(options))[1]
    except RequestError:
        return ()


def _keywords(schema: object, options: ConstraintOptions) -> Iterator[tuple[str, str, bool]]:
    """(keyword, JSON pointer, does it constrain anything?) of every keyword in the schema, in the order written."""
    default = DRAFTS[-1] if options.draft is None else draft_of(options.draft)
    assert default is not None, "options check it"
    waiting: list[tuple[object, str, Draft]] = [(schema, "#", default)]
    while waiting:
        each, pointer, draft = waiting.pop()
        if not isinstance(each, dict):
            continue
        draft = draft_of(each["$schema"]) or draft if isinstance(each.get("$schema"), str) else draft
        inner: list[tuple[object, str, Draft]] = []
        for keyword, value in each.items():
            at = f"{pointer}{steps(keyword)}"
            form = draft.forms.get(keyword)
            annotates = keyword == "format" and options.format == "annotation" and not draft.asserts_format
            yield keyword, at, form is not None and not annotates and keyword not in _NAMING
            if form is not None and is_form(form, value):
                inner += [(part, f"{at}{steps(*keys)}", draft) for part, keys in subschemas(form, value)]
        waiting += reversed(inner)


_NAMING = ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "$comment")
"""Keywords that name schemas, or hold them for others."""
