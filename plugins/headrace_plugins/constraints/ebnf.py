"""Rules printed as the EBNF of xgrammar 0.2.

Its parser follows every way to read a text, so nothing here depends on the longest match. It has neither And nor Not:
regexes with them become automata, and those regexes or rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_plugins.constraints.automata import MAX_STATES, automaton
from headrace_plugins.constraints.dfa import Dfa, regex_of, rules_of
from headrace_plugins.constraints.grammar import EMPTY_EXPR, Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special, counts
from headrace_plugins.constraints.regex import NOTHING, And, Cat, Chars, Not, Or, Regex, Repeat, cat, either, repeat
from headrace_plugins.constraints.trimming import too_deep, trimmed

ROOT = "root"


def print_ebnf(rules: Rules, special: Mapping[str, int], *, max_states: int = MAX_STATES) -> str:
    """The EBNF text of a grammar; its first rule is `root`.

    special: name of a special token -> its id; a name that is not there is printed as text.
    Raises RequestError HR-CONSTRAINT-07 when no text matches, HR-CONSTRAINT-04 when a regex with And or Not needs more
    than max_states states.
    """
    try:
        return _Printer(trimmed(rules), special, max_states).text()
    except RecursionError:
        raise too_deep() from None


class _Printer:
    def __init__(self, rules: Rules, special: Mapping[str, int], max_states: int) -> None:
        self.rules = rules
        self.special = special
        self.max_states = max_states
        self.names = {rules.start: ROOT} | {name: f"r_{name}" for name in rules.rules if name != rules.start}
        self.automata: dict[Regex, Dfa] = {}
        self.machines: dict[Regex, str] = {}
        self.lines: list[str] = []

    def text(self) -> str:
        for name, body in self.rules.rules.items():
            self._rule(self.names[name], body)
        root = next(i for i, line in enumerate(self.lines) if line.startswith(f"{ROOT} ::="))
        return "\n".join([self.lines.pop(root), *self.lines]) + "\n"

    def _rule(self, name: str, body: Expr) -> None:
        choices = body.choices if isinstance(body, Alt) else (body,)
        self.lines.append(f"{name} ::= " + " | ".join(self.expr(choice) for choice in choices))

    def expr(self, body: Expr) -> str:
        match body:
            case Lit(text):
                return quoted(text)
            case Special(name):
                number = self.special.get(name)
                return f"Token({number})" if number is not None else quoted(name)
            case Rx(regex):
                return self.regex(self._living(regex))
            case Ref(name):
                return self.names.get(name, name)
            case Seq(parts):
                return " ".join(self._operand(part) for part in parts) or '""'
            case Alt(choices):
                return f"({' | '.join(self.expr(choice) for choice in choices)})"
            case Rep(inner, least, most):
                return f"({self.expr(inner)}){counts(least, most)}" if inner != EMPTY_EXPR else '""'

    def _operand(self, body: Expr) -> str:
        return f"({self.expr(body)})" if isinstance(body, Seq) else self.expr(body)

    def regex(self, regex: Regex) -> str:
        match regex:
            case Chars(ranges):
                if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                    return quoted(chr(ranges[0][0]))
                return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"
            case Cat(parts):
                return self._series(parts)
            case Or(choices):
                return f"({' | '.join(map(self.regex, choices))})"
            case Repeat(body, least, most):
                return f"({self.regex(body)}){counts(least, most)}"
            case And() | Not():
                return self._machine(regex)

    def _living(self, regex: Regex) -> Regex:
        """Without parts that match no text: xgrammar would allow what leads to them."""
        match regex:
            case Cat(parts):
                return cat(*map(self._living, parts))
            case Or(choices):
                return either(*map(self._living, choices))
            case Repeat(body, least, most):
                return repeat(self._living(body), least, most)
            case And() | Not():
                return regex if any(self._dfa(regex).accepting) else NOTHING
            case _:
                return regex

    def _dfa(self, regex: Regex) -> Dfa:
        found = self.automata.get(regex)
        if found is None:
            found = self.automata[regex] = automaton(regex, self.max_states)
        return found

    def _series(self, parts: tuple[Regex, ...]) -> str:
        """With neighbouring single characters as one text."""
        texts: list[str] = []
        run = ""
        for part in parts:
            if isinstance(part, Chars) and len(part.ranges) == 1 and part.ranges[0][0] == part.ranges[0][1]:
                run += chr(part.ranges[0][0])
                continue
            texts += [quoted(run)] if run else []
            run = ""
            texts.append(self.regex(part))
        texts += [quoted(run)] if run or not texts else []
        return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"

    def _machine(self, regex: Regex) -> str:
        if regex in self.machines:
            return self.machines[regex]
        dfa = self._dfa(regex)
        plain = regex_of(dfa, 500) if len(dfa.edges) <= 30 else None
        prefix = f"m{len(self.machines)}_"
        if plain is not None:
            name = f"{prefix}0"
            self.lines.append(f"{name} ::= {self.regex(plain)}")
        else:
            rules = rules_of(dfa, prefix)
            name = rules.start
            for each, body in rules.rules.items():
                self._rule(each, body)
        self.machines[regex] = name
        return name


def quoted(text: str) -> str:
    return '"' + "".join(char if " " <= char <= "~" and char not in '"\\' else _char(ord(char)) for char in text) + '"'


def _char(point: int) -> str:
    if point < 128 and chr(point).isalnum():
        return chr(point)
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
