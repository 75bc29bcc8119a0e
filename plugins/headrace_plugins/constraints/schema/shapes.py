"""What a JSON schema allows, as data: for every value a union of shapes, each of one JSON type.

A shape is a conjunction of plain facts; a union is a disjunction of shapes. Values inside arrays and objects are
`Node`s: numbers of unions in a `ShapeTable` that are worked out when asked for, so that recursive schemas are finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from headrace_plugins.constraints.regex import ANY_TEXT, Regex

Node = int
"""A union in its table. Equal nodes are equal unions."""


@dataclass(frozen=True, slots=True)
class Null:
    pass


@dataclass(frozen=True, slots=True)
class Boolean:
    values: tuple[bool, ...]
    """In the order written; (True, False) where both may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """values given: one of these, nothing else. Otherwise all of the facts hold."""

    values: tuple[Fraction, ...] | None = None
    integer: bool | None = None
    """True: whole numbers (1.0 is one). False: only numbers with a fraction. None: both."""
    low: Fraction | None = None
    low_open: bool = False
    """True: low itself is excluded."""
    high: Fraction | None = None
    high_open: bool = False
    multiples: tuple[Fraction, ...] = ()
    """A multiple of each."""
    not_multiples: tuple[Fraction, ...] = ()
    excluded: tuple[Fraction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class String:
    values: tuple[str, ...] | None = None
    """One of these, in the order written, and `language` is ANY_TEXT; None: any text of the language."""
    language: Regex = ANY_TEXT
    """Over the characters of the value, not of its JSON spelling."""


@dataclass(frozen=True, slots=True)
class Contains:
    """least to most elements are of `node`."""

    node: Node
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    prefix: tuple[Node, ...] = ()
    """Of the first elements, as far as there are any."""
    rest: Node
    """Of the elements behind the prefix."""
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False
    not_unique: bool = False
    """Two elements are equal."""


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    node: Node
    required: bool


@dataclass(frozen=True, slots=True)
class Some:
    """At least one member has a name of `names` and a value of `node`."""

    names: Regex
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    properties: tuple[Property, ...] = ()
    """Members by name, in the order written. A name that must not occur has a node whose union is empty."""
    others: tuple[tuple[Regex, Node], ...] = ()
    """Classes of the names of other members with their values: disjoint, and disjoint from the names in `properties`
    (a consumer need not check either). A name in no class must not occur."""
    least: int = 0
    most: int | None = None
    some: tuple[Some, ...] = ()


Shape = Null | Boolean | Number | String | Array | Object


class ShapeTable(Protocol):
    """Unions by node. Raises HeadraceError when a limit is reached or a keyword can't be kept."""

    root: Node

    def union(self, node: Node) -> Seq[Shape]:
        """The shapes of a node, in the order written; empty: no value at all is allowed."""
        ...

    def both(self, *nodes: Node) -> Node:
        """The values that are in each of these."""
        ...

    def outside(self, node: Node) -> Node:
        """The values that are not in this."""
        ...

    def where(self, node: Node) -> str:
        """JSON pointer of the schema that the node came from, for error texts ("#/properties/a")."""
        ...


Documents = Mapping[str, object]
"""URI -> schema, for $ref to other documents."""
