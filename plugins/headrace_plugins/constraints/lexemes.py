"""Terminals among which taking the longest match loses nothing.

llguidance reads a text as terminals: of all that the grammar allows next it takes the longest match, and never gives
any of it back. A text is lost where terminal x is complete, x or another terminal y could go on with a byte, and the
grammar could also go on behind x with that byte. `lexical` finds these places and puts them right: neighbours become
one terminal, or terminals are taken apart, in the end to single characters, which can't lose anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import Terms, automaton, begins, literal_text, matches, nullable
from headrace_plugins.constraints.dfa import rules_of
from headrace_plugins.constraints.grammar import EMPTY_EXPR, Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq
from headrace_plugins.constraints.regex import And, Cat, Chars, Not, Or, Ranges, Regex, Repeat, cat, literal
from headrace_plugins.constraints.trimming import post_order, references, some

MAX_STATES = 1_500
"""States looked at for one terminal, or one set of terminals that may come next. Beyond them nothing is found, and the
promise of `Rx` stands alone."""
MAX_WORK = 500_000
"""Terminals compared in one round, each state of each counted; a second or two."""
MAX_ROUNDS = 20
FINE_ROUNDS = 8
"""After so many rounds, terminals at which texts are lost are taken apart to single characters."""
MAX_SAMPLES = 8
"""Places at which one terminal is cut in one round."""

Lost = dict[Regex, dict[str, None]]
"""Terminals that go on where they should not -> texts at whose end they do."""


def lexical(rules: Rules) -> Rules:
    """The same grammar with terminals that lose no text. Expects trimmed rules."""
    bodies = {name: _filled(body) for name, body in rules.rules.items()}
    for number in range(MAX_ROUNDS):
        lost = _Survey(Rules(rules.start, bodies)).conflicts()
        if not lost:
            break
        changed = {name: _merged(body, lost) for name, body in bodies.items()} if number == 0 else bodies
        if changed == bodies:
            cuts = _Cuts(lost, set(bodies), fine=number >= FINE_ROUNDS)
            changed = {name: cuts.split(body) for name, body in bodies.items()} | cuts.added
        if changed == bodies:  # the rest can't be taken apart: texts may be lost, none is added
            break
        bodies = changed
    return Rules(rules.start, bodies)


def _filled(body: Expr) -> Expr:
    """With terminals that may be empty as options of ones that may not."""
    match body:
        case Rx(regex):
            if not nullable(regex):
                return body
            return Alt((Rx(some(regex)), EMPTY_EXPR))
        case Seq(parts):
            return Seq(tuple(map(_filled, parts)))
        case Alt(choices):
            return Alt(tuple(map(_filled, choices)))
        case Rep(inner, least, most):
            return Rep(_filled(inner), least, most)
        case _:
            return body


def _regex(leaf: Expr) -> Regex | None:
    match leaf:
        case Lit(text):
            return literal(text)
        case Rx(regex):
            return regex
        case _:
            return None


def _merged(body: Expr, lost: Lost) -> Expr:
    """With each of the terminals put together with a terminal right behind it."""
    match body:
        case Seq(parts):
            result: list[Expr] = []
            for part in (_merged(each, lost) for each in parts):
                before, regex = _regex(result[-1]) if result else None, _regex(part)
                if before in lost and before is not None and regex is not None:
                    result[-1] = Rx(cat(before, regex))
                else:
                    result.append(part)
            return result[0] if len(result) == 1 else Seq(tuple(result))
        case Alt(choices):
            return Alt(tuple(_merged(choice, lost) for choice in choices))
        case Rep(inner, least, most):
            return Rep(_merged(inner, lost), least, most)
        case _:
            return body


class _Cuts:
    """Takes terminals apart, no further than their texts make necessary."""

    def __init__(self, lost: Lost, taken: set[str], *, fine: bool) -> None:
        self._taken = taken
        self._fine = fine
        self.added: dict[str, Expr] = {}
        """Rules for terminals that only an automaton takes apart."""
        self._parts = {regex: _filled(self._cut(regex, list(texts))) for regex, texts in lost.items()}

    def split(self, body: Expr) -> Expr:
        regex = _regex(body)
        if regex is not None:
            return self._parts.get(regex, body)
        match body:
            case Seq(parts):
                return Seq(tuple(map(self.split, parts)))
            case Alt(choices):
                return Alt(tuple(map(self.split, choices)))
            case Rep(inner, least, most):
                return Rep(self.split(inner), least, most)
            case _:
                return body

    def _cut(self, regex: Regex, texts: list[str]) -> Expr:
        match regex:
            case Cat(parts) if self._fine:
                return Seq(tuple(self._cut(part, texts) for part in parts))
            case Or(choices) if self._fine:
                return Alt(tuple(self._cut(choice, texts) for choice in choices))
            case Repeat(body, least, most) if self._fine:
                return Rep(self._cut(body, texts), least, most)
            case Cat(parts):
                whole = literal_text(regex)
                places = sorted({place for text in texts for place in _places(parts, text, whole is not None)})
                pieces = [cat(*parts[low:high]) for low, high in pairwise([0, *places, len(parts)])]
                return Seq(tuple(map(_leaf, pieces)))
            case Or(choices):
                return Alt(tuple(map(_leaf, choices)))
            case Repeat(body, least, most):
                return Rep(_leaf(body), least, most)
            case And() | Not():
                return self._automaton(regex)
            case _:
                return Rx(regex)

    def _automaton(self, regex: Regex) -> Expr:
        taken = self._taken | self.added.keys()
        prefix = next(name for name in (f"x{n}_" for n in range(len(taken) + 1)) if f"{name}end" not in taken)
        try:
            rules = rules_of(automaton(regex, MAX_STATES), prefix, left=True)
        except RequestError:
            return Rx(regex)
        self.added.update(rules.rules)
        return Ref(rules.start)


def _leaf(regex: Regex) -> Expr:
    text = literal_text(regex)
    return Rx(regex) if text is None else Lit(text)


def _places(parts: tuple[Regex, ...], text: str, plain: bool) -> Iterable[int]:
    """Where to cut a series so that the text ends at a cut, or else before and behind the part in which it ends."""
    if plain:
        return (len(text),)
    ends = [place for place in range(1, len(parts)) if matches(cat(*parts[:place]), text)]
    if ends:
        return ends[-1:]
    inside = next((place for place in range(1, len(parts)) if begins(cat(*parts[:place]), text)), len(parts))
    return [place for place in (inside - 1, inside) if 0 < place < len(parts)] or (1,)


@dataclass(slots=True)
class _Survey:
    """What may come first in a grammar, and next to each terminal. Sets of terminals are bits of an int."""

    rules: Rules
    terminals: list[Regex | None] = field(default_factory=list)
    """None: a special token."""
    _numbers: dict[Expr, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    """By id: the rules keep their leaves alive."""
    _by_regex: dict[Regex, int] = field(default_factory=dict)
    _firsts: dict[str, tuple[int, bool]] = field(default_factory=dict)
    _follow: dict[str, int] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)
    _lead: dict[int, int] = field(default_factory=dict)
    _leads_of: dict[int, int] = field(default_factory=dict)
    _leads_behind: dict[int, int] = field(default_factory=dict)
    _work: int = 0
    _unsure: int = 0
    _suspects: int = 0
    """Terminals that are not sure, or have one behind them that is not."""

    def conflicts(self) -> Lost:
        """The terminals that would go on where a text may be lost."""
        self._read()
        self._suspects = self._unsure | _union(1 << n for n, behind in self._next.items() if behind & self._unsure)
        lost: dict[int, dict[str, None]] = {}
        for number, behind in self._next.items():
            if not (1 << number | behind) & self._unsure:
                continue
            text = self._goes_on(number, self._leads(behind))
            if text is not None:
                lost.setdefault(number, {})[text] = None
        terms = Terms(MAX_STATES)
        starts: dict[int, int] = {}
        rows = [self._firsts[self.rules.start][0], *self._next.values()]
        rows.sort(key=int.bit_count)
        checked: list[int] = []
        while rows:  # the largest first: what is right in a row is right in a part of it
            row = rows.pop()
            if self._may_lose(row) and all(row & ~larger for larger in checked):
                checked.append(row)
                rows += self._check(row, terms, starts, lost)
        found = ((self.terminals[number], texts) for number, texts in lost.items())
        return {regex: texts for regex, texts in found if regex is not None and not isinstance(regex, Chars)}

    def _doubtful(self, states: tuple[tuple[int, int], ...]) -> bool:
        """Whether one of the terminals, or one that may come behind it, is not sure."""
        return any(self._suspects >> number & 1 for number, _ in states)

    def _may_lose(self, row: int) -> bool:
        """Whether not all terminals of a row and behind it are sure."""
        return bool(_union(1 << number | self._next.get(number, 0) for number in _members(row)) & self._unsure)

    def _read(self) -> None:
        rules = self.rules.rules
        self._firsts = dict.fromkeys(rules, (0, False))
        order = post_order(rules, self.rules.start)[0]
        changed = True
        while changed:
            changed = False
            for name in order:
                found = self._first(rules[name])
                changed |= found != self._firsts[name]
                self._firsts[name] = found
        self._follow = dict.fromkeys(rules, 0)
        waiting = dict.fromkeys(reversed(order))
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            before = {each: self._follow[each] for each in set(references(rules[name]))}
            self._walk(rules[name], self._follow[name])
            waiting |= dict.fromkeys(each for each, mask in before.items() if self._follow[each] != mask)

    def _number(self, leaf: Expr) -> int:
        number = self._seen.get(id(leaf))  # a leaf may be large: its hash is taken once
        if number is None:
            number = self._seen[id(leaf)] = self._numbered(leaf)
        return number

    def _numbered(self, leaf: Expr) -> int:
        number = self._numbers.get(leaf)
        if number is None:
            regex = _regex(leaf)
            number = len(self.terminals) if regex is None else self._by_regex.get(regex, len(self.terminals))
            if number == len(self.terminals):
                self.terminals.append(regex)
                if regex is not None:
                    self._by_regex[regex] = number
            self._numbers[leaf] = number
            if not (isinstance(leaf, Rx) and leaf.sure):
                self._unsure |= 1 << number
        return number

    def _first(self, body: Expr) -> tuple[int, bool]:
        """Terminals that may come first, and whether there may be none."""
        match body:
            case Ref(name):
                return self._firsts[name]
            case Seq(parts):
                mask = 0
                for part in parts:
                    first, empty = self._first(part)
                    mask |= first
                    if not empty:
                        return mask, False
                return mask, True
            case Alt(choices):
                found = [self._first(choice) for choice in choices]
                return _union(mask for mask, _ in found), any(empty for _, empty in found)
            case Rep(inner, least, _):
                mask, empty = self._first(inner)
                return mask, empty or least == 0
            case _:
                return 1 << self._number(body), False

    def _walk(self, body: Expr, follow: int) -> None:
        """Note what may come behind each part when `follow` may come behind the body."""
        match body:
            case Ref(name):
                self._follow[name] |= follow
            case Seq(parts):
                for part in reversed(parts):
                    self._walk(part, follow)
                    first, empty = self._first(part)
                    follow = first | follow if empty else first
            case Alt(choices):
                for choice in choices:
                    self._walk(choice, follow)
            case Rep(inner, _, most):
                self._walk(inner, follow if most == 1 else follow | self._first(inner)[0])
            case _:
                number = self._number(body)
                self._next[number] = self._next.get(number, 0) | follow

    def _leads(self, mask: int) -> int:
        """First bytes of the terminals of a set, as bits."""
        found = self._leads_of.get(mask)
        if found is None:
            found = self._leads_of[mask] = _union(self._lead_of(number) for number in _members(mask))
        return found

    def _lead_of(self, number: int) -> int:
        found = self._lead.get(number)
        if found is None:
            regex = self.terminals[number]
            terms = Terms(MAX_STATES)
            try:
                edges = [] if regex is None else terms.edges(terms.read(regex))
                found = leads((low, high) for low, high, _ in edges)
            except RequestError:
                found = 0
            self._lead[number] = found
        return found

    def _goes_on(self, number: int, bytes_behind: int) -> str | None:
        """A text of the terminal with which it may go on by one of the bytes."""
        regex = self.terminals[number]
        if regex is None or not bytes_behind or literal_text(regex) is not None or isinstance(regex, Chars):
            return None
        terms = Terms(MAX_STATES)
        try:
            start = terms.read(regex)
            seen, waiting = {start: ""}, [start]
            for state in waiting:  # grows while it is walked
                edges = terms.edges(state)
                if terms.nullable[state] and leads((low, high) for low, high, _ in edges) & bytes_behind:
                    return seen[state]
                for low, _, target in edges:
                    if target not in seen:
                        seen[target] = seen[state] + chr(low)
                        waiting.append(target)
                        terms.check_states(len(seen))
        except RequestError:
            return None
        return None

    def _check(self, row: int, terms: Terms, starts: dict[int, int], lost: dict[int, dict[str, None]]) -> list[int]:
        """Compare the terminals of a row with each other. Returns the rows behind texts that several of them match."""
        new: list[int] = []
        for number in _members(row):
            regex = self.terminals[number]
            if number not in starts and regex is not None:
                try:
                    starts[number] = terms.read(regex)
                except RequestError:
                    return new
        start = tuple((number, starts[number]) for number in _members(row) if number in starts)
        seen, waiting = {start: ""}, [start]
        for states in waiting:  # grows while it is walked
            self._work += len(states)
            if self._work > MAX_WORK:
                break
            complete = _union(1 << number for number, state in states if terms.nullable[state])
            if complete & (complete - 1):
                new.append(_union(self._next.get(number, 0) for number in _members(complete)))
            try:
                steps = list(_steps({number: terms.edges(state) for number, state in states}))
            except RequestError:
                break
            for low, high, targets in steps:
                for number in self._going_on(complete, leads([(low, high)]), targets):
                    texts = lost.setdefault(number, {})
                    if len(texts) < MAX_SAMPLES:
                        texts[seen[states]] = None
                if len(targets) > 1 and targets not in seen and len(seen) < MAX_STATES and self._doubtful(targets):
                    seen[targets] = seen[states] + chr(low)
                    waiting.append(targets)
        return new

    def _going_on(self, complete: int, lead: int, targets: tuple[tuple[int, int], ...]) -> Iterable[int]:
        """The terminals that go on where another one is complete and something else may come behind it."""
        for number in _members(complete):
            if self._behind(number) & lead:
                yield from (each for each, _ in targets if each != number)

    def _behind(self, number: int) -> int:
        """First bytes of what may come behind a terminal, as bits."""
        found = self._leads_behind.get(number)
        if found is None:
            found = self._leads_behind[number] = self._leads(self._next.get(number, 0))
        return found


def _union(masks: Iterable[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def _members(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _steps(
    edges: Mapping[int, list[tuple[int, int, int]]],
) -> Iterable[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """(first, last, ((terminal, its next state), ...)) for each run of characters that tells the edges apart."""
    events: dict[int, list[tuple[bool, int, int]]] = {}
    for number, row in edges.items():
        for low, high, target in row:
            events.setdefault(low, []).append((True, number, target))
            events.setdefault(high + 1, []).append((False, number, target))
    active: dict[int, int] = {}
    points = sorted(events)
    for index, point in enumerate(points[:-1]):
        for enters, number, target in sorted(events[point]):  # leaving first
            if enters:
                active[number] = target
            else:
                del active[number]
        if active:
            yield point, points[index + 1] - 1, tuple(sorted(active.items()))


def leads(ranges: Iterable[tuple[int, int]] | Ranges) -> int:
    """First bytes of the UTF-8 of characters, as bits. A lexer of bytes can't tell characters apart that share one."""
    mask = 0
    for low, high in ranges:
        first, last = _lead(low), _lead(high)
        mask |= (1 << (last + 1)) - (1 << first)
    return mask


def _lead(point: int) -> int:
    if point < 0x80:
        return point
    if point < 0x800:
        return 0xC0 | point >> 6
    return 0xE0 | point >> 12 if point < 0x10000 else 0xF0 | point >> 18
