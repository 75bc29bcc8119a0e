"""Python types as JSON schemas, and constrained text as values: what tools and structured answers share."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typing_extensions
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from headrace.errors import AnswerError, HeadraceError, RequestError
from headrace.types import Grammar, Output

UNUSABLE = (PydanticUserError, PydanticSchemaGenerationError, NameError, TypeError, ValueError, RecursionError)
"""What pydantic raises for a type that it can't use."""

INLINE_CHARS = 300
"""A definition that is used more than once is put in its place if its JSON is no longer than this."""

_ONE = ("items", "additionalProperties", "contains", "not", "propertyNames", "if", "then", "else")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_TABLES = ("properties", "patternProperties", "$defs", "dependentSchemas")


# --- types to schemas ------------------------------------------------------------------------------------------------


class TypeSchema(GenerateJsonSchema):
    """pydantic's schemas, without what a grammar can't hold and validation repairs by itself."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's declaration

    def set_schema(self, schema: Any) -> Any:
        return _repeating(super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> Any:
        return _repeating(super().frozenset_schema(schema))

    def decimal_schema(self, schema: Any) -> Any:
        return self.float_schema(schema)


def _repeating(schema: Any) -> Any:
    """A list with repeats is a set too."""
    return {key: value for key, value in schema.items() if key != "uniqueItems"}


def adapter_of(type_: Any) -> TypeAdapter[Any]:
    """Raises one of UNUSABLE."""
    try:
        return TypeAdapter(portable(type_), config=ConfigDict(extra="forbid"))
    except PydanticUserError as error:
        if error.code != "type-adapter-config-unused":  # models, dataclasses and TypedDicts have a config of their own
            raise
        return TypeAdapter(portable(type_))


def portable(type_: Any) -> Any:
    """The type as pydantic takes it: before Python 3.12, a TypedDict of `typing` becomes one of typing_extensions."""
    if sys.version_info >= (3, 12):
        return type_
    if typing.is_typeddict(type_) and type(type_).__module__ == "typing":
        return _portable_dict(type_)
    args = typing.get_args(type_)
    if not args or typing.get_origin(type_) is typing.Literal:
        return type_
    if typing.get_origin(type_) is Annotated:
        return Annotated[(portable(args[0]), *args[1:])]
    changed = tuple(portable(arg) if not isinstance(arg, list) else arg for arg in args)
    if all(a is b for a, b in zip(args, changed, strict=True)):
        return type_
    if hasattr(type_, "copy_with"):
        return type_.copy_with(changed)
    return typing.Union[changed] if isinstance(type_, _UNION) else typing.get_origin(type_)[changed]  # noqa: UP007


_UNION = type(int | str)


def _portable_dict(type_: Any) -> Any:
    fields: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(type_, include_extras=True).items():
        needed = name in type_.__required_keys__
        while (origin := typing.get_origin(hint)) in (typing.Required, typing.NotRequired):
            needed, hint = origin is typing.Required, typing.get_args(hint)[0]
        fields[name] = typing_extensions.Required[portable(hint)] if needed else _optional(portable(hint))
    made: Any = typing_extensions.TypedDict(type_.__name__, fields)  # type: ignore[misc]
    made.__doc__ = type_.__doc__
    config = getattr(type_, "__pydantic_config__", ConfigDict(extra="forbid"))
    made.__pydantic_config__ = config  # type: ignore[attr-defined]
    return made


def _optional(hint: Any) -> Any:
    return typing_extensions.NotRequired[hint]


def tidied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of pydantic, small: no titles, definitions in their place where they are short, used once and not
    recursive; objects with named members take no others."""
    root = dict(schema)
    definitions: dict[str, Any] = root.pop("$defs", {})
    uses: dict[str, int] = {}
    for node in (root, *definitions.values()):
        for name in _references(node):
            uses[name] = uses.get(name, 0) + 1
    done: dict[str, Any] = {}

    def settle(name: str, above: tuple[str, ...]) -> Any:
        """The definition, to be put in its place; None: it stays where it is."""
        if name in above:
            return None
        if name not in done:
            found = _mapped(definitions[name], lambda inner: settle(inner, (*above, name)))
            recursive = name in set(_references(found))
            short = uses[name] == 1 or len(json.dumps(found, default=str)) <= INLINE_CHARS
            done[name] = (found, short and not recursive)
        found, inline = done[name]
        return found if inline else None

    tidy = _mapped(root, lambda name: settle(name, ()))
    kept: dict[str, Any] = {}
    pending = list(_references(tidy))
    while pending:
        name = pending.pop()
        if name not in kept:
            kept[name] = done[name][0]
            pending += _references(kept[name])
    return {**tidy, "$defs": kept} if kept else tidy


def _mapped(node: Any, settle: Callable[[str], Any]) -> Any:
    """A copy of a schema node, tidied; settle says what a reference becomes."""
    if not isinstance(node, Mapping):
        return node
    found = {key: value for key, value in node.items() if key not in ("title", "discriminator")}
    for key in found:
        if key in _ONE:
            found[key] = _mapped(found[key], settle)
        elif key in _LISTS:
            found[key] = [_mapped(each, settle) for each in found[key]]
        elif key in _TABLES:
            found[key] = {name: _mapped(each, settle) for name, each in found[key].items()}
    if "properties" in found and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    name = _reference(found)
    if name is not None and (target := settle(name)) is not None:
        del found["$ref"]
        found = {**target, **found}
    return found


def _reference(node: Mapping[str, Any]) -> str | None:
    reference = node.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else None


def _references(node: Any) -> Iterator[str]:
    """Names of the definitions that a schema refers to, once per use."""
    if not isinstance(node, Mapping):
        return
    if (name := _reference(node)) is not None:
        yield name
    for key, value in node.items():
        inner = [value] if key in _ONE else value if key in _LISTS else value.values() if key in _TABLES else ()
        for each in inner:
            yield from _references(each)


# --- text to values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer must be: the grammar that holds it to that, and how its text becomes a value."""

    grammar: Grammar
    read: Callable[[str], Any]
    """Raises ValueError."""


def expected(schema: Any) -> Expected:
    """schema: a pydantic model, a dataclass, a TypedDict or any other type that pydantic takes (the value is an object
    of it); a JSON schema as a dict or as text (the value is plain JSON); a Grammar (the value is the text, or the JSON
    value of a JSON grammar). Raises RequestError HR-CONSTRAINT-02."""
    if isinstance(schema, Grammar):
        return Expected(schema, json.loads if schema.kind in ("json_schema", "json_object") else str)
    if isinstance(schema, (str, bool, Mapping)):
        return Expected(Grammar("json_schema", schema if isinstance(schema, str) else _written(schema)), json.loads)
    try:
        adapter = adapter_of(schema)
        found = tidied(adapter.json_schema(schema_generator=TypeSchema))
    except UNUSABLE as error:
        why = f"{error}".partition("\n")[0]
        raise RequestError(
            "HR-CONSTRAINT-02",
            f"schema = {schema!r:.100} is no type that a JSON schema can be made of: {why:.300}",
            "give a pydantic model, a dataclass, a TypedDict, another type that pydantic takes, or a JSON schema",
        ) from error
    return Expected(Grammar("json_schema", _written(found)), adapter.validate_json)


def _written(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            "HR-CONSTRAINT-02", f"the schema is no JSON: {error}", "a schema holds JSON values"
        ) from error


def value_of(wanted: Expected, text: str, output: Output) -> Any:
    """The value of a finished answer. Raises the output's own error, AnswerError HR-CONSTRAINT-10 for one that was cut,
    -09 for one that the type refuses though the schema allows it."""
    if output.error is not None:
        raise output.error
    if output.finish_reason not in ("stop", "tool_calls"):
        raise AnswerError(
            "HR-CONSTRAINT-10",
            f"the answer ended before its value was complete ({output.finish_reason}): ...{text[-60:]!r}",
            "raise max_tokens" if output.finish_reason == "length" else "ask again",
            output=output,
        )
    try:
        return wanted.read(text)
    except ValueError as error:
        if isinstance(error, ValidationError) and error.errors()[0]["type"] != "json_invalid":
            code, why = "HR-CONSTRAINT-09", f"the type refuses the answer: {problems_of(error)}"
            help = "say in the schema what the type's validators ask for"
        else:
            code, why = "HR-CONSTRAINT-10", f"the answer is no JSON: {str(error).partition(chr(10))[0]}: {text[:60]!r}"
            help = "a stop string may have cut it: leave `stop` out"
        raise AnswerError(code, why, help, output=output) from error


def values_of(wanted: Expected, outputs: Sequence[Output], single: bool) -> list[Any]:
    """The values of all answers. Raises the first failure, which names its prompt and has every output."""
    found: list[Any] = []
    failure: HeadraceError | None = None
    for i, output in enumerate(outputs):
        try:
            found.append(value_of(wanted, output.text, output))
        except HeadraceError as error:
            failure = failure or _placed(error, "" if single else f"prompt {i}: ", output, outputs)
    if failure is not None:
        raise failure
    return found


def _placed(error: HeadraceError, where: str, output: Output, outputs: Sequence[Output]) -> HeadraceError:
    placed = AnswerError(error.code, where + error.message, error.help, output=output, outputs=outputs)
    placed.__cause__ = error
    return placed


def problems_of(error: ValidationError) -> str:
    """pydantic's complaints in one line each: "city: Field required; days.0: ..."."""
    found = [
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    return "; ".join(found[:8])
