"""Options of the constraint engines: the `[constraints]` table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from headrace.options import ByteSize, Options, Seconds

Count = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]

MOST_NESTING = 256
"""The readers of nested text recurse."""


class ConstraintOptions(Options):
    """Hold what is generated to a grammar: a JSON schema, a regular expression, EBNF, GBNF, Lark, a list of texts."""

    compile_timeout: Seconds = 20.0
    """Longest time that a grammar may take before its first mask; then its request ends with an error."""
    cache_memory: ByteSize = 64 << 20
    """Memory of compiled grammars that are kept for later requests; those used last stay longest."""
    jump_forward: bool = True
    """Append what a grammar leaves no choice about without asking the model. Such text is then tokenised as the model's
    tokenizer does it."""
    whitespace: Literal["compact", "bounded", "any"] = "bounded"
    """Blanks between the parts of JSON. compact: none. bounded: as `json.dumps` writes them, with or without `indent`.
    any: any number."""
    on_unsupported: Literal["refuse", "validate"] = "refuse"
    """What happens to a JSON schema with a keyword that no mask can enforce. refuse: its request is an error that names
    the keyword. validate: the rest is enforced and the finished value is checked; one that breaks the schema ends in
    an error, with the text. Needs `jsonschema`."""
    format: Literal["annotation", "assertion"] = "annotation"
    """Whether `format` of a JSON schema says something (annotation) or must hold (assertion)."""
    draft: str | None = None
    """Draft of JSON schemas without `$schema`: 4, 6, 7, 2019-09 or 2020-12. Unset: 2020-12."""
    documents: dict[str, Any] = Field(default_factory=dict)
    """JSON schemas that `$ref` may name, by URI: a table, or the path of a JSON file. The network is never asked."""
    max_text: ByteSize = 1 << 20
    """Longest text of a grammar."""
    max_nesting: Annotated[int, Field(ge=1, le=MOST_NESTING)] = 128
    """Most brackets inside each other, in grammars that are JSON: schemas, lists of texts, tagged documents."""
    schema_size: Count = 500_000
    """Most values in the text of a JSON schema: objects, arrays and what they hold."""
    schema_enum_entries: Count = 100_000
    """Most entries of all `enum`s of a JSON schema together."""
    schema_nodes: Count = 50_000
    """Most different sets of values that a JSON schema speaks of."""
    schema_shapes: Count = 1_024
    """Most ways in which the value of one place may look, after all combinations of a JSON schema are worked out."""
    schema_classes: Count = 64
    """Most classes into which overlapping `patternProperties` split the names of members."""
    schema_cases: Count = 512
    """Most combinations of evaluated members or elements that `unevaluatedProperties` and `unevaluatedItems` meet."""
    schema_steps: Count = 50_000
    """Most shapes that are worked out for a JSON schema."""

    @field_validator("draft", mode="after")
    @classmethod
    def _known_draft(cls, value: str | None) -> str | None:
        from headrace_plugins.constraints.schema.drafts import draft_names, draft_of

        if value is not None and draft_of(value) is None:
            raise ValueError(f"it should be one of {draft_names()}")
        return value
