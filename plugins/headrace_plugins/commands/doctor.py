"""`headrace doctor`: is this machine fit to run, and what is wrong with it? Own checks first, then those of plugins."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from headrace import __version__
from headrace.catalog import install_line, missing_packages
from headrace.errors import EXIT_CHECK, EXIT_OK, FAULTS, HeadraceError, why
from headrace.hooks import BackendSpec, CheckResult, CheckSpec
from headrace_plugins.commands.text import as_json, table

if TYPE_CHECKING:
    from headrace.catalog import Catalog

MINIMUM_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 1 << 30
STATUSES = get_args(get_type_hints(CheckResult)["status"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    results = list(diagnose(args.catalog))
    failed = any(each.status == "fail" for each in results)
    if args.json:
        print(as_json({"headrace": __version__, "ok": not failed, "checks": [asdict(each) for each in results]}))
    else:
        print(f"headrace {__version__}")
        mark = {"unverified": "UNVERIFIED"}
        rows = [[mark.get(each.status, each.status), each.name, each.detail] for each in results]
        print(table(rows))
        for each in results:
            if each.help and each.status != "ok":
                print(f"\n{each.name}: {each.help}")
    return EXIT_CHECK if failed else EXIT_OK


def diagnose(catalog: Catalog) -> Iterator[CheckResult]:
    """Every check's results. One that raises is a failed check; the others go on."""
    yield _python()
    yield from _machine()
    yield from _plugins(catalog)
    yield from _backends(catalog)
    for entry in catalog.specs(CheckSpec):
        results: list[CheckResult] = []
        try:
            with redirect_stdout(sys.stderr):  # what a check prints is not part of the report
                for each in catalog.load_object(entry.spec.factory, entry)():
                    results.append(_checked(each))
        except HeadraceError as error:
            results.append(CheckResult(entry.spec.name, "fail", error.message, error.help))
        except FAULTS as error:
            detail = f"the check itself failed: {why(error)}"
            help = f"report it to the authors of {entry.plugin.dist}"
            results.append(CheckResult(entry.spec.name, "fail", detail, help))
        yield from results


def _checked(result: Any) -> CheckResult:
    """A plugin's result, if it is one."""
    if not isinstance(result, CheckResult):
        raise TypeError(f"it gave {result!r:.60}, which is no CheckResult")
    if result.status not in STATUSES:
        raise ValueError(f"it gave the status {result.status!r:.60}; there are {', '.join(STATUSES)}")
    if not all(isinstance(text, str) for text in (result.name, result.detail, result.help)):
        raise TypeError(f"name, detail and help of {result!r:.200} must be text")
    return result


def _python() -> CheckResult:
    version = platform.python_version()
    detail = f"{platform.python_implementation()} {version} on {platform.system()} {platform.machine()}"
    if sys.version_info < MINIMUM_PYTHON:
        return CheckResult("python", "fail", detail, f"use Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer")
    return CheckResult("python", "ok", detail, facts={"version": version, "executable": sys.executable})


def _machine() -> Iterator[CheckResult]:
    from headrace.machine import probe_machine

    machine = probe_machine()
    yield CheckResult("cores", "ok", f"{machine.physical_cores} physical cores may be used",
                      facts={"physical_cores": machine.physical_cores})  # fmt: skip
    total, available = machine.host_memory_bytes, machine.available_memory_bytes
    low = available < LOW_MEMORY_BYTES
    yield CheckResult(
        "memory", "warn" if low else "ok", f"{available / 2**30:.1f} GiB of {total / 2**30:.1f} GiB available",
        "close other programs, or raise the container's limit" if low else "",
        {"total_bytes": total, "available_bytes": available},
    )  # fmt: skip


def _plugins(catalog: Catalog) -> Iterator[CheckResult]:
    for plugin in catalog.plugins:
        facts = {"dist": plugin.dist, "version": plugin.version, "module": plugin.module}
        name = f"plugin {plugin.name}"
        if plugin.status == "broken":
            yield CheckResult(name, "fail", plugin.error, plugin.help, facts)
        else:
            detail = f"{plugin.dist} {plugin.version}".strip()
            yield CheckResult(name, "ok", detail + (", disabled" if plugin.status == "disabled" else ""), facts=facts)
    for name, where in catalog.unknown_disabled:
        yield CheckResult(f"plugin {name}", "warn", f"{where} disables it, but it is not installed", "remove the name")


def _backends(catalog: Catalog) -> Iterator[CheckResult]:
    entries = catalog.specs(BackendSpec)
    if not entries:
        yield CheckResult("backends", "fail", "none is installed", "pip install 'headrace[gguf]'")
    for entry in entries:
        name = f"backend {entry.spec.name}"
        try:
            catalog.load_object(entry.spec.probe, entry)
            missing = missing_packages(entry.spec)
        except HeadraceError as error:
            yield CheckResult(name, "fail", error.message, error.help)
            continue
        reads = f"reads {', '.join(entry.spec.formats)}"
        if missing:
            why = f"{reads}; not usable: needs {', '.join(missing)}"
            yield CheckResult(name, "warn", why, install_line(entry.spec, missing))
        elif entry.spec.verified:
            yield CheckResult(name, "ok", f"{reads}; verified on {entry.spec.verified}")
        else:
            help = "it has never run on the hardware that it is for; treat its results with care"
            yield CheckResult(name, "unverified", f"{reads}; UNVERIFIED on any hardware", help)
