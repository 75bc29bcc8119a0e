"""Deterministic automata: made small, and written as regexes and as rules for engines without And and Not."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace_plugins.constraints.grammar import Alt, Expr, Ref, Rules, Rx, Seq
from headrace_plugins.constraints.regex import EMPTY, NOTHING, Regex, cat, chars, either, n_parts, repeat

Edge = tuple[int, int, int]
"""(first code point, last code point, target)."""


@dataclass(frozen=True, slots=True)
class Dfa:
    """State 0 is the start; every state is reached and can still accept, but a language without any text has
    state 0 alone."""

    accepting: tuple[bool, ...]
    edges: tuple[tuple[Edge, ...], ...]
    """Per state, sorted and disjoint. A character on no edge ends the match."""

    def matches(self, text: str) -> bool:
        state = 0
        for char in text:
            row = self.edges[state]
            index = bisect_right(row, ord(char), key=lambda edge: edge[0]) - 1
            if index < 0 or ord(char) > row[index][1]:
                return False
            state = row[index][2]
        return self.accepting[state]

    def by_target(self, state: int) -> dict[int, Regex]:
        """Target -> the characters that lead to it."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in self.edges[state]:
            ranges.setdefault(target, []).append((low, high))
        return {target: chars(pairs) for target, pairs in ranges.items()}


def minimised(accepting: Sequence[bool], edges: Sequence[Sequence[Edge]]) -> Dfa:
    """Without states that can't accept, and with equal states merged (Hopcroft, 1971, over ranges)."""
    trimmed = _trimmed(accepting, edges)
    blocks = _blocks(trimmed)
    block_of = {state: number for number, block in enumerate(blocks) for state in block}
    numbers, order = {block_of[0]: 0}, [next(iter(blocks[block_of[0]]))]
    rows: list[tuple[Edge, ...]] = []
    for state in order:  # grows while it is walked
        row: list[Edge] = []
        for low, high, target in trimmed.edges[state]:
            block = block_of[target]
            if block not in numbers:
                numbers[block] = len(order)
                order.append(next(iter(blocks[block])))
            if row and row[-1][1] == low - 1 and row[-1][2] == numbers[block]:
                low = row.pop()[0]
            row.append((low, high, numbers[block]))
        rows.append(tuple(row))
    return Dfa(tuple(trimmed.accepting[state] for state in order), tuple(rows))


def _trimmed(accepting: Sequence[bool], edges: Sequence[Sequence[Edge]]) -> Dfa:
    back: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for _, _, target in row:
            back[target].append(state)
    alive = {state for state, ends in enumerate(accepting) if ends}
    waiting = list(alive)
    while waiting:
        for state in back[waiting.pop()]:
            if state not in alive:
                alive.add(state)
                waiting.append(state)
    if 0 not in alive:
        return Dfa((False,), ((),))
    numbers = {state: number for number, state in enumerate(sorted(alive))}
    rows = tuple(
        tuple((low, high, numbers[target]) for low, high, target in edges[state] if target in alive)
        for state in numbers
    )
    return Dfa(tuple(accepting[state] for state in numbers), rows)


def _blocks(dfa: Dfa) -> list[set[int]]:
    """The sets of equal states."""
    back: list[list[tuple[int, int, int]]] = [[] for _ in dfa.edges]
    for source, row in enumerate(dfa.edges):
        for low, high, target in row:
            back[target].append((low, high, source))
    ends = {state for state, end in enumerate(dfa.accepting) if end}
    blocks = [block for block in (ends, set(range(len(dfa.edges))) - ends) if block]
    block_of = [0] * len(dfa.edges)
    for number, block in enumerate(blocks):
        for state in block:
            block_of[state] = number
    waiting = set(range(len(blocks)))
    while waiting:
        splitter = [edge for state in blocks[waiting.pop()] for edge in back[state]]
        for sources in _by_character(splitter):
            touched: dict[int, set[int]] = {}
            for state in sources:
                touched.setdefault(block_of[state], set()).add(state)
            for number, part in touched.items():
                if len(part) == len(blocks[number]):
                    continue
                rest = blocks[number] - part
                new, kept = (part, rest) if len(part) < len(rest) else (rest, part)
                blocks[number] = kept
                for state in new:
                    block_of[state] = len(blocks)
                waiting.add(len(blocks))
                blocks.append(new)
    return blocks


def _by_character(edges: list[tuple[int, int, int]]) -> Iterable[set[int]]:
    """For each run of characters that the edges tell apart: the states that have one of them."""
    events: dict[int, list[tuple[bool, int]]] = {}
    for low, high, source in edges:
        events.setdefault(low, []).append((True, source))
        events.setdefault(high + 1, []).append((False, source))
    active: set[int] = set()
    for point in sorted(events):
        for enters, source in sorted(events[point]):  # leaving first
            (active.add if enters else active.discard)(source)
        if active:
            yield set(active)


def regex_of(dfa: Dfa, limit: int = 2_000) -> Regex | None:
    """The same language without And and Not, by state elimination; None where it takes more than `limit` parts."""
    end = len(dfa.edges)
    arrows: dict[int, dict[int, Regex]] = {state: dfa.by_target(state) for state in range(end)}
    for state, accepts in enumerate(dfa.accepting):
        if accepts:
            arrows[state][end] = EMPTY
    arrows[-1] = {0: EMPTY}
    back: dict[int, set[int]] = {state: set() for state in range(end + 1)}
    for state, row in arrows.items():
        for target in row:
            back[target].add(state)
    left = set(range(end))
    while left:
        state = min(left, key=lambda each: len(back[each]) * len(arrows[each]))
        left.discard(state)
        row = arrows.pop(state)
        loop = row.pop(state, NOTHING)
        around = EMPTY if loop == NOTHING else repeat(loop)
        sources = back.pop(state) - {state}
        for source in sources:
            to = arrows[source].pop(state)
            for target, over in row.items():
                way = cat(to, around, over)
                arrows[source][target] = either(arrows[source].get(target, NOTHING), way)
                back[target].add(source)
                if n_parts(arrows[source][target]) > limit:
                    return None
        for target in row:
            back[target].discard(state)
    return arrows[-1].get(end, NOTHING)


def rules_of(dfa: Dfa, prefix: str, *, left: bool = False) -> Rules:
    """The same language as rules of single characters, one for each state, named prefix0, prefix1, ...

    left: recursion on the left, which Earley parsers follow in constant time a character; else on the right.
    """
    rules: dict[str, Expr] = {}
    if not left:
        for state, accepts in enumerate(dfa.accepting):
            steps: list[Expr] = [Seq((Rx(over), Ref(f"{prefix}{to}"))) for to, over in dfa.by_target(state).items()]
            rules[f"{prefix}{state}"] = Alt((*steps, *([Seq(())] if accepts else [])))
        return Rules(f"{prefix}0", rules)
    ways: list[list[Expr]] = [[] for _ in dfa.edges]
    ways[0].append(Seq(()))
    for state in range(len(dfa.edges)):
        for to, over in dfa.by_target(state).items():
            ways[to].append(Seq((Ref(f"{prefix}{state}"), Rx(over))))
    for state, choices in enumerate(ways):
        rules[f"{prefix}{state}"] = Alt(tuple(choices))
    rules[f"{prefix}end"] = Alt(tuple(Ref(f"{prefix}{state}") for state, end in enumerate(dfa.accepting) if end))
    return Rules(f"{prefix}end", rules)
