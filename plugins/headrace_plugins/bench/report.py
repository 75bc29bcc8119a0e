"""The one form of every benchmark's result: a table, or one JSON object."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """`ours` and `baseline` in `unit`; ratio is ours / baseline. A figure without a baseline has None in both."""

    name: str
    ours: float
    baseline: float | None
    ratio: float | None
    unit: str


def compared(name: str, ours: float, baseline: float, unit: str) -> Result:
    return Result(name, round(ours, 4), round(baseline, 4), round(ours / baseline, 4) if baseline else None, unit)


def measured(name: str, ours: float, unit: str) -> Result:
    return Result(name, round(ours, 4), None, None, unit)


@contextmanager
def pinned(n_cores: int) -> Iterator[None]:
    """Keep this process on n cores, so that both sides meet the same caches and clock."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-n_cores:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def machine() -> dict[str, Any]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else (0.0, 0.0, 0.0)
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform(), "load": round(load[0], 2)}


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("headrace", "numpy", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def show(
    bench: str,
    results: list[Result],
    packages: tuple[str, ...],
    as_json: bool,
    write: Callable[[str], Any],
    sides: tuple[str, str] = ("ours", "baseline"),
) -> None:
    """Print the results. JSON: {"bench", "machine", "versions", "results"}. sides: what the table calls the two."""
    if as_json:
        report = {"bench": bench, "machine": machine(), "versions": versions(*packages)}
        write(json.dumps(report | {"results": [asdict(result) for result in results]}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"headrace bench {bench}")
    for column in ("what", *sides, "ratio", "unit"):
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    for result in results:
        numbers = ("" if value is None else f"{value:,.3f}" for value in (result.ours, result.baseline, result.ratio))
        table.add_row(result.name, *numbers, result.unit)
    console = Console(width=110)
    console.print(table)
    about = machine()
    console.print(
        f"{about['cpu']}, load {about['load']}; medians, both sides in this process, alternating", style="dim"
    )
