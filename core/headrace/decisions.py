"""What a build decided and why, for `headrace config explain`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.catalog import Entry, install_line, missing_packages
from headrace.config import Chosen, Config
from headrace.contracts import Executor
from headrace.errors import PluginError
from headrace.hooks import ConstraintSpec, DrafterSpec, ObserverSpec, Spec, StoreSpec, kind_of
from headrace.selection import Selected, choose_dialect
from headrace.textfile import is_template, read_text
from headrace.types import FALLBACK_SAMPLING, Capabilities, field_names

TEMPLATE = "chat_template"
"""Fact of a Fit: the text of the model's own template, which is too long to be shown."""

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


def decisions(
    config: Config, selected: Selected, executor: Executor, model_sampling: Mapping[str, Any]
) -> Iterator[Decision]:
    """Every choice, in the order of the config's tables. The executor need not be open, its caps are as it foresees
    them then. model_sampling: SamplingParams fields that the model's metadata recommends."""
    caps = executor.caps
    said = config.where("model") or " (argument)"
    facts = {key: value for key, value in selected.fit.facts.items() if key != TEMPLATE}
    yield Decision(key="model", value=selected.source.uri, why=f"config{said}", facts=facts)
    yield _backend_decision(config, selected, executor)
    yield from (
        Decision(key=f"ops.{each.op}", value=each.kernel, plugin=each.source, why=each.why, rejected=each.rejected)
        for each in executor.bound()
    )
    promise = "identical whatever shares its steps" if caps.row_invariant else NEAR_TIES
    notes = {"but approximate": caps.approximations, "but not the whole model": caps.departures}
    facts = {"same request, same seed": promise}
    facts |= {title: "; ".join(sentences) for title, sentences in notes.items() if sentences}
    asked = f"config{config.where('determinism')}" if "determinism" in config.origin else "default"
    yield Decision(key="determinism", value=config.determinism, why=asked, facts=facts)
    for key, kind in (("drafter", DrafterSpec), ("constraints", ConstraintSpec), ("store", StoreSpec)):
        yield _part_decision(config, selected, key, kind, caps)
    for choice in config.observers:
        yield _part_decision(config, selected, choice.key, ObserverSpec, caps)
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
    yield _dialect_decision(config, selected)
    for name, value in config.chat.items():
        if name != "dialect":
            yield Decision(key=f"chat.{name}", value=value, why=f"config{config.where(f'chat.{name}')}")


def _backend_decision(config: Config, selected: Selected, executor: Executor) -> Decision:
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
        key: value
        for key, value in asdict(executor.caps).items()
        if key not in ("approximations", "departures") and value not in ((), {}, frozenset())
    }
    return Decision(key="backend", value=spec.name, plugin=label(chosen.entry), why=why, rejected=selected.rejected,
                    facts=facts)  # fmt: skip


def _dialect_decision(config: Config, selected: Selected) -> Decision:
    """What writes chats. None, or a package that it lacks, is an error when somebody chats, and no sooner."""
    architecture = str(selected.fit.facts.get("architecture", ""))
    template, asked = config.chat.get("template"), config.chat.get("dialect")
    try:
        entry, why = choose_dialect(selected.catalog, architecture, template is not None, asked)
    except PluginError as error:
        return Decision(key="chat.dialect", value="none", why=error.message)
    if asked is not None:
        why = f"config{config.where('chat.dialect')}"
    if missing := missing_packages(entry.spec):
        facts = {"missing": f"{', '.join(missing)}: {install_line(entry.spec, missing)}"}
        return Decision(key="chat.dialect", value=entry.spec.name, plugin=label(entry), why=why, facts=facts)
    facts = {} if entry.spec.match else {"family": _family(selected, entry, template, asked)}
    return Decision(key="chat.dialect", value=entry.spec.name, plugin=label(entry), why=why, facts=facts)


def _family(selected: Selected, entry: Entry[Any], template: str | None, asked: str | None) -> str:
    """What the dialect for templates says of the model. ConfigError for a family that it doesn't know."""
    dialect = selected.catalog.load_object(entry.spec.factory, entry)()
    if not hasattr(dialect, "explain"):
        return "not told"
    facts = selected.fit.facts
    source = facts.get(TEMPLATE) or ""
    if template is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # an error when somebody chats
            source = template if is_template(template) else read_text(template)
    told: str = dialect.explain(
        source, architecture=str(facts.get("architecture", "")), name=selected.source.uri, family=asked
    )
    return told


def _part_decision(config: Config, selected: Selected, key: str, kind: type[Spec], caps: Capabilities) -> Decision:
    chosen = selected.parts.get(key)
    unasked = key == "constraints" and config.constraints is None
    if unasked and chosen is not None and not caps.masks:
        return Decision(key=key, value="none", why="the backend takes no token masks")
    name = chosen.entry.spec.name if chosen else ""
    others = tuple(
        (entry.spec.name, f"the config chose '{name}'" if chosen and not unasked else f"no [{key}] table asks for it")
        for entry in selected.catalog.specs(kind)
        if entry.spec.name != name
    )
    if chosen is None:
        none = "none asked for" if others else f"none asked for, no {kind_of(kind)} is installed"
        return Decision(key=key, value="none", why=none, rejected=others)
    facts = {f"option {option}": value for option, value in _shown(chosen).items()}
    why = "default" if unasked else f"config{config.where(f'{key}.use')}"
    return Decision(key=key, value=name, plugin=label(chosen.entry), why=why, rejected=others, facts=facts)


def label(entry: Entry[Any]) -> str:
    """Plugin, distribution and version behind a record."""
    return f"{entry.plugin.name} ({entry.plugin.dist} {entry.plugin.version})".replace(" )", ")")


def _shown(chosen: Chosen[Any]) -> dict[str, Any]:
    """Options that have a value; secrets are masked by their type."""
    return chosen.options.model_dump(mode="json", exclude_none=True) if chosen.options is not None else {}
