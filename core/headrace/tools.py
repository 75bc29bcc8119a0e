"""Tools: Python callables that a model may call, described to it by their annotations and docstring.

def weather(city: str, days: Annotated[int, Field(ge=1, le=7)] = 1) -> str:
    \"\"\"The forecast for a city.\"\"\"

Tool.of(weather).schema -> {"type": "function", "function": {"name": "weather", "parameters": {...}, ...}}
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from headrace import dialogue
from headrace.errors import RequestError, did_you_mean
from headrace.schemas import UNUSABLE, TypeSchema, portable, problems_of, tidied

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NAME_HELP = "a name has 1 to 64 of a-z A-Z 0-9 _ . -; give one with tool(name=...)"
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_DICT_HELP = (
    'a tool looks like {"type": "function", "function": {"name": "weather", "description": "...", '
    '"parameters": {"type": "object", "properties": {...}}}}'
)
MAX_NESTING = 200
"""Of a tool's dict, in levels."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that a model may call. Made by `Tool.of` from a callable, or from a dict as the Chat Completions API
    has it, or by the decorator `tool`. Without a function, calls of it go to whoever asked for the answer."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object, in the order of the callable's parameters."""
    function: Callable[..., Any] | None = None
    timeout_s: float | None = None
    """None: the chat's own."""
    strict: bool | None = None
    """As a dict had it; the arguments are always held to the schema."""
    _model: type[BaseModel] | None = field(default=None, repr=False, compare=False)
    _slots: tuple[_Slot, ...] = field(default=(), repr=False, compare=False)

    @staticmethod
    def of(what: Tool | Callable[..., Any] | Mapping[str, Any]) -> Tool:
        """Raises RequestError HR-TOOL-01 for a callable, HR-TOOL-02 for a dict or a name that can't be used."""
        if isinstance(what, Tool):
            return what
        if isinstance(what, Mapping):
            return _from_dict(what)
        if not callable(what):
            message = f"a tool is a callable, a Tool or a dict, not {what!r:.80} ({type(what).__name__})"
            raise RequestError("HR-TOOL-02", message, _DICT_HELP)
        return _from_callable(what)

    @property
    def schema(self) -> dialogue.Tool:
        """What dialects are told."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}

    @property
    def is_async(self) -> bool:
        called = _plain(self.function)
        return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004

    def bind(self, arguments: str) -> Callable[[], Any]:
        """The call with these arguments (JSON text of an object), validated and converted to what the annotations say.
        Raises RequestError HR-TOOL-03, with all that is wrong with them."""
        assert self.function is not None
        assert self._model is not None
        try:
            values = self._model.model_validate_json(arguments)
        except ValidationError as error:
            message = f"the arguments of {self.name} are not valid: {problems_of(error)}"
            raise RequestError("HR-TOOL-03", message, "see the tool's parameters") from error
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        for slot in self._slots:
            given = slot.field in values.model_fields_set
            if slot.positional:
                args.append(getattr(values, slot.field) if given or slot.filled else slot.default)
            elif given or slot.filled:
                keywords[slot.parameter] = getattr(values, slot.field)
        return functools.partial(self.function, *args, **keywords)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the value of a field goes in a call."""

    field: str
    parameter: str
    positional: bool
    default: Any
    filled: bool
    """pydantic has the default (`x: int = Field(3)`), not the callable."""


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str | None = ..., description: str | None = ..., timeout_s: float | None = ...
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Decorator, and call, that makes a Tool: `@tool`, `@tool(name="search", timeout_s=5)`, `tool(name="f")(g)`.

    What is given replaces what the callable says of itself. timeout_s: seconds for one call.
    """
    if function is None:
        return functools.partial(_from_callable, name=name, description=description, timeout_s=timeout_s)
    return _from_callable(function)


def toolbox(tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]]) -> dict[str, Tool]:
    """Tools by name, in order. Raises RequestError HR-TOOL-01, HR-TOOL-02."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Iterable):
        raise RequestError("HR-TOOL-02", f"tools must be a list, not {tools!r:.80}", "tools=[weather, search]")
    found: dict[str, Tool] = {}
    for i, each in enumerate(tools):
        try:
            made = Tool.of(each)
        except RequestError as error:
            raise RequestError(error.code, f"tools[{i}]: {error.message}", error.help) from error
        if made.name in found:
            message = f"tools[{i}]: there is a tool named {made.name!r} already"
            raise RequestError("HR-TOOL-02", message, "rename one of them: tool(name=...)(function)")
        found[made.name] = made
    return found


def choice_of(choice: str, parallel: bool, tools: Mapping[str, Tool]) -> dialogue.ToolChoice:
    """choice: auto, none, required, or the name of a tool. Raises RequestError HR-TOOL-04."""
    if choice in ("auto", "none") or (choice == "required" and tools):
        return dialogue.ToolChoice(choice, parallel=parallel)  # type: ignore[arg-type]
    if not isinstance(choice, str) or choice not in tools:
        known = ("auto", "none", "required", *tools)
        near = did_you_mean(choice, known) if isinstance(choice, str) else ""
        message = f"tool_choice = {choice!r:.60} can't be" + ("" if tools else ": there are no tools")
        raise RequestError("HR-TOOL-04", message, f"{near}known: {', '.join(known)}")
    return dialogue.ToolChoice("required", choice, parallel)


# --- callables -------------------------------------------------------------------------------------------------------


def _from_callable(
    function: Callable[..., Any],
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
) -> Tool:
    if isinstance(function, Tool):
        given = {"name": name, "description": description, "timeout_s": timeout_s}
        return _named(replace(function, **{key: value for key, value in given.items() if value is not None}))
    if not callable(function):
        raise RequestError("HR-TOOL-01", f"{function!r:.80} is not callable", "a tool is made of a callable")
    plain = _plain(function)
    name = name if name is not None else getattr(plain, "__name__", None) or type(plain).__name__
    summary, described = _docstring(plain)
    slots, model = _model_of(function, name, described)
    parameters = tidied(model.model_json_schema(schema_generator=TypeSchema))
    return _named(
        Tool(
            name,
            summary if description is None else description,
            {"type": "object", "properties": {}, **{key: parameters[key] for key in _ORDER if key in parameters}},
            function,
            timeout_s,
            None,
            model,
            slots,
        )
    )


_ORDER = ("type", "properties", "required", "additionalProperties", "$defs")


def _named(made: Tool) -> Tool:
    if not isinstance(made.name, str) or not _NAME.fullmatch(made.name):
        raise RequestError("HR-TOOL-02", f"{made.name!r:.80} can't be the name of a tool", _NAME_HELP)
    if made.timeout_s is not None and not is_seconds(made.timeout_s):
        message = f"timeout_s = {made.timeout_s!r} of the tool {made.name!r} can't be"
        raise RequestError("HR-TOOL-02", message, "give seconds above 0")
    return made


def is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _plain(function: Any) -> Any:
    """What has the name, the docstring and the annotations: below partials, methods and wrappers."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _model_of(
    function: Callable[..., Any], name: str, described: Mapping[str, str]
) -> tuple[tuple[_Slot, ...], type[BaseModel]]:
    """The callable's parameters as fields f0, f1, ... with their names as aliases: a name can then be anything."""
    hints = _hints(function, name)
    preset = set(function.keywords) if isinstance(function, functools.partial) else set()
    slots: list[_Slot] = []
    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RequestError("HR-TOOL-01", f"the tool {name!r} has no signature: {error}", "wrap it in a def") from error
    for parameter in parameters.values():
        if parameter.name in preset:
            continue
        slot, definition = _field(parameter, len(slots), name, hints, described.get(parameter.name, ""))
        slots.append(slot)
        fields[slot.field] = definition
    return tuple(slots), _model(name, fields)


def _field(
    parameter: inspect.Parameter, number: int, name: str, hints: Mapping[str, Any], described: str
) -> tuple[_Slot, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        raise RequestError(
            "HR-TOOL-01",
            f"the tool {name!r} takes {stars}{parameter.name}, whose names and number a model can't know",
            "name each parameter, or take a list or a dict",
        )
    if parameter.name not in hints:
        raise RequestError(
            "HR-TOOL-01",
            f"parameter {parameter.name!r} of the tool {name!r} has no annotation",
            f"annotate it: {parameter.name}: str",
        )
    hint, default = hints[parameter.name], parameter.default
    has_default = default is not parameter.empty
    own = FieldInfo.from_annotation(hint)
    more: dict[str, Any] = {"alias": own.alias or parameter.name}
    if text := own.description or _noted(own.metadata) or described:
        more["description"] = text
    if isinstance(default, FieldInfo) and default.description:
        more.pop("description", None)
    filled = isinstance(default, FieldInfo) or (not has_default and not own.is_required())
    positional = parameter.kind is parameter.POSITIONAL_ONLY
    slot = _Slot(f"f{number}", parameter.name, positional, default if has_default else None, filled)
    annotation: Any = Annotated[hint, Field(**more)]
    return slot, (annotation, default) if has_default else annotation if filled else (annotation, ...)


def _noted(metadata: Iterable[Any]) -> str:
    """A description as Annotated[int, "how many"] has it, or typing's Doc."""
    texts = (each if isinstance(each, str) else getattr(each, "documentation", None) for each in metadata)
    return next((text for text in texts if isinstance(text, str)), "")


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Annotations of the parameters, those written as text evaluated."""
    plain = _plain(function)
    if inspect.isclass(plain):
        plain = plain.__init__
    elif not inspect.isroutine(plain):
        plain = _plain(type(plain).__call__)
    local: dict[str, Any] = {}
    if inspect.isfunction(plain):
        cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=False)
        local = {key: cell.cell_contents for key, cell in cells if _is_filled(cell)}
    try:
        found = typing.get_type_hints(plain, localns=local, include_extras=True)
        found.pop("return", None)
        return {key: portable(hint) for key, hint in found.items()}
    except (NameError, AttributeError, TypeError, SyntaxError, RecursionError) as error:
        raise RequestError(
            "HR-TOOL-01",
            f"the annotations of the tool {name!r} can't be evaluated: {error}: {_written(plain)}",
            "define the types where the module can see them; types that hold themselves: typing_extensions.TypedDict",
        ) from error


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises
    except ValueError:
        return False
    return True


def _written(plain: Any) -> str:
    written = getattr(plain, "__annotations__", {})
    return ", ".join(f"{key}: {value}" for key, value in written.items() if isinstance(value, str))


def _model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    config = ConfigDict(extra="forbid", protected_namespaces=())
    try:
        made = create_model("Arguments", __config__=config, **fields)
        made.model_json_schema(schema_generator=TypeSchema)
        return made
    except UNUSABLE as error:
        raise _unusable(name, fields, config, error) from error


def _unusable(name: str, fields: dict[str, Any], config: ConfigDict, error: Exception) -> RequestError:
    """The error that names the first parameter at fault."""
    for definition in fields.values():
        hint = definition[0] if isinstance(definition, tuple) else definition
        try:
            create_model("Arguments", __config__=config, f=(hint, ...)).model_json_schema(schema_generator=TypeSchema)
        except UNUSABLE as own:
            bare, info = typing.get_args(hint)[0], typing.get_args(hint)[-1]
            written = bare.__name__ if inspect.isclass(bare) and not typing.get_args(bare) else str(bare)
            why = str(own).partition("\n")[0]
            return RequestError(
                "HR-TOOL-01",
                f"parameter {info.alias!r} of the tool {name!r} has the annotation {written}, "
                f"which JSON can't carry: {why:.200}",
                "use types that JSON has, dataclasses, TypedDicts, enums, pydantic models and containers of these",
            )
    message = f"the parameters of the tool {name!r} can't be described: {error!s:.200}"
    return RequestError("HR-TOOL-01", message, "simplify its annotations")


def _docstring(plain: Any) -> tuple[str, dict[str, str]]:
    """(what the tool does, description of each parameter) of a docstring in Google's, NumPy's or Sphinx's style."""
    from docstring_parser import ParseError, parse

    described = plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain).__call__
    text = inspect.getdoc(described) or ""
    try:
        found = parse(text)
    except ParseError:  # acceptable: the model reads the docstring as it is
        return text, {}
    summary = "\n\n".join(part.strip() for part in (found.short_description, found.long_description) if part)
    return summary, {each.arg_name: each.description or "" for each in found.params}


# --- dicts -----------------------------------------------------------------------------------------------------------


def _from_dict(what: Mapping[str, Any]) -> Tool:
    if what.get("type") != "function":
        raise _bad("/type", f'is {what.get("type")!r:.60}, the only type is "function"')
    function = what.get("function")
    if not isinstance(function, Mapping):
        raise _bad("/function", f"is no object but {function!r:.60}")
    for where, given, known in (("", what, ("type", "function")), ("/function", function, _FIELDS)):
        for key in given:
            if key not in known:
                raise _bad(f"{where}/{key}", f"is unknown; known: {', '.join(known)}")
    description, strict = function.get("description") or "", function.get("strict")
    if not isinstance(description, str):
        raise _bad("/function/description", f"is no text but {description!r:.60}")
    if strict is not None and not isinstance(strict, bool):
        raise _bad("/function/strict", f"is {strict!r:.60}, not true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        got = parameters.get("type") if isinstance(parameters, Mapping) else parameters
        raise _bad("/function/parameters" + "/type" * isinstance(parameters, Mapping), f'is {got!r:.60}, not "object"')
    _check_schema(parameters)
    return _named(Tool(function.get("name", ""), description, {"type": "object", **parameters}, strict=strict))


_FIELDS = ("name", "description", "parameters", "strict")


def _bad(pointer: str, what: str) -> RequestError:
    return RequestError("HR-TOOL-02", f"the tool's {pointer} {what}", _DICT_HELP)


def _check_schema(parameters: Mapping[str, Any]) -> None:
    """What can be told without an engine: the shape of the document. Its keywords are read when a grammar is made."""
    try:
        json.dumps(parameters, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad("/function/parameters", f"is no JSON: {error}") from error
    pending: list[tuple[str, Any, int]] = [("/function/parameters", parameters, 0)]
    while pending:
        pointer, node, depth = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise _bad(pointer, f"is no schema but {node!r:.60}")
        if depth > MAX_NESTING:
            raise _bad(pointer, f"is nested more than {MAX_NESTING} deep")
        types = node.get("type", [])
        for each in types if isinstance(types, (list, tuple)) else [types]:
            if each not in _TYPES:
                raise _bad(f"{pointer}/type", f"is {each!r:.60}, no type of JSON: {', '.join(_TYPES)}")
        if not isinstance(node.get("pattern", ""), str):
            raise _bad(f"{pointer}/pattern", f"is no text but {node['pattern']!r:.60}")
        properties = node.get("properties", {})
        if not isinstance(properties, Mapping):
            raise _bad(f"{pointer}/properties", f"is no object but {properties!r:.60}")
        pending += [(f"{pointer}/properties/{key}", each, depth + 1) for key, each in properties.items()]
        for key in ("items", "additionalProperties", "not"):
            if key in node and not (key == "items" and isinstance(node[key], (list, tuple))):
                pending.append((f"{pointer}/{key}", node[key], depth + 1))
        for key in ("anyOf", "oneOf", "allOf"):
            if not isinstance(node.get(key, []), (list, tuple)):
                raise _bad(f"{pointer}/{key}", f"is no list but {node[key]!r:.60}")
            pending += [(f"{pointer}/{key}/{i}", each, depth + 1) for i, each in enumerate(node.get(key, []))]
