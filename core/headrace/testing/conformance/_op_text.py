"""Shapes and types as the text of an op says them: "x: [n, k] act; weight: [m, k] act or Quantised. -> [n, m] act"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.ops import OpContract

_NAMES = re.compile(r"((?:\w+, )*\w+): (?=\[)")
_SHAPE = re.compile(r"(?:(\w+) )?\[([^\]]*)\]([^\[]*)")
_END = re.compile(r";|\.(?= |$)")
_DTYPES = re.compile(r"\b(act|float32|int64|bool)\b")


@dataclass(frozen=True, slots=True)
class Shape:
    dims: tuple[str, ...]
    """Symbols; "..." stands for any number of leading ones. Two arrays of a call that share a symbol agree in it."""
    dtypes: frozenset[str]
    """Types that are allowed; empty: none was said."""

    @property
    def per_row(self) -> bool:
        """The first axis is that of the tokens (or rows) of the call."""
        return self.dims[0] in ("n", "...")

    def __str__(self) -> str:
        return f"[{', '.join(self.dims)}]" + "".join(f" {name}" for name in sorted(self.dtypes))


@dataclass(frozen=True, slots=True)
class OpText:
    inputs: Mapping[str, tuple[Shape, ...]]
    """Parameter -> the shapes that it may have."""
    results: tuple[Shape, ...]
    like: str = ""
    """Parameter whose shape and type the result has."""


def read(contract: OpContract) -> OpText:
    """What the text says. Parameters that it gives no shape (numbers, caches) are left out."""
    text = " ".join(contract.text.split())
    said, _, result = text.partition(" -> ")
    inputs = {}
    for found in _NAMES.finditer(said):
        body = _until_end(said[found.end() :])
        dtypes = frozenset(_DTYPES.findall(body))
        shapes = tuple(Shape(_dims(inner), dtypes) for _, inner, _ in _SHAPE.findall(body))
        inputs.update(dict.fromkeys(found.group(1).split(", "), shapes))
    result = _until_end(result)
    if result.startswith("like "):
        return OpText(inputs, (), result.removeprefix("like "))
    results: list[Shape] = []
    dtypes = frozenset()
    for label, inner, tail in reversed(_SHAPE.findall(result)):  # "a [n], b [n], float32": both are float32
        dtypes = frozenset(_DTYPES.findall(tail)) or dtypes
        results += [Shape(_dims(inner), dtypes)] * (2 if label == "two" else 1)
    return OpText(inputs, tuple(reversed(results)))


def bind(shape: Shape, actual: tuple[int, ...], known: dict[str, Any], *, learn: bool = True) -> str:
    """Why `actual` is not of this shape, given what the symbols stand for; "" when it is. learn: remember new ones."""
    dims = shape.dims
    if dims[0] == "...":
        n_leading = len(actual) - (len(dims) - 1)
        leading = actual[: max(n_leading, 0)]
        if n_leading < 0 or known.get("...", leading) != leading:
            return f"is {list(actual)}, not {shape}"
        if learn:
            known["..."] = leading
        dims, actual = dims[1:], actual[n_leading:]
    if len(dims) != len(actual):
        return f"is {list(actual)}, not {shape}"
    for symbol, size in zip(dims, actual, strict=True):
        value = _value(symbol, known)
        if value is not None and value != size:
            return f"is {list(actual)}, not {shape}: {symbol} is {value}"
        if learn and value is None and symbol.isidentifier():
            known[symbol] = size
    return ""


def _value(symbol: str, known: Mapping[str, Any]) -> int | None:
    """Of a number, a symbol or a sum of them. None: not known, or written as something else."""
    total = 0
    for part in symbol.split(" + "):
        value = int(part) if part.isdigit() else known.get(part)
        if not isinstance(value, int):
            return None
        total += value
    return total


def _until_end(text: str) -> str:
    found = _END.search(text)
    return text[: found.start()] if found else text


def _dims(inner: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in inner.split(","))
