"""`headrace constraint check`: who serves a schema or grammar, and what of it is enforced. Needs no model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from headrace.errors import EXIT_CHECK, EXIT_OK, HeadraceError
from headrace_plugins.commands.grammar_args import KINDS, grammar_of_file
from headrace_plugins.commands.text import as_json, table

if TYPE_CHECKING:
    from headrace_plugins.constraints.options import ConstraintOptions
    from headrace_plugins.constraints.report import Report

CHECK = """
Compile a JSON schema or a grammar as a request would, and say which engine serves it, which keywords are enforced, and
what stands in the way. Exit code 8: it is refused.
"""
ENGINES = ("auto", "llguidance", "xgrammar")
POINTERS_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = verbs.add_parser("check", help="who serves a file, and what is enforced", description=CHECK)
    check.add_argument("file", metavar="FILE", help=f"by suffix: {', '.join(f'{s} {k}' for s, k in KINDS.items())}")
    check.add_argument("--kind", choices=_kinds(), metavar="KIND", help=f"whatever the suffix: {', '.join(_kinds())}")
    check.add_argument("--engine", choices=ENGINES, default="auto", help="ask this one alone")
    check.add_argument("--draft", metavar="DRAFT", help="of a JSON schema without $schema: 4, 6, 7, 2019-09, 2020-12")
    check.add_argument("--assert-format", action="store_true", help="`format` has to hold")
    check.add_argument("--json", action="store_true", help="print JSON")


def _kinds() -> Sequence[str]:
    return ("json_schema", "regex", "ebnf", "gbnf", "lark", "choice", "tagged")


def run(args: argparse.Namespace) -> int:
    from headrace.testing.accepts import ByteTokenizer
    from headrace_plugins.constraints.engines import SERVES
    from headrace_plugins.constraints.report import report
    from headrace_plugins.constraints.vocabulary import Vocabulary

    grammar = grammar_of_file(args.file, "FILE", kind=args.kind)
    engines = tuple(SERVES) if args.engine == "auto" else (args.engine,)
    found = report(grammar, _options(args), Vocabulary(ByteTokenizer()), engines)
    print(as_json(_plain(found)) if args.json else _text(args.file, found))
    return EXIT_OK if found.error is None else EXIT_CHECK


def _options(args: argparse.Namespace) -> ConstraintOptions:
    from headrace.errors import UsageError
    from headrace_plugins.constraints.options import ConstraintOptions
    from headrace_plugins.constraints.schema.drafts import draft_names, draft_of

    if args.draft is not None and draft_of(args.draft) is None:
        raise UsageError("HR-USAGE-01", f"--draft {args.draft}: there is no such draft", f"known: {draft_names()}")
    return ConstraintOptions(draft=args.draft, format="assertion" if args.assert_format else "annotation")


def _text(path: str, found: Report) -> str:
    lines = [f"{path}: {found.kind}, {f'served by {found.engine}' if found.engine else 'refused'}"]
    for title, keywords in (("enforced", found.enforced), ("says nothing", found.annotations)):
        if keywords:
            lines += [f"{title}:", table(_rows(keywords))]
    if found.conflicts:
        lines.append(f"not enforced: {len(found.conflicts)}")
        lines += [f"  '{keyword}' at {pointer}: {why}" for pointer, keyword, why in found.conflicts]
    if found.error is not None:
        lines.append(str(found.error))
    return "\n".join(lines)


def _rows(keywords: Mapping[str, Sequence[str]]) -> list[list[str]]:
    rows = []
    for keyword, pointers in keywords.items():
        more = f", and {len(pointers) - POINTERS_SHOWN} more" if len(pointers) > POINTERS_SHOWN else ""
        rows.append([f"  {keyword}", f"{len(pointers)}", ", ".join(pointers[:POINTERS_SHOWN]) + more])
    return rows


def _plain(found: Report) -> dict[str, object]:
    error: HeadraceError | None = found.error
    plain = {name: value for name, value in asdict(found).items() if name not in ("error", "conflicts")}
    plain["conflicts"] = [
        {"pointer": pointer, "keyword": keyword, "why": why} for pointer, keyword, why in found.conflicts
    ]
    plain["error"] = error and {"code": error.code, "message": error.message, "help": error.help}
    return plain
