"""Rules printed as a Lark grammar of llguidance 1.9.

A terminal there is one lexeme: the longest match of all that are allowed is taken and never given back. Equal terminals
are one, and a terminal never matches the empty text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import literal_text, nullable
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special, counts
from headrace_plugins.constraints.lexemes import lexical
from headrace_plugins.constraints.regex import ANY_CHAR, EMPTY, And, Cat, Chars, Not, Or, Regex, Repeat
from headrace_plugins.constraints.trimming import post_order, shallow, some, too_deep, trimmed

HEADER = "%llguidance {}"
MAX_CHAIN = 100
MAX_DEPTH = 1_000
"""Rules that lead to each other. The compiler of llguidance 1.9.1 follows them by recursion and overflows its stack,
with the process, between 2,000 and 5,000 of them (8 MiB). Beyond MAX_CHAIN they are named from the bottom up first."""
MAX_NESTING = 10
"""Of expressions; llguidance reads 29 pairs of parentheses, and one expression may print two."""
MAX_GROUPS = 60
"""Levels of one regex; Rust's crate reads 250, and a level may print two."""
_VALID = "/(?s:.*)/"
"""Every valid UTF-8 text: a complement alone would let other bytes through."""


def print_lark(rules: Rules, special: Mapping[str, int]) -> str:
    """The Lark text of a grammar.

    special: name of a special token -> its id; a name that is not there is printed as text.
    Raises RequestError HR-CONSTRAINT-07 when no text matches, HR-CONSTRAINT-04 for what is nested too deep.
    """
    try:
        return _printed(rules, special)
    except RecursionError:
        raise too_deep() from None


def _printed(rules: Rules, special: Mapping[str, int]) -> str:
    rules = shallow(lexical(trimmed(_spelled_out(rules, special))), MAX_NESTING)
    printer = _Printer(rules, special)
    order = printer.order()
    lines = [f"{printer.names[name]}: {printer.rule(body)}" for name, body in rules.rules.items()]
    if order:
        start = list(rules.rules).index(rules.start)
        lines[start] = lines[start].replace("start: ", f"start: {printer.first}\n    | ", 1)
    terminals = [f"{name}: {definition}" for definition, name in printer.terminals.items()]
    return "\n".join([HEADER, *lines, *order, *terminals]) + "\n"


def _spelled_out(rules: Rules, special: Mapping[str, int]) -> Rules:
    """The rules with names that are no special token as text, which terminals before it must leave for it."""

    def text_of(body: Expr) -> Expr:
        match body:
            case Special(name) if name not in special:
                return Lit(name)
            case Seq(parts):
                return Seq(tuple(map(text_of, parts)))
            case Alt(choices):
                return Alt(tuple(map(text_of, choices)))
            case Rep(inner, least, most):
                return Rep(text_of(inner), least, most)
        return body

    unknown = any(isinstance(each, Special) and each.name not in special for each in _parts(rules))
    return Rules(rules.start, {name: text_of(body) for name, body in rules.rules.items()}) if unknown else rules


def _parts(rules: Rules) -> Iterator[Expr]:
    waiting = list(rules.rules.values())
    while waiting:
        body = waiting.pop()
        yield body
        match body:
            case Seq(parts) | Alt(parts):
                waiting += parts
            case Rep(inner):
                waiting.append(inner)


class _Printer:
    def __init__(self, rules: Rules, special: Mapping[str, int]) -> None:
        self.special = special
        self.terminals: dict[str, str] = {}
        self.printed: dict[int, str] = {}
        self.rules = rules
        self.first = "first"
        self.names = {rules.start: "start"}
        for name in rules.rules:
            self.names.setdefault(name, f"{name}_rule" if name == "start" else name)
        while len(set(self.names.values())) < len(self.names):
            self.names = {name: as_ if as_ == "start" else f"{as_}_" for name, as_ in self.names.items()}

    def order(self) -> list[str]:
        """For long chains of rules: one that never matches and names them from the bottom up."""
        rules, start = self.rules.rules, self.rules.start
        names, depth = post_order(rules, start)
        if depth <= MAX_CHAIN:
            return []
        first = {start: Seq(tuple(map(Ref, names)))} | {name: body for name, body in rules.items() if name != start}
        depth = post_order(first, start)[1]
        if depth > MAX_DEPTH:
            raise RequestError(
                "HR-CONSTRAINT-04",
                f"a grammar in which {depth:,} rules lead to each other; at most {MAX_DEPTH:,} can be compiled",
                "use repetition in place of chains of rules, or the engine xgrammar",
            )
        while self.first in self.names.values():
            self.first += "_"
        listed = " ".join(self.names[name] for name in names if name != start)
        return [f"{self.first}: NEVER {listed}", "NEVER: /a/ & /b/"]

    def rule(self, body: Expr) -> str:
        if isinstance(body, Alt):
            texts = [self.expr(choice) for choice in body.choices]
            if all(texts):
                return "\n    | ".join(texts)
        return self.expr(body) or '""'

    def expr(self, body: Expr) -> str:
        """As one operand or a series; "" for the empty text."""
        match body:
            case Lit(text):
                return quoted(text) if text else ""
            case Special(name):
                number = self.special.get(name)
                return f"<[{number}]>" if number is not None else quoted(name)
            case Rx(regex):
                known = self.printed.get(id(regex))  # the rules keep it alive
                if known is None:
                    known = self.printed[id(regex)] = self._terminal(regex)
                return known
            case Ref(name):
                return self.names[name]
            case Seq(parts):
                return " ".join(filter(None, (self._operand(part) for part in parts)))
            case Alt(choices):
                texts = list(dict.fromkeys(self.expr(choice) for choice in choices))
                kept = [text for text in texts if text]
                if not kept:
                    return ""
                return f"({' | '.join(kept)})" + ("" if len(kept) == len(texts) else "?")
            case Rep(inner, least, most):
                text = self.expr(inner)
                return f"({text}){counts(least, most)}" if text else ""

    def _operand(self, body: Expr) -> str:
        text = self.expr(body)
        return f"({text})" if isinstance(body, Seq) and text else text

    def _terminal(self, regex: Regex) -> str:
        if regex == EMPTY:
            return ""
        text = literal_text(regex)
        if text is not None:
            return quoted(text)
        if nullable(regex):
            return f"({self._terminal(some(regex))})?"
        return self._named(regex)

    def _named(self, regex: Regex) -> str:
        definition = self._definition(regex)
        return self.terminals.setdefault(definition, f"T{len(self.terminals)}")

    def _definition(self, regex: Regex) -> str:
        """`/.../` where a regex is plain; else with Lark's operators, its parts as terminals of their own."""
        if _is_plain(regex):
            return f"/{rust(regex)}/"
        match regex:
            case Cat(parts):
                return " ".join(map(self._part, _runs(parts)))
            case Or(choices):
                return " | ".join(map(self._part, choices))
            case Repeat(body, least, most):
                return f"({self._part(body)}){counts(least, most)}"
            case And(parts):
                positive = [self._part(part) for part in parts if not isinstance(part, Not)] or [_VALID]
                negative = [f"~{self._part(part.body)}" for part in parts if isinstance(part, Not)]
                return " & ".join(positive + negative)
            case Not(body):
                return f"{_VALID} & ~{self._part(body)}"
            case _:
                raise AssertionError(regex)

    def _part(self, regex: Regex) -> str:
        return self._definition(regex) if _is_plain(regex) else self._named(regex)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _runs(parts: tuple[Regex, ...]) -> list[Regex]:
    """With neighbours that are plain put together."""
    runs: list[Regex] = []
    before_is_plain = False
    for part in parts:
        is_plain = _levels(part) < MAX_GROUPS
        if is_plain and before_is_plain:
            before = runs[-1].parts if isinstance(runs[-1], Cat) else (runs[-1],)
            runs[-1] = Cat((*before, part))
        else:
            runs.append(part)
        before_is_plain = is_plain
    return runs


def _is_plain(regex: Regex) -> bool:
    return _levels(regex) <= MAX_GROUPS


def _levels(regex: Regex) -> int:
    """How deep a regex is nested; beyond MAX_GROUPS with And or Not in it."""
    match regex:
        case Chars():
            return 0
        case And() | Not():
            return MAX_GROUPS + 1
        case Cat(parts) | Or(parts):
            return 1 + max(map(_levels, parts), default=0)
        case Repeat(body):
            return 1 + _levels(body)


def rust(regex: Regex) -> str:
    """A regex without And and Not in the syntax of Rust's regex crate, inside of slashes."""
    match regex:
        case Chars(ranges):
            if regex == ANY_CHAR:
                return "(?s:.)"
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return _char(ranges[0][0])
            return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"
        case Cat(parts):
            return "".join(f"(?:{rust(part)})" if isinstance(part, Or) else rust(part) for part in parts) or "(?:)"
        case Or(choices):
            return "|".join(map(rust, choices))
        case Repeat(body, least, most):
            inner = rust(body)
            return (inner if isinstance(body, Chars) else f"(?:{inner})") + counts(least, most)
        case _:
            raise AssertionError(regex)


def _char(point: int) -> str:
    return chr(point) if point < 128 and chr(point).isalnum() else f"\\x{{{point:x}}}"
