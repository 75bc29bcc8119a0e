"""What every plugin module must do: stay light, say its API number, yield records that lead somewhere."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pluggy
import pytest

from headrace.catalog import missing_packages
from headrace.hooks import API, HOOKS, PROJECT, BackendSpec, CommandSpec, HookSpecs, KernelSpec, Spec
from headrace.types import DeviceInfo, Fit, MachineInfo, ModelSource, Reject

HEAVY = ("torch", "torch_npu", "triton", "llama_cpp", "xgrammar", "transformers", "jax", "tensorflow")


class PluginConformance:
    """Subclass and set `module` to the module that your entry point names."""

    module: str
    heavy: tuple[str, ...] = HEAVY
    """Modules that importing the plugin must not import; a factory may."""
    devices: tuple[str, ...] = ("cpu", "cuda", "npu")
    """Device kinds that headrace_kernels is asked about."""

    @pytest.fixture
    def plugin(self) -> Any:
        return importlib.import_module(self.module)

    @pytest.fixture
    def records(self, plugin: Any) -> list[tuple[str, Spec]]:
        """(hook, record) of everything that the plugin yields."""
        return list(records_of(plugin, self.devices))

    def test_import_is_light(self) -> None:
        """In a process of its own; `headrace --help` imports every plugin."""
        code = f"import json, sys, {self.module}; print(json.dumps([m for m in {self.heavy!r} if m in sys.modules]))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        loaded = json.loads(done.stdout.splitlines()[-1])
        assert not loaded, f"importing {self.module} imported {', '.join(loaded)}: move it behind factory="

    def test_api_number(self, plugin: Any) -> None:
        number = getattr(plugin, "headrace_api", None)
        assert number in (API, API - 1), f"{self.module}.headrace_api = {number!r}, this headrace speaks {API}"

    def test_hooks_exist(self, plugin: Any) -> None:
        """A misspelt hook or argument would never be called."""
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookSpecs)
        manager.register(plugin, self.module)  # raises PluginValidationError for unknown arguments
        manager.check_pending()
        assert manager.get_hookcallers(plugin), f"{self.module} implements no hook: did you forget @hookimpl?"

    def test_records_are_of_the_right_type(self, records: list[tuple[str, Spec]]) -> None:
        for hook, record in records:
            assert isinstance(record, HOOKS[hook] or ()), f"{hook} yielded {record!r}"

    def test_names_are_unique_and_plain(self, records: list[tuple[str, Spec]]) -> None:
        seen = set()
        for hook, record in records:
            assert record.name == record.name.strip().lower(), f"{record.name!r}: lower case, no blanks"
            assert record.name
            assert not set(record.name) & set(" =/.,:"), record.name
            if not isinstance(record, KernelSpec):
                assert (hook, record.name) not in seen, f"{hook} yields {record.name!r} twice"
            seen.add((hook, record.name))

    def test_kernels_serve_ops(self, plugin: Any) -> None:
        """Those for the CPU are made, when the packages that they need are here."""
        from headrace.ops import OPS, KernelContext, kernel_problem

        if not hasattr(plugin, "headrace_kernels"):
            pytest.skip("offers no kernels")
        for device in self.devices:
            seen = set()
            for record in plugin.headrace_kernels(device) or ():
                assert record.op in OPS, f"'{record.name}' is for {record.op!r}, which is no op"
                assert (record.op, record.name) not in seen, f"'{record.name}' twice for {record.op} on {device}"
                seen.add((record.op, record.name))
                context = KernelContext(device=device, exact=record.exact)
                if device != "cpu" or missing_packages(record) or (record.when and load(record.when)(context)):
                    continue
                made = load(record.factory)(context)
                assert callable(made), f"{record.factory} gave {made!r}"
                problem = kernel_problem(OPS[record.op], made)
                assert not problem, f"'{record.name}' does not match {record.op}: {problem}"

    def test_summaries_are_one_line(self, records: list[tuple[str, Spec]]) -> None:
        for _, record in records:
            assert record.summary, record.name
            assert "\n" not in record.summary, record.name

    def test_factories_lead_somewhere(self, records: list[tuple[str, Spec]]) -> None:
        for _, record in installed_only(records):
            target = load(record.factory)
            if isinstance(record, CommandSpec):
                assert callable(target.add_arguments), record.factory
                assert callable(target.run), record.factory
            else:
                assert callable(target), f"{record.factory} is {target!r}"

    def test_options_are_models_with_defaults_and_descriptions(self, records: list[tuple[str, Spec]]) -> None:
        from headrace.options import Options

        for _, record in installed_only(records):
            if record.options is None:
                continue
            model = load(record.options)
            is_options = inspect.isclass(model) and issubclass(model, Options)
            assert is_options, f"{record.options} must subclass headrace.config.Options"
            for name, field in model.model_fields.items():
                assert field.description, f"{record.options}.{name} has no description: the docs are made from it"
            if not any(field.is_required() for field in model.model_fields.values()):
                model()

    def test_probes_answer(self, records: list[tuple[str, Spec]]) -> None:
        """A probe is asked about models of other formats too, and must not raise."""
        machine = MachineInfo(
            devices=(DeviceInfo(kind="cpu", arch="x86_64", index=0, memory_bytes=2**33),),
            host_memory_bytes=2**33,
            available_memory_bytes=2**32,
            physical_cores=2,
        )
        source = ModelSource(uri="none://x", path="", format="no-such-format")
        for _, record in records:
            if isinstance(record, BackendSpec):
                assert record.formats, record.name
                assert isinstance(load(record.probe)(machine, source), (Fit, Reject)), record.probe

    def test_resolve_leaves_other_schemes_alone(self, plugin: Any) -> None:
        resolve = getattr(plugin, "headrace_resolve", None)
        if resolve is None:
            pytest.skip("does not implement headrace_resolve")
        assert resolve("no-such-scheme://x/y") is None


def records_of(plugin: Any, devices: tuple[str, ...] = ("cpu",)) -> Iterator[tuple[str, Spec]]:
    """(hook, record) of every record that the plugin module yields."""
    for hook, spec_type in HOOKS.items():
        implementation = getattr(plugin, hook, None)
        if implementation is None or spec_type is None:
            continue
        if hook == "headrace_kernels":
            for device in devices:
                yield from ((hook, record) for record in implementation(device) or ())
        else:
            yield from ((hook, record) for record in implementation() or ())


def installed_only(records: list[tuple[str, Spec]]) -> Iterator[tuple[str, Spec]]:
    """Those whose required packages are here."""
    for hook, record in records:
        if not missing_packages(record):
            yield hook, record


def load(target: str) -> Any:
    """The object that "module:attribute" names; a module when there is no attribute."""
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, attribute.split(".")):
        found = getattr(found, name)
    return found
