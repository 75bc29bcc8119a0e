"""The grammar that engines are given: rules over text, regular expressions and special tokens.

Every kind of grammar becomes this; `lark.py` and `ebnf.py` print it for an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_plugins.constraints.regex import Regex


@dataclass(frozen=True, slots=True)
class Lit:
    """This text, byte by byte; special tokens do not stand for it."""

    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """The special token of this name; where the vocabulary has none, the name as plain text."""

    name: str


@dataclass(frozen=True, slots=True)
class Rx:
    """Text that matches as a whole. One terminal: the longest match is taken, so what may follow it must not be able to
    continue it."""

    regex: Regex
    sure: bool = False
    """Some text matches, and among terminals that are all sure taking the longest match loses none: printers need not
    look."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The rule of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; no parts: the empty text."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of these; none: nothing matches."""

    choices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """body, least to most times."""

    body: Expr
    least: int = 0
    most: int | None = None


Expr = Lit | Special | Rx | Ref | Seq | Alt | Rep

NOTHING_EXPR = Alt(())
EMPTY_EXPR = Seq(())


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar. rules: name ([a-z][a-z0-9_]*) -> expression; every Ref has its rule."""

    start: str
    rules: Mapping[str, Expr]


def counts(least: int, most: int | None) -> str:
    """The bounds of a repetition behind what is repeated, as Lark, EBNF and regexes write them: `*`, `{2,5}`."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
    if (least, most) in signs:
        return signs[least, most]
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
