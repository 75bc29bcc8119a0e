"""Objects written as grammar.

Names of `properties` come in their order, so that none can come twice. Another name may: counts of members rely on no
more than one of these, and a member that must be there on none that a later one of its name could undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_plugins.constraints.automata import matches, overlap
from headrace_plugins.constraints.grammar import EMPTY_EXPR, Alt, Expr, Rep, Seq
from headrace_plugins.constraints.regex import NOTHING, Regex, both, either
from headrace_plugins.constraints.schema.objects import Others
from headrace_plugins.constraints.schema.shapes import Node, Object, Property
from headrace_plugins.constraints.schema.states import States

if TYPE_CHECKING:
    from headrace_plugins.constraints.schema.writing import Frame, Writer

MAX_STATES = 20_000
"""Of one object: members so far and what they have fulfilled."""


def write_object(writer: Writer, shape: Object, node: Node, frame: Frame) -> Expr:
    """The objects of a shape, which is one of `node`, in their frame."""
    named = [each for each in shape.properties if each.required or not writer.is_empty(each.node)]
    classes: dict[Node, Regex] = {}
    for names, of in shape.others:
        if not writer.is_empty(of):
            classes[of] = either(classes.get(of, NOTHING), names)
    others = tuple((names, of) for of, names in classes.items())
    needed = sum(each.required for each in named)
    counted = shape.least > needed or (shape.most is not None and (bool(others) or shape.most < len(named)))
    if counted or shape.some:
        return _Counting(writer, shape, node, frame, named, others).write()
    return _chain(writer, node, frame, named, others)


def _any_other(writer: Writer, frame: Frame, others: Others) -> Expr:
    choices = tuple(Seq((writer.any_name(names, frame), writer.value(of))) for names, of in others)
    return choices[0] if len(choices) == 1 else writer.add("m", Alt(choices))


def _chain(writer: Writer, node: Node, frame: Frame, named: list[Property], others: Others) -> Expr:
    """Nothing is counted. The first member is one of those up to the first that must be there; behind it every member
    has a comma before it."""
    written = [Seq((writer.name(each.name, node, frame), writer.value(each.node))) for each in named]
    behind = [
        Seq((frame.comma, *member.parts)) if each.required else Rep(Seq((frame.comma, *member.parts)), 0, 1)
        for each, member in zip(named, written, strict=True)
    ]
    other = _any_other(writer, frame, others) if others else None
    rest: list[Expr] = [] if other is None else [Rep(Seq((frame.comma, other)))]
    first_needed = next((i for i, each in enumerate(named) if each.required), len(named))
    choices: list[Expr] = []
    if first_needed == len(named):
        if other is not None:
            choices.append(Seq((frame.open, other, *rest, frame.close)))
        choices.append(frame.empty)
        tail: Expr = Seq((*rest, frame.close))
    else:
        tail = Seq((*behind[first_needed + 1 :], *rest, frame.close))
        choices.append(Seq((frame.open, written[first_needed], tail)))
        if first_needed:
            tail = Seq((behind[first_needed], writer.add("t", tail)))
    for i in reversed(range(first_needed)):
        if i < first_needed - 1:
            tail = Seq((behind[i + 1], writer.add("t", tail)))
        choices.append(Seq((frame.open, written[i], tail)))
    return Alt(tuple(reversed(choices)))


@dataclass(frozen=True, slots=True)
class _State:
    at: int
    """Index of the next of the named members."""
    count: int
    """Members so far, up to what matters."""
    fulfilled: int
    """Bits of `some`."""


class _Counting:
    """A rule per state: which member is next, how many there are, and which of `some` are fulfilled."""

    def __init__(
        self, writer: Writer, shape: Object, node: Node, frame: Frame, named: list[Property], others: Others
    ) -> None:
        self._writer, self._shape, self._node, self._frame = writer, shape, node, frame
        self._named, self._others = named, others
        self._enough = max(shape.least, shape.most or 0, 1)
        self._all = (1 << len(shape.some)) - 1
        self._states: States[_State] = States(writer.rules, writer.rule_name("c"))
        self._check()

    def _check(self) -> None:
        needed = sum(each.required for each in self._named)
        if self._others and self._shape.least > needed + 1:
            why = "so many members of any name may be one that is written several times"
            raise self._writer.refused(self._node, "minProperties", why)
        # Members of other names are counted by repetition, unless they have something to fulfil.
        counts = self._enough if self._all else min(self._enough, len(self._named))
        if (len(self._named) + 1) * (counts + 1) * (self._all + 1) > MAX_STATES:
            raise self._writer.refused(self._node, "minProperties or maxProperties", "there are too many to count")

    def write(self) -> Expr:
        frame, start = self._frame, self._states.ref(_State(0, 0, 0))
        self._states.write(self._body)
        some = Seq((frame.open, start, frame.close))
        may_be_empty = not (self._shape.least or self._all or any(each.required for each in self._named))
        return Alt((some, frame.empty)) if may_be_empty else some

    def _body(self, state: _State) -> Expr:
        if state.at == len(self._named):
            return self._behind(state)
        each = self._named[state.at]
        choices: list[Expr] = [
            Seq(
                (
                    *self._comma(state),
                    self._writer.name(each.name, self._node, self._frame),
                    value,
                    self._states.ref(after),
                )
            )
            for value, after in self._ways(each, state)
        ]
        if not each.required:
            choices.append(self._states.ref(_State(state.at + 1, state.count, state.fulfilled)))
        return Alt(tuple(choices))

    def _ways(self, each: Property, state: _State) -> Iterator[tuple[Expr, _State]]:
        if not self._has_room(state):
            return
        count = min(state.count + 1, self._enough)
        for bits, of in self._claims(each.node, state, lambda some: matches(some, each.name)):
            yield self._writer.value(of), _State(state.at + 1, count, state.fulfilled | bits)

    def _claims(self, base: Node, state: _State, may) -> Iterator[tuple[int, Node]]:  # type: ignore[no-untyped-def]
        """(bits of `some` that one member fulfils, its values), for every choice of bits."""
        facts = [
            (1 << i, fact)
            for i, fact in enumerate(self._shape.some)
            if not state.fulfilled & 1 << i and may(fact.names)
        ]
        ways: list[tuple[int, Node]] = [(0, base)]
        for bit, fact in facts:
            claimed = [(bits | bit, self._writer.table.both(of, fact.node)) for bits, of in ways]
            if all(of == before for (_, of), (_, before) in zip(claimed, ways, strict=True)):
                ways = claimed  # fulfilled anyway
            else:
                ways += [(bits, of) for bits, of in claimed if not self._writer.is_empty(of)]
        yield from ways

    def _behind(self, state: _State) -> Expr:
        """Members of other names."""
        # Without any member the object is written as one terminal, not as two.
        ends = 0 < state.count >= self._shape.least and state.fulfilled == self._all
        if not self._others or not self._has_room(state):
            return EMPTY_EXPR if ends else Alt(())
        if state.fulfilled == self._all:
            return self._any_number(state, ends)
        loops: list[Expr] = []
        choices: list[Expr] = []
        for names, value, after in self._other_ways(state):
            step = (*self._comma(state), self._writer.any_name(names, self._frame), value)
            if after == state:
                loops.append(Seq(step))
            else:
                choices.append(Seq((*step, self._states.ref(after))))
        return Seq((Rep(Alt(tuple(loops))), Alt(tuple(choices)))) if loops else Alt(tuple(choices))

    def _any_number(self, state: _State, ends: bool) -> Expr:
        other = _any_other(self._writer, self._frame, self._others)
        room = None if self._shape.most is None else self._shape.most - state.count
        if state.count:
            return Rep(Seq((self._frame.comma, other)), 0 if ends else 1, room)
        return Seq((other, Rep(Seq((self._frame.comma, other)), 0, None if room is None else room - 1)))

    def _other_ways(self, state: _State) -> Iterator[tuple[Regex, Expr, _State]]:
        count = min(state.count + 1, self._enough)
        for names, base in self._others:
            yield names, self._writer.value(base), _State(state.at, count, state.fulfilled)
            for i, fact in enumerate(self._shape.some):
                if state.fulfilled & 1 << i or not overlap(names, fact.names):
                    continue
                of = self._writer.table.both(base, fact.node)
                if of != base and not self._writer.is_empty(of):
                    why = "a later member of the same name could undo what one member must be"
                    raise self._writer.refused(self._node, "not", why)
            bits = [
                (1 << i, fact)
                for i, fact in enumerate(self._shape.some)
                if not state.fulfilled & 1 << i
                and self._writer.table.both(base, fact.node) == base
                and overlap(names, fact.names)
            ]
            for chosen in range(1, 1 << len(bits)):
                facts = [fact for n, (_, fact) in enumerate(bits) if chosen & 1 << n]
                mask = sum(bit for n, (bit, _) in enumerate(bits) if chosen & 1 << n)
                claimed = both(names, *(fact.names for fact in facts))
                yield claimed, self._writer.value(base), _State(state.at, count, state.fulfilled | mask)

    def _has_room(self, state: _State) -> bool:
        return self._shape.most is None or state.count < self._shape.most

    def _comma(self, state: _State) -> tuple[Expr, ...]:
        return (self._frame.comma,) if state.count else ()
