"""Arrays written as grammar: plain ones as sequences, counted ones (`contains`) and those of different elements as a
rule per state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

from headrace_plugins.constraints.grammar import EMPTY_EXPR, Alt, Expr, Rep, Seq
from headrace_plugins.constraints.schema.finite import finite_values
from headrace_plugins.constraints.schema.shapes import Array, Contains, Node
from headrace_plugins.constraints.schema.states import States

if TYPE_CHECKING:
    from headrace_plugins.constraints.schema.writing import Writer

MAX_STATES = 20_000
"""Of one array: elements so far and how many of them are contained."""
MAX_SUBSETS = 1_200
"""Sets of elements that have come, where no two may be equal."""
MAX_FINITE = 12


def write_array(writer: Writer, shape: Array, node: Node) -> Expr:
    """The arrays of a shape, which is one of `node`."""
    shape = _fitted(writer, shape)
    if shape.most is not None and shape.least > shape.most:
        return Alt(())
    unique = shape.unique and (shape.most is None or shape.most > 1)
    if unique or shape.not_unique:
        return _Different(writer, replace(shape, unique=unique), node).write()
    if not shape.contains:
        return _plain(writer, shape)
    simple = not shape.prefix and shape.least <= 1 and shape.most is None and len(shape.contains) == 1
    if simple and shape.contains[0].least == 1 and shape.contains[0].most is None:
        return _with_one(writer, shape)
    return _Counting(writer, shape, node).write()


def _fitted(writer: Writer, shape: Array) -> Array:
    """With a prefix and a most that say how long an array can be."""
    prefix, most = shape.prefix, shape.most
    closed = next((i for i, each in enumerate(prefix) if writer.is_empty(each)), None)
    if closed is not None:
        most = closed if most is None else min(most, closed)
    elif writer.is_empty(shape.rest):
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None:
        prefix = prefix[:most]
    contains = tuple(each for each in shape.contains if each.least or each.most is not None)
    return replace(shape, prefix=prefix, most=most, contains=contains)


def _framed(writer: Writer, inside: Expr, or_empty: bool = False) -> Expr:
    """An empty array is one terminal, not two: so inside is one element or more."""
    some = Seq((writer.array.open, inside, writer.array.close))
    return Alt((some, writer.array.empty)) if or_empty else some


def _plain(writer: Writer, shape: Array) -> Expr:
    choices: list[Expr] = []
    if shape.least == 0:
        choices.append(writer.array.empty)
    if shape.most != 0:
        first = shape.prefix[0] if shape.prefix else shape.rest
        choices.append(_framed(writer, Seq((writer.value(first), _behind(writer, shape)))))
    return choices[0] if len(choices) == 1 else Alt(tuple(choices))


def _behind(writer: Writer, shape: Array) -> Expr:
    """Elements behind the first."""
    length = max(len(shape.prefix), 1)
    tail: Expr = EMPTY_EXPR
    if shape.most is None or shape.most > length:
        most = None if shape.most is None else shape.most - length
        tail = Rep(Seq((writer.comma, writer.value(shape.rest))), max(shape.least - length, 0), most)
    for i in reversed(range(1, len(shape.prefix))):
        body = Seq((writer.comma, writer.value(shape.prefix[i]), tail))
        tail = body if i < shape.least else Rep(body, 0, 1)
        if i % 8 == 0:
            tail = writer.add("e", tail)
    return tail


def _with_one(writer: Writer, shape: Array) -> Expr:
    """Any elements, one that is contained, any elements."""
    any_element = writer.value(shape.rest)
    witness = writer.value(writer.table.both(shape.rest, shape.contains[0].node))
    inside = Seq((Rep(Seq((any_element, writer.comma))), witness, Rep(Seq((writer.comma, any_element)))))
    return _framed(writer, inside)


@dataclass(frozen=True, slots=True)
class _State:
    length: int
    """Elements so far, up to what matters."""
    counts: tuple[int, ...]
    """Of each `contains`: elements that are taken as contained, up to what matters."""


class _Counting:
    """A rule per state. Where `contains` has no most, an element that is contained may be taken as one or not; where it
    has, that is decided."""

    def __init__(self, writer: Writer, shape: Array, node: Node) -> None:
        self._writer, self._shape = writer, shape
        self._enough = max(shape.least, shape.most or 0, len(shape.prefix), 1)
        self._states: States[_State] = States(writer.rules, writer.rule_name("k"))
        states = self._enough + 1
        for each in shape.contains:
            states *= (each.least if each.most is None else each.most) + 1
        if states * 2 ** len(shape.contains) > MAX_STATES:
            raise writer.refused(node, "contains", "there is too much to count")

    def write(self) -> Expr:
        start = self._states.ref(_State(0, (0,) * len(self._shape.contains)))
        self._states.write(self._body)
        may_be_empty = not self._shape.least and all(not each.least for each in self._shape.contains)
        return _framed(self._writer, start, may_be_empty)

    def _body(self, state: _State) -> Expr:
        shape = self._shape
        choices: list[Expr] = []
        loops: list[Expr] = []
        if 0 < state.length >= shape.least and all(
            count >= each.least for count, each in zip(state.counts, shape.contains, strict=True)
        ):
            choices.append(EMPTY_EXPR)
        if shape.most is None or state.length < shape.most:
            base = shape.prefix[state.length] if state.length < len(shape.prefix) else shape.rest
            comma = (self._writer.comma,) if state.length else ()
            for of, counts in self._ways(base, state.counts):
                after = _State(min(state.length + 1, self._enough), counts)
                step = (*comma, self._writer.value(of))
                if after == state:
                    loops.append(Seq(step))
                else:
                    choices.append(Seq((*step, self._states.ref(after))))
        body = Alt(tuple(choices))
        return Seq((Rep(Alt(tuple(loops))), body)) if loops else body

    def _ways(self, base: Node, counts: tuple[int, ...]) -> Iterator[tuple[Node, tuple[int, ...]]]:
        """(values of the next element, counts behind it)."""
        ways: list[tuple[Node, tuple[int, ...]]] = [(base, ())]
        for count, each in zip(counts, self._shape.contains, strict=True):
            ways = [(more, (*done, after)) for of, done in ways for more, after in self._decided(of, count, each)]
        return iter(ways)

    def _decided(self, of: Node, count: int, each: Contains) -> Iterator[tuple[Node, int]]:
        table = self._writer.table
        if each.most is None:
            yield of, count
            if count < each.least:
                yield from self._possible(table.both(of, each.node), count + 1)
            return
        yield from self._possible(table.both(of, table.outside(each.node)), count)
        if count < each.most:
            yield from self._possible(table.both(of, each.node), count + 1)

    def _possible(self, of: Node, count: int) -> Iterator[tuple[Node, int]]:
        if not self._writer.is_empty(of):
            yield of, count


_Seen = tuple[int, int, bool]
"""(bits of the values that have come, how many elements, were two equal?)."""


class _Different:
    """Arrays of which no two elements are equal, or of which two are: a rule per set of elements that have come. Only
    where there are few different elements."""

    def __init__(self, writer: Writer, shape: Array, node: Node) -> None:
        self._writer, self._shape, self._node = writer, shape, node
        self._bits: dict[object, int] = {}
        self._of: dict[Node, list[tuple[int, Expr]]] = {}
        self._states: States[_Seen] = States(writer.rules, writer.rule_name("u"))

    def write(self) -> Expr:
        self._survey()
        start = self._states.ref((0, 0, False))
        self._states.write(self._body)
        return _framed(self._writer, start, not self._shape.least and not self._shape.not_unique)

    def _survey(self) -> None:
        """Number the values that elements can have."""
        shape = self._shape
        why = "that no two elements are equal can be kept among few values only"
        nodes = [*shape.prefix, *([shape.rest] if shape.most is None or shape.most > len(shape.prefix) else [])]
        for of in nodes:
            values = finite_values(self._writer, of, MAX_FINITE)
            if values is None or shape.contains:
                raise self._writer.refused(self._node, "uniqueItems", why)
            for value in values:
                self._bits.setdefault(value, len(self._bits))
            self._of[of] = [(1 << self._bits[value], written) for value, written in values.items()]
        size = len(self._bits)
        longest = size if shape.most is None else min(size, shape.most)
        if sum(comb(size, count) for count in range(longest + 1)) > MAX_SUBSETS:
            raise self._writer.refused(self._node, "uniqueItems", why)

    def _body(self, state: _Seen) -> Expr:
        """The rest of an array behind the elements that have come."""
        shape, (seen, length, repeated) = self._shape, state
        choices: list[Expr] = []
        if 0 < length >= shape.least and (repeated or not shape.not_unique):
            choices.append(EMPTY_EXPR)
        if shape.most is None or length < shape.most:
            base = shape.prefix[length] if length < len(shape.prefix) else shape.rest
            comma = (self._writer.comma,) if length else ()
            for bit, written in self._of[base]:
                if shape.unique and seen & bit:
                    continue
                again = repeated or bool(seen & bit)
                # Behind two equal elements only the length counts, up to where it no longer does.
                enough = max(shape.least, shape.most or 0, len(shape.prefix), 1)
                after = min(length + 1, enough) if again else length + 1
                choices.append(Seq((*comma, written, self._states.ref((0 if again else seen | bit, after, again)))))
        return Alt(tuple(choices))
