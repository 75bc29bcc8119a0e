"""Which texts a grammar allows, decided by the meaning of `Rules` alone: no engine, no lexer."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from headrace_plugins.constraints.automata import automaton
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special

_automaton = lru_cache(maxsize=2000)(automaton)


class Recogniser:
    """Special tokens count as the text of their names. Rules must not be left-recursive."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def accepts(self, text: str) -> bool:
        self._text = text
        self._known: dict[tuple[str, int], frozenset[int]] = {}
        return len(text) in self._ends(Ref(self._rules.start), 0)

    def _ends(self, body: Expr, at: int) -> frozenset[int]:
        match body:
            case Lit(text) | Special(text):
                return frozenset([at + len(text)] if self._text.startswith(text, at) else [])
            case Rx(regex):
                return self._matched(regex, at)
            case Ref(name):
                if (name, at) not in self._known:
                    self._known[name, at] = self._ends(self._rules.rules[name], at)
                return self._known[name, at]
            case Seq(parts):
                ends = frozenset([at])
                for part in parts:
                    ends = self._all(part, ends)
                return ends
            case Alt(choices):
                return frozenset().union(*(self._ends(choice, at) for choice in choices))
            case Rep(inner, least, most):
                return self._repeated(inner, least, most, at)

    def _all(self, body: Expr, starts: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(self._ends(body, start) for start in starts))

    def _repeated(self, inner: Expr, least: int, most: int | None, at: int) -> frozenset[int]:
        ends = frozenset([at])
        for _ in range(least):
            ends = self._all(inner, ends)
        found, times = ends, least
        while ends and (most is None or times < most):
            ends = self._all(inner, ends) - found
            found |= ends
            times += 1
        return found

    def _matched(self, regex, at: int) -> frozenset[int]:
        machine = _automaton(regex)
        state, ends = 0, {at} if machine.accepting[0] else set()
        for place in range(at, len(self._text)):
            row, point = machine.edges[state], ord(self._text[place])
            index = bisect_right(row, point, key=lambda edge: edge[0]) - 1
            if index < 0 or point > row[index][1]:
                break
            state = row[index][2]
            if machine.accepting[state]:
                ends.add(place + 1)
        return frozenset(ends)
