"""What importing Headrace loads, by module set instead of by clock: `--help` and plugin discovery must stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

NEVER_WITH_PLUGINS = {"torch", "triton", "torch_npu", "transformers", "llama_cpp", "xgrammar"}
NEVER_WITH_HEADRACE = NEVER_WITH_PLUGINS | {"numpy", "pydantic", "asyncio", "importlib.metadata", "rich", "jinja2"}
LOAD_PLUGINS = """
from importlib.metadata import entry_points
names = [entry.name for entry in entry_points(group="headrace") if entry.load()]
assert {"builtin", "gguf"} <= set(names), names
"""


def loaded_by(code: str) -> set[str]:
    """Modules that a fresh interpreter loads for `code`, beyond those that it starts with."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


def test_headrace_loads_nothing_heavy() -> None:
    assert not loaded_by("import headrace") & NEVER_WITH_HEADRACE


@pytest.mark.parametrize("module", ["errors", "types", "contracts"])
def test_seams_need_the_standard_library_only(module: str) -> None:
    loaded = {name.split(".")[0] for name in loaded_by(f"import headrace.{module}")}
    assert loaded <= sys.stdlib_module_names | {"headrace"}
    assert "asyncio" not in loaded


def test_hookimpl_adds_pluggy_only() -> None:
    loaded = {name.split(".")[0] for name in loaded_by("from headrace import hookimpl")}
    assert loaded <= sys.stdlib_module_names | {"headrace", "pluggy"}


def test_plugins_load_nothing_heavy() -> None:
    assert not loaded_by(LOAD_PLUGINS) & NEVER_WITH_PLUGINS


def test_loads_are_seen() -> None:
    assert {"numpy", "headrace"} <= loaded_by("import headrace.noise")
