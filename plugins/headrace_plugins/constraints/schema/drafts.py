"""The drafts of JSON Schema: which keywords each has, and of what form their values are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headrace_plugins.constraints.schema.limits import Refusal, invalid

Form = Literal[
    "schema", "schemas", "schema_map", "items", "dependencies", "schema_or_flag", "type", "list", "count", "number",
    "positive", "text", "flag", "names", "names_map", "any",
]  # fmt: skip
"""What a keyword's value must be; "schema..." forms hold schemas."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft, or what a metaschema leaves of it."""

    name: str
    uri: str
    forms: Mapping[str, Form]
    """The keywords with a meaning; every other keyword is an annotation."""
    id_keyword: str = "$id"
    ref_alone: bool = False
    """`$ref` hides the keywords beside it."""
    id_anchors: bool = False
    """An id that is only a fragment names an anchor."""
    flags: bool = True
    """true and false are schemas."""
    contains_evaluates: bool = False
    """Elements that `contains` matched count as evaluated."""
    asserts_format: bool = False


_TEXT: Mapping[str, Form] = {"$ref": "text", "$schema": "text", "format": "text", "pattern": "text"}
_DRAFT_4: dict[str, Form] = {
    **_TEXT,
    "type": "type",
    "enum": "list",
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), "schemas"),
    "not": "schema",
    "multipleOf": "positive",
    **dict.fromkeys(("minimum", "maximum"), "number"),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), "flag"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), "count"),
    "uniqueItems": "flag",
    "required": "names",
    **dict.fromkeys(("properties", "patternProperties", "definitions"), "schema_map"),
    **dict.fromkeys(("additionalProperties", "additionalItems"), "schema_or_flag"),
    "items": "items",
    "dependencies": "dependencies",
    "id": "text",
}
_DRAFT_6: dict[str, Form] = {
    **{keyword: form for keyword, form in _DRAFT_4.items() if keyword != "id"},
    "$id": "text",
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("additionalProperties", "additionalItems", "contains", "propertyNames"), "schema"),
    "const": "any",
}
_DRAFT_7: dict[str, Form] = {**_DRAFT_6, **dict.fromkeys(("if", "then", "else"), "schema")}
_DRAFT_2019: dict[str, Form] = {
    **{keyword: form for keyword, form in _DRAFT_7.items() if keyword != "dependencies"},
    **dict.fromkeys(("$anchor", "$recursiveRef"), "text"),
    "$recursiveAnchor": "flag",
    **dict.fromkeys(("$defs", "dependentSchemas"), "schema_map"),
    "dependentRequired": "names_map",
    **dict.fromkeys(("minContains", "maxContains"), "count"),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "contentSchema"), "schema"),
}
_DRAFT_2020: dict[str, Form] = {
    **{
        keyword: form
        for keyword, form in _DRAFT_2019.items()
        if keyword not in ("additionalItems", "$recursiveRef", "$recursiveAnchor")
    },
    "items": "schema",
    "prefixItems": "schemas",
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor"), "text"),
}

_OLD = "http://json-schema.org/draft-0{}/schema"
_NEW = "https://json-schema.org/draft/{}/schema"
DRAFTS: tuple[Draft, ...] = (
    Draft("4", _OLD.format(4), MappingProxyType(_DRAFT_4), "id", ref_alone=True, id_anchors=True, flags=False),
    Draft("6", _OLD.format(6), MappingProxyType(_DRAFT_6), ref_alone=True, id_anchors=True),
    Draft("7", _OLD.format(7), MappingProxyType(_DRAFT_7), ref_alone=True, id_anchors=True),
    Draft("2019-09", _NEW.format("2019-09"), MappingProxyType(_DRAFT_2019)),
    Draft("2020-12", _NEW.format("2020-12"), MappingProxyType(_DRAFT_2020), contains_evaluates=True),
)

_VALIDATION = (
    frozenset({"type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
    | {"minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains"}
    | {"minProperties", "maxProperties", "required", "dependentRequired"}
)
_UNEVALUATED = frozenset({"unevaluatedItems", "unevaluatedProperties"})
_APPLICATOR = (
    frozenset({"prefixItems", "items", "additionalItems", "contains", "properties", "patternProperties"})
    | {"additionalProperties", "propertyNames", "dependentSchemas", "if", "then", "else"}
    | {"allOf", "anyOf", "oneOf", "not"}
)


def draft_of(name: str | int) -> Draft | None:
    """The draft of this name ("7", "draft7", "2020-12", 7) or metaschema URI; None: there is none."""
    text = str(name).rstrip("#").removeprefix("draft").removeprefix("-").removeprefix("0")
    return next((draft for draft in DRAFTS if text in (draft.name, draft.uri)), None)


def draft_names() -> str:
    return ", ".join(draft.name for draft in DRAFTS)


def with_vocabulary(draft: Draft, vocabulary: Mapping[str, object], pointer: str) -> Draft:
    """What of `draft` the vocabularies of a metaschema leave. Raises HR-CONSTRAINT-03 for a required unknown one."""
    groups = {
        "core": frozenset(draft.forms) - _VALIDATION - _UNEVALUATED - _APPLICATOR,
        "validation": _VALIDATION,
        "applicator": _APPLICATOR | (frozenset() if draft.name == "2020-12" else _UNEVALUATED),
        "unevaluated": _UNEVALUATED,
    }
    silent = ("meta-data", "content", "format", "format-annotation", "format-assertion")
    kept = set(groups["core"])
    prefix = draft.uri.removesuffix("schema") + "vocab/"
    for uri, required in vocabulary.items():
        name = uri.removeprefix(prefix)
        if name in groups:
            kept |= groups[name]
        elif required and name not in silent:
            raise Refusal(pointer, "$vocabulary", f"the vocabulary {uri} is unknown")
    forms = MappingProxyType({keyword: form for keyword, form in draft.forms.items() if keyword in kept})
    return Draft(
        draft.name, draft.uri, forms,
        contains_evaluates=draft.contains_evaluates, asserts_format=prefix + "format-assertion" in vocabulary,
    )  # fmt: skip


_TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_WANTED: Mapping[str, str] = {
    "schemas": "a non-empty array of schemas",
    "schema_map": "an object of schemas",
    "dependencies": "an object of schemas and arrays of names",
    "type": "a type name or a non-empty array of them",
    "list": "an array",
    "count": "a whole number >= 0",
    "number": "a number",
    "positive": "a number > 0",
    "text": "a string",
    "flag": "true or false",
    "names": "an array of strings",
    "names_map": "an object of arrays of strings",
}


def check_form(form: Form, value: object, pointer: str) -> None:
    """Raises HR-CONSTRAINT-02 when a keyword's value at `pointer` is of the wrong form (schemas inside are not looked
    at)."""
    if not is_form(form, value):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        help = ""
        if form == "type":
            help = "the types are null, boolean, number, integer, string, array, object"
        raise invalid(pointer, f"{shown} is not {_WANTED[form]}", help)


def is_form(form: Form, value: object) -> bool:
    """Whether a keyword's value is of its form; schemas inside are not looked at."""
    number = isinstance(value, (int, float)) or type(value).__name__ == "Decimal"
    number = number and not isinstance(value, bool)
    match form:
        case "schema" | "items" | "schema_or_flag" | "any":
            return True
        case "schemas":
            return isinstance(value, list) and bool(value)
        case "schema_map" | "dependencies":
            return isinstance(value, dict)
        case "type":
            names = [value] if isinstance(value, str) else value
            return isinstance(names, list) and bool(names) and all(type(n) is str and n in _TYPES for n in names)
        case "list":
            return isinstance(value, list)
        case "count":
            return number and value == int(value) and value >= 0  # type: ignore[call-overload, operator]
        case "number":
            return number
        case "positive":
            return number and value > 0  # type: ignore[operator]
        case "text":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "names":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "names_map":
            return isinstance(value, dict) and all(is_form("names", names) for names in value.values())
