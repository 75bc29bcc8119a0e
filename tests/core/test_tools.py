"""Tools from Python callables: what models are told of them, and how their arguments come back."""

from __future__ import annotations

import enum
import functools
import json
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import pytest
from pydantic import BaseModel, Field, model_validator

from headrace import Tool, tool
from headrace.errors import RequestError
from headrace.tools import choice_of, toolbox


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: int = 0


class Where(NamedTuple):
    city: str
    zip: int = 0


class Options(typing.TypedDict, total=False):
    limit: typing.Required[int]
    order: str


class Tree(BaseModel):
    name: str
    kids: list[Tree] = []


class Even(BaseModel):
    n: int

    @model_validator(mode="after")
    def even(self) -> Even:
        if self.n % 2:
            raise ValueError("n is odd")
        return self


def schema_of(annotation: Any) -> Any:
    def f(x: Any) -> None: ...

    f.__annotations__["x"] = annotation
    return Tool.of(f).parameters["properties"]["x"]


def passed(annotation: Any, value: Any) -> Any:
    def f(x: Any) -> Any:
        return x

    f.__annotations__["x"] = annotation
    return Tool.of(f).bind(json.dumps({"x": value}))()


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
POINT = {
    "type": "object",
    "properties": {"x": INTEGER, "y": {"type": "integer", "default": 0}},
    "required": ["x"],
    "additionalProperties": False,
}
OPTIONS = {
    "type": "object",
    "properties": {"limit": INTEGER, "order": STRING},
    "required": ["limit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("annotation", "schema", "given", "value"),
    [
        (str, STRING, "a", "a"),
        (int, INTEGER, 3, 3),
        (int, INTEGER, 1.0, 1),
        (int, INTEGER, "1.0", 1),
        (float, {"type": "number"}, 3, 3.0),
        (bool, {"type": "boolean"}, True, True),
        (None, NULL, None, None),
        (Any, {}, [1], [1]),
        (list, {"type": "array", "items": {}}, [1, "a"], [1, "a"]),
        (list[int], {"type": "array", "items": INTEGER}, [1], [1]),
        (dict, {"type": "object", "additionalProperties": True}, {"a": 1}, {"a": 1}),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}, {"a": 1}, {"a": 1}),
        (set[int], {"type": "array", "items": INTEGER}, [1, 2, 1], {1, 2}),
        (frozenset[str], {"type": "array", "items": STRING}, ["a", "a"], frozenset("a")),
        (tuple[int, ...], {"type": "array", "items": INTEGER}, [1, 2], (1, 2)),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2},
            [1, "a"],
            (1, "a"),
        ),
        (Optional[int], {"anyOf": [INTEGER, NULL]}, None, None),  # noqa: UP045
        (int | None, {"anyOf": [INTEGER, NULL]}, 4, 4),
        (Union[int, str], {"anyOf": [INTEGER, STRING]}, "a", "a"),  # noqa: UP007
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, "b", "b"),
        (Unit, {"type": "string", "enum": ["celsius", "fahrenheit"]}, "celsius", Unit.C),
        (Level, {"type": "integer", "enum": [1, 2]}, 2, Level.HIGH),
        (Point, POINT, {"x": 1}, Point(1)),
        (list[Point], {"type": "array", "items": POINT}, [{"x": 1, "y": 2}], [Point(1, 2)]),
        (Options, OPTIONS, {"limit": 3}, {"limit": 3}),
        (
            dict[str, Options | None],
            {"type": "object", "additionalProperties": {"anyOf": [OPTIONS, NULL]}},
            {"a": {"limit": 3, "order": "up"}},
            {"a": {"limit": 3, "order": "up"}},
        ),
        (
            Where,
            {
                "type": "array",
                "prefixItems": [STRING, {"type": "integer", "default": 0}],
                "minItems": 1,
                "maxItems": 2,
            },
            ["Rome"],
            Where("Rome"),
        ),
        (
            Even,
            {"type": "object", "properties": {"n": INTEGER}, "required": ["n"], "additionalProperties": False},
            {"n": 2},
            Even(n=2),
        ),
        (Annotated[int, Field(ge=1, lt=8)], {"type": "integer", "minimum": 1, "exclusiveMaximum": 8}, 7, 7),
        (Annotated[str, Field(pattern="^a+$", max_length=3)], {**STRING, "pattern": "^a+$", "maxLength": 3}, "a", "a"),
        (Annotated[list[int], Field(min_length=1)], {"type": "array", "items": INTEGER, "minItems": 1}, [1], [1]),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}, 1, 1),
        (date, {"type": "string", "format": "date"}, "2026-01-02", date(2026, 1, 2)),
        (Decimal, {"type": "number"}, 1.5, Decimal("1.5")),
    ],
    ids=str,
)
def test_annotations(annotation: Any, schema: Any, given: Any, value: Any) -> None:
    assert schema_of(annotation) == schema
    found = passed(annotation, given)
    assert found == value
    assert type(found) is type(value)


def test_a_recursive_model_keeps_its_definition() -> None:
    def plant(tree: Tree, other: Tree) -> str:
        return tree.kids[0].name + other.name

    made = Tool.of(plant)
    assert made.parameters["properties"] == {name: {"$ref": "#/$defs/Tree"} for name in ("tree", "other")}
    assert list(made.parameters["$defs"]) == ["Tree"]
    assert made.bind('{"tree": {"name": "a", "kids": [{"name": "b"}]}, "other": {"name": "c"}}')() == "bc"


def test_definitions_that_many_use_are_not_copied_without_end() -> None:
    fields: dict[str, Any] = {}
    inner: Any = int
    for i in range(12):
        inner = type(f"M{i}", (BaseModel,), {"__annotations__": dict.fromkeys(("left", "right"), inner)})
    fields["x"] = inner
    assert len(json.dumps(schema_of(inner))) < 4000


def test_parameters_in_order_and_defaults() -> None:
    def f(b: int, /, a: str, schema: int = 3, *, self: float = 0.5, json: Point | None = None) -> Any:
        return b, a, schema, self, json

    made = Tool.of(f)
    assert list(made.parameters["properties"]) == ["b", "a", "schema", "self", "json"]
    assert made.parameters["required"] == ["b", "a"]
    assert made.parameters["additionalProperties"] is False
    assert made.parameters["properties"]["schema"] == {"type": "integer", "default": 3}
    assert made.bind('{"a": "x", "b": 1}')() == (1, "x", 3, 0.5, None)
    assert made.bind('{"json": {"x": 1}, "a": "x", "b": 1, "self": 2}')() == (1, "x", 3, 2.0, Point(1))


def test_gaps_between_positional_only_parameters() -> None:
    def f(a: int = 1, b: int = 2, /) -> Any:
        return a, b

    assert Tool.of(f).bind('{"b": 5}')() == (1, 5)


def test_defaults_that_json_can_not_say_and_those_of_fields() -> None:
    missing = object()

    def f(a: int = missing, b: int = Field(7, ge=3, description="be")) -> Any:  # type: ignore[assignment]
        return a is missing, b

    made = Tool.of(f)
    assert made.parameters["properties"] == {
        "a": {"type": "integer"},
        "b": {"type": "integer", "minimum": 3, "default": 7, "description": "be"},
    }
    assert made.bind("{}")() == (True, 7)


def test_no_parameters() -> None:
    made = tool(name="now")(lambda: 5)
    assert made.schema == {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    }
    assert made.bind("{}")() == 5


class Thermometer:
    def read(self, unit: Unit = Unit.C) -> str:
        """Reads it."""
        return unit.value

    @classmethod
    def make(cls, n: int) -> str:
        return cls.__name__ * n

    @staticmethod
    def scale(n: int) -> int:
        return 2 * n

    def __call__(self, n: int) -> int:
        """Calls it."""
        return n


def kelvin(value: float, unit: Unit) -> str:
    """To kelvin."""
    return f"{value} {unit.value}"


@functools.wraps(kelvin)
def wrapped(*args: Any, **kwargs: Any) -> str:
    return kelvin(*args, **kwargs)


async def later(n: int) -> int:
    return n


@pytest.mark.parametrize(
    ("made", "name", "description", "parameters", "arguments", "value"),
    [
        (Thermometer().read, "read", "Reads it.", ["unit"], {"unit": "fahrenheit"}, "fahrenheit"),
        (Thermometer.make, "make", "", ["n"], {"n": 2}, "ThermometerThermometer"),
        (Thermometer.scale, "scale", "", ["n"], {"n": 2}, 4),
        (Thermometer(), "Thermometer", "Calls it.", ["n"], {"n": 2}, 2),
        (functools.partial(kelvin, unit=Unit.C), "kelvin", "To kelvin.", ["value"], {"value": 1}, "1.0 celsius"),
        (functools.partial(kelvin, 2.0), "kelvin", "To kelvin.", ["unit"], {"unit": "celsius"}, "2.0 celsius"),
        (wrapped, "kelvin", "To kelvin.", ["value", "unit"], {"value": 1, "unit": "celsius"}, "1.0 celsius"),
    ],
)
def test_kinds_of_callables(
    made: Any, name: str, description: str, parameters: list[str], arguments: Any, value: Any
) -> None:
    found = Tool.of(made)
    assert (found.name, found.description, list(found.parameters["properties"])) == (name, description, parameters)
    assert not found.is_async
    assert found.bind(json.dumps(arguments))() == value


def test_async_functions_are_known() -> None:
    class Later:
        async def __call__(self, n: int) -> int:
            return n

    assert Tool.of(later).is_async
    assert Tool.of(functools.partial(later, n=1)).is_async
    assert Tool.of(Later()).is_async


def google(city: str, days: int = 1) -> None:
    """The weather.

    As far as it is known.

    Args:
        city: where,
            with its country
        days (int): how many
    """


def numpy(city: str, days: int = 1) -> None:
    """The weather.

    As far as it is known.

    Parameters
    ----------
    city : str
        where,
        with its country
    days
        how many
    """


def sphinx(city: str, days: int = 1) -> None:
    """The weather.

    As far as it is known.

    :param city: where,
        with its country
    :param int days: how many
    :returns: nothing
    """


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_docstrings(function: Callable[..., Any]) -> None:
    made = Tool.of(function)
    assert made.description == "The weather.\n\nAs far as it is known."
    described = {key: value["description"] for key, value in made.parameters["properties"].items()}
    assert described == {"city": "where,\nwith its country", "days": "how many"}


def test_a_fields_description_wins() -> None:
    def f(a: Annotated[int, Field(description="own")]) -> None:
        """Does it.

        Args:
            a: the docstring's
        """

    assert Tool.of(f).parameters["properties"]["a"]["description"] == "own"


def test_the_decorator() -> None:
    @tool
    def plain(a: int) -> int:
        return a

    @tool(name="search", description="Finds.", timeout_s=2)
    def named(a: int) -> int:
        """Not this."""
        return a

    assert (plain.name, plain.timeout_s) == ("plain", None)
    assert (named.name, named.description, named.timeout_s) == ("search", "Finds.", 2)
    assert tool(name="other")(named).name == "other"
    for bad in (0, -1, True, "1", float("nan")):
        with pytest.raises(RequestError, match="HR-TOOL-02: timeout_s"):
            tool(timeout_s=bad)(named)  # type: ignore[arg-type]


class Opaque: ...


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Opaque, "annotation Opaque"),
        (list[Opaque], "Opaque"),
        (Callable[[int], int], "Callable"),
        (typing.Iterator, "Iterator"),
    ],
)
def test_annotations_that_json_can_not_carry(annotation: Any, text: str) -> None:
    def f(fine: int, x: Any) -> None: ...

    f.__annotations__["x"] = annotation
    with pytest.raises(RequestError, match=r"HR-TOOL-01: parameter 'x' of the tool 'f' .*") as raised:
        Tool.of(f)
    assert text in raised.value.message


def test_callables_that_can_not_be_tools() -> None:
    def stars(*rest: int) -> None: ...

    def keywords(a: int, **rest: int) -> None: ...

    def bare(a) -> None: ...  # type: ignore[no-untyped-def]

    def lost(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function, text in (
        (stars, r"takes \*rest"),
        (keywords, r"takes \*\*rest"),
        (bare, "'a' of the tool 'bare' has no annotation"),
        (lost, "'Nowhere' is not defined: a: Nowhere"),
    ):
        with pytest.raises(RequestError, match=f"HR-TOOL-01: .*{text}"):
            Tool.of(function)
    with pytest.raises(RequestError, match="HR-TOOL-02: '<lambda>' can't be the name"):
        Tool.of(lambda: 1)


def test_types_of_the_function_around_are_found() -> None:
    class Local(BaseModel):
        n: int

    def f(x: Local) -> int:
        return Local.model_validate(x).n

    assert Tool.of(f).bind('{"x": {"n": 3}}')() == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ("{}", "a: Field required"),
        ('{"a": "x"}', "a: Input should be a valid integer"),
        ('{"a": 1.5}', "a: Input should be a valid integer"),
        ('{"a": 1, "b": 2, "x": 3}', "b: Unexpected keyword argument|Extra inputs"),
        ('{"a": 1, "p": {"x": "1", "z": 2}}', r"p\.z: Unexpected"),
        ('{"a": 1, "e": {"n": 3}}', "n is odd"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "recursion limit"),
    ],
)
def test_wrong_arguments_are_named(arguments: str, text: str) -> None:
    def f(a: int, p: Point | None = None, e: Even | None = None) -> None: ...

    with pytest.raises(RequestError, match=f"HR-TOOL-03: the arguments of f are not valid: .*(?:{text})"):
        Tool.of(f).bind(arguments)


# --- dicts -----------------------------------------------------------------------------------------------------------


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_a_dict_is_told_as_it_is() -> None:
    parameters = {"type": "object", "properties": {"z": STRING, "a": {"pattern": "^x"}}, "required": ["z"]}
    given = function(description="does", parameters=parameters, strict=True)
    made = Tool.of(given)
    assert made.schema == given
    assert list(made.schema["function"]["parameters"]["properties"]) == ["z", "a"]
    assert made.function is None
    empty = Tool.of(function())
    assert empty.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "/type is None"),
        ({"type": "something"}, "/type is 'something'"),
        ({"type": "function"}, "/function is no object"),
        (function(name=5), "5 can't be the name"),
        (function(name=""), "'' can't be the name"),
        (function(name="a b"), "'a b' can't be the name"),
        (function(name="x" * 65), "can't be the name"),
        (function(description=5), "/function/description is no text"),
        (function(strict="yes"), "/function/strict is 'yes'"),
        (function(arguments={}), "/function/arguments is unknown"),
        ({**function(), "more": 1}, "/more is unknown"),
        (function(parameters=[]), r"/function/parameters is \[\]"),
        (function(parameters={"type": "array"}), "/function/parameters/type is 'array'"),
        (function(parameters={"type": "something"}), "/function/parameters/type is 'something'"),
        (
            function(parameters={"properties": {"a": {"type": "text"}}}),
            "/function/parameters/properties/a/type is 'text'",
        ),
        (function(parameters={"properties": {"a": 5}}), "/function/parameters/properties/a is no schema but 5"),
        (function(parameters={"properties": {"a": {"pattern": 5}}}), "/properties/a/pattern is no text but 5"),
        (function(parameters={"properties": []}), r"/function/parameters/properties is no object but \[\]"),
        (function(parameters={"properties": {"a": {"anyOf": {}}}}), r"/properties/a/anyOf is no list but \{\}"),
        (function(parameters={"properties": {"a": {"items": 1}}}), "/properties/a/items is no schema but 1"),
        (function(parameters={"properties": {"a": {"const": {1}}}}), "is no JSON: .*set"),
        (function(parameters={"properties": {"a": {"const": float("nan")}}}), "is no JSON: .*[Nn]a[Nn]|float"),
    ],
)
def test_bad_dicts(given: Any, text: str) -> None:
    with pytest.raises(RequestError, match=f"HR-TOOL-02: .*{text}"):
        Tool.of(given)


def test_deep_dicts_are_refused_in_time() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="HR-TOOL-02"):
        Tool.of(function(parameters={"properties": {"a": deep}}))


def test_toolbox() -> None:
    found = toolbox([google, function(), tool(name="x.y-Z_9")(kelvin)])
    assert list(found) == ["google", "f", "x.y-Z_9"]
    for bad, text in (
        ([google, google], r"tools\[1\]: there is a tool named 'google' already"),
        ([google, {"type": "x"}], r"tools\[1\]: the tool's /type"),
        ([5], r"tools\[0\]: a tool is a callable"),
        ("google", "tools must be a list"),
        (function(), "tools must be a list"),
        (5, "tools must be a list"),
    ):
        with pytest.raises(RequestError, match=f"HR-TOOL-02: {text}"):
            toolbox(bad)  # type: ignore[arg-type]


def test_choices() -> None:
    box = toolbox([google, kelvin])
    assert choice_of("auto", True, {}).mode == "auto"
    assert choice_of("none", True, box).mode == "none"
    assert (choice_of("required", False, box).mode, choice_of("required", False, box).parallel) == ("required", False)
    assert (choice_of("kelvin", True, box).mode, choice_of("kelvin", True, box).name) == ("required", "kelvin")
    for bad, tools, text in (
        ("kelvn", box, "'kelvn' can't be\nhelp: did you mean 'kelvin'"),
        ("required", {}, "'required' can't be: there are no tools"),
        ({"type": "function"}, box, "can't be"),
    ):
        with pytest.raises(RequestError, match=f"HR-TOOL-04: tool_choice = .*{text}"):
            choice_of(bad, True, tools)  # type: ignore[arg-type]


class Left(typing.TypedDict):
    right: Right


class Right(typing.TypedDict):
    left: Left


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there pydantic takes typing's TypedDict as it is")
def test_types_that_hold_each_other() -> None:
    def walk(side: Left) -> None:
        """Walks."""

    with pytest.raises(RequestError, match=r"HR-TOOL-01.*'walk'.*recursion"):
        tool(walk)
