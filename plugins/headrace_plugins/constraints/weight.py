"""How large a grammar is for an engine: its states, once repetitions are written out."""

from __future__ import annotations

from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special
from headrace_plugins.constraints.regex import And, Cat, Chars, Not, Or, Regex, Repeat


def weight(rules: Rules) -> int:
    """About how many states the grammar has. Shared parts count as often as they stand there."""
    known: dict[int, int] = {}
    return sum(1 + _weight(body, known) for body in rules.rules.values())


def _weight(body: Expr, known: dict[int, int]) -> int:
    match body:
        case Lit(text):
            return len(text)
        case Special() | Ref():
            return 1
        case Rx(regex):
            return _regex_weight(regex, known)
        case Seq(parts) | Alt(parts):
            return 1 + sum(_weight(part, known) for part in parts)
        case Rep(inner, least, most):
            return 1 + _weight(inner, known) * max(1, least + 1 if most is None else most)


def _regex_weight(regex: Regex, known: dict[int, int]) -> int:
    found = known.get(id(regex))
    if found is None:
        match regex:
            case Chars(ranges):
                found = 1 + len(ranges)
            case Cat(parts) | Or(parts) | And(parts):
                found = 1 + sum(_regex_weight(part, known) for part in parts)
            case Not(inner):
                found = 1 + _regex_weight(inner, known)
            case Repeat(inner, least, most):
                found = 1 + _regex_weight(inner, known) * max(1, least + 1 if most is None else most)
        known[id(regex)] = found
    return found
