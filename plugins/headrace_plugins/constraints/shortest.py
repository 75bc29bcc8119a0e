"""How long the shortest text of a grammar is, and of each of its parts.

All texts that follow a state begin with what is forced there, so no forced text is longer than the shortest of these.
Engines work forced text out as a whole: a few rules that each stand twice in the one before make it 2**60 characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special
from headrace_plugins.constraints.regex import And, Cat, Chars, Not, Or, Regex, Repeat
from headrace_plugins.constraints.trimming import post_order, references

MOST_CHARACTERS = 1 << 20
"""Of the shortest text of a part of a grammar: no answer is that long."""
MAX_VISITS = 20
"""Times that a rule is looked at again, on average; then what is known has to do."""


def check_shortest(rules: Rules) -> None:
    """Raises RequestError HR-CONSTRAINT-04 that names a rule of which no text can be written to its end."""
    order, _ = post_order(rules.rules, rules.start)
    lengths, known = _lengths(rules.rules, order), dict[int, float]()
    for name in order:
        longest = _longest(rules.rules[name], lengths, known)
        if longest > MOST_CHARACTERS:
            raise RequestError(
                "HR-CONSTRAINT-04",
                f"rule {name!r} of the grammar has no end within {MOST_CHARACTERS:,} characters",
                "lower the bounds of repetitions, and leave out rules that stand in each other several times",
            )


def _lengths(bodies: Mapping[str, Expr], order: list[str]) -> dict[str, float]:
    """Characters of the shortest text of each rule, inf where there is none."""
    users: dict[str, list[str]] = {}
    for name in order:
        for used in set(references(bodies[name])):
            users.setdefault(used, []).append(name)
    lengths: dict[str, float] = dict.fromkeys(order, inf)
    known: dict[int, float] = {}
    waiting = dict.fromkeys(order)
    for _ in range(MAX_VISITS * len(order)):
        if not waiting:
            break
        name = next(iter(waiting))
        del waiting[name]
        length = _shortest(bodies[name], lengths, known)
        if length < lengths[name]:
            lengths[name] = length
            waiting |= dict.fromkeys(users.get(name, ()))
    return lengths


def _shortest(body: Expr, lengths: Mapping[str, float], known: dict[int, float]) -> float:
    match body:
        case Lit(text):
            return len(text)
        case Special():
            return 1
        case Ref(name):
            return lengths.get(name, inf)
        case Rx(regex):
            return _of_regex(regex, known)
        case Seq(parts):
            return sum(_shortest(part, lengths, known) for part in parts)
        case Alt(choices):
            return min((_shortest(choice, lengths, known) for choice in choices), default=inf)
        case Rep(inner, least, _):
            return least * _shortest(inner, lengths, known) if least else 0


def _longest(body: Expr, lengths: Mapping[str, float], known: dict[int, float]) -> float:
    """The most that any alternative in it needs; what never ends is left out, as no text goes there."""
    match body:
        case Alt(choices):
            return max((_longest(choice, lengths, known) for choice in choices), default=0)
        case Seq(parts):
            inner = max((_longest(part, lengths, known) for part in parts), default=0)
        case Rep(repeated):
            inner = _longest(repeated, lengths, known)
        case _:
            inner = 0
    whole = _shortest(body, lengths, known)
    return max(inner, 0 if whole == inf else whole)


def _of_regex(regex: Regex, known: dict[int, float]) -> float:
    """For an intersection or a complement no more than it is: engines find out as they go."""
    found = known.get(id(regex))
    if found is None:
        match regex:
            case Chars(ranges):
                found = 1 if ranges else inf
            case Cat(parts):
                found = sum(_of_regex(part, known) for part in parts)
            case Or(choices):
                found = min((_of_regex(choice, known) for choice in choices), default=inf)
            case And(parts):
                found = max((_of_regex(part, known) for part in parts), default=0)
            case Not():
                found = 0
            case Repeat(inner, least, _):
                found = least * _of_regex(inner, known) if least else 0
        known[id(regex)] = found
    return found
