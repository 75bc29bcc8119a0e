"""Grammars without what can't match and can't be reached, and regexes without the empty text: what is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import nullable, surely_empty
from headrace_plugins.constraints.grammar import EMPTY_EXPR, NOTHING_EXPR, Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq
from headrace_plugins.constraints.regex import (
    EMPTY,
    NOTHING,
    And,
    Cat,
    Chars,
    Not,
    Or,
    Regex,
    Repeat,
    both,
    cat,
    complement,
    either,
    repeat,
)


def too_deep() -> RequestError:
    """For an expression or a regex deeper than the stack of this process."""
    return RequestError(
        "HR-CONSTRAINT-04", "a grammar is nested too deep", "take inner parts out into rules of their own"
    )


def trimmed(rules: Rules) -> Rules:
    """The same grammar without alternatives that match no text, rules that match the empty text alone, and rules
    that are not reached.

    Raises RequestError HR-CONSTRAINT-07 when the whole grammar matches none.
    """
    bodies = {name: _simplified(body) for name, body in rules.rules.items()}
    productive = _closure(bodies, _ends)
    if rules.start not in productive:
        raise RequestError(
            "HR-CONSTRAINT-07",
            f"no text matches the grammar: rule {rules.start!r} never ends",
            "check its alternatives",
        )
    if len(productive) < len(bodies):
        bodies = _put(bodies, dict.fromkeys(bodies.keys() - productive, NOTHING_EXPR))
    # xgrammar's compiler was seen to crash on rules like a ::= a{0,2}
    empty = bodies.keys() - _closure(bodies, _writes)
    if empty:
        bodies = {rules.start: EMPTY_EXPR} | _put(bodies, dict.fromkeys(empty, EMPTY_EXPR))
    reached, waiting = {rules.start: None}, [rules.start]
    while waiting:
        for name in references(bodies[waiting.pop()]):
            if name not in reached:
                reached[name] = None
                waiting.append(name)
    return Rules(rules.start, {name: bodies[name] for name in rules.rules if name in reached})


def references(body: Expr) -> Iterable[str]:
    """Names of the rules that an expression mentions, in order."""
    waiting = [body]
    while waiting:
        each = waiting.pop()
        match each:
            case Ref(name):
                yield name
            case Seq(parts) | Alt(parts):
                waiting.extend(reversed(parts))
            case Rep(inner):
                waiting.append(inner)


def post_order(rules: Mapping[str, Expr], start: str) -> tuple[list[str], int]:
    """Each rule that start leads to behind those that it uses, as far as they don't use it; and how many rules the
    longest chain had on the way."""
    order: list[str] = []
    done = {start}
    stack = [(start, iter(tuple(references(rules[start]))))]
    depth = 1
    while stack:
        depth = max(depth, len(stack))
        name, used = stack[-1]
        following = next((each for each in used if each not in done), None)
        if following is None:
            stack.pop()
            order.append(name)
        else:
            done.add(following)
            stack.append((following, iter(tuple(references(rules[following])))))
    return order, depth


def shallow(rules: Rules, levels: int) -> Rules:
    """The same grammar with expressions nested no deeper; what lies deeper stands in rules of its own."""
    bodies = dict(rules.rules)

    def visit(body: Expr) -> tuple[Expr, int]:
        match body:
            case Seq(parts) | Alt(parts):
                visited = [visit(part) for part in parts]
                inner = tuple(each for each, _ in visited)
                height = 1 + max((height for _, height in visited), default=0)
                result: Expr = Seq(inner) if isinstance(body, Seq) else Alt(inner)
            case Rep(repeated, least, most):
                each, height = visit(repeated)
                result, height = Rep(each, least, most), height + 1
            case _:
                return body, 0
        if height < levels:
            return result, height
        number = len(bodies)
        while f"n{number}" in bodies:
            number += 1
        bodies[f"n{number}"] = result
        return Ref(f"n{number}"), 0

    for name, body in rules.rules.items():
        bodies[name] = visit(body)[0]
    return Rules(rules.start, bodies)


def _closure(bodies: dict[str, Expr], holds: Callable[[Expr, set[str]], bool]) -> set[str]:
    """Rules of which something holds, given the rules of which it holds."""
    users: dict[str, list[str]] = {}
    for name, body in bodies.items():
        for used in set(references(body)):
            users.setdefault(used, []).append(name)
    found: set[str] = set()
    waiting = list(reversed(bodies))
    while waiting:
        name = waiting.pop()
        if name not in found and holds(bodies[name], found):
            found.add(name)
            waiting += users.get(name, ())
    return found


def _ends(body: Expr, productive: set[str]) -> bool:
    """Does it match some text?"""
    match body:
        case Ref(name):
            return name in productive
        case Seq(parts):
            return all(_ends(part, productive) for part in parts)
        case Alt(choices):
            return any(_ends(choice, productive) for choice in choices)
        case Rep(inner, least, _):
            return least == 0 or _ends(inner, productive)
        case _:
            return True


def _writes(body: Expr, writing: set[str]) -> bool:
    """Does it match more than the empty text? Every rule matches some text."""
    match body:
        case Ref(name):
            return name in writing
        case Seq(parts) | Alt(parts):
            return any(_writes(part, writing) for part in parts)
        case Rep(inner, _, most):
            return most != 0 and _writes(inner, writing)
        case _:
            return True


def _put(bodies: dict[str, Expr], known: Mapping[str, Expr]) -> dict[str, Expr]:
    """The other rules, with what is known in place of these."""
    return {name: _simplified(_replaced(body, known)) for name, body in bodies.items() if name not in known}


def _replaced(body: Expr, known: Mapping[str, Expr]) -> Expr:
    match body:
        case Ref(name):
            return known.get(name, body)
        case Seq(parts):
            return Seq(tuple(_replaced(part, known) for part in parts))
        case Alt(choices):
            return Alt(tuple(_replaced(choice, known) for choice in choices))
        case Rep(inner, least, most):
            return Rep(_replaced(inner, known), least, most)
        case _:
            return body


def _simplified(body: Expr) -> Expr:
    """Flat, with `Alt(())` and `Seq(())` only where nothing else is said."""
    match body:
        case Lit(text):
            return body if text else EMPTY_EXPR
        case Rx(regex, sure):
            return body if sure else _simplified_regex(regex)
        case Seq(parts):
            flat: list[Expr] = []
            for part in map(_simplified, parts):
                if part == NOTHING_EXPR:
                    return NOTHING_EXPR
                flat += part.parts if isinstance(part, Seq) else (part,)
            return flat[0] if len(flat) == 1 else Seq(tuple(flat))
        case Alt(choices):
            kept: dict[Expr, None] = {}
            for choice in map(_simplified, choices):
                kept |= dict.fromkeys(choice.choices if isinstance(choice, Alt) else (choice,))
            return next(iter(kept)) if len(kept) == 1 else Alt(tuple(kept))
        case Rep(inner, least, most):
            inner = _simplified(inner)
            if most == 0 or inner == EMPTY_EXPR or (inner == NOTHING_EXPR and least == 0):
                return EMPTY_EXPR
            return inner if inner == NOTHING_EXPR or least == most == 1 else Rep(inner, least, most)
        case _:
            return body


def _simplified_regex(regex: Regex) -> Expr:
    if _holds_nothing(regex):
        regex = simplified(regex)
    if regex == EMPTY:
        return EMPTY_EXPR
    # too big to tell: then the engine finds out, or nothing can follow
    return NOTHING_EXPR if surely_empty(regex) else Rx(regex)


def _holds_nothing(regex: Regex) -> bool:
    match regex:
        case Chars(ranges):
            return not ranges
        case Cat(parts) | Or(parts) | And(parts):
            return any(map(_holds_nothing, parts))
        case Repeat(body) | Not(body):
            return _holds_nothing(body)


def simplified(regex: Regex) -> Regex:
    """Rebuilt, so that `NOTHING` only stands where it is all there is."""
    match regex:
        case Chars():
            return regex
        case Cat(parts):
            return cat(*map(simplified, parts))
        case Or(choices):
            return either(*map(simplified, choices))
        case And(parts):
            return both(*map(simplified, parts))
        case Not(body):
            return complement(simplified(body))
        case Repeat(body, least, most):
            return repeat(simplified(body), least, most)


def some(regex: Regex) -> Regex:
    """A regex without the empty text."""
    if not nullable(regex):
        return regex
    match regex:
        case Cat(parts):
            if not parts:
                return NOTHING
            first, rest = parts[0], cat(*parts[1:])
            return either(cat(some(first), rest), some(rest))
        case Or(choices):
            return either(*map(some, choices))
        case Repeat(body, _, most) if not nullable(body):
            return repeat(body, 1, most)
        case Repeat(body, least, most):
            return cat(some(body), repeat(body, max(least - 1, 0), None if most is None else most - 1))
        case _:
            return both(regex, complement(EMPTY))
