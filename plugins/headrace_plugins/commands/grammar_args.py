"""Arguments that say what an answer must look like, and grammars in files."""

from __future__ import annotations

import argparse
import json
from pathlib import PurePath

from headrace.errors import RequestError
from headrace.textfile import read_text
from headrace.types import Grammar
from headrace_plugins.commands.model_args import usage_error

KINDS = {".json": "json_schema", ".lark": "lark", ".gbnf": "gbnf", ".ebnf": "ebnf", ".regex": "regex"}
"""What a file holds, by its suffix."""

MAX_BYTES = 16 * 2**20


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("constraints", "at most one; the answer then holds to it, token by token")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--schema", metavar="FILE", help="a JSON schema")
    one.add_argument("--regex", metavar="R", help="a regular expression that the whole answer matches")
    one.add_argument("--grammar", metavar="FILE", help="a grammar: .lark, .gbnf or .ebnf")
    one.add_argument("--choice", metavar="A,B,...", help="one of these texts (with commas in them: a JSON list)")


def grammar_of(args: argparse.Namespace) -> Grammar | None:
    """The constraint that was asked for. UsageError for what can't be one, RequestError for a file."""
    if args.schema is not None:
        return grammar_of_file(args.schema, "--schema", (".json",), kind="json_schema")
    if args.grammar is not None:
        return grammar_of_file(args.grammar, "--grammar", (".lark", ".gbnf", ".ebnf"))
    if args.regex is not None:
        return Grammar("regex", args.regex)
    return None if args.choice is None else Grammar("choice", json.dumps(_choices(args.choice)))


def grammar_of_file(
    path: str, option: str, suffixes: tuple[str, ...] = tuple(KINDS), kind: str | None = None
) -> Grammar:
    """The grammar in a file; kind: instead of what its suffix says."""
    suffix = PurePath(path).suffix.lower()
    if kind is None and suffix not in suffixes:
        message = f"{option} {path}: the suffix {suffix!r} tells no kind of grammar"
        raise usage_error(message, f"known suffixes: {', '.join(suffixes)}")
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError("HR-CONSTRAINT-12", f"{option} {path} can't be read: {why}", "name a text file") from error
    kind = kind or KINDS[suffix]
    if kind == "json_schema":
        _check_json(text, f"{option} {path}")
    return Grammar(kind, text)


def _check_json(text: str, where: str) -> None:
    """What is no JSON is said before a model is loaded."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        message = f"{where} is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        raise RequestError("HR-CONSTRAINT-02", message, "correct the file") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "HR-CONSTRAINT-02", f"{where} is no JSON that can be read: {error}", "make it smaller"
        ) from error


def _choices(text: str) -> list[str]:
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise usage_error(f"--choice {text:.60} is no JSON list: {error}", "--choice yes,no") from error
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise usage_error(f"--choice {text:.60} is no list of texts", '--choice \'["yes", "no, never"]\'')
    return found
