"""What reading a schema may cost, and the errors that a schema ends in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import RequestError


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Bounds of one schema with the documents it refers to. What exceeds one is refused with HR-CONSTRAINT-04."""

    depth: int = 128
    """Objects and arrays inside each other, in the schema's text."""
    size: int = 500_000
    """Values in the schema's text: objects, arrays and what they hold."""
    enum_entries: int = 100_000
    """Entries of all `enum`s together."""
    nodes: int = 50_000
    """Different sets of values that the schema speaks of."""
    cases: int = 512
    """Combinations of what `anyOf`, `if` ... leave evaluated, for `unevaluatedProperties` and `unevaluatedItems`."""
    shapes: int = 1_024
    """In one union: ways in which a value of one place may look."""
    classes: int = 64
    """Of names, into which overlapping `patternProperties` split the members of an object."""
    steps: int = 50_000
    """Shapes that are worked out."""


def invalid(pointer: str, why: str, help: str = "") -> RequestError:
    """The schema itself is wrong at `pointer`."""
    return RequestError("HR-CONSTRAINT-02", f"the JSON schema is invalid at {pointer}: {why}", help)


class Refusal(RequestError):
    """`keyword` of the schema at `pointer` has a meaning that can't be enforced."""

    def __init__(self, pointer: str, keyword: str, why: str) -> None:
        super().__init__(
            "HR-CONSTRAINT-03",
            f"'{keyword}' at {pointer} can't be enforced: {why}",
            'remove or simplify it, or check the finished value instead: constraints.on_unsupported = "validate"',
        )
        self.pointer, self.keyword, self.why = pointer, keyword, why


def exceeded(what: str, limit: str, most: int) -> RequestError:
    """`limit`: a field of SchemaLimits."""
    option = "max_nesting" if limit == "depth" else f"schema_{limit}"
    return RequestError(
        "HR-CONSTRAINT-04",
        f"the JSON schema {what}, more than the limit of {most:,} ({option})",
        f"simplify the schema, or raise constraints.{option}",
    )


class Budget:
    """Counts what one reading costs, and asks now and then whether it was cancelled."""

    def __init__(self, limits: SchemaLimits, cancelled: Callable[[], bool]) -> None:
        self.limits = limits
        self._cancelled = cancelled
        self._steps = 0
        self._size = 0
        self._enum_entries = 0

    def step(self) -> None:
        """One shape more. Raises HR-CONSTRAINT-04 when there are too many, HR-CONSTRAINT-06 when cancelled."""
        self._steps += 1
        if self._steps > self.limits.steps:
            raise exceeded("combines into too many shapes", "steps", self.limits.steps)
        if self._steps % 256 == 0:
            self.ask()

    def ask(self) -> None:
        """Raises HR-CONSTRAINT-06 when the reading was cancelled."""
        if self._cancelled():
            raise RequestError("HR-CONSTRAINT-06", "reading the JSON schema was cancelled")

    def hold(self, depth: int) -> None:
        """One value of schema text, this deep."""
        self._size += 1
        if self._size > self.limits.size:
            raise exceeded("has too many values", "size", self.limits.size)
        if depth > self.limits.depth:
            raise exceeded("nests too deep", "depth", self.limits.depth)
        if self._size % 4096 == 0:
            self.ask()

    def spread(self, shapes: int) -> None:
        """A union of so many shapes."""
        if shapes > self.limits.shapes:
            raise exceeded("combines into too many shapes of one value", "shapes", self.limits.shapes)

    def split(self, classes: int) -> None:
        """An object with so many classes of names."""
        if classes > self.limits.classes:
            raise exceeded("splits the names of members into too many classes", "classes", self.limits.classes)

    def list(self, entries: int) -> None:
        """An enum of so many entries."""
        self._enum_entries += entries
        if self._enum_entries > self.limits.enum_entries:
            count = self._enum_entries
            raise exceeded(f"lists {count} enum entries", "enum_entries", self.limits.enum_entries)
