"""Regular languages over Unicode text: the tree, its constructors, and the algebra that schemas need.

A tree is a value: frozen, comparable, hashable. Characters are code points without surrogates. `And` and `Not` are part
of the tree; engines that have no such operators get an equivalent automaton, or refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Inclusive code point ranges, sorted, disjoint, not adjacent, without surrogates."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set; no ranges: nothing matches."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat:
    """One after the other; no parts: the empty text."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Or:
    choices: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    body: Regex
    least: int
    most: int | None
    """None: no bound."""


@dataclass(frozen=True, slots=True)
class And:
    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """Every text that body does not match."""

    body: Regex


Regex = Chars | Cat | Or | Repeat | And | Not

NOTHING = Chars(())
EMPTY = Cat(())
ANY_CHAR = Chars(((0, 0xD7FF), (0xE000, MAX_CODE_POINT)))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)


def chars(ranges: Iterable[tuple[int, int]]) -> Chars:
    """A set of characters from ranges in any order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        elif low <= high:
            merged.append((low, high))
    kept: list[tuple[int, int]] = []
    for low, high in merged:
        kept += [(a, b) for a, b in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)) if a <= b]
    return Chars(tuple(kept))


def literal(text: str) -> Regex:
    return cat(*(Chars(((ord(char), ord(char)),)) for char in text))


def cat(*parts: Regex) -> Regex:
    flat: list[Regex] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Cat) else (part,)
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def either(*choices: Regex) -> Regex:
    flat: dict[Regex, None] = {}
    for choice in choices:
        flat |= dict.fromkeys(choice.choices if isinstance(choice, Or) else (choice,))
    flat.pop(NOTHING, None)
    if ANY_TEXT in flat:
        return ANY_TEXT
    sets = [choice for choice in flat if isinstance(choice, Chars)]
    if len(sets) > 1:
        merged = chars(pair for each in sets for pair in each.ranges)
        flat = {merged: None} | {choice: None for choice in flat if not isinstance(choice, Chars)}
    kept = tuple(flat)
    return NOTHING if not kept else kept[0] if len(kept) == 1 else Or(kept)


def both(*parts: Regex) -> Regex:
    flat: dict[Regex, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if isinstance(part, And) else (part,))
    flat.pop(ANY_TEXT, None)
    if NOTHING in flat:
        return NOTHING
    kept = tuple(flat)
    return ANY_TEXT if not kept else kept[0] if len(kept) == 1 else And(kept)


def complement(body: Regex) -> Regex:
    if isinstance(body, Not):
        return body.body
    if body == NOTHING:
        return ANY_TEXT
    return NOTHING if body == ANY_TEXT else Not(body)


def repeat(body: Regex, least: int = 0, most: int | None = None) -> Regex:
    if most == 0 or (body == NOTHING and least == 0) or body == EMPTY:
        return EMPTY
    if body == NOTHING:
        return NOTHING
    return body if (least, most) == (1, 1) else Repeat(body, least, most)


def n_parts(regex: Regex) -> int:
    """How large a tree is. Shared parts count as often as they stand there."""
    match regex:
        case Chars():
            return 1
        case Cat(parts) | Or(parts) | And(parts):
            return 1 + sum(map(n_parts, parts))
        case Repeat(body) | Not(body):
            return 1 + n_parts(body)
