"""The steps of a build that load no weights: from a config to the backend and the plugins that will serve it.

Options are checked, the model is resolved, every backend is probed, the best one is chosen, and what no executor can
serve is refused before anybody waits for a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.catalog import Catalog, Entry, extras, install_line, missing_packages
from headrace.config import (
    CONSTRAINTS,
    Choice,
    Chosen,
    Config,
    check_disabled,
    check_options,
    choose,
    raise_problems,
)
from headrace.errors import FAULTS, ConfigError, HeadraceError, ModelError, PluginError, why
from headrace.hooks import BackendSpec, ConstraintSpec, DialectSpec
from headrace.machine import probe_machine
from headrace.types import Fit, MachineInfo, ModelSource, Reject


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The outcome of the steps that load no weights."""

    catalog: Catalog
    source: ModelSource
    machine: MachineInfo
    backend: Chosen[BackendSpec]
    fit: Fit
    rejected: tuple[tuple[str, str], ...]
    parts: Mapping[str, Chosen[Any]]
    """Config key -> drafter, constraints, store, observers and strategies."""


def select(config: Config, catalog: Catalog | None) -> Selected:
    """Choose everything that the config asks for. Without a catalog, one is loaded.

    ConfigError, with every problem found; PluginError; ModelError when the model can't be found or nobody serves it.
    """
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
    asked = config.backend or Choice(path=("backend",), use=None)
    answers = _probe(catalog, machine, source, asked)
    entry, fit, rejected = _best(catalog, answers, source, asked)
    backend: Chosen[Any] | None = chosen.get("backend") or check_options(config, asked, entry, catalog, problems)
    raise_problems(problems)
    assert backend is not None
    parts = {key: each for key, each in chosen.items() if key != "backend" and each is not None}
    if (unasked := _default_constraints(config, catalog, problems)) is not None:
        parts["constraints"] = unasked
    _check_asked(config, backend)
    return Selected(catalog=catalog, source=source, machine=machine, backend=backend, fit=fit, rejected=rejected,
                    parts=parts)  # fmt: skip


def _default_constraints(config: Config, catalog: Catalog, problems: list[HeadraceError]) -> Chosen[Any] | None:
    """What serves constraints though the config does not say so; None where it says anything, `use = "none"` too."""
    if config.constraints is not None or any(path[:1] == ("constraints",) for path in config.paths):
        return None
    offered = [entry for entry in catalog.specs(ConstraintSpec) if entry.spec.name == CONSTRAINTS]
    if len(offered) != 1:
        return None
    return check_options(config, Choice(path=("constraints",), use=CONSTRAINTS), offered[0], catalog, problems)


TEMPLATES = "jinja"
"""The dialect that renders chat templates."""


def choose_dialect(
    catalog: Catalog, architecture: str, templated: bool, asked: str | None = None
) -> tuple[Entry[DialectSpec], str]:
    """(what writes the chats of a model, why). templated: the user gave a template, which counts more than the model.
    asked: [chat] dialect of the config, which counts most: a dialect, else a family that the one for templates knows.
    PluginError when two plugins claim the architecture, or none renders templates."""
    if asked is not None:
        named = any(entry.spec.name == asked for entry in catalog.specs(DialectSpec))
        return catalog.find(DialectSpec, asked if named else TEMPLATES), "[chat] dialect names it"
    made_for = [entry for entry in catalog.specs(DialectSpec) if architecture in entry.spec.match]
    if templated:
        return catalog.find(DialectSpec, TEMPLATES), "a template is given"
    if not made_for:
        return catalog.find(DialectSpec, TEMPLATES), "the model's own chat template, if it has one"
    if len(made_for) > 1:
        names = " and ".join(f"'{entry.spec.name}' of {entry.plugin}" for entry in made_for)
        raise PluginError(
            "HR-PLUGIN-04", f"the chats of {architecture} are written by more than one dialect: {names}",
            f"disable one of them: --no-plugin {made_for[-1].plugin.name}, or [plugins] disable = [...]",
        )  # fmt: skip
    return made_for[0], f"made for {architecture}"


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
    except FAULTS as error:  # kept as the reason why this backend lost: it is shown if none is left
        return Reject(f"its probe failed with {why(error)}", f"report it to {entry.plugin.dist}")
    if isinstance(answer, Reject):
        return answer
    if isinstance(answer, Fit):
        if isinstance(answer.score, int | float) and answer.score == answer.score:
            return answer
        return Reject(f"its probe gave the score {answer.score!r:.60}", f"report it to {entry.plugin.dist}")
    return Reject(f"its probe answered {answer!r:.60} instead of Fit or Reject", f"report it to {entry.plugin.dist}")


def _best(
    catalog: Catalog, answers: Answers, source: ModelSource, asked: Choice
) -> tuple[Entry[BackendSpec], Fit, tuple[tuple[str, str], ...]]:
    """The backend of the highest score (ties: by name), and why the others lost. ModelError when none fits."""
    fits = [(entry, answer) for entry, answer in answers if isinstance(answer, Fit)]
    if not fits:
        raise _no_backend(answers, source, asked)
    best, fit = min(fits, key=lambda each: (-each[1].score, each[0].spec.name))
    catalog.find(BackendSpec, best.spec.name)  # refuses a name that two plugins offer
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
    readers = [entry.spec.name for entry, _ in answers if source.format in entry.spec.formats]
    if source.format in extras() and not readers:
        helps.insert(0, f"pip install 'headrace[{source.format}]'")
    if asked.use and readers and asked.use not in readers:
        helps.insert(0, f"leave 'backend.use' out, or name one that reads {source.format}: {', '.join(readers)}")
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
            unserved(choice, f"backend '{name}' runs on a single device, it can't split work", "remove the table")
        )
    if config.store:
        why = f"the executor of backend '{name}' does not export KV"
        problems.append(unserved(config.store, why, "remove [store]; engine.prefix_cache keeps prefixes on the device"))
    raise_problems(problems)


def unserved(choice: Choice, why: str, help: str) -> ConfigError:
    where = f" ({choice.where})" if choice.where else ""
    return ConfigError("HR-CONFIG-10", f"[{choice.key}] use = '{choice.use}'{where} can't be served: {why}", help)
