r"""Assertions of patterns (`^`, `$`, `\b`, lookahead) turned into plain regular languages.

A pattern is read from its end: each part is given the language of all that may follow it, one for each thing that may
stand before it (the start of the text, a word character, another character). A lookahead then is an intersection with
what follows, and an anchor picks one of the three. Exact everywhere but under repetition, where a fixed point would be
needed; there the shapes that people write are resolved, and the others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import nullable
from headrace_plugins.constraints.characters import common, inverted
from headrace_plugins.constraints.regex import (
    ANY_TEXT,
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
    literal,
    repeat,
)

MAX_COPIES = 64
"""Of a repeated part with assertions that is written out."""
MAX_SIZE = 200_000
"""Parts of the regular expression that a pattern becomes."""
MAX_STEPS = 50_000
"""Parts of a pattern that are worked out, copies counted: repetitions with assertions inside each other multiply."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A place: start of the text, end, end but for a line feed (Python's `$`), border of a word, or none."""

    kind: Literal["start", "end", "last line", "word", "no word"]
    at: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """What follows begins, or does not begin, with body."""

    body: Node
    negative: bool
    at: int


@dataclass(frozen=True, slots=True)
class Series:
    parts: tuple[Node, ...]

    @staticmethod
    def of(parts: Sequence[Node]) -> Node:
        joined: list[Node] = []
        plain: list[Regex] = []
        for part in parts:
            if isinstance(part, Regex):
                plain.append(part)
                continue
            if plain:
                joined.append(cat(*plain))
                plain = []
            joined += part.parts if isinstance(part, Series) else (part,)
        if plain or not joined:
            joined.append(cat(*plain))
        return joined[0] if len(joined) == 1 else Series(tuple(joined))


@dataclass(frozen=True, slots=True)
class Choice:
    choices: tuple[Node, ...]

    @staticmethod
    def of(choices: Sequence[Node]) -> Node:
        plain = [choice for choice in choices if isinstance(choice, Regex)]
        others = [choice for choice in choices if not isinstance(choice, Regex)]
        if not others:
            return either(*plain)
        return Choice((*([either(*plain)] if plain else []), *others)) if plain or len(others) > 1 else others[0]


@dataclass(frozen=True, slots=True)
class Times:
    """A repeated part with assertions in it."""

    body: Node
    least: int
    most: int | None
    at: int


Node = Regex | Edge | Ahead | Series | Choice | Times
Refuse = Callable[[str, int | None], RequestError]


@dataclass(frozen=True, slots=True)
class _Rest:
    """The language of what follows, by what stands before."""

    start: Regex
    word: Regex
    other: Regex

    @staticmethod
    def same(regex: Regex) -> _Rest:
        return _Rest(regex, regex, regex)

    def map(self, change: Callable[[Regex], Regex]) -> _Rest:
        if self.start is self.word is self.other:
            return _Rest.same(change(self.start))
        return _Rest(change(self.start), change(self.word), change(self.other))

    def merge(self, other: _Rest, join: Callable[[Regex, Regex], Regex]) -> _Rest:
        if self.start is self.word is self.other and other.start is other.word is other.other:
            return _Rest.same(join(self.start, other.start))
        return _Rest(join(self.start, other.start), join(self.word, other.word), join(self.other, other.other))


def resolve(node: Node, *, search: bool, word: Chars, refuse: Refuse) -> Regex:
    """The texts that a pattern matches as a whole, or, with `search`, in which it is found.

    word: the word characters of its dialect. refuse: makes the error for what can't be resolved, from what and where.
    Raises that, and RequestError HR-CONSTRAINT-04 for assertions that multiply.
    """
    if search:
        node = Series.of([ANY_TEXT, node])
    try:
        return _Resolver(word, refuse).before(node, _Rest.same(ANY_TEXT if search else EMPTY)).start
    except RecursionError:
        raise _too_big("becomes a regular expression that is nested too deep") from None


class _Resolver:
    def __init__(self, word: Chars, refuse: Refuse) -> None:
        self._word = word
        self._other = inverted(word)
        self._refuse = refuse
        self._sizes: dict[int, tuple[Regex, int]] = {}
        self._n_steps = 0

    def before(self, node: Node, rest: _Rest) -> _Rest:
        """What matches `node` and then what the rest says."""
        self._n_steps += 1
        if self._n_steps > MAX_STEPS:
            raise _too_big(f"takes more than {MAX_STEPS:,} steps")
        match node:
            case Series(parts):
                for part in reversed(parts):
                    rest = self.before(part, rest)
                return rest
            case Choice(choices):
                result = self.before(choices[0], rest)
                for choice in choices[1:]:
                    result = result.merge(self.before(choice, rest), either)
                return self._checked(result)
            case Edge():
                return self._at_edge(node, rest)
            case Ahead(body, negative):
                ahead = self.before(body, _Rest.same(ANY_TEXT))
                return self._checked(rest.merge(ahead.map(complement) if negative else ahead, both))
            case Times():
                return self._checked(self._repeated(node, rest))
            case _:
                return self._plain(node, rest)

    def _at_edge(self, edge: Edge, rest: _Rest) -> _Rest:
        if edge.kind == "start":
            return _Rest(rest.start, NOTHING, NOTHING)
        if edge.kind == "end":
            return rest.map(lambda regex: EMPTY if nullable(regex) else NOTHING)
        if edge.kind == "last line":
            return rest.map(lambda regex: both(either(EMPTY, literal("\n")), regex))
        before_word = cat(self._word, ANY_TEXT)
        before_other = either(EMPTY, cat(self._other, ANY_TEXT))
        if edge.kind == "no word":
            before_word, before_other = before_other, before_word
        return _Rest(both(rest.start, before_word), both(rest.word, before_other), both(rest.other, before_word))

    def _plain(self, regex: Regex, rest: _Rest) -> _Rest:
        if rest.start == rest.word == rest.other:
            return _Rest.same(cat(regex, rest.start))
        some = _without_empty(regex)
        if rest.word == rest.other:
            behind = cat(some, rest.word)
        else:
            behind = either(cat(_ending(some, self._word), rest.word), cat(_ending(some, self._other), rest.other))
        if not nullable(regex):
            return _Rest.same(behind)
        return rest.map(lambda following: either(following, behind))

    def _repeated(self, node: Times, rest: _Rest) -> _Rest:
        parts = _anchored(node)
        if parts is not None:
            return self.before(_written(parts, node.at), rest)
        if node.most is not None and node.most <= MAX_COPIES:
            return self._copies(node.body, node.least, node.most, rest)
        if rest.start == rest.word == rest.other == ANY_TEXT and node.least <= MAX_COPIES:
            return self._copies(node.body, node.least, node.least, rest)  # any more may as well be of the rest
        if rest.start == rest.word == rest.other == EMPTY:
            tempered = self._tempered(node)
            if tempered is not None:
                return _Rest.same(tempered)
        raise self._refuse("an assertion inside of a repetition", node.at)

    def _copies(self, body: Node, least: int, most: int, rest: _Rest) -> _Rest:
        result = rest
        for count in reversed(range(most)):
            result = self.before(body, result)
            result = self._checked(result.merge(rest, either) if count >= least else result)
        return result

    def _tempered(self, node: Times) -> Regex | None:
        """Lookaheads before each character to the end of the text, as in ((?!x).)*: it begins so at no character."""
        if not isinstance(node.body, Series) or not isinstance(node.body.parts[-1], Chars):
            return None
        each, faults = node.body.parts[-1], []
        for ahead in node.body.parts[:-1]:
            if not isinstance(ahead, Ahead):
                return None
            found = self.before(ahead.body, _Rest.same(ANY_TEXT))
            if not found.start == found.word == found.other:
                return None
            faults.append(found.start if ahead.negative else complement(found.start))
        fault = cat(repeat(each), both(either(*faults), cat(each, ANY_TEXT)))
        return both(repeat(each, node.least, node.most), complement(fault))

    def _checked(self, rest: _Rest) -> _Rest:
        for regex in (rest.start, rest.word, rest.other):
            if self._size(regex) > MAX_SIZE:
                raise _too_big(f"becomes a regular expression of more than {MAX_SIZE:,} parts")
        return rest

    def _size(self, regex: Regex) -> int:
        """As a tree, though counted over shared parts."""
        known = self._sizes.get(id(regex))
        if known is not None and known[0] is regex:
            return known[1]
        match regex:
            case Cat(parts) | And(parts) | Or(parts):
                size = 1 + sum(map(self._size, parts))
            case Repeat(body) | Not(body):
                size = 1 + self._size(body)
            case _:
                size = 1
        self._sizes[id(regex)] = (regex, size)
        return size


def _too_big(what: str) -> RequestError:
    return RequestError(
        "HR-CONSTRAINT-04",
        f"a pattern with assertions {what}",
        "write fewer anchors and lookaheads inside of groups",
    )


_Anchored = dict[tuple[bool, bool], Regex]
"""(begins at the start, ends at the end) -> the texts that match there."""


def _anchored(node: Node) -> _Anchored | None:
    """What a part matches by the anchors it needs; None where it has other assertions."""
    match node:
        case Edge(kind):
            return {(kind == "start", kind == "end"): EMPTY} if kind in ("start", "end") else None
        case Ahead():
            return None
        case Series(parts):
            result: _Anchored = {(False, False): EMPTY}
            for part in parts:
                following = _anchored(part)
                if following is None:
                    return None
                result = _joined(result, following)
            return result
        case Choice(choices):
            result = {}
            for choice in choices:
                found = _anchored(choice)
                if found is None:
                    return None
                for flags, regex in found.items():
                    result[flags] = either(result.get(flags, NOTHING), regex)
            return result
        case Times(body, least, most):
            inner = _anchored(body)
            return None if inner is None else _repeated_anchors(inner, least, most)
        case _:
            return {(False, False): node}


def _joined(first: _Anchored, second: _Anchored) -> _Anchored:
    result: _Anchored = {}
    for (starts, ended), before in first.items():
        for (started, ends), behind in second.items():
            if (ended and not nullable(behind)) or (started and not nullable(before)):
                continue
            joined = EMPTY if ended and started else before if ended else behind if started else cat(before, behind)
            flags = (starts or started, ended or ends)
            result[flags] = either(result.get(flags, NOTHING), joined)
    return result


def _repeated_anchors(body: _Anchored, least: int, most: int | None) -> _Anchored:
    """Only the first time may need the start, only the last the end; any others that do have to match nothing."""
    plain, first, last, alone = (
        body.get(flags, NOTHING) for flags in ((False, False), (True, False), (False, True), (True, True))
    )

    def between(taken: int, *fillers: Regex) -> Regex:
        if most is not None and most < taken:
            return NOTHING
        low = 0 if any(map(nullable, fillers)) else max(least - taken, 0)
        return repeat(plain, low, None if most is None else most - taken)

    any_empty = any(map(nullable, (plain, first, last)))
    single = alone if least <= 1 or any_empty else EMPTY if nullable(alone) else NOTHING
    result = {
        (False, False): either(EMPTY, between(0)) if least == 0 else between(0),
        (True, False): cat(first, between(1, first)),
        (False, True): cat(between(1, last), last),
        (True, True): either(cat(first, between(2, first, last), last), single),
    }
    return {flags: regex for flags, regex in result.items() if regex != NOTHING}


def _written(parts: _Anchored, at: int) -> Node:
    choices: list[Node] = []
    for (starts, ends), regex in parts.items():
        before: list[Node] = [Edge("start", at)] if starts else []
        behind: list[Node] = [Edge("end", at)] if ends else []
        choices.append(Series.of([*before, regex, *behind]))
    return Choice.of(choices) if choices else NOTHING


def _without_empty(regex: Regex) -> Regex:
    if not nullable(regex):
        return regex
    if isinstance(regex, Repeat) and not nullable(regex.body):
        return repeat(regex.body, 1, regex.most)
    return NOTHING if regex == EMPTY else both(regex, complement(EMPTY))


def _ending(regex: Regex, last: Chars) -> Regex:
    """The texts whose last character is one of a set."""
    if isinstance(regex, Chars):
        return common(regex, last)
    if isinstance(regex, Cat) and regex.parts and isinstance(regex.parts[-1], Chars):
        return cat(*regex.parts[:-1], common(regex.parts[-1], last))
    return both(regex, cat(ANY_TEXT, last))
