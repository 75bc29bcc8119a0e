"""Sets of JSON values as expressions over schemas: what a node of the table stands for before it is worked out."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_plugins.constraints.regex import ANY_TEXT, NOTHING, Regex, either
from headrace_plugins.constraints.schema.documents import Place, Resource
from headrace_plugins.constraints.schema.shapes import Array, Boolean, Node, Null, Number, Object, Shape, String

ALL: Node = 0
"""Every value."""
NONE: Node = 1
"""No value."""

Union = tuple[Shape, ...]

ANY_NUMBER = Number()
ANY_STRING = String()
ANY_ARRAY = Array(rest=ALL)
ANY_OBJECT = Object(others=((ANY_TEXT, ALL),))
ANY_BOOLEAN = Boolean((True, False))
EVERY: Union = (ANY_OBJECT, ANY_ARRAY, ANY_STRING, ANY_NUMBER, ANY_BOOLEAN, Null())


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Which members and elements of a value a schema has looked at, as `unevaluated...` asks."""

    names: Regex = NOTHING
    items: int | None = 0
    """The first so many; None: all."""
    matching: tuple[Node, ...] = ()
    """Elements of these too."""

    def __or__(self, other: Evaluated) -> Evaluated:
        if other in (NOTHING_EVALUATED, self):
            return self
        if self == NOTHING_EVALUATED:
            return other
        items = None if self.items is None or other.items is None else max(self.items, other.items)
        matching = () if items is None else tuple(dict.fromkeys(self.matching + other.matching))
        return Evaluated(either(self.names, other.names), items, matching)


NOTHING_EVALUATED = Evaluated()


@dataclass(frozen=True, slots=True)
class At:
    """What a schema allows. scope: the resources passed on the way that have dynamic anchors, outermost first."""

    place: Place
    scope: tuple[Resource, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """These shapes."""

    shapes: Union
    evaluated: Evaluated = NOTHING_EVALUATED


@dataclass(frozen=True, slots=True)
class Both:
    """In each of these."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """In one or more of these."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class One:
    """In one of these and no other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Outside:
    """Not in this."""

    body: Node


Expression = At | Fact | Both | Either | One | Outside
