"""Rules with all that is regular in them put into single regexes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace_plugins.constraints.automata import literal_text
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq
from headrace_plugins.constraints.regex import (
    EMPTY,
    And,
    Cat,
    Chars,
    Not,
    Or,
    Regex,
    Repeat,
    cat,
    either,
    literal,
    repeat,
)
from headrace_plugins.constraints.trimming import references

MAX_SIZE = 400
"""Parts of a regex that still takes in other rules and neighbours."""


def folded(rules: Rules) -> Rules:
    """The same grammar in which rules that don't lead back to themselves stand where they are used, as regexes.

    For grammars that are written character by character; terminals so are as long as can be.
    """
    plain: dict[str, Regex] = {}
    bodies: dict[str, Expr] = {}
    for name in _bottom_up(rules.rules):
        body = _folded(rules.rules[name], plain)
        bodies[name] = body
        regex = _regex(body, plain)
        if regex is not None and _size(regex) <= MAX_SIZE:
            plain[name] = regex
    reached, waiting = {rules.start: None}, [rules.start]
    while waiting:
        for name in references(bodies[waiting.pop()]):
            if name not in reached:
                reached[name] = None
                waiting.append(name)
    return Rules(rules.start, {name: bodies[name] for name in rules.rules if name in reached})


def _bottom_up(rules: Mapping[str, Expr]) -> Iterable[str]:
    """Each rule behind those that it uses, as far as they don't use it."""
    done: set[str] = set()
    for root in rules:
        if root in done:
            continue
        done.add(root)
        stack = [(root, iter(tuple(references(rules[root]))))]
        while stack:
            name, used = stack[-1]
            following = next((each for each in used if each not in done), None)
            if following is None:
                stack.pop()
                yield name
            else:
                done.add(following)
                stack.append((following, iter(tuple(references(rules[following])))))


def _folded(body: Expr, plain: Mapping[str, Regex]) -> Expr:
    regex = _regex(body, plain)
    if regex is not None:
        return _leaf(regex)
    match body:
        case Seq(parts):
            result: list[Expr] = []
            for part in (_folded(each, plain) for each in parts):
                regex, before = _regex(part, plain), _regex(result[-1], plain) if result else None
                if regex is not None and before is not None and _size(regex) + _size(before) <= MAX_SIZE:
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
    if len(regexes) < 2 or sum(map(_size, regexes)) > MAX_SIZE:
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
                size += _size(found)
                regexes.append(found)
            if size > MAX_SIZE:
                return None
            return cat(*regexes) if isinstance(body, Seq) else either(*regexes)
        case Rep(inner, least, most):
            each = _regex(inner, plain)
            return None if each is None else repeat(each, least, most)
        case _:
            return None


def _size(regex: Regex) -> int:
    match regex:
        case Chars():
            return 1
        case Cat(parts) | Or(parts) | And(parts):
            return 1 + sum(map(_size, parts))
        case Repeat(body) | Not(body):
            return 1 + _size(body)
