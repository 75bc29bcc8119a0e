"""The hooks that plugins implement, and the frozen records that they yield.

A plugin is a module named by an entry point of group `headrace`. It says `headrace_api = 1` and implements any of the
hooks below with `@hookimpl`. Hooks are called when a pipeline is built or a command line is parsed, never inside a
step. They yield records that name a factory as "module:attribute"; the factory's module is imported only when the
config selects the record by name. Keep the plugin module itself light: it is imported by every `headrace` command.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pluggy

from headrace.types import ModelSource

API = 1
"""Hook API number. Core runs plugins of API and API - 1."""

PROJECT = "headrace"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One thing a plugin offers."""

    name: str
    """What the config calls it: use = "name"."""
    factory: str
    """"module:attribute", imported only when selected."""
    summary: str
    """One line for `headrace plugins list`."""
    options: str | None = None
    """"module:Model": a pydantic model of the options, a headrace.config.Options; imported when selected."""
    requires: tuple[str, ...] = ()
    """Import names that the factory needs, for `plugins list` and a clear error before the import fails."""
    install: str = ""
    """The pip line that brings `requires`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec(Spec):
    """factory(source: ModelSource, options, context: BuildContext) -> Executor (not opened).
    probe(machine: MachineInfo, source: ModelSource) -> Fit | Reject must be quick and touch no device."""

    formats: tuple[str, ...]
    probe: str
    devices: tuple[str, ...] = ("cpu",)
    verified: str = ""
    """On which hardware it ran; empty prints UNVERIFIED."""
    baseline: str = ""
    """"module:Class" of a raw loop over the same library, for `headrace bench engine`: Class(executor) with
    start(prompts), step(), close(), and decode_s, the seconds that the executor spent inside the library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Spec):
    """factory(context: headrace.ops.KernelContext) -> callable with the signature of the op."""

    op: str
    """Name in `headrace.ops.OPS`."""
    priority: int = 0
    """The highest one that serves the context wins, ties by name; below 0: only where a config names it."""
    exact: bool = False
    """A row's bits don't depend on the rows beside it, nor on their number."""
    when: str | None = None
    """"module:predicate": predicate(context) says why the kernel can't serve it, "" = it can. None: always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec(Spec):
    """factory -> a `headrace.modeling.Model` class: factory(config, ops, context: ModelContext)."""

    architectures: tuple[str, ...]
    """As config.json names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec(Spec):
    """factory(options, machine) -> Strategy."""

    axis: Literal["cp", "ep", "dp", "tp", "pp", "balance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec(Spec):
    """factory(options, model: ModelSpec) -> Drafter."""

    placement: Literal["host", "fused"] = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec(Spec):
    """factory(options, tokenizer: Tokenizer) -> ConstraintEngine."""

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(Spec):
    """factory(options) -> Store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectSpec(Spec):
    """factory() -> dialect: how the chats of a model family are written. It has
    `chat_format(source, origin, tokenizer, *, architecture, name, family) -> headrace.dialogue.ChatFormat`. source: the
    template's text, origin: where it came from, for error texts (both are of the model, and may be empty, where `match`
    made the choice). architecture and name (URI): of the model. family: [chat] dialect of the config, if it names one.

    The one for templates also has `explain(source, *, architecture, name, family) -> str`, for `config explain`."""

    match: tuple[str, ...] = ()
    """Architectures (`ModelSpec.architecture`) whose chats it writes without a template. None: it is for templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverSpec(Spec):
    """factory(options) -> Observer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec(Spec):
    """factory -> an object with add_arguments(parser) and run(args) -> exit code, e.g. a module."""

    order: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec(Spec):
    """factory() -> Iterable[CheckResult], for `headrace doctor`."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    status: Literal["ok", "warn", "fail", "unverified"]
    detail: str
    help: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class HookSpecs:
    """The hook list. Names and arguments are API; adding an argument is compatible, removing one is not."""

    @hookspec
    def headrace_backends(self) -> Iterable[BackendSpec]:
        """Offer backends: what loads a model and runs steps.

        @hookimpl
        def headrace_backends():
            yield BackendSpec(name="mine", formats=("gguf",), probe="mine.backend:probe",
                              factory="mine.backend:open_executor", summary="my device")
        """
        return ()

    @hookspec
    def headrace_kernels(self, device: str) -> Iterable[KernelSpec]:
        """Offer kernels for a device kind. mylab.rms: def make(context): return rms, def rms(x, weight, eps): ...

        @hookimpl
        def headrace_kernels(device):
            if device == "cpu":
                yield KernelSpec(name="mylab", op="norm.rms", factory="mylab.rms:make", summary="fast rms")
        """
        return ()

    @hookspec
    def headrace_models(self) -> Iterable[ArchSpec]:
        """Offer model architectures to torch-family backends.

        @hookimpl
        def headrace_models():
            yield ArchSpec(name="toy", architectures=("ToyForCausalLM",), factory="mine.toy:Toy", summary="toy")
        """
        return ()

    @hookspec
    def headrace_strategies(self) -> Iterable[StrategySpec]:
        """Offer parallel strategies.

        @hookimpl
        def headrace_strategies():
            yield StrategySpec(name="dp", axis="dp", factory="mine.dp:DataParallel", summary="data parallel")
        """
        return ()

    @hookspec
    def headrace_drafters(self) -> Iterable[DrafterSpec]:
        """Offer speculative drafters.

        @hookimpl
        def headrace_drafters():
            yield DrafterSpec(name="echo", factory="mine.echo:Echo", summary="repeats the last token")
        """
        return ()

    @hookspec
    def headrace_constraints(self) -> Iterable[ConstraintSpec]:
        """Offer constraint engines.

        @hookimpl
        def headrace_constraints():
            yield ConstraintSpec(name="mine", kinds=("regex",), factory="mine.re:Engine", summary="regex masks")
        """
        return ()

    @hookspec
    def headrace_stores(self) -> Iterable[StoreSpec]:
        """Offer KV stores.

        @hookimpl
        def headrace_stores():
            yield StoreSpec(name="mine", factory="mine.store:Store", options="mine.store:Options", summary="redis")
        """
        return ()

    @hookspec
    def headrace_dialects(self) -> Iterable[DialectSpec]:
        """Offer chat dialects (template, tool calls, reasoning).

        @hookimpl
        def headrace_dialects():
            yield DialectSpec(name="mine", factory="mine.dialect:Mine", match=("MineForCausalLM",), summary="mine")
        """
        return ()

    @hookspec
    def headrace_observers(self) -> Iterable[ObserverSpec]:
        """Offer observers of steps and requests.

        @hookimpl
        def headrace_observers():
            yield ObserverSpec(name="log", factory="mine.log:Log", summary="logs each step")
        """
        return ()

    @hookspec
    def headrace_commands(self) -> Iterable[CommandSpec]:
        """Add a sub-command to `headrace`.

        @hookimpl
        def headrace_commands():
            yield CommandSpec(name="hello", factory="mine.hello", summary="says hello")
        """
        return ()

    @hookspec
    def headrace_checks(self) -> Iterable[CheckSpec]:
        """Add checks to `headrace doctor`.

        @hookimpl
        def headrace_checks():
            yield CheckSpec(name="mine", factory="mine.checks:run", summary="is my device there?")
        """
        return ()

    @hookspec(firstresult=True)
    def headrace_resolve(self, uri: str) -> ModelSource | None:
        """Turn a model URI into files on disk. Answer None for schemes that are not yours.

        @hookimpl
        def headrace_resolve(uri):
            if uri.startswith("s3://"):
                from mine.s3 import fetch
                return fetch(uri)
        """
        return None


HOOKS: dict[str, type[Spec] | None] = {
    "headrace_backends": BackendSpec,
    "headrace_kernels": KernelSpec,
    "headrace_models": ArchSpec,
    "headrace_strategies": StrategySpec,
    "headrace_drafters": DrafterSpec,
    "headrace_constraints": ConstraintSpec,
    "headrace_stores": StoreSpec,
    "headrace_dialects": DialectSpec,
    "headrace_observers": ObserverSpec,
    "headrace_commands": CommandSpec,
    "headrace_checks": CheckSpec,
    "headrace_resolve": None,
}
"""Hook name -> the record type that it must yield."""


def kind_of(spec_type: type[Spec]) -> str:
    """ "backend" for BackendSpec: the word used in tables, config and error texts."""
    return {"ArchSpec": "model"}.get(spec_type.__name__, spec_type.__name__.removesuffix("Spec").lower())
