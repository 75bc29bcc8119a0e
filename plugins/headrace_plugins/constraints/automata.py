"""Questions about regular languages, answered by derivatives over character classes.

`And`, `Not` and counted repetition are derived as they are (Brzozowski, "Derivatives of Regular Expressions", 1964;
Owens, Reppy and Turon, "Regular-expression derivatives re-examined", 2009), so nothing is expanded before it is needed.
A language with more states than the limit raises HR-CONSTRAINT-04.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from headrace.errors import RequestError
from headrace_plugins.constraints.dfa import Dfa, Edge, minimised
from headrace_plugins.constraints.regex import (
    ANY_CHAR,
    MAX_CODE_POINT,
    NOTHING,
    And,
    Cat,
    Chars,
    Not,
    Or,
    Regex,
    Repeat,
    both,
)

MAX_STATES = 20_000
EMPTINESS_STATES = 2_000
"""Up to so many states of a language are looked at where it may as well be left in, though no text is of it."""
NODES_PER_STATE = 40
"""Terms that may be made per state of the limit: bounds the memory of languages whose states are long unions."""

SHORT_TEXT = 64
"""Characters of a text that is one term; the ends of longer ones would take up memory by the square."""


class Language:
    """One language that is asked many times; states are worked out when met. Not for several threads at once."""

    def __init__(self, regex: Regex, limit: int = MAX_STATES) -> None:
        self._terms = Terms(limit)
        self._start = self._terms.read(regex)

    def matches(self, text: str) -> bool:
        terms, state = self._terms, self._start
        for char in text:
            if state == Terms.NOTHING or state == terms.any_text:
                break
            state = terms.step(state, ord(char))
        return terms.nullable[state]

    def is_empty(self) -> bool:
        terms = self._terms
        seen, waiting = {self._start}, [self._start]
        while waiting:
            state = waiting.pop()
            if terms.nullable[state]:
                return False
            for _, _, target in terms.edges(state):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
                    terms.check_states(len(seen))
        return True

    def automaton(self) -> Dfa:
        terms = self._terms
        numbers, order = {self._start: 0}, [self._start]
        edges: list[list[Edge]] = []
        for state in order:  # grows while it is walked
            row: list[Edge] = []
            for low, high, target in terms.edges(state):
                if target == Terms.NOTHING:
                    continue
                if target not in numbers:
                    numbers[target] = len(order)
                    order.append(target)
                    terms.check_states(len(order))
                row.append((low, high, numbers[target]))
            edges.append(row)
        return minimised([terms.nullable[state] for state in order], edges)


def matches(regex: Regex, text: str) -> bool:
    """Whether the regex matches the text as a whole. Time grows with the text, never the stack."""
    return Language(regex).matches(text)


def begins(regex: Regex, text: str) -> bool:
    """Whether some text that matches may begin with this one. True, too, where only an empty And tells otherwise."""
    terms = Terms(MAX_STATES)
    state = terms.read(regex)
    for char in text:
        state = terms.step(state, ord(char))
    return state != Terms.NOTHING


def is_empty(regex: Regex, limit: int = MAX_STATES) -> bool:
    """Whether no text matches. Raises HR-CONSTRAINT-04 above `limit` states."""
    if not contains_operators(regex):
        return regex == NOTHING or not _possible(regex)
    return Language(regex, limit).is_empty()


def surely_empty(regex: Regex) -> bool:
    """Whether no text matches, as far as EMPTINESS_STATES tell."""
    try:
        return is_empty(regex, EMPTINESS_STATES)
    except RequestError:
        return False


def overlap(a: Regex, b: Regex) -> bool:
    """Whether some text is in both."""
    for one, other in ((a, b), (b, a)):
        text = literal_text(one)
        if text is not None:
            return matches(other, text)
    return not is_empty(both(a, b))


def automaton(regex: Regex, limit: int = MAX_STATES) -> Dfa:
    """The smallest automaton of a language. Raises HR-CONSTRAINT-04 above `limit` states."""
    return Language(regex, limit).automaton()


def nullable(regex: Regex) -> bool:
    """Whether the empty text matches."""
    match regex:
        case Chars():
            return False
        case Cat(parts) | And(parts):
            return all(nullable(part) for part in parts)
        case Or(choices):
            return any(nullable(choice) for choice in choices)
        case Repeat(body, least, _):
            return least == 0 or nullable(body)
        case Not(body):
            return not nullable(body)


def literal_text(regex: Regex) -> str | None:
    """The only text that matches, where that is plain to see."""
    parts = regex.parts if isinstance(regex, Cat) else (regex,)
    text = []
    for part in parts:
        if not isinstance(part, Chars) or len(part.ranges) != 1 or part.ranges[0][0] != part.ranges[0][1]:
            return None
        text.append(chr(part.ranges[0][0]))
    return "".join(text)


def contains_operators(regex: Regex) -> bool:
    match regex:
        case Chars():
            return False
        case And() | Not():
            return True
        case Cat(parts):
            return any(map(contains_operators, parts))
        case Or(choices):
            return any(map(contains_operators, choices))
        case Repeat(body):
            return contains_operators(body)


def _possible(regex: Regex) -> bool:
    """Whether some text matches a regex without And and Not."""
    match regex:
        case Chars(ranges):
            return bool(ranges)
        case Cat(parts):
            return all(map(_possible, parts))
        case Or(choices):
            return any(map(_possible, choices))
        case Repeat(body, least, _):
            return least == 0 or _possible(body)
        case _:
            raise AssertionError(regex)


class Terms:
    """Terms numbered so that equal ones (up to order in unions and intersections) have one number."""

    NOTHING = 0
    EMPTY = 1

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nullable: list[bool] = []
        self._terms: list[tuple[object, ...]] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._edges: dict[int, list[Edge]] = {}
        self._starts: dict[int, list[int]] = {}
        self._number(("chars", ()), False)
        self._number(("empty",), True)
        any_char = self._number(("chars", ANY_CHAR.ranges), False)
        self.any_text = self._number(("repeat", any_char, 0, None), True)

    def check_states(self, states: int) -> None:
        if states > self.limit:
            raise _too_big(self.limit, "states")

    def _number(self, term: tuple[object, ...], empty: bool) -> int:
        number = self._numbers.get(term)
        if number is None:
            number = len(self._terms)
            if number > self.limit * NODES_PER_STATE:
                raise _too_big(self.limit, "states' worth of terms")
            self._numbers[term] = number
            self._terms.append(term)
            self.nullable.append(empty)
        return number

    def read(self, regex: Regex) -> int:
        match regex:
            case Chars(ranges):
                return self._number(("chars", ranges), False)
            case Cat(parts):
                text = literal_text(regex) if len(parts) <= SHORT_TEXT else None
                if text:
                    return self.text(text)
                number = self.EMPTY
                for part in reversed(_counted(parts)):
                    number = self.cat(self.read(part), number)
                return number
            case Or(choices):
                return self.union(self.read(choice) for choice in choices)
            case And(parts):
                return self.meet(self.read(part) for part in parts)
            case Not(body):
                return self.negation(self.read(body))
            case Repeat(body, least, most):
                return self.repeat(self.read(body), least, most)

    def text(self, text: str) -> int:
        return self._number(("text", text), False) if text else self.EMPTY

    def cat(self, first: int, rest: int) -> int:
        if first == self.NOTHING or rest == self.NOTHING:
            return self.NOTHING
        if first == self.EMPTY:
            return rest
        if rest == self.EMPTY or first == rest == self.any_text:
            return first
        return self._number(("cat", first, rest), self.nullable[first] and self.nullable[rest])

    def union(self, numbers: Iterable[int]) -> int:
        flat: set[int] = set()
        for number in numbers:
            term = self._terms[number]
            flat.update(term[1] if term[0] == "union" else (number,))  # type: ignore[arg-type]
        flat.discard(self.NOTHING)
        if self.any_text in flat:
            return self.any_text
        if len(flat) < 2:
            return next(iter(flat), self.NOTHING)
        return self._number(("union", frozenset(flat)), any(self.nullable[each] for each in flat))

    def meet(self, numbers: Iterable[int]) -> int:
        flat: set[int] = set()
        for number in numbers:
            term = self._terms[number]
            flat.update(term[1] if term[0] == "meet" else (number,))  # type: ignore[arg-type]
        flat.discard(self.any_text)
        if self.NOTHING in flat:
            return self.NOTHING
        if len(flat) < 2:
            return next(iter(flat), self.any_text)
        return self._number(("meet", frozenset(flat)), all(self.nullable[each] for each in flat))

    def negation(self, number: int) -> int:
        if number in (self.NOTHING, self.any_text):
            return self.any_text if number == self.NOTHING else self.NOTHING
        term = self._terms[number]
        return term[1] if term[0] == "not" else self._number(("not", number), not self.nullable[number])  # type: ignore[return-value]

    def repeat(self, body: int, least: int, most: int | None) -> int:
        if most == 0 or body == self.EMPTY or (body == self.NOTHING and least == 0):
            return self.EMPTY
        if body == self.NOTHING or (least == most == 1):
            return body
        least = 0 if self.nullable[body] else least
        if body == self.any_text or (least == 0 and most is None and self._terms[body][0] == "repeat"):
            inner = self._terms[body]
            if inner[2] == 0 and inner[3] is None:
                return body
        return self._number(("repeat", body, least, most), least == 0)

    def step(self, number: int, point: int) -> int:
        edges = self.edges(number)
        starts = self._starts.get(number)
        if starts is None:
            starts = self._starts[number] = [edge[0] for edge in edges]
        index = bisect_right(starts, point) - 1
        return edges[index][2] if index >= 0 and point <= edges[index][1] else self.NOTHING

    def edges(self, number: int) -> list[Edge]:
        """What is left of a term after each character: sorted and disjoint; a character on no edge leaves nothing."""
        found = self._edges.get(number)
        if found is None:
            found = self._edges[number] = self._derive(number)
        return found

    def _derive(self, number: int) -> list[Edge]:
        term = self._terms[number]
        match term:
            case ("chars", ranges):
                return [(low, high, self.EMPTY) for low, high in ranges]  # type: ignore[attr-defined]
            case ("empty",):
                return []
            case ("text", str(text)):
                return [(ord(text[0]), ord(text[0]), self.text(text[1:]))]
            case ("cat", _, _):
                return self._derive_cat(number)
            case ("repeat", int(body), int(least), most):
                rest = self.repeat(body, max(least - 1, 0), None if most is None else most - 1)  # type: ignore[operator]
                return [(low, high, self.cat(target, rest)) for low, high, target in self.edges(body)]
            case ("union", members):
                return self._gathered([self.edges(member) for member in members], self.union)  # type: ignore[attr-defined]
            case ("meet", members):
                rows = [self.edges(member) for member in members]  # type: ignore[attr-defined]
                return self._gathered(rows, self.meet, len(rows))
            case ("not", int(body)):
                return self._derive_not(body)
            case _:
                raise AssertionError(term)

    def _derive_cat(self, number: int) -> list[Edge]:
        rows: list[list[Edge]] = []
        while True:  # along the parts that may be empty; not by recursion, there may be thousands
            term = self._terms[number]
            if term[0] != "cat":
                rows.append(self.edges(number))
                break
            first, rest = term[1], term[2]
            assert isinstance(first, int)
            assert isinstance(rest, int)
            rows.append([(low, high, self.cat(target, rest)) for low, high, target in self.edges(first)])
            if not self.nullable[first]:
                break
            number = rest
        return rows[0] if len(rows) == 1 else self._gathered(rows, self.union)

    def _derive_not(self, body: int) -> list[Edge]:
        row: list[Edge] = []
        at = 0
        for low, high, target in self.edges(body):
            row += self._any(at, low - 1)
            row.append((low, high, self.negation(target)))
            at = high + 1
        row += self._any(at, MAX_CODE_POINT)
        return [edge for edge in row if edge[2] != self.NOTHING]

    def _any(self, low: int, high: int) -> list[Edge]:
        parts = ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))
        return [(first, last, self.any_text) for first, last in parts if first <= last]

    def _gathered(self, rows: list[list[Edge]], join, needed: int = 1) -> list[Edge]:  # type: ignore[no-untyped-def]
        """One row from several: a character that is on at least `needed` of them leads to their targets, joined."""
        events: dict[int, list[tuple[bool, int]]] = {}
        for row in rows:
            for low, high, target in row:
                events.setdefault(low, []).append((True, target))
                events.setdefault(high + 1, []).append((False, target))
        active: dict[int, int] = {}
        count = 0
        result: list[Edge] = []
        points = sorted(events)
        for point, following in pairwise(points):
            for enters, target in events[point]:
                count += 1 if enters else -1
                active[target] = active.get(target, 0) + (1 if enters else -1)
                if not active[target]:
                    del active[target]
            if count >= needed:
                target = join(active)
                if target == self.NOTHING:
                    continue
                if result and result[-1][2] == target and result[-1][1] == point - 1:
                    result[-1] = (result[-1][0], following - 1, target)
                else:
                    result.append((point, following - 1, target))
        return result


def _counted(parts: tuple[Regex, ...]) -> list[Regex]:
    """With repetitions of the same thing in a row as one."""
    result: list[Regex] = []
    for part in parts:
        before = result[-1] if result else None
        if isinstance(part, Repeat) and isinstance(before, Repeat) and part.body == before.body:
            most = None if part.most is None or before.most is None else part.most + before.most
            result[-1] = Repeat(part.body, part.least + before.least, most)
        else:
            result.append(part)
    return result


def _too_big(limit: int, what: str) -> RequestError:
    return RequestError(
        "HR-CONSTRAINT-04",
        f"a regular expression needs more than {limit:,} {what}",
        "simplify the pattern, or lower the counts of its repetitions",
    )
