"""The table of a schema's nodes: expressions that are worked out into unions of shapes when asked for.

Equal expressions are one node, so that what a recursive schema needs is finite. A union is worked out from the unions
of schemas at the same place of a value (`allOf`, `$ref` ...); what elements and members may be stays a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from headrace.errors import RequestError
from headrace_plugins.constraints.schema import unions
from headrace_plugins.constraints.schema.expressions import (
    ALL,
    EVERY,
    NONE,
    NOTHING_EVALUATED,
    At,
    Both,
    Either,
    Evaluated,
    Expression,
    Fact,
    One,
    Outside,
    Union,
)
from headrace_plugins.constraints.schema.formats import NARROW
from headrace_plugins.constraints.schema.languages import Languages
from headrace_plugins.constraints.schema.limits import Budget, Refusal, exceeded, invalid
from headrace_plugins.constraints.schema.objects import finished
from headrace_plugins.constraints.schema.shapes import Node, Object, String

_BARRIER: Node = -1
_NEGATING = ("not", "oneOf", "if")
MAX_LOOKED_AHEAD = 12
"""How deep inside values it is looked whether a union is empty."""


class _Unsettled(Exception):
    """Whether a node is empty depends on a node that is being worked out."""


class Table:
    """A ShapeTable. `expand` gives the node that says what a schema's keywords mean."""

    def __init__(self, expand: Callable[[At], Node], budget: Budget, *, lenient: bool, counts: bool) -> None:
        self.root: Node = ALL
        self.languages = Languages()
        self.lenient = lenient
        self.counts = counts
        self.budget = budget
        self.problems: list[tuple[str, str, str]] = []
        """What was dropped: (JSON pointer, keyword, why)."""
        self._expand = expand
        self._expressions: list[Expression] = []
        self._nodes: dict[object, Node] = {}
        self._where: dict[Node, str] = {}
        self._unions: dict[Node, Union] = {}
        self._shown: dict[Node, Union] = {}
        self._expanded: dict[Node, Node] = {}
        self._empty: dict[Node, bool] = {}
        self._loose: set[Node] = set()
        """Nodes that allow more than they should."""
        self._narrow: set[Node] = set()
        """Nodes that allow less: formats of which some texts are left out."""
        self._active: list[Node] = []
        self._walked: list[Node] = []
        self._depth = 0
        assert self.node(Fact(EVERY)) == ALL
        assert self.node(Fact(())) == NONE

    # the ShapeTable

    def union(self, node: Node) -> Union:
        shown = self._shown.get(node)
        if shown is None:
            try:
                shapes = self.work_out(node)
                kept = [shape for shape in shapes if not unions.is_hollow(shape, self)]
            except RecursionError:
                raise exceeded("has references that lead too deep", "depth", self.budget.limits.depth) from None
            shown = tuple(finished(shape, self) if isinstance(shape, Object) else shape for shape in kept)
            self._shown[node] = shown
        return shown

    def where(self, node: Node) -> str:
        for _ in range(100):
            if node in self._where:
                break
            expression = self._expressions[node]
            if isinstance(expression, At):
                return expression.place.pointer
            if isinstance(expression, Outside):
                node = expression.body
            elif isinstance(expression, Both | Either | One) and expression.parts:
                node = expression.parts[0]
            else:
                break
        return self._where.get(node, "#")

    # nodes

    def node(self, expression: Expression, where: str | None = None) -> Node:
        """The node of an expression; `where`: JSON pointer of the keyword that it comes from."""
        key: object = expression
        if isinstance(expression, Both | Either):
            key = type(expression), frozenset(expression.parts)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = len(self._expressions)
            if found > self.budget.limits.nodes:
                raise exceeded("speaks of too many sets of values", "nodes", self.budget.limits.nodes)
            self._expressions.append(expression)
            if where is not None:
                self._where[found] = where
        return found

    def expression(self, node: Node) -> Expression:
        return self._expressions[node]

    def both(self, *nodes: Node) -> Node:
        """The values that are in each of these."""
        parts: dict[Node, None] = {}
        for node in nodes:
            expression = self._expressions[node] if node > NONE else None
            parts |= dict.fromkeys(expression.parts if isinstance(expression, Both) else (node,))
        parts.pop(ALL, None)
        if NONE in parts or any(self._is_outside(part, parts) for part in parts):
            return NONE
        if len(parts) < 2:
            return next(iter(parts), ALL)
        return self.node(Both(tuple(parts)))

    def _is_outside(self, node: Node, others: Iterable[Node]) -> bool:
        expression = self._expressions[node]
        return isinstance(expression, Outside) and expression.body in others

    def outside(self, node: Node) -> Node:
        """The values that are not in this."""
        if node in (ALL, NONE):
            return NONE if node == ALL else ALL
        expression = self._expressions[node]
        return expression.body if isinstance(expression, Outside) else self.node(Outside(node))

    def either(self, parts: Iterable[Node]) -> Node:
        """The values that are in one or more of these. Parts that allow everything stay: they may say what is
        evaluated."""
        kept = tuple(part for part in dict.fromkeys(parts) if part != NONE)
        return self.node(Either(kept)) if len(kept) > 1 else kept[0] if kept else NONE

    def fact(self, shapes: Union, evaluated: Evaluated = NOTHING_EVALUATED, where: str | None = None) -> Node:
        return self.node(Fact(EVERY if set(shapes) == set(EVERY) else shapes, evaluated), where)

    # unions

    def expanded(self, node: Node) -> Node:
        """The node that says what the schema of a node means."""
        expression = self._expressions[node]
        if not isinstance(expression, At):
            return node
        found = self._expanded.get(node)
        if found is None:
            self.budget.step()
            self._active.append(node)
            try:
                found = self._expanded[node] = self._expand(expression)
            finally:
                self._active.pop()
        self._pass_on(node)
        return found

    def _pass_on(self, node: Node) -> None:
        """What is worked out with a node that is not exact may not be exact."""
        for inexact in (self._loose, self._narrow):
            if node in inexact:
                self._mark(inexact)

    def _mark(self, inexact: set[Node]) -> None:
        if self._active and self._active[-1] != _BARRIER:
            inexact.add(self._active[-1])

    def narrow(self) -> None:
        """The schema that is being read allows less than it should."""
        self._mark(self._narrow)

    def expanded_fully(self, node: Node) -> Node:
        """The same, through schemas that are only references to others."""
        seen = {node}
        while isinstance(self._expressions[node], At):
            node = self.expanded(node)
            if node in seen:
                raise invalid(self.where(node), "it refers to itself without end")
            seen.add(node)
        return node

    def work_out_apart(self, node: Node) -> Union:
        """The shapes of a node for another value than the one that is being worked out."""
        self._active.append(_BARRIER)
        try:
            return self.work_out(node)
        except _Unsettled:
            raise invalid(self.where(node), "it refers to a schema that needs it first") from None
        finally:
            self._active.pop()

    @contextmanager
    def in_place(self, node: Node) -> Iterator[None]:
        """While parts of a node are looked at. Raises HR-CONSTRAINT-02 when it is a part of itself."""
        if node in self._walked:
            raise invalid(self.where(node), "it refers to itself without end")
        self._walked.append(node)
        try:
            yield
        finally:
            self._walked.pop()

    def work_out(self, node: Node) -> Union:
        """The shapes of a node, in the algebra's form."""
        known = self._unions.get(node)
        if known is None:
            if node in self._active:
                self._refuse_circle(node)
            self._active.append(node)
            try:
                known = self._evaluate(node)
            finally:
                self._active.pop()
            self._unions[node] = known
        self._pass_on(node)
        return known

    def _refuse_circle(self, node: Node) -> None:
        if _BARRIER in self._active[self._active.index(node) :]:
            raise _Unsettled
        places = [self.where(each) for each in self._active[self._active.index(node) :]]
        circle = [place for place, after in pairwise([*places, self.where(node)]) if place != after]
        shown = " -> ".join([*circle, self.where(node)])
        raise invalid(self.where(node), f"it refers to itself without end ({shown})")

    def _evaluate(self, node: Node) -> Union:
        expression = self._expressions[node]
        while isinstance(expression, At):
            target = self.expanded(node)
            if isinstance(self._expressions[target], At):
                return self.work_out(target)
            node, expression = target, self._expressions[target]
        match expression:
            case Fact(shapes):
                return shapes
            case Both(parts):
                return self._meet(parts)
            case Either(parts):
                return unions.join([self.work_out(part) for part in parts], self, self.budget)
            case One(parts):
                worked = [self.work_out(part) for part in parts]
                texts = sum(any(isinstance(shape, String) for shape in shapes) for shapes in worked)
                if not all(self._is_exact(part, texts > 1) for part in parts):
                    return unions.join(worked, self, self.budget)
                return unions.exactly_one(worked, self, self.budget)
            case Outside(body):
                return self._without(EVERY, body)
        raise AssertionError(expression)

    def _meet(self, parts: Iterable[Node]) -> Union:
        shapes = EVERY
        without = []
        for part in parts:
            expression = self._expressions[part]
            if isinstance(expression, Outside):
                without.append(expression.body)
            else:
                shapes = unions.meet(shapes, self.work_out(part), self, self.budget)
                if not shapes:
                    return ()
        for part in without:
            shapes = self._without(shapes, part)
        return shapes

    def _without(self, shapes: Union, part: Node) -> Union:
        taken = self.work_out(part)
        if not self._is_exact(part, all(any(isinstance(each, String) for each in both) for both in (shapes, taken))):
            return shapes
        return unions.subtract(shapes, taken, self, self.budget)

    def _is_exact(self, node: Node, among_texts: bool) -> bool:
        """Whether a node that was worked out can be taken from others; if not, it must be left in."""
        if among_texts and node in self._narrow:
            self.give_up(f"it excludes a format of which not every text is known ({', '.join(sorted(NARROW))})")
            return False
        return node not in self._loose

    def is_empty(self, node: Node) -> bool:
        """Whether surely no value is in a node, as far as one can see without going too deep."""
        if node in (ALL, NONE):
            return node == NONE
        known = self._empty.get(node)
        if known is not None:
            return known
        if self._depth >= MAX_LOOKED_AHEAD or node in self._active:
            return False
        self._depth += 1
        self._active.append(_BARRIER)
        try:
            shapes = self.work_out(node)
            self._active.append(node)
            try:
                empty = all(unions.is_hollow(shape, self) for shape in shapes)
            finally:
                self._active.pop()
        except _Unsettled:
            return False
        finally:
            self._active.pop()
            self._depth -= 1
        if empty or self._depth == 0:
            self._empty[node] = empty
        return empty

    # what can't be said

    def drop(self, pointer: str, keyword: str, why: str) -> None:
        """A keyword of the schema at `pointer` can't be kept. Raises HR-CONSTRAINT-03, or notes it when lenient."""
        if not self.lenient:
            raise Refusal(pointer, keyword, why)
        problem = (pointer, keyword, why)
        if problem not in self.problems:
            self.problems.append(problem)
        self._mark(self._loose)

    def give_up(self, why: str) -> None:
        node = next((each for each in reversed(self._active) if each != _BARRIER), self.root)
        expression = self._expressions[node]
        schema = expression.place.schema if isinstance(expression, At) else None
        keywords = schema if isinstance(schema, dict) else {}
        self.drop(self.where(node), next((each for each in _NEGATING if each in keywords), "not"), why)


def error_with_pointer(error: RequestError, pointer: str) -> RequestError:
    """The error of a part of the schema that does not know where it stands."""
    return RequestError(error.code, f"{error.message} (the JSON schema at {pointer})", error.help)
