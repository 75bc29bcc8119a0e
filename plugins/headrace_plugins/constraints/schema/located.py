"""One schema as it is read: its keywords, where it stands, and the nodes of the schemas inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace_plugins.constraints.regex import Regex
from headrace_plugins.constraints.schema.documents import steps
from headrace_plugins.constraints.schema.drafts import Draft
from headrace_plugins.constraints.schema.expressions import At
from headrace_plugins.constraints.schema.shapes import Node

if TYPE_CHECKING:
    from headrace_plugins.constraints.schema.reading import Reader
    from headrace_plugins.constraints.schema.table import Table


class Schema:
    """The keywords that the draft knows, in the order written."""

    def __init__(self, reader: Reader, at: At) -> None:
        assert isinstance(at.place.schema, dict)
        self.reader = reader
        self.at = at
        self.draft: Draft = at.place.resource.draft
        self._keywords = {key: value for key, value in at.place.schema.items() if key in self.draft.forms}

    @property
    def table(self) -> Table:
        return self.reader.table

    def __contains__(self, keyword: str) -> bool:
        return keyword in self._keywords

    def __iter__(self) -> Iterator[str]:
        return iter(self._keywords)

    def __getitem__(self, keyword: str) -> Any:
        return self._keywords[keyword]

    def get(self, keyword: str, default: Any = None) -> Any:
        return self._keywords.get(keyword, default)

    def where(self, *keys: str | int) -> str:
        """JSON pointer of what is `keys` inside."""
        return self.at.place.pointer + steps(*keys)

    def inner(self, schema: object, *keys: str | int) -> Node:
        """The node of a schema inside this one."""
        return self.reader.node_of(self.reader.library.place(schema, self.at.place, *keys), self.at.scope)

    def pattern(self, text: str, keyword: str, *keys: str) -> Regex | None:
        return self.reader.pattern(self, text, keyword, *keys)

    def drop(self, keyword: str, why: str) -> None:
        self.table.drop(self.where(), keyword, why)
