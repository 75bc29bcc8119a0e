"""JSON Schema to shapes: every keyword gets its exact meaning or is refused by name.

read_schema -> Library (documents, references) -> Table (nodes) -> Reader.expand per schema -> unions of shapes
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import RequestError
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import Regex
from headrace_plugins.constraints.schema.applicators import in_place, target_of
from headrace_plugins.constraints.schema.documents import Library, Place, Resource
from headrace_plugins.constraints.schema.drafts import DRAFTS, draft_names, draft_of
from headrace_plugins.constraints.schema.expressions import ALL, NONE, At
from headrace_plugins.constraints.schema.facts import base_facts
from headrace_plugins.constraints.schema.limits import Budget, SchemaLimits
from headrace_plugins.constraints.schema.located import Schema
from headrace_plugins.constraints.schema.shapes import Documents, Node
from headrace_plugins.constraints.schema.table import Table, error_with_pointer
from headrace_plugins.constraints.schema.unevaluated import with_unevaluated

_SILENT = frozenset({"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs"}) | {
    "definitions", "contentSchema",
}  # fmt: skip
"""Keywords that say nothing of a value."""


def read_schema(
    schema: object,
    *,
    draft: str | int | None = None,
    documents: Documents | None = None,
    assert_formats: bool = False,
    lenient: bool = False,
    limits: SchemaLimits | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Table:
    """What a JSON schema allows, as a ShapeTable.

    schema: parsed JSON; numbers may be int, float or Decimal. draft: "4", "6", "7", "2019-09", "2020-12" (default) or
    a metaschema URI, for a schema without `$schema`. documents: URI -> schema, for references; the network is never
    asked. assert_formats: `format` is a constraint, not an annotation. lenient: keywords that can't be kept are dropped
    so that the table allows more than the schema, and listed in `problems`; otherwise the first one raises.

    Raises RequestError: HR-CONSTRAINT-02 the schema is wrong, -03 a keyword can't be enforced, -04 a limit is exceeded,
    -06 cancelled. Unions are worked out when asked for, so `table.union` may raise the same.
    """
    default = DRAFTS[-1] if draft is None else draft_of(draft)
    if default is None:
        raise RequestError("HR-CONSTRAINT-02", f"draft {draft!r} of JSON Schema is unknown", f"known: {draft_names()}")
    budget = Budget(limits or SchemaLimits(), cancelled)
    library = Library(schema, default, documents or {}, budget)
    reader = Reader(library, budget, assert_formats)
    table = reader.table = Table(reader.expand, budget, lenient=lenient, counts=not (lenient or assert_formats))
    table.root = reader.node_of(library.root, ())
    table.union(table.root)
    return table


class Reader:
    """Reads schemas of one library into one table, each when it is needed."""

    table: Table

    def __init__(self, library: Library, budget: Budget, assert_formats: bool) -> None:
        self.library = library
        self.assert_formats = assert_formats
        self._budget = budget
        self._patterns: dict[str, Regex] = {}

    def node_of(self, place: Place, scope: tuple[Resource, ...]) -> Node:
        """The node of a schema; a mere reference is its target."""
        seen: set[Place] = set()
        while True:
            if isinstance(place.schema, bool):
                return ALL if place.schema else NONE
            if any(all(name not in outer.dynamic for outer in scope) for name in place.resource.dynamic):
                scope = (*scope, place.resource)  # others are hidden by those outside of them
            if self._says_nothing(place):
                return ALL
            if place in seen or not self._is_reference(place):
                return self.table.node(At(place, scope))
            seen.add(place)
            place = self.library.resolve(place.schema["$ref"], place.resource, f"{place.pointer}/$ref")[0]

    def _is_reference(self, place: Place) -> bool:
        assert isinstance(place.schema, dict)
        if "$ref" not in place.schema or "$ref" not in place.resource.draft.forms:
            return False
        return place.resource.draft.ref_alone or self._says_nothing(place, "$ref")

    def _says_nothing(self, place: Place, *without: str) -> bool:
        assert isinstance(place.schema, dict)
        draft = place.resource.draft
        silent = _SILENT if self.assert_formats or draft.asserts_format else _SILENT | {"format"}
        return all(key not in draft.forms or key in silent or key in without for key in place.schema)

    def expand(self, at: At) -> Node:
        """The node that says what a schema's keywords mean."""
        schema = Schema(self, at)
        if "$ref" in schema and at.place.resource.draft.ref_alone:
            return target_of(schema, "$ref")
        parts: list[Node] = []
        base = base_facts(schema)
        for keyword in schema:
            if keyword == "properties":
                # Members of `allOf` and `$ref` come before or behind these, as they are written.
                parts.append(base)
            parts += in_place(schema, keyword)
        if base not in parts:
            parts.insert(0, base)
        return with_unevaluated(schema, self.table.both(*parts))

    def pattern(self, schema: Schema, text: str, keyword: str, *keys: str) -> Regex | None:
        """The language of a pattern, which is found somewhere in a text; None where it was dropped."""
        if text not in self._patterns:
            self._budget.ask()
            try:
                self._patterns[text] = parse_pattern(text, search=True, dialect="ecma")
            except RequestError as error:
                if error.code != "HR-CONSTRAINT-03":
                    raise error_with_pointer(error, schema.where(keyword, *keys)) from None
                schema.drop(keyword, error.message)
                return None
        return self._patterns[text]
