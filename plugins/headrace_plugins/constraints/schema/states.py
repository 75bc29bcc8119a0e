"""Rules for the states of what is counted: one each, written when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from headrace_plugins.constraints.grammar import EMPTY_EXPR, Expr, Ref

State = TypeVar("State", bound=Hashable)


class States(Generic[State]):
    """Names begin with `name`; `rules` gets a rule for every state that is referred to."""

    def __init__(self, rules: dict[str, Expr], name: str) -> None:
        self._rules, self._name = rules, name
        self._refs: dict[State, Ref] = {}
        self._waiting: list[State] = []

    def ref(self, state: State) -> Ref:
        """What follows in a state, as its rule."""
        known = self._refs.get(state)
        if known is None:
            known = self._refs[state] = Ref(f"{self._name}_{len(self._refs)}")
            self._rules[known.name] = EMPTY_EXPR  # names of other rules count those that are there
            self._waiting.append(state)
        return known

    def write(self, body: Callable[[State], Expr]) -> None:
        """Until every state that is referred to has its rule."""
        while self._waiting:
            state = self._waiting.pop()
            self._rules[self._refs[state].name] = body(state)
