"""A jinja2 environment that bounds time, memory and reach of a template.

Templates come with model files, so they may be hostile. jinja2's sandbox keeps them from running code, but not from
looping for hours or building 8 GB of "A". Three measures bound that, in this process and without a watchdog:

- The parsed template is rewritten: loops, outputs, `~`, slices and comparisons go through guard filters, whose names
  hold a space so that no template can spell them. Calls, operators and filters are intercepted by jinja2's own means.
- Every guard checks the deadline. Whatever makes a value larger than its parts is charged to a budget of bytes, before
  it is built where it could be far larger.
- What recurses in C without end (printing, comparing, hashing) is weighed first: a list of shared lists is small in
  memory and exponential to walk. Only filters and methods known to be harmless exist at all.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.visitor import NodeTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one template may use."""

    source_chars: int = 256 << 10
    nesting: int = 100
    """Open brackets and blocks at once."""
    tokens: int = 50_000
    seconds: float = 2.0
    """Wall time of one render."""
    output_chars: int = 4 << 20
    work_bytes: int = 64 << 20
    """Everything built on the way, in total."""
    nodes: int = 200_000
    """Entries of one value that is printed, compared or hashed, shared parts counted each time."""


class LimitReached(Exception):
    """A template used more than it may."""


_CONTAINERS: tuple[type, ...] = (
    Mapping,
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)

METER = "render meter"
"""Where a render's meter lies in its context; not an identifier, so no template can name it."""

MAX_INT_BITS = 4096
MAX_ARGUMENT = 10_000
"""Largest number that a filter takes as width, count or precision."""
ENTRY_BYTES = 64


class Meter:
    """The budget of one render."""

    __slots__ = ("_clock", "_ends", "_left", "limits")

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._ends = clock() + limits.seconds
        self._left = limits.work_bytes

    def tick(self) -> None:
        if self._clock() > self._ends:
            raise LimitReached(f"it ran longer than {self.limits.seconds:g} s")

    def spend(self, n_bytes: int) -> None:
        self._left -= n_bytes
        if self._left < 0:
            raise LimitReached(f"it builds more than {self.limits.work_bytes >> 20} MiB of text and lists")

    def charge(self, value: Any) -> Any:
        """Pay for a value that was just built, and pass it on."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.spend(len(value) * ENTRY_BYTES)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise LimitReached(f"it computes a number of {value.bit_length()} bits")
        return value

    def each(self, values: Any) -> Any:
        """Iterate over values with the deadline in view; the length stays known to `loop`."""
        return _Each(self, values) if hasattr(values, "__len__") else self._ticking(values)

    def _ticking(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def weigh(self, value: Any, printing: bool = True) -> int:
        """About the characters that printing value takes; raises if it is too large or deep to walk."""
        n_nodes = n_chars = 0
        stack = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            n_nodes += 1
            if isinstance(item, str):
                n_chars += len(item) + 2
            elif item is None or isinstance(item, (bool, float, range, Undefined)):
                n_chars += 32
            elif isinstance(item, int):
                n_chars += 2 + item.bit_length() // 3
            elif isinstance(item, _CONTAINERS):
                parts: Any = item
                if depth > self.limits.nesting or n_nodes + len(parts) > self.limits.nodes:
                    raise LimitReached(f"it uses a value with more than {self.limits.nodes:,} parts")
                stack += [(part, depth + 1) for part in parts]
                if isinstance(item, Mapping):
                    stack += [(part, depth + 1) for part in item.values()]
            elif printing:
                raise SecurityError(f"a template can't print a {type(item).__name__}")
            if len(stack) + n_nodes > self.limits.nodes:
                raise LimitReached(f"it uses a value with more than {self.limits.nodes:,} parts")
        return n_chars

    def comparable(self, value: Any) -> Any:
        """The value, weighed if it is a container; an iterator becomes a list."""
        if isinstance(value, (str, int, float, type(None), Undefined)):
            return value
        if isinstance(value, Iterator):
            value = self.charge(list(self.each(value)))
        self.weigh(value, printing=False)
        return value


class _Each:
    __slots__ = ("meter", "values")

    def __init__(self, meter: Meter, values: Any) -> None:
        self.meter = meter
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return self.meter._ticking(self.values)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- what guards do --------------------------------------------------------------------------------------------------

_WIDE = re.compile(r"\d{4,}|\*")


def _check_format(meter: Meter, text: str, mark: str, values: Iterable[Any]) -> None:
    """Bound str.format and % before they run: every mark may insert the largest value, at a width below 1,000."""
    for spec in re.findall(r"%(?:\([^)]*\))?[^a-zA-Z%]*" if mark == "%" else r"\{[^{}]*(?:\{|\}|$)", text):
        if _WIDE.search(spec) or (mark == "{" and ":" in spec and spec.endswith("{")):
            raise LimitReached(f"the format {spec[:40]!r} asks for an unbounded width")
    largest = max((meter.weigh(value) for value in values), default=0)
    meter.spend(text.count(mark) * (largest + 1000))


def _check_method(
    meter: Meter, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Bound a str method before it runs, and give the arguments to use. Only those matter that make more text than
    they are given."""
    args = tuple(meter.comparable(arg) for arg in args)
    if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        meter.spend(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        meter.spend(meter.weigh(args[0]) + len(text) * len(args[0]))
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        meter.spend(args[0])
    elif name in ("format", "format_map"):
        _check_format(meter, text, "{", (*args, *kwargs.values()))
    return args


def _product(meter: Meter, left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            meter.spend(len(value) * max(times, 0) * (1 if isinstance(value, str) else ENTRY_BYTES))
            return left * right
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def _power(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def _sum_of(meter: Meter, left: Any, right: Any) -> Any:
    for value in (left, right):
        if isinstance(value, (str, list, tuple)):
            meter.charge(value)
    return left + right


def _modulo(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_format(meter, left, "%", [right])
    return left % right


def _check_bits(n_bits: int) -> None:
    if n_bits > MAX_INT_BITS:
        raise LimitReached(f"it computes a number of {n_bits} bits")


_OPERATORS: Mapping[str, Callable[[Meter, Any, Any], Any]] = {
    "*": _product,
    "**": _power,
    "+": _sum_of,
    "%": _modulo,
}

# Of each type only these attributes exist; other objects (loop, macro, namespace) follow jinja2's rules.
_STR_METHODS = _words(
    "capitalize casefold center count endswith find format index isalnum isalpha isdecimal isdigit isidentifier "
    "islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
    "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: Mapping[type, frozenset[str]] = {
    str: _STR_METHODS,
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
    bytes: frozenset(),
}


# --- filters ---------------------------------------------------------------------------------------------------------

_FILTERS = _words(
    "abs batch capitalize count d default dictsort e escape first float forceescape format groupby indent int items "
    "join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title tojson trim unique upper wordcount"
)
_OF_TEXT = _words("capitalize e escape forceescape format indent lower replace safe string title trim upper")
_OF_ORDER = _words("dictsort groupby max min sort unique")
_COMPARING = _words("eq == equalto ne != in lt < lessthan gt > greaterthan le <= ge >=")


def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    meter = _meter(context)
    items = list(meter.each(value))
    if attribute is not None:
        items = [make_attrgetter(context.environment, attribute)(item) for item in items]
    meter.spend(meter.weigh(items) + len(d) * len(items))
    return d.join(str(item) for item in items)


def _sum(context: Context, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    meter = _meter(context)
    get = (lambda item: item) if attribute is None else make_attrgetter(context.environment, attribute)
    total = start
    for item in meter.each(value):
        total = _sum_of(meter, total, get(item))
    return total


def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, other languages left readable."""
    if isinstance(indent, int) and indent > 16:
        raise LimitReached(f"tojson(indent={indent}) is more than 16")
    _meter(context).weigh(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_OWN_FILTERS: Mapping[str, Callable[..., Any]] = {"join": _join, "sum": _sum, "tojson": _tojson}


def _guarded(name: str) -> Callable[..., Any]:
    """The filter `name`, within the meter's bounds. Takes the context, which also keeps it from running at compile
    time."""
    function: Callable[..., Any] = _OWN_FILTERS.get(name) or FILTERS[name]
    passed = "context" if name in _OWN_FILTERS else getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    of_text, of_order, bounded = name in _OF_TEXT, name in _OF_ORDER, name not in ("d", "default", "int", "float")

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.tick()
        for arg in (*args, *kwargs.values()):
            if bounded and isinstance(arg, int) and abs(arg) > MAX_ARGUMENT:
                raise LimitReached(f"the filter '{name}' got {arg}, more than {MAX_ARGUMENT}")
            if of_text:
                meter.comparable(arg)
        if of_text:
            value = meter.comparable(value)
            _check_text_filter(meter, name, value, args, kwargs)
        elif of_order:
            value = list(meter.each(value)) if not isinstance(value, Mapping) else value
            meter.weigh(value)
        first = {"context": (context,), "environment": (context.environment,), "eval_context": (context.eval_ctx,)}
        return meter.charge(function(*first.get(passed, ()), value, *args, **kwargs))

    return guarded


def _check_text_filter(meter: Meter, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    text = value if isinstance(value, str) else str(value)
    if name == "replace":
        old, new = (*args, *kwargs.values(), "", "")[:2]
        meter.spend(len(text) + text.count(str(old)) * len(str(new)))
    elif name == "format":
        _check_format(meter, text, "%", (*args, *kwargs.values()))
    elif name == "indent":
        width = args[0] if args else kwargs.get("width", 4)
        meter.spend((text.count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))
    else:
        meter.spend(len(text))


def _guarded_test(name: str) -> Callable[..., Any]:
    function: Any = TESTS[name]

    @pass_context
    def test(context: Context, value: Any, *args: Any) -> Any:
        meter = _meter(context)
        return function(*(meter.comparable(item) for item in (value, *args)))

    return test


def _meter(context: Context) -> Meter:
    meter: Meter = context.parent[METER]
    return meter


# --- guards that the rewritten template calls ------------------------------------------------------------------------


@pass_context
def _guard_each(context: Context, values: Any) -> Any:
    return _meter(context).each(values)


@pass_context
def _guard_shown(context: Context, value: Any) -> Any:
    meter = _meter(context)
    meter.tick()
    meter.spend(len(value) if isinstance(value, str) else meter.weigh(value))
    return value


@pass_context
def _guard_concat(context: Context, values: tuple[Any, ...]) -> str:
    meter = _meter(context)
    meter.tick()
    for value in values:
        meter.spend(len(value) if isinstance(value, str) else meter.weigh(value))
    return "".join(map(str, values))


@pass_context
def _guard_sized(context: Context, value: Any) -> Any:
    return _meter(context).charge(value)


@pass_context
def _guard_weighed(context: Context, value: Any) -> Any:
    return _meter(context).comparable(value)


_GUARDS = {
    "each guard": _guard_each,
    "shown guard": _guard_shown,
    "concat guard": _guard_concat,
    "sized guard": _guard_sized,
    "weighed guard": _guard_weighed,
}


def _through(guard: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, f"{guard} guard", [], [], None, None, lineno=node.lineno, environment=node.environment)


class _Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("each", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            _through("shown", nodes.Const(child.data, lineno=child.lineno, environment=child.environment))
            if isinstance(child, nodes.TemplateData)
            else _through("shown", child)
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("concat", nodes.Tuple(node.nodes, "load", lineno=node.lineno, environment=node.environment))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        holders: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for holder in holders:
            if not isinstance(holder.expr, nodes.Const):
                holder.expr = _through("weighed", holder.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _through("sized", node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _through("weighed", node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _through("weighed", node.key)
        return node


class _Compiler(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        super().visit_Template(_Rewriter().visit(node), frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """Renders need a `Meter` in their context, under METER."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        self.filters = {name: _guarded(name) for name in _FILTERS} | _GUARDS
        for name in _COMPARING:
            self.tests[name] = _guarded_test(name)
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # jinja2 would fail only when the value is used; a probe for internals deserves no second step
        if attribute.startswith("_"):
            raise SecurityError(f"access to '{attribute}' of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        meter.tick()
        return meter.charge(_OPERATORS[operator](meter, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(__context)
        meter.tick()
        bound = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(bound, str):
            args = _check_method(meter, bound, __obj.__name__, args, kwargs)
        elif isinstance(bound, (list, tuple, dict)) or __obj is dict:
            args = tuple(meter.comparable(arg) for arg in args)
        elif isinstance(__obj, LoopContext):
            args = tuple(meter.each(arg) for arg in args)
        return meter.charge(super().call(__context, __obj, *args, **kwargs))
