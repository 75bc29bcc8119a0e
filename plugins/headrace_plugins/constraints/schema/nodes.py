"""What the algebra of arrays and objects asks of the table whose nodes it combines."""

from __future__ import annotations

from typing import Protocol

from headrace_plugins.constraints.schema.languages import Languages
from headrace_plugins.constraints.schema.limits import Budget
from headrace_plugins.constraints.schema.shapes import Node


class Nodes(Protocol):
    languages: Languages
    budget: Budget
    counts: bool
    """Nodes are exact, so that what is of them can be counted: no keyword may be dropped, no format is asserted."""

    def both(self, *nodes: Node) -> Node:
        """The values that are in each of these."""
        ...

    def outside(self, node: Node) -> Node:
        """The values that are not in this."""
        ...

    def is_empty(self, node: Node) -> bool:
        """Whether surely no value is in this."""
        ...

    def give_up(self, why: str) -> None:
        """What is asked can't be said in shapes. Raises HR-CONSTRAINT-03; returns when lenient."""
        ...
