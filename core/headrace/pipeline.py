"""Build a pipeline from a config: named steps, each with one kind of error.

    select (options -> resolve -> probe -> select -> asked) -> executor | open -> check -> parts -> kv

What stands before the bar loads no weights (`headrace.selection`); `explain` stops there, and checks what the executor
foresees. Hooks are called by the catalog only. What comes out is a frozen record of plain bound objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.catalog import Catalog, Entry, missing_packages
from headrace.config import Config, raise_problems
from headrace.contracts import ConstraintEngine, Contract, Drafter, Executor, KVSpace, Observer, Tokenizer
from headrace.decisions import NEAR_TIES, Decision, decisions, label
from headrace.errors import FAULTS, ConfigError, HeadraceError, ModelError, PluginError, why
from headrace.hooks import ArchSpec, BackendSpec, DrafterSpec
from headrace.ops import Candidate
from headrace.selection import Selected, select, unserved
from headrace.types import BuildContext, Capabilities, ModelSpec

if TYPE_CHECKING:
    from headrace.engine import Engine

Report = Callable[[str, float], None]
T = TypeVar("T", bound=Contract)

_OPTION = re.compile(r"[a-z_]+(?:\.[a-z_]+)+(?= = )")
"""An option as `Capabilities.approximations` names it: (backend.prefix = "replay")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Everything bound and open. Close it, or use it as a context manager."""

    config: Config
    catalog: Catalog
    """Where its plugins came from, without those that the config disables."""
    model: ModelSpec
    executor: Executor
    kv: KVSpace
    tokenizer: Tokenizer
    drafter: Drafter | None = None
    constraints: ConstraintEngine | None = None
    observers: tuple[Observer, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The config's, then the model's; what is missing comes from FALLBACK_SAMPLING."""
    decisions: tuple[Decision, ...] = ()

    def engine(self) -> Engine:
        """The engine of this pipeline; it has one at a time. The observers are the engine's to close."""
        from headrace.engine import Engine

        return Engine(
            self.executor, self.kv, self.config.engine,
            drafter=self.drafter, constraints=self.constraints, observers=self.observers,
        )  # fmt: skip

    def close(self) -> None:
        """Free the device. Safe to call twice."""
        self.executor.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build(config: Config, *, catalog: Catalog | None = None, report: Report | None = None) -> Pipeline:
    """Load the model and bind everything that the config asks for. Whatever was opened is closed if a step fails.

    ConfigError: the config asks for what can't be served. PluginError: a plugin is missing or broken. ModelError: the
    model can't be found, read or loaded. report: progress of the load, (phase, 0..1).
    """
    selected = select(config, catalog)
    with ExitStack() as opened:
        executor = _make_executor(config, selected, report)
        opened.callback(executor.close)
        _open(executor, selected)
        _check(config, selected, executor.caps)
        drafter, constraints, observers = _make_parts(config, selected, executor, opened)
        pipeline = Pipeline(
            config=config,
            catalog=selected.catalog,
            model=executor.model,
            executor=executor,
            kv=_make_kv(config, executor),
            tokenizer=executor.tokenizer,
            drafter=drafter,
            constraints=constraints,
            observers=observers,
            sampling_defaults={**executor.model.sampling_defaults, **config.sampling},
            decisions=tuple(decisions(config, selected, executor, executor.model.sampling_defaults)),
        )
        opened.pop_all()
    return pipeline


def explain(config: Config, catalog: Catalog | None = None) -> tuple[Decision, ...]:
    """What `build` would choose, and why, without loading weights. Raises what build would raise up to there."""
    selected = select(config, catalog)
    executor = _make_executor(config, selected, None)
    try:
        _check(config, selected, executor.caps)
        return tuple(decisions(config, selected, executor, selected.fit.facts.get("sampling_defaults", {})))
    finally:
        executor.close()


def _make(catalog: Catalog, entry: Entry[Any], contract: type[T], *args: Any) -> T:
    """Call a factory. PluginError when it fails or gives something else than its contract."""
    factory = catalog.load_object(entry.spec.factory, entry)
    try:
        made = factory(*args)
    except HeadraceError:
        raise
    except FAULTS as error:
        raise PluginError(
            "HR-PLUGIN-09", f"{entry} could not be made: {why(error)}",
            f"report it to the authors of {entry.plugin.dist}; --log-level debug shows where",
        ) from error  # fmt: skip
    if not isinstance(made, contract):
        raise PluginError(
            "HR-PLUGIN-09", f"the factory of {entry} gave a {type(made).__name__}, not a {contract.__name__}",
            f"it must return a subclass of headrace.contracts.{contract.__name__}",
        )  # fmt: skip
    return made


def _make_executor(config: Config, selected: Selected, report: Report | None) -> Executor:
    catalog = selected.catalog
    context = BuildContext(
        engine=config.engine,
        machine=selected.machine,
        determinism=config.determinism,
        report=report or (lambda phase, fraction: None),
        kernels=lambda device: _kernels(catalog, device),
        architecture=lambda name: _architecture(catalog, name),
    )
    backend = selected.backend
    executor: Executor = _make(
        catalog, backend.entry, Executor, selected.source, backend.options, context  # type: ignore[type-abstract]
    )  # fmt: skip
    return executor


def _kernels(catalog: Catalog, device: str) -> tuple[Candidate, ...]:
    """Every kernel for a device kind, as `headrace.ops.bind` takes them."""
    return tuple(
        Candidate(
            spec=entry.spec,
            source=label(entry),
            load=partial(catalog.load_object, entry=entry),
            missing=tuple(missing_packages(entry.spec)),
        )
        for entry in catalog.kernels(device)
    )


def _architecture(catalog: Catalog, name: str) -> Any:
    """The factory of the model that config.json names. ModelError when no plugin knows it."""
    entries = catalog.specs(ArchSpec)
    match [entry for entry in entries if name in entry.spec.architectures]:
        case [entry]:
            return catalog.load_object(entry.spec.factory, entry)
        case []:
            known = sorted({each for entry in entries for each in entry.spec.architectures})
            # no "did you mean": the model's file says it, and a name like it is another architecture
            lines = [f"known: {', '.join(known) or 'none'}"]
            lines += [f"plugin {plugin} is broken, so what it offers is missing" for plugin in catalog.broken()]
            raise ModelError(
                "HR-MODEL-03", f"no plugin knows the architecture '{name}' of the model", "\n  ".join(lines)
            )
        case several:
            owners = " and ".join(str(entry) for entry in several)
            raise PluginError(
                "HR-PLUGIN-04", f"the architecture '{name}' is claimed by more than one model: {owners}",
                f"disable one of them: --no-plugin {several[-1].plugin.name}, or [plugins] disable = [...]",
            )  # fmt: skip


def _open(executor: Executor, selected: Selected) -> None:
    entry = selected.backend.entry
    try:
        executor.open()
    except HeadraceError:
        raise
    except FAULTS as error:
        raise ModelError(
            "HR-MODEL-02", f"backend '{entry.spec.name}' could not load {selected.source.uri}: "
            f"{why(error)}", "--log-level debug shows where; `headrace doctor` checks the machine",
        ) from error  # fmt: skip
    for name in ("caps", "model", "tokenizer", "layout"):
        if not hasattr(executor, name):
            raise PluginError("HR-PLUGIN-09", f"the executor of {entry} has no '{name}' after open()",
                              f"report it to the authors of {entry.plugin.dist}")  # fmt: skip


def _check(config: Config, selected: Selected, caps: Capabilities) -> None:
    """Everything asked for against what the executor can do, or foresees to: all that is missing, at once."""
    problems: list[HeadraceError] = []
    name = selected.backend.entry.spec.name
    others = [
        entry.spec.name for entry in selected.catalog.specs(BackendSpec)
        if entry.spec.name != name and selected.source.format in entry.spec.formats
    ]  # fmt: skip
    elsewhere = f"or try another backend: {', '.join(others)}" if others else "no other backend reads this model"
    if config.determinism == "batch-invariant" and not caps.row_invariant:
        problems.append(
            ConfigError(
                "HR-CONFIG-10",
                f"determinism = 'batch-invariant'{config.where('determinism')} can't be served: "
                f"on backend '{name}' the logits of a request depend on what shares its step",
                f"determinism = 'seeded' is {NEAR_TIES.partition(':')[0]}, {elsewhere}",
            )
        )
    if config.determinism == "batch-invariant" and caps.approximations:
        options = dict.fromkeys(_OPTION.findall(" ".join(caps.approximations)))
        edits = f"change {', '.join(options)}" if options else f"change the options of backend '{name}' behind it"
        problems.append(
            ConfigError(
                "HR-CONFIG-10",
                f"determinism = 'batch-invariant'{config.where('determinism')} can't be served, this is approximate: "
                + "; ".join(f"'{sentence}'" for sentence in caps.approximations),
                f"{edits}, or set determinism = 'seeded'",
            )
        )
    drafter = selected.parts.get("drafter")
    if drafter is not None:
        why = _drafter_problem(drafter.entry.spec, name, caps)
        if why:
            fused = f"; backend '{name}' has its own: {', '.join(sorted(caps.fused_drafters))}"
            help = f"remove [drafter]{fused if caps.fused_drafters else ''}, {elsewhere}"
            problems.append(unserved(drafter.choice, why, help))
    constraints = selected.parts.get("constraints")
    if constraints is not None and config.constraints is not None and not caps.masks:
        native = f"; it enforces these by itself: {', '.join(sorted(caps.native_constraints))}"
        help = f"remove [constraints]{native if caps.native_constraints else ''}, {elsewhere}"
        problems.append(unserved(constraints.choice, f"backend '{name}' takes no token masks", help))
    for key in config.sampling:
        if key in caps.refuses:
            message = f"sampling.{key}{config.where(f'sampling.{key}')} can't be served: {caps.refuses[key]}"
            problems.append(ConfigError("HR-CONFIG-10", message, "remove the key"))
    raise_problems(problems)


def _drafter_problem(spec: DrafterSpec, backend: str, caps: Capabilities) -> str:
    if spec.placement == "fused" and spec.name not in caps.fused_drafters:
        return f"backend '{backend}' can't fuse it"
    if not caps.partial_trim:
        return f"backend '{backend}' can't take back rejected drafts of this model (its memory is recurrent)"
    return "" if caps.drafts else f"backend '{backend}' does not verify drafts"


def _make_parts(
    config: Config, selected: Selected, executor: Executor, opened: ExitStack
) -> tuple[Drafter | None, ConstraintEngine | None, tuple[Observer, ...]]:
    parts, catalog = selected.parts, selected.catalog
    drafter: Drafter | None = None
    constraints: ConstraintEngine | None = None
    if chosen := parts.get("drafter"):
        drafter = _make(catalog, chosen.entry, Drafter, chosen.options, executor.model)  # type: ignore[type-abstract]
    if (chosen := parts.get("constraints")) and executor.caps.masks:
        constraints = _make(catalog, chosen.entry, ConstraintEngine, chosen.options, executor.tokenizer)  # type: ignore[type-abstract]
    observers = []
    for choice in config.observers:
        observer = _make(catalog, parts[choice.key].entry, Observer, parts[choice.key].options)
        opened.callback(observer.close)
        observers.append(observer)
    return drafter, constraints, tuple(observers)


def _make_kv(config: Config, executor: Executor) -> KVSpace:
    from headrace.kvspace import PagedSpace, SlotSpace

    caps, options = executor.caps, config.engine
    if caps.kv == "paged":
        n_rows = min(options.max_sequences, caps.max_rows)
        return PagedSpace(
            executor.layout, n_rows, prefix_cache=options.prefix_cache, context_tokens=executor.model.context_tokens
        )
    return SlotSpace(executor.layout, partial_trim=caps.partial_trim, fork=caps.fork, prefix_cache=options.prefix_cache)
