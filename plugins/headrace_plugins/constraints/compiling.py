"""From a grammar of any kind to a program of an engine that enforces all of it.

Grammar -> checks of the text -> reader of its kind -> Rules -> text of the engine -> (trial in a child) -> Program
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError, did_you_mean
from headrace.types import Grammar
from headrace_plugins.constraints.cache import cancelled_error
from headrace_plugins.constraints.child import Children
from headrace_plugins.constraints.engines import SERVES, Engine, installed, load_engine
from headrace_plugins.constraints.grammar import Rules
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.texts import check_text, read_json
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Program
from headrace_plugins.constraints.weight import weight

if TYPE_CHECKING:
    from headrace_plugins.constraints.schema.limits import SchemaLimits
    from headrace_plugins.constraints.schema.table import Table

KINDS = ("json_schema", "json_object", "regex", "ebnf", "gbnf", "lark", "choice", "tagged")
"""Everything that `Compiler` reads."""

TRIAL_WEIGHT = 20_000
"""Grammars of more states are tried in a child process first; smaller ones take an engine well below a second."""
MOST_WEIGHT = 20_000_000
"""No engine is asked for more: it would take gigabytes."""
UNTOLD = 10**15
"""States beyond which a message does not count them."""
CHILD_MEMORY_BYTES = 1 << 30
"""That a compile may take."""

_ENGINE_LIMITS = ("HR-CONSTRAINT-03", "HR-CONSTRAINT-04", "HR-CONSTRAINT-05", "HR-CONSTRAINT-08")
"""What one engine can't do, and another perhaps can."""


class Work:
    """One compile: until when it may go on."""

    def __init__(self, cancelled: Callable[[], bool], timeout_s: float) -> None:
        self._cancelled = cancelled
        self._timeout_s, self._until = timeout_s, time.monotonic() + timeout_s

    def over(self) -> bool:
        """Is it cancelled, or out of time?"""
        return time.monotonic() > self._until or self._cancelled()

    def check(self) -> None:
        """Raises RequestError: HR-CONSTRAINT-06 when cancelled, -05 when out of time."""
        if self._cancelled():
            raise cancelled_error()
        if time.monotonic() > self._until:
            raise RequestError(
                "HR-CONSTRAINT-05", f"the grammar did not compile within compile_timeout = {self._timeout_s:g} s",
                "make it smaller, or raise compile_timeout in [constraints]",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """A program, and who made it."""

    program: Program
    engine: str
    dropped: Seq[str] = ()
    """Keywords of the schema that masks don't enforce, a sentence each; the finished value is checked for them."""


class Compiler:
    """Compiles for one vocabulary with the engines named, in this order. Any thread; engines are imported when they are
    first needed."""

    def __init__(self, options: ConstraintOptions, vocabulary: Vocabulary, engines: Seq[str] = tuple(SERVES)) -> None:
        self.options, self.vocabulary, self.engines = options, vocabulary, tuple(engines)
        self._lock = threading.Lock()
        self._loaded: dict[str, Engine] = {}
        self._children: dict[str, Children] = {}

    def compile(self, grammar: Grammar, work: Work) -> Made:
        """Raises RequestError, HR-CONSTRAINT-01 to -08."""
        candidates = self._candidates(grammar.kind)
        if grammar.kind != "json_object" or grammar.text.strip():
            check_text(grammar.kind, grammar.text, self.options.max_text)
        try:
            return self._compile(grammar, candidates, work)
        except RequestError as error:
            if error.code == "HR-CONSTRAINT-06":
                work.check()  # readers know one reason to stop; was it the other one?
            raise

    def _compile(self, grammar: Grammar, candidates: Seq[str], work: Work) -> Made:
        if grammar.kind == "tagged":
            if grammar.trigger is not None:
                raise RequestError(
                    "HR-CONSTRAINT-02", f"a tagged grammar has its own triggers, and takes no {grammar.trigger!r:.60}",
                    'name the end of the reasoning as its "think": {"end": ...}',
                )  # fmt: skip
            read_json(grammar.kind, grammar.text, self.options.max_nesting)
            return self._first(candidates, lambda name: self._tagged(name, grammar.text, work))
        made = self._body(grammar, candidates, work)
        if grammar.trigger is None:
            return made
        from headrace_plugins.constraints.tagged import compile_after

        program = compile_after(grammar.trigger, grammar.trigger_budget, made.program, self.vocabulary)
        return Made(program, made.engine, made.dropped)

    def close(self) -> None:
        """End child processes. Safe to call twice; a later compile starts new ones."""
        with self._lock:
            children, self._children = self._children, {}
        for each in children.values():
            each.close()

    # --- engines

    def _candidates(self, kind: str) -> Seq[str]:
        """Installed engines that can serve the kind. Raises HR-CONSTRAINT-01 when there are none."""
        if kind not in KINDS:
            raise RequestError(
                "HR-CONSTRAINT-01", f"constraint kind {kind!r:.60} is unknown",
                f"{did_you_mean(kind, KINDS)}known: {', '.join(KINDS)}",
            )  # fmt: skip
        able = [name for name in self.engines if kind in SERVES[name].kinds]
        if not able:
            others = [name for name, serves in SERVES.items() if kind in serves.kinds]
            raise RequestError(
                "HR-CONSTRAINT-01", f"engine '{', '.join(self.engines)}' does not read {kind} grammars",
                f'use = "{others[0]}" in [constraints] does, and so does "auto"',
            )  # fmt: skip
        found = [name for name in able if installed(name)]
        if not found:
            raise RequestError(
                "HR-CONSTRAINT-01", f"no engine for a {kind} constraint is installed ({', '.join(able)})",
                SERVES[able[0]].install,
            )  # fmt: skip
        return found

    def _engine(self, name: str) -> Engine:
        with self._lock:
            engine = self._loaded.get(name)
            if engine is None:
                engine = self._loaded[name] = load_engine(name, self.vocabulary)
            return engine

    def _first(self, candidates: Seq[str], make: Callable[[str], Made]) -> Made:
        """What the first engine makes that can; the error of the first one if none can."""
        first: RequestError | None = None
        for name in candidates:
            try:
                return make(name)
            except RequestError as error:
                if error.code not in _ENGINE_LIMITS:
                    raise
                first = first or error
        assert first is not None
        raise first

    def _program(self, name: str, rules: Rules, work: Work) -> Program:
        work.check()
        states = weight(rules)
        if states > MOST_WEIGHT:
            raise RequestError(
                "HR-CONSTRAINT-04",
                f"the grammar has about {min(states, UNTOLD):,} states, or more; the limit is {MOST_WEIGHT:,}",
                "lower the bounds of its repetitions, above all of those inside others",
            )  # fmt: skip
        from headrace_plugins.constraints.shortest import check_shortest

        check_shortest(rules)
        return self._program_of(name, self._engine(name).print(rules), work, trial=states > TRIAL_WEIGHT)

    def _program_of(self, name: str, text: str, work: Work, trial: bool) -> Program:
        work.check()
        if trial:
            with self._lock:
                children = self._children.get(name)
                if children is None:
                    children = self._children[name] = Children(name, self.vocabulary, CHILD_MEMORY_BYTES)
            children.try_compile(text, work.check)
        return self._engine(name).compile_text(text)

    # --- kinds

    def _body(self, grammar: Grammar, candidates: Seq[str], work: Work) -> Made:
        kind, text = grammar.kind, grammar.text
        if kind == "lark":
            # the library's parser was seen to die of some texts, and never to end with others
            return Made(self._program_of(candidates[0], text, work, trial=True), candidates[0])
        if kind in ("json_schema", "json_object"):
            return self._schema(kind, text, candidates, work)
        rules = self._read(kind, text)
        return self._first(candidates, lambda name: Made(self._program(name, rules, work), name))

    def _read(self, kind: str, text: str) -> Rules:
        if kind == "regex":
            from headrace_plugins.constraints.grammar import Rx
            from headrace_plugins.constraints.patterns import parse_pattern

            return Rules("regex", {"regex": Rx(parse_pattern(text, search=False, dialect="python"))})
        if kind == "choice":
            from headrace_plugins.constraints.choice import read_choice

            return read_choice(text, self.options.max_nesting)
        from headrace_plugins.constraints.gbnf import read_gbnf

        names = {token: name for name, token in self.vocabulary.special.items()}
        return read_gbnf(text, "gbnf" if kind == "gbnf" else "ebnf", tokens=names)

    def _schema(self, kind: str, text: str, candidates: Seq[str], work: Work) -> Made:
        schema = read_json(kind, text, self.options.max_nesting) if text.strip() else {}
        if kind == "json_object":
            if schema != {}:
                raise RequestError(
                    "HR-CONSTRAINT-02", "json_object takes no schema", 'its text is "" or {}; json_schema takes one'
                )
            schema = {"type": "object"}
        options = self.options
        problems: Seq[tuple[str, str, str]] = ()
        if options.on_unsupported == "refuse":
            table = read_table(schema, options, work, lenient=False)
            rules = write_table(table, options, work)
        else:
            rules, problems = write_loosely(schema, options, work)
        made = self._first(candidates, lambda name: Made(self._program(name, rules, work), name))
        if not problems:
            return made
        from headrace_plugins.constraints.verdicts import Checked, make_validator

        validator = make_validator(
            _plain(schema), options.draft, _plain(_documents(options)), assert_formats=options.format == "assertion"
        )
        dropped = [f"'{keyword}' at {pointer}: {why}" for pointer, keyword, why in problems]
        return Made(Checked(made.program, validator, self.vocabulary), made.engine, dropped)

    def _tagged(self, name: str, text: str, work: Work) -> Made:
        from headrace_plugins.constraints.expression import read_expression
        from headrace_plugins.constraints.tagged import compile_tagged

        def compile_body(expression: Any) -> Program:
            rules = read_expression(
                expression,
                read_schema=lambda schema: read_table(schema, self.options, work, lenient=False),
                whitespace=self.options.whitespace, limits=schema_limits(self.options), cancelled=work.over,
            )  # fmt: skip
            return self._program(name, rules, work)

        try:
            return Made(compile_tagged(text, self.vocabulary, compile_body), name)
        except RequestError as error:
            if error.code != "HR-CONSTRAINT-03" or "on_unsupported" not in error.help:
                raise
            raise RequestError(error.code, error.message, _IN_FULL) from error


_IN_FULL = "remove or simplify it: beside reasoning and tool calls on_unsupported is not heeded, a schema holds in full"


def read_table(schema: object, options: ConstraintOptions, work: Work, *, lenient: bool) -> Table:
    """The shapes of a JSON schema, as the options say. lenient: what can't be enforced is noted in `problems`."""
    from headrace_plugins.constraints.schema.reading import read_schema

    return read_schema(
        schema, draft=options.draft, documents=_documents(options), assert_formats=options.format == "assertion",
        lenient=lenient, limits=schema_limits(options), cancelled=work.over,
    )  # fmt: skip


def write_table(table: Table, options: ConstraintOptions, work: Work) -> Rules:
    """The grammar of the shapes."""
    from headrace_plugins.constraints.schema.writing import write_rules

    return write_rules(table, whitespace=options.whitespace, limits=schema_limits(options), cancelled=work.over)


def write_loosely(schema: object, options: ConstraintOptions, work: Work) -> tuple[Rules, Seq[tuple[str, str, str]]]:
    """(a grammar that allows what the schema does, and perhaps more; what it leaves out: (pointer, keyword, why))."""
    from headrace_plugins.constraints.loosening import without
    from headrace_plugins.constraints.schema.limits import Refusal

    left_out: list[tuple[str, str, str]] = []
    while True:
        table = read_table(schema, options, work, lenient=True)
        try:
            rules = write_table(table, options, work)
        except Refusal as refusal:
            schema = without(schema, refusal.pointer, refusal.keyword)
            if schema is None:
                raise
            left_out.append((refusal.pointer, refusal.keyword, refusal.why))
            continue
        return rules, [*table.problems, *(each for each in left_out if each not in table.problems)]


def _documents(options: ConstraintOptions) -> Mapping[str, Any]:
    """The option `documents`, with files read."""
    documents = {}
    for uri, given in options.documents.items():
        if isinstance(given, str):
            try:
                given = Path(given).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise RequestError(
                    "HR-CONSTRAINT-02", f"the document of {uri} can't be read: {error}", "see constraints.documents"
                ) from None
            given = read_json(f"document of {uri}", given, options.max_nesting)
        documents[uri] = given
    return documents


def _plain(value: Any) -> Any:
    """JSON as most libraries want it: no Decimal."""
    return json.loads(json.dumps(value, default=float))


def schema_limits(options: ConstraintOptions) -> SchemaLimits:
    from headrace_plugins.constraints.schema.limits import SchemaLimits

    return SchemaLimits(
        depth=options.max_nesting,
        size=options.schema_size,
        enum_entries=options.schema_enum_entries,
        nodes=options.schema_nodes,
        shapes=options.schema_shapes,
        classes=options.schema_classes,
        cases=options.schema_cases,
        steps=options.schema_steps,
    )
