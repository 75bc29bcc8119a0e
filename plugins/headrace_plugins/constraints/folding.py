"""Rules with all that is regular in them put into single regexes."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_plugins.constraints.automata import literal_text
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq
from headrace_plugins.constraints.regex import EMPTY, Regex, cat, either, literal, n_parts, repeat
from headrace_plugins.constraints.trimming import post_order

MAX_SIZE = 400
"""Parts of a regex that still takes in other rules and neighbours."""


def folded(rules: Rules) -> Rules:
    """The same grammar in which rules that don't lead back to themselves stand where they are used, as regexes.

    For grammars that are written character by character; terminals so are as long as can be.
    """
    plain: dict[str, Regex] = {}
    bodies: dict[str, Expr] = {}
    order, _ = post_order(rules.rules, rules.start)
    for name in order:
        body = _folded(rules.rules[name], plain)
        bodies[name] = body
        regex = _regex(body, plain)
        if regex is not None and n_parts(regex) <= MAX_SIZE:
            plain[name] = regex
    kept = set(post_order(bodies, rules.start)[0])
    return Rules(rules.start, {name: bodies[name] for name in rules.rules if name in kept})


def _folded(body: Expr, plain: Mapping[str, Regex]) -> Expr:
    regex = _regex(body, plain)
    if regex is not None:
        return _leaf(regex)
    match body:
        case Seq(parts):
            result: list[Expr] = []
            for part in (_folded(each, plain) for each in parts):
                regex, before = _regex(part, plain), _regex(result[-1], plain) if result else None
                if regex is not None and before is not None and n_parts(regex) + n_parts(before) <= MAX_SIZE:
                    result[-1] = _leaf(cat(before, regex))
                else:
                    result.append(part)
            return result[0] if len(result) == 1 else Seq(tuple(result))
        case Alt(choices):
            return _folded_choices([_folded(choice, plain) for choice in choices], plain)
        case Rep(inner, least, most):
            return Rep(_folded(inner, plain), least, most)
        case _:
            return body


def _folded_choices(choices: list[Expr], plain: Mapping[str, Regex]) -> Expr:
    regexes = [regex for regex in (_regex(choice, plain) for choice in choices) if regex is not None]
    if len(regexes) < 2 or sum(map(n_parts, regexes)) > MAX_SIZE:
        return Alt(tuple(choices))
    others = [choice for choice in choices if _regex(choice, plain) is None]
    return Alt((_leaf(either(*regexes)), *others))


def _leaf(regex: Regex) -> Expr:
    text = literal_text(regex)
    if text is not None:
        return Lit(text)
    return Seq(()) if regex == EMPTY else Rx(regex)


def _regex(body: Expr, plain: Mapping[str, Regex]) -> Regex | None:
    """The whole as one regex; None where a rule or a special token is in it, or it grows too big."""
    match body:
        case Lit(text):
            return literal(text)
        case Rx(regex):
            return regex
        case Ref(name):
            return plain.get(name)
        case Seq(parts) | Alt(parts):
            regexes: list[Regex] = []
            size = 0
            for part in parts:
                found = _regex(part, plain)
                if found is None:
                    return None
                size += n_parts(found)
                regexes.append(found)
            if size > MAX_SIZE:
                return None
            return cat(*regexes) if isinstance(body, Seq) else either(*regexes)
        case Rep(inner, least, most):
            each = _regex(inner, plain)
            return None if each is None else repeat(each, least, most)
        case _:
            return None
