"""Build a pipeline from a config: named steps, each with one kind of error.

    options -> resolve -> probe -> select -> asked | executor -> open -> check -> parts -> kv

The steps before the bar load no weights; `explain` stops there. Hooks are called here and in the catalog only. What
comes out is a frozen record of plain bound objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.catalog import Catalog, Entry, extras, install_line, missing_packages
from headrace.config import Choice, Chosen, Config, check_disabled, check_options, choose, raise_problems
from headrace.contracts import ConstraintEngine, Contract, Drafter, Executor, KVSpace, Observer, Tokenizer
from headrace.errors import ConfigError, HeadraceError, ModelError, PluginError
from headrace.hooks import BackendSpec, ConstraintSpec, DrafterSpec, ObserverSpec, Spec, StoreSpec, kind_of
from headrace.machine import probe_machine
from headrace.types import (
    FALLBACK_SAMPLING,
    BuildContext,
    Capabilities,
    Fit,
    MachineInfo,
    ModelSource,
    ModelSpec,
    Reject,
    field_names,
)

if TYPE_CHECKING:
    from headrace.engine import Engine

Report = Callable[[str, float], None]
T = TypeVar("T", bound=Contract)

NEAR_TIES = "identical up to near ties: what shares a step with a request can change its logits in the last bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice of a pipeline and its reasons, for `headrace config explain`."""

    key: str
    value: str
    plugin: str = ""
    """Plugin and version behind it, where there is one."""
    why: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    """(name, why it lost)."""
    facts: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selected:
    """The outcome of the steps that load no weights."""

    catalog: Catalog
    source: ModelSource
    machine: MachineInfo
    backend: Chosen[BackendSpec]
    fit: Fit
    rejected: tuple[tuple[str, str], ...]
    parts: Mapping[str, Chosen[Any]]
    """Config key -> drafter, constraints, store, observers and strategies."""


def build(config: Config, *, catalog: Catalog | None = None, report: Report | None = None) -> Pipeline:
    """Load the model and bind everything that the config asks for. Whatever was opened is closed if a step fails.

    ConfigError: the config asks for what can't be served. PluginError: a plugin is missing or broken. ModelError: the
    model can't be found, read or loaded. report: progress of the load, (phase, 0..1).
    """
    selected = _select_all(config, catalog)
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
            decisions=tuple(_decisions(config, selected, executor, executor.model.sampling_defaults)),
        )
        opened.pop_all()
    return pipeline


def explain(config: Config, catalog: Catalog | None = None) -> tuple[Decision, ...]:
    """What `build` would choose, and why, without loading weights. Raises what build would raise up to there."""
    selected = _select_all(config, catalog)
    executor = _make_executor(config, selected, None)
    try:
        return tuple(_decisions(config, selected, executor, selected.fit.facts.get("sampling_defaults", {})))
    finally:
        executor.close()


# --- steps that load no weights --------------------------------------------------------------------------------------


def _select_all(config: Config, catalog: Catalog | None) -> _Selected:
    if catalog is None:
        catalog = Catalog.load(config.plugins_disable)
    machine = probe_machine()
    problems: list[HeadraceError] = []
    check_disabled(config, catalog, problems)
    catalog = catalog.without({plugin.name for plugin in catalog.plugins} & set(config.plugins_disable))
    chosen: dict[str, Chosen[Any] | None] = {
        choice.key: choose(config, choice, kind, catalog, problems) for choice, kind in config.choices()
    }
    raise_problems(problems)
    source = catalog.resolve(config.model)
    asked = config.backend or Choice(key="backend", path=("backend",), use=None)
    answers = _probe(catalog, machine, source, asked)
    entry, fit, rejected = _select(answers, source, asked)
    backend: Chosen[Any] | None = chosen.get("backend") or check_options(config, asked, entry, catalog, problems)
    raise_problems(problems)
    assert backend is not None
    parts = {key: each for key, each in chosen.items() if key != "backend" and each is not None}
    _check_asked(config, backend)
    return _Selected(catalog=catalog, source=source, machine=machine, backend=backend, fit=fit, rejected=rejected,
                     parts=parts)  # fmt: skip


Answers = list[tuple[Entry[BackendSpec], Fit | Reject]]


def _probe(catalog: Catalog, machine: MachineInfo, source: ModelSource, asked: Choice) -> Answers:
    """Ask every backend whether it can serve the model; all answers are kept. When the config names one, only that one
    is asked. A HeadraceError of a probe is about the model itself (a damaged file) and ends the build."""
    answers: Answers = []
    for entry in catalog.specs(BackendSpec):
        spec = entry.spec
        missing = missing_packages(spec)
        answer: Fit | Reject
        if asked.use not in (None, spec.name):
            answer = Reject(f"not asked: the config chose '{asked.use}'")
        elif source.format not in spec.formats:
            answer = Reject(f"reads {', '.join(spec.formats)}; the model is {source.format or 'of no known format'}")
        elif missing:
            answer = Reject(f"needs {', '.join(missing)}, not installed", install_line(spec, missing))
        else:
            answer = _ask(catalog, entry, machine, source)
        answers.append((entry, answer))
    return answers


def _ask(catalog: Catalog, entry: Entry[BackendSpec], machine: MachineInfo, source: ModelSource) -> Fit | Reject:
    try:
        answer = catalog.load_object(entry.spec.probe, entry)(machine, source)
    except PluginError as error:
        return Reject(error.message, error.help)
    except HeadraceError:
        raise
    except Exception as error:  # kept as the reason why this backend lost: it is shown if none is left
        return Reject(f"its probe failed with {type(error).__name__}: {error}", f"report it to {entry.plugin.dist}")
    if isinstance(answer, Fit | Reject):
        return answer
    return Reject(f"its probe answered {answer!r:.60} instead of Fit or Reject", f"report it to {entry.plugin.dist}")


def _select(
    answers: Answers, source: ModelSource, asked: Choice
) -> tuple[Entry[BackendSpec], Fit, tuple[tuple[str, str], ...]]:
    """The backend of the highest score (ties: by name), and why the others lost. ModelError when none fits."""
    fits = [(entry, answer) for entry, answer in answers if isinstance(answer, Fit)]
    if not fits:
        raise _no_backend(answers, source, asked)
    best, fit = min(fits, key=lambda each: (-each[1].score, each[0].spec.name))
    twins = [entry for entry, _ in fits if entry.spec.name == best.spec.name]
    if twins[1:]:
        raise PluginError(
            "HR-PLUGIN-04", f"backend '{best.spec.name}' is offered by more than one plugin: "
            + " and ".join(str(entry.plugin) for entry in twins), f"disable one: --no-plugin {twins[-1].plugin.name}",
        )  # fmt: skip
    rejected = tuple(
        (
            entry.spec.name,
            f"score {answer.score} < {fit.score}: {answer.why}" if isinstance(answer, Fit) else answer.why,
        )
        for entry, answer in answers
        if entry is not best
    )
    return best, fit, rejected


def _no_backend(answers: Answers, source: ModelSource, asked: Choice) -> ModelError:
    told = [(entry, answer) for entry, answer in answers if isinstance(answer, Reject)]
    told = [each for each in told if asked.use in (None, each[0].spec.name)]
    helps = [answer.help for _, answer in told if answer.help]
    readers = [entry for entry, _ in told if source.format in entry.spec.formats]
    if source.format in extras() and not readers:
        helps.insert(0, f"pip install 'headrace[{source.format}]'")
    reasons = "; ".join(f"{entry.spec.name}: {answer.why}" for entry, answer in told) or "no backend is installed"
    if asked.use:
        where = f" ({asked.where})" if asked.where else ""
        message = f"backend '{asked.use}'{where} can't serve {source.uri}: {told[0][1].why}"
    else:
        message = f"no backend can serve {source.uri} (format {source.format or 'unknown'}): {reasons}"
    return ModelError("HR-BACKEND-01", message, "\n  ".join(dict.fromkeys(helps)) or "see `headrace doctor`")


def _check_asked(config: Config, backend: Chosen[BackendSpec]) -> None:
    """What no executor of this version can serve, so that nobody waits for a load to hear it."""
    problems: list[HeadraceError] = []
    name = backend.entry.spec.name
    for choice in config.parallel.values():
        problems.append(
            _unserved(choice, f"backend '{name}' runs on a single device, it can't split work", "remove the table")
        )
    if config.store:
        why = f"the executor of backend '{name}' does not export KV"
        problems.append(
            _unserved(config.store, why, "remove [store]; engine.prefix_cache keeps prefixes on the device")
        )
    raise_problems(problems)


def _unserved(choice: Choice, why: str, help: str) -> ConfigError:
    where = f" ({choice.where})" if choice.where else ""
    return ConfigError("HR-CONFIG-10", f"[{choice.key}] use = '{choice.use}'{where} can't be served: {why}", help)


# --- steps that load -------------------------------------------------------------------------------------------------


def _make(catalog: Catalog, entry: Entry[Any], contract: type[T], *args: Any) -> T:
    """Call a factory. PluginError when it fails or gives something else than its contract."""
    factory = catalog.load_object(entry.spec.factory, entry)
    try:
        made = factory(*args)
    except HeadraceError:
        raise
    except Exception as error:
        raise PluginError(
            "HR-PLUGIN-09", f"{entry} could not be made: {type(error).__name__}: {error}",
            f"report it to the authors of {entry.plugin.dist}; --log-level debug shows where",
        ) from error  # fmt: skip
    if not isinstance(made, contract):
        raise PluginError(
            "HR-PLUGIN-09", f"the factory of {entry} gave a {type(made).__name__}, not a {contract.__name__}",
            f"it must return a subclass of headrace.contracts.{contract.__name__}",
        )  # fmt: skip
    return made


def _make_executor(config: Config, selected: _Selected, report: Report | None) -> Executor:
    context = BuildContext(
        engine=config.engine,
        machine=selected.machine,
        determinism=config.determinism,
        **({"report": report} if report else {}),
    )
    backend = selected.backend
    executor: Executor = _make(
        selected.catalog, backend.entry, Executor, selected.source, backend.options, context  # type: ignore[type-abstract]
    )  # fmt: skip
    return executor


def _open(executor: Executor, selected: _Selected) -> None:
    entry = selected.backend.entry
    try:
        executor.open()
    except HeadraceError:
        raise
    except Exception as error:
        raise ModelError(
            "HR-MODEL-02", f"backend '{entry.spec.name}' could not load {selected.source.uri}: "
            f"{type(error).__name__}: {error}", "--log-level debug shows where; `headrace doctor` checks the machine",
        ) from error  # fmt: skip
    for name in ("caps", "model", "tokenizer", "layout"):
        if not hasattr(executor, name):
            raise PluginError("HR-PLUGIN-09", f"the executor of {entry} has no '{name}' after open()",
                              f"report it to the authors of {entry.plugin.dist}")  # fmt: skip


def _check(config: Config, selected: _Selected, caps: Capabilities) -> None:
    """Everything asked for against what the open executor can do: all that is missing, at once."""
    problems: list[HeadraceError] = []
    name = selected.backend.entry.spec.name
    others = [entry.spec.name for entry in selected.catalog.specs(BackendSpec) if entry.spec.name != name]
    elsewhere = f"or try another backend: {', '.join(others)}" if others else "no other backend is installed"
    if config.determinism == "batch-invariant" and not caps.row_invariant:
        problems.append(
            ConfigError(
                "HR-CONFIG-10",
                f"determinism = 'batch-invariant'{config.where('determinism')} can't be served: "
                f"on backend '{name}' the logits of a request depend on what shares its step",
                f"determinism = 'seeded' is {NEAR_TIES.partition(':')[0]}, {elsewhere}",
            )
        )
    drafter = selected.parts.get("drafter")
    if drafter is not None:
        why = _drafter_problem(drafter.entry.spec, name, caps)
        if why:
            fused = f"; backend '{name}' has its own: {', '.join(sorted(caps.fused_drafters))}"
            help = f"remove [drafter]{fused if caps.fused_drafters else ''}, {elsewhere}"
            problems.append(_unserved(drafter.choice, why, help))
    constraints = selected.parts.get("constraints")
    if constraints is not None and not caps.masks:
        native = f"; it enforces these by itself: {', '.join(sorted(caps.native_constraints))}"
        help = f"remove [constraints]{native if caps.native_constraints else ''}, {elsewhere}"
        problems.append(_unserved(constraints.choice, f"backend '{name}' takes no token masks", help))
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
    config: Config, selected: _Selected, executor: Executor, opened: ExitStack
) -> tuple[Drafter | None, ConstraintEngine | None, tuple[Observer, ...]]:
    parts, catalog = selected.parts, selected.catalog
    drafter: Drafter | None = None
    constraints: ConstraintEngine | None = None
    if chosen := parts.get("drafter"):
        drafter = _make(catalog, chosen.entry, Drafter, chosen.options, executor.model)  # type: ignore[type-abstract]
    if chosen := parts.get("constraints"):
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
        return PagedSpace(executor.layout, n_rows, prefix_cache=options.prefix_cache)
    return SlotSpace(executor.layout, partial_trim=caps.partial_trim, fork=caps.fork, prefix_cache=options.prefix_cache)


# --- explaining ------------------------------------------------------------------------------------------------------


def _decisions(
    config: Config, selected: _Selected, executor: Executor, model_sampling: Mapping[str, Any]
) -> Iterator[Decision]:
    caps = executor.caps
    said = config.where("model") or " (argument)"
    yield Decision(key="model", value=selected.source.uri, why=f"config{said}", facts=dict(selected.fit.facts))
    yield _backend_decision(config, selected, executor)
    promise = "identical whatever shares its steps" if caps.row_invariant else NEAR_TIES
    asked = f"config{config.where('determinism')}" if "determinism" in config.origin else "default"
    yield Decision(key="determinism", value=config.determinism, why=asked, facts={"same request, same seed": promise})
    for key, kind in (("drafter", DrafterSpec), ("constraints", ConstraintSpec), ("store", StoreSpec)):
        yield _part_decision(config, selected, key, kind)
    for choice in config.observers:
        yield _part_decision(config, selected, choice.key, ObserverSpec)
    for name in field_names(type(config.engine)):
        why = f"config{config.where(f'engine.{name}')}" if f"engine.{name}" in config.origin else "default"
        limit = {"max_sequences": caps.max_rows, "max_batch_tokens": caps.max_tokens}.get(name)
        value = getattr(config.engine, name)
        if limit is not None and limit < value:
            why += f"; the backend takes at most {limit}"
        yield Decision(key=f"engine.{name}", value=str(value), why=why)
    for name, fallback in FALLBACK_SAMPLING.items():
        if name in config.sampling:
            value, why = config.sampling[name], f"config{config.where(f'sampling.{name}')}"
        elif model_sampling.get(name) is not None:
            value, why = model_sampling[name], "the model's metadata"
        else:
            value, why = fallback, "Headrace's default"
        yield Decision(key=f"sampling.{name}", value=str(value), why=why)
    for name, value in config.chat.items():
        yield Decision(key=f"chat.{name}", value=value, why=f"config{config.where(f'chat.{name}')}")


def _backend_decision(config: Config, selected: _Selected, executor: Executor) -> Decision:
    chosen = selected.backend
    spec = chosen.entry.spec
    asked = config.backend is not None and config.backend.use is not None
    why = f"config{config.where('backend.use')}: {selected.fit.why}" if asked else (
        f"best score, {selected.fit.score}: {selected.fit.why}"
    )  # fmt: skip
    facts: dict[str, Any] = {"verified on": spec.verified or "UNVERIFIED on any hardware"}
    facts |= {f"option {key}": value for key, value in _shown(chosen).items()}
    facts |= executor.describe()
    facts["capabilities"] = {
        key: value for key, value in asdict(executor.caps).items() if value not in ((), {}, frozenset())
    }
    return Decision(key="backend", value=spec.name, plugin=_label(chosen.entry), why=why, rejected=selected.rejected,
                    facts=facts)  # fmt: skip


def _part_decision(config: Config, selected: _Selected, key: str, kind: type[Spec]) -> Decision:
    chosen = selected.parts.get(key)
    name = chosen.entry.spec.name if chosen else ""
    others = tuple(
        (entry.spec.name, f"the config chose '{name}'" if chosen else f"no [{key}] table asks for it")
        for entry in selected.catalog.specs(kind)
        if entry.spec.name != name
    )
    if chosen is None:
        none = "none asked for" if others else f"none asked for, no {kind_of(kind)} is installed"
        return Decision(key=key, value="none", why=none, rejected=others)
    facts = {f"option {option}": value for option, value in _shown(chosen).items()}
    return Decision(key=key, value=name, plugin=_label(chosen.entry), why=f"config{config.where(f'{key}.use')}",
                    rejected=others, facts=facts)  # fmt: skip


def _label(entry: Entry[Any]) -> str:
    return f"{entry.plugin.name} ({entry.plugin.dist} {entry.plugin.version})".replace(" )", ")")


def _shown(chosen: Chosen[Any]) -> dict[str, Any]:
    """Options that have a value; secrets are masked by their type."""
    return chosen.options.model_dump(mode="json", exclude_none=True) if chosen.options is not None else {}
