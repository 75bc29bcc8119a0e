"""Arguments of calls in formats that write every argument by itself, strings as they are and other values as JSON.

One by one means: which arguments there are must be plain from the schema, so not every schema can be written so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.errors import RequestError
from headrace_plugins.dialects.family import Expression, any_of
from headrace_plugins.dialects.reading import Broken, CallReader, Cursor, Ended, Steps, is_name, quoted
from headrace_plugins.dialects.values import WORDS, python_value

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
"""Of JSON values; an integer is a number."""

_BEYOND = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef"}
    | {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
    | {"dependencies", "dependentRequired", "dependentSchemas"}
)
"""Keywords by which more depends on each other than can be said of arguments that are written one by one."""
_PLAIN_REFERENCE = frozenset({"$ref", "$defs", "definitions", "$schema"})
_TOOL = "tool:parameters"
_DEEPEST = 32
"""References and branches that are followed to find the types of a value."""

Schema = Any


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a tool."""

    name: str
    schema: Schema
    """Stands by itself: references in it can be followed."""
    required: bool


def arguments_of(tool: str, schema: Mapping[str, Any]) -> list[Argument]:
    """The arguments that a call may have, in the order of the schema.

    Where the schema names arguments and allows others too, the others are left out: a call without them is valid.
    Raises RequestError HR-CONSTRAINT-03 for what can't be said of arguments one by one.
    """
    root, place = schema, ""
    for _ in range(_DEEPEST):
        if "$ref" not in root or not set(root) <= _PLAIN_REFERENCE:
            break
        root, place = _resolved(root["$ref"], schema), str(root["$ref"]).removeprefix("#")
        if not isinstance(root, Mapping):
            root = {}
    _check_plain(tool, root)
    properties: Mapping[str, Any] = root.get("properties") or {}
    required = [str(name) for name in root.get("required") or ()]
    found = [
        Argument(name, _standing_alone(each, schema, f"{place}/properties/{_escaped(name)}"), name in required)
        for name, each in properties.items()
        if each is not False or name in required
    ]
    keyword = _others_keyword(root)
    others = _standing_alone(root.get(keyword, True), schema, f"{place}/{keyword}")
    return found + [Argument(name, others, True) for name in required if name not in properties]


def _check_plain(tool: str, root: Mapping[str, Any]) -> None:
    """Raises RequestError HR-CONSTRAINT-03 for a schema that says more than which arguments there are."""
    for keyword in root:
        if keyword in _BEYOND:
            message = (
                f"the parameters of tool '{tool}' can't be kept: #/{keyword} says more than which arguments there are"
            )
            raise RequestError("HR-CONSTRAINT-03", message, "move it into an argument, or leave it out")
    if root.get("type", "object") not in ("object", ["object"]):
        message = f"the parameters of tool '{tool}' have the type {root['type']!r:.60}"
        raise RequestError("HR-CONSTRAINT-03", message, 'parameters must be {"type": "object", "properties": {...}}')


def others_of(schema: Mapping[str, Any]) -> Schema | None:
    """The schema of arguments of any name, for tools that name none; None where there are none."""
    if schema.get("properties") or schema.get("required") or "$ref" in schema:
        return None
    keyword = _others_keyword(schema)
    others = schema.get(keyword, "properties" not in schema)
    return None if others is False else _standing_alone(others, schema, f"/{keyword}")


def _others_keyword(root: Mapping[str, Any]) -> str:
    """What says which other arguments there are; where nothing else evaluates any, both keywords mean the same."""
    return "additionalProperties" if "additionalProperties" in root else "unevaluatedProperties"


def _standing_alone(schema: Schema, root: Mapping[str, Any], pointer: str) -> Schema:
    """The schema, which lies at `pointer` of the root, with what its references need."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping) or not (references := list(_references(schema))):
        return schema
    if all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        return {**schema, **{key: root[key] for key in ("$schema", "$defs", "definitions") if key in root}}
    if "$id" in root:
        return {"$defs": {"tool": root}, "$ref": f"{root['$id']}#{pointer}"}
    return {"$defs": {"tool": {**root, "$id": _TOOL}}, "$ref": f"{_TOOL}#{pointer}"}


def _references(schema: Schema) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef"):
                yield str(value)
            yield from _references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def types_of(schema: Schema, root: Schema = None, depth: int = 0) -> frozenset[str]:
    """The types that values of a schema may have; too many rather than too few."""
    root = schema if root is None else root
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return TYPES
    types = TYPES
    if "$ref" in schema:
        types &= types_of(_resolved(schema["$ref"], root), root, depth + 1)
    stated = schema.get("type")
    if stated is not None:
        named = {"number" if each == "integer" else each for each in ([stated] if isinstance(stated, str) else stated)}
        types &= frozenset(named) if named <= TYPES else TYPES
    if isinstance(schema.get("enum"), list):
        types &= {_type_of(value) for value in schema["enum"]}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            types &= frozenset().union(*(types_of(each, root, depth + 1) for each in schema[keyword]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= types_of(each, root, depth + 1)
    return types


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _resolved(reference: object, root: Schema) -> Schema:
    """What a reference within the schema points at; {} where that isn't plain."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return {}
    found = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return {}
        found = found[name]
    return found


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="")


# --- grammar ---------------------------------------------------------------------------------------------------------


def value_of(schema: Schema, end: str, mark: str = "") -> Expression:
    """A value as these formats write it, followed by `end`, which no string may hold. mark: what readers end it at,
    which it may not hold either; "": the same.

    Where a string may stand beside other values, it is none that `json_of` would take for one of their types.
    """
    types, mark = types_of(schema), mark or end
    if types == {"string"} and mark == end and set(schema) <= {"type", "description", "title", "default", "examples"}:
        return {"until": end}
    values: list[Expression] = []
    if "string" in types:
        looks = [re.escape(mark)] if mark != end else []
        looks += [f"^{_BLANKS}*(?:{look}){_BLANKS}*$" for kind, look in _LOOKS.items() if kind in types]
        text = narrowed(schema, ["string"], *({"not": {"pattern": look}} for look in looks))
        values.append({"schema": text, "notation": "raw", "until": end})
    if types != {"string"}:
        others = narrowed(schema, sorted(types - {"string"})) if "string" in types else schema
        values.append({"schema": others, "notation": "raw", "until": mark})
    return any_of(values)


_BLANKS = r"[\s\x1c-\x1f\x85]"
_LOOKS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "array": r"\[[^]*\]",
    "object": r"\{[^]*\}",
}
"""Type -> texts that may be read as one of its values."""
_SHARED = frozenset({"$schema", "$defs", "definitions"})


def narrowed(schema: Schema, types: Seq[str], *more: Schema) -> Schema:
    """The schema for values of these types only, of which more holds."""
    if not isinstance(schema, Mapping):
        return {"allOf": [schema if isinstance(schema, bool) else {}, {"type": types}, *more]}
    # beside "$ref", drafts up to 7 ignore all else
    shared = {key: value for key, value in schema.items() if key in _SHARED}
    return {**shared, "allOf": [{k: v for k, v in schema.items() if k not in _SHARED}, {"type": types}, *more]}


def arguments_expression(
    tool: str, schema: Mapping[str, Any], write: Callable[[Expression, Schema], Expression]
) -> list[Expression]:
    """The arguments of a call, one after the other: write(name, schema of the value) is one of them."""
    others = others_of(schema)
    if others is not None:
        _check_plain(tool, schema)
        name = {"regex": "[a-zA-Z_][a-zA-Z0-9_.-]{0,63}"}
        return [{"many": write(name, others), "min": 0, "max": None}]
    written = []
    for argument in arguments_of(tool, schema):
        if not is_name(argument.name):
            message = (
                f"argument {argument.name!r:.60} of tool '{tool}' can't be written: its name could not be read back"
            )
            raise RequestError("HR-CONSTRAINT-03", message, "name it with letters, digits, '_', '-' and '.'")
        one = write(argument.name, argument.schema)
        written.append(one if argument.required else {"opt": one})
    return written


# --- reading ---------------------------------------------------------------------------------------------------------


class ParameterReader(CallReader):
    """Writes arguments that come one by one as one JSON object."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._schema: Mapping[str, Any] = {}
        self._n_arguments = 0

    def begin(self, name: str) -> None:
        """A call begins."""
        self.call(name)
        self._schema = self._schemas.get(name, {})
        self._n_arguments = 0

    def argument(self, name: str, *marks: str) -> Steps[str]:
        """Read a value up to the first of the marks, which is given."""
        self.write_name(name)
        types = self._types(name)
        if types == {"string"}:
            self.write('"')
            mark = yield from self.cursor.flow(lambda piece: self.write(quoted(piece)), *marks)
            self.write('"')
        else:
            text, mark = yield from self.cursor.until(*marks)
            self.write(json_of(text, types))
        return mark

    def write_name(self, name: str) -> None:
        """The name of an argument; its value comes next."""
        self.write(", " if self._n_arguments else "{")
        self._n_arguments += 1
        self.write(f'"{quoted(name)}": ')

    def finish_call(self) -> None:
        """The call is complete."""
        self.write("}" if self._n_arguments else "{}")
        self.close()

    def _types(self, name: str) -> frozenset[str]:
        root = self._schema
        for _ in range(_DEEPEST):
            if not (isinstance(root, Mapping) and "$ref" in root and "properties" not in root):
                break
            root = _resolved(root["$ref"], self._schema)
        properties = root.get("properties") if isinstance(root, Mapping) else None
        if isinstance(properties, Mapping) and name in properties:
            return types_of(properties[name], self._schema)
        others = root.get("additionalProperties") if isinstance(root, Mapping) else None
        return types_of(others, self._schema) if isinstance(others, Mapping) else TYPES


def json_of(text: str, types: frozenset[str]) -> str:
    """A value that was written without quotes, as JSON text of one of the types where it is any of these. Words and
    literals of Python's are understood where no string may be meant."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
        if _type_of(value) in types - {"string"}:
            return stripped
    except (ValueError, RecursionError):
        value = None
        word = WORDS.get(stripped, "")
        if word and ("null" if word == "null" else "boolean") in types:
            return word
    if "string" not in types and (written := _python_of(stripped)):
        return written
    return f'"{quoted(text)}"'


def _python_of(text: str) -> str:
    """A Python literal as JSON; "" where it is none."""
    cursor, pieces = Cursor(), list[str]()
    cursor.add(text + "\n")
    cursor.closed = True
    try:
        for _ in python_value(cursor, pieces.append):
            pass
    except (Broken, Ended):
        return ""
    return "".join(pieces) if not cursor.rest.strip() else ""


def _no_constant(name: str) -> Any:
    raise ValueError(name)
