"""One TOML file (and what it extends, `--set`, arguments) becomes a frozen `Config`.

Pydantic checks the edge; what comes out are frozen dataclasses. Every fault is collected and raised at once. Options of
plugins stay as they were written (`Choice.options`) until their plugin is known: `choose` checks them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from headrace.catalog import NONE, Catalog, Entry, missing_packages, needs, unknown_plugin
from headrace.errors import (
    EXIT_PLUGIN,
    FAULTS,
    ConfigError,
    HeadraceError,
    PluginError,
    RequestError,
    did_you_mean,
    why,
)
from headrace.hooks import (
    BackendSpec,
    ConstraintSpec,
    DrafterSpec,
    ObserverSpec,
    Spec,
    StoreSpec,
    StrategySpec,
    kind_of,
)
from headrace.layers import Tree, Where, argument_tree, at, file_tree, nested, set_tree
from headrace.options import ByteSize, Options, Seconds, validate
from headrace.textfile import expanded, is_template
from headrace.tomlmap import KeyPath, dotted
from headrace.types import EngineOptions, SamplingParams, field_names

__all__ = ["ByteSize", "Choice", "Chosen", "Config", "Options", "Seconds", "Where", "choose", "load_config"]

ENV_CONFIG = "HEADRACE_CONFIG"

Determinism = Literal["off", "seeded", "batch-invariant"]


class RootTable(Options):
    """Keys at the top of the file."""

    model: str = Field(min_length=1)
    """Path or URI of the model: `model.gguf`, `hf://OWNER/REPO/FILE`, `pkg://PACKAGE/FILE`, `toy://vocab=512`. A
    relative path is relative to the file that says it."""
    determinism: Determinism = "seeded"
    """off: no promise. seeded: a request repeats its output for the same seed, and has a fixed one by default.
    batch-invariant: it does so whatever else runs beside it; an error on backends that can't."""


_ENGINE = EngineOptions()
"""Where the defaults of [engine] are."""


class EngineTable(Options):
    """How requests are scheduled."""

    max_sequences: int = Field(_ENGINE.max_sequences, ge=1, le=65536)
    """Most sequences that run at once; a backend with fewer slots runs fewer."""
    max_batch_tokens: int = Field(_ENGINE.max_batch_tokens, ge=1)
    """Most tokens that one step computes."""
    prefill_chunk_tokens: int = Field(_ENGINE.prefill_chunk_tokens, ge=1)
    """Most prompt tokens of one sequence in a step, so that long prompts don't stall the others."""
    max_waiting: int = Field(_ENGINE.max_waiting, ge=1)
    """Most sequences that wait; more requests are refused as busy."""
    prefix_cache: bool = _ENGINE.prefix_cache
    """Reuse the KV of equal prompt beginnings."""
    block_tokens: int = Field(_ENGINE.block_tokens, ge=1, le=4096)
    """Tokens per KV block, on backends with paged KV."""
    aging_skips: int = Field(_ENGINE.aging_skips, ge=0)
    """How often later requests may overtake a waiting one that does not fit yet."""

    @model_validator(mode="after")
    def _chunk_fits(self) -> EngineTable:
        if "prefill_chunk_tokens" in self.model_fields_set and self.prefill_chunk_tokens > self.max_batch_tokens:
            raise ValueError(
                f"prefill_chunk_tokens = {self.prefill_chunk_tokens} does not fit into "
                f"max_batch_tokens = {self.max_batch_tokens}"
            )
        return self


class SamplingTable(Options):
    """Defaults for requests that don't say; they win over the model's own. Other sampling parameters belong to a
    request."""

    temperature: float | None = None
    """0 is greedy. Unset, here and below: the model's own default, else Headrace's."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float | None = None
    """Keep the likeliest tokens that hold this much probability."""
    min_p: float | None = None
    """Keep tokens of at least this share of the likeliest one's probability."""
    typical_p: float | None = None
    """Keep the most typical tokens that hold this much probability."""
    repetition_penalty: float | None = None
    """Divides (or multiplies, below 0) the logits of tokens seen before; 1 = off."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens seen before."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit per occurrence."""
    seed: int | Literal["random"] | None = None
    """Seed of requests that set none."""

    @field_validator("*", mode="after")
    @classmethod
    def _in_range(cls, value: Any, info: Any) -> Any:
        try:
            SamplingParams(**{info.field_name: value})
        except RequestError as error:
            raise ValueError(error.help) from None
        return value


class ChatTable(Options):
    """For chats."""

    template: str | None = None
    """Jinja template, or the path of a file with one; wins over the model's own."""
    dialect: str | None = None
    """How tool calls and reasoning are written: a family or a dialect. Unset: by template, architecture and name."""
    system: str | None = None
    """System prompt of chats that set none."""


class PluginsTable(Options):
    """Which plugins are loaded."""

    disable: tuple[str, ...] = ()
    """Names of plugins that are not loaded."""


CONSTRAINTS = "auto"
"""The constraint engine of configs that name none, where a plugin offers it. It may lack its packages until a request
has a constraint."""
SINGLE: Mapping[str, type[Spec]] = {
    "backend": BackendSpec,
    "drafter": DrafterSpec,
    "constraints": ConstraintSpec,
    "store": StoreSpec,
}
"""Tables with one `use`."""
MANY: Mapping[str, type[Spec]] = {"observers": ObserverSpec, "parallel": StrategySpec}
"""Tables of tables with a `use` each."""
TABLES: Mapping[str, type[Options]] = {
    "engine": EngineTable,
    "sampling": SamplingTable,
    "chat": ChatTable,
    "plugins": PluginsTable,
}
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(RootTable.model_fields, "the top of the file"),
    **{key: f"[{name}]" for name, table in TABLES.items() for key in table.model_fields},
}
"""Key -> where it is valid, for keys that were put into the wrong table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plugin that the config picks, with options as they were written."""

    path: KeyPath
    """Of the table: ("backend",), ("parallel", "experts"), ("observers", "0")."""
    use: str | None
    """Record name; None = choose for me (backend only)."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    where: Where | None = None

    @property
    def key(self) -> str:
        """The path, dotted: "backend", "parallel.experts", "observers.0"."""
        return dotted(self.path)


S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, slots=True)
class Chosen(Generic[S]):
    """A choice whose plugin was found and whose options are valid."""

    choice: Choice
    entry: Entry[S]
    options: Options | None
    """None when the plugin has no options model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A checked configuration: what `headrace.pipeline.build` takes."""

    model: str
    determinism: Determinism = "seeded"
    engine: EngineOptions = field(default_factory=EngineOptions)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """SamplingParams fields that were set."""
    backend: Choice | None = None
    drafter: Choice | None = None
    constraints: Choice | None = None
    store: Choice | None = None
    observers: tuple[Choice, ...] = ()
    parallel: Mapping[str, Choice] = field(default_factory=dict)
    plugins_disable: tuple[str, ...] = ()
    chat: Mapping[str, str] = field(default_factory=dict)
    """template (absolute path, or Jinja text) and system, where set."""
    path: str | None = None
    paths: Mapping[KeyPath, Where] = field(default_factory=dict, repr=False)
    """Key -> where it was set; keys at their default are missing."""

    @property
    def origin(self) -> Mapping[str, Where]:
        """The same by dotted key."""
        return {dotted(path): where for path, where in self.paths.items()}

    def choices(self) -> Iterable[tuple[Choice, type[Spec]]]:
        """Every choice with the kind of record that it picks."""
        for name, kind in SINGLE.items():
            choice = getattr(self, name)
            if choice is not None:
                yield choice, kind
        yield from ((choice, ObserverSpec) for choice in self.observers)
        yield from ((choice, StrategySpec) for choice in self.parallel.values())

    def where(self, key: str) -> str:
        """ " (node.toml:7)" for a key that was set, else an empty string."""
        found = self.origin.get(key)
        return f" ({found})" if found else ""


def load_config(
    path: str | os.PathLike[str] | None,
    *,
    model: str | None = None,
    sets: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    catalog: Catalog | None = None,
) -> Config:
    """Read and check a configuration. Later wins: file, `sets` ("a.b=c" texts), `overrides` (tables or dotted keys),
    `model`. Without path and model the file is $HEADRACE_CONFIG.

    ConfigError holds every problem. With `catalog` (or when there are problems anyway) plugin names and options are
    checked as well; otherwise `headrace.pipeline.build` does it.
    """
    if path is None and model is None and not (overrides and "model" in overrides):
        path = os.environ.get(ENV_CONFIG) or None
    problems: list[HeadraceError] = []
    tree = file_tree(path) if path is not None else Tree()
    tree.add(set_tree(sets, problems))
    tree.add(argument_tree(overrides or {}, Where("argument")))
    if model is not None:
        tree.add(nested(("model",), model, Where("argument")))
    config = _config(tree, str(path) if path is not None else None, problems)
    if catalog is not None or problems:
        catalog = catalog or Catalog.load(_names(tree))
        check_disabled(config, catalog, problems)
        for choice, kind in config.choices():
            choose(config, choice, kind, catalog, problems)
    raise_problems(problems)
    return config


def file_or_model(name: str) -> tuple[str | None, str | None]:
    """(path, model) for `load_config` of a name that may be either: a pipeline file ends in ".toml"."""
    return (name, None) if name.endswith(".toml") else (None, name)


def raise_problems(problems: Sequence[HeadraceError]) -> None:
    """Raise one ConfigError with all of them, in the order of file and line; nothing when there are none."""
    if not problems:
        return
    first = problems[0]
    error = ConfigError(first.code, first.message, first.help, problems)
    if all(isinstance(problem, PluginError) for problem in problems):
        error.exit_code = EXIT_PLUGIN
    raise error


def _names(tree: Tree) -> list[str]:
    table = tree.data.get("plugins")
    names = table.get("disable") if isinstance(table, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []


def _config(tree: Tree, path: str | None, problems: list[HeadraceError]) -> Config:
    data = tree.data
    known = {*RootTable.model_fields, *TABLES, *SINGLE, *MANY}
    for key in [key for key in data if key not in known]:
        near = f"'{key}' belongs in {_ELSEWHERE[key]}. " if key in _ELSEWHERE else did_you_mean(key, known)
        help = f"{near}keys and tables here: {', '.join(sorted(known))}."
        problems.append(ConfigError("HR-CONFIG-03", f"unknown key {at((key,), tree)}", help))
    if "model" not in data:
        where, help = (f" in {path}", f'put model = "..." at the top of {path}') if path else ("", "give MODEL")
        problems.append(ConfigError("HR-CONFIG-05", f"no model is named{where}", help))
    root = validate(RootTable, {"model": "-"} | {key: data[key] for key in RootTable.model_fields if key in data}, (),
                    tree, "the top of the file", problems)  # fmt: skip
    tables: dict[str, Any] = {}
    for name, table in TABLES.items():
        raw = _table(data.get(name, {}), (name,), tree, problems)
        tables[name] = validate(table, raw, (name,), tree, f"[{name}]", problems, _ELSEWHERE) or table()
    engine = tables["engine"]
    options = {name: getattr(engine, name) for name in field_names(EngineOptions)}
    options["prefill_chunk_tokens"] = min(options["prefill_chunk_tokens"], options["max_batch_tokens"])
    return Config(
        model=_model(root.model, tree) if root else "-",
        determinism=root.determinism if root else "seeded",
        engine=EngineOptions(**options),
        sampling={key: value for key, value in tables["sampling"].model_dump().items() if value is not None},
        plugins_disable=tables["plugins"].disable,
        chat=_chat(tables["chat"], tree, problems),
        path=path,
        paths=dict(tree.origin),
        observers=tuple(_many("observers", tree, problems).values()),
        parallel=_many("parallel", tree, problems),
        **{name: _single((name,), data[name], tree, problems) if name in data else None for name in SINGLE},
    )  # fmt: skip


def _table(raw: Any, path: KeyPath, tree: Tree, problems: list[HeadraceError]) -> dict[str, Any]:
    if isinstance(raw, Mapping):
        return dict(raw)
    help = f"write [{dotted(path)}] and its keys below"
    if path[-1] in SINGLE and isinstance(raw, str):
        help = f'write [{dotted(path)}], and use = "{raw}" below'
    problems.append(ConfigError("HR-CONFIG-04", f"{at(path, tree)} must be a table, not {raw!r:.60}", help))
    return {}


def _single(path: KeyPath, raw: Any, tree: Tree, problems: list[HeadraceError]) -> Choice | None:
    n_before = len(problems)
    options = _table(raw, path, tree, problems)
    use = options.pop("use", None)
    if len(problems) > n_before:
        return None
    if use is None and path == ("constraints",):
        use = CONSTRAINTS
    if use is None and path != ("backend",):
        message = f"required key {at((*path, 'use'), tree)} is missing"
        problems.append(ConfigError("HR-CONFIG-05", message, f'use = "NAME" picks a plugin, use = "{NONE}" none'))
        return None
    if use is not None and (not isinstance(use, str) or not use):
        message = f"{at((*path, 'use'), tree)} = {use!r:.60} is not allowed"
        problems.append(ConfigError("HR-CONFIG-04", message, "it should be the name of a plugin's offer"))
        return None
    if use == NONE:
        for key in options:
            message = f"unknown key {at((*path, key), tree)}"
            problems.append(ConfigError("HR-CONFIG-03", message, f'use = "{NONE}" takes no options'))
        return None
    return Choice(path=path, use=use, options=options, where=tree.where((*path, "use")) or tree.where(path))


def _many(name: str, tree: Tree, problems: list[HeadraceError]) -> dict[str, Choice]:
    """Tables with a `use` each: by name or, for observers, a list."""
    raw = tree.data.get(name, {})
    if isinstance(raw, list | tuple) and name == "observers":
        raw = {str(i): each for i, each in enumerate(raw)}
    choices = {}
    for key, value in _table(raw, (name,), tree, problems).items():
        if not isinstance(value, Mapping):
            problems.append(
                ConfigError("HR-CONFIG-03", f"unknown key {at((name, key), tree)}", f'{name}.NAME = {{ use = "..." }}')
            )
            continue
        choice = _single((name, key), value, tree, problems)
        if choice is not None:
            choices[key] = choice
    return choices


def _model(model: str, tree: Tree) -> str:
    """A relative path in a file is relative to that file."""
    where = tree.where(("model",))
    if "://" in model or where is None:
        return model
    return os.fspath(where.folder() / expanded(model))


def _chat(table: ChatTable, tree: Tree, problems: list[HeadraceError]) -> dict[str, str]:
    chat = {key: value for key, value in table.model_dump().items() if value is not None}
    template = chat.get("template")
    if template is not None and not is_template(template):
        where = tree.where(("chat", "template"))
        path = (where.folder() if where else Path()) / expanded(template)
        if not os.path.isfile(path):
            message = f"{at(('chat', 'template'), tree)}: no such file: {path}"
            problems.append(ConfigError("HR-CONFIG-04", message, "name a file, or write the Jinja template itself"))
        chat["template"] = os.fspath(path.absolute())
    return chat


def check_disabled(config: Config, catalog: Catalog, problems: list[HeadraceError]) -> None:
    """Names of [plugins] disable that no plugin has are problems."""
    known = [plugin.name for plugin in catalog.plugins]
    where = str(config.origin.get("plugins.disable", ""))
    problems += [unknown_plugin(name, known, "can't be disabled", where) for name in config.plugins_disable
                 if name not in known]  # fmt: skip


def choose(
    config: Config, choice: Choice, kind: type[S], catalog: Catalog, problems: list[HeadraceError]
) -> Chosen[S] | None:
    """Find the plugin of a choice and check its options. Every fault is added to `problems`; then the result is None.
    So it is for a backend that is yet to be chosen (`use` is None)."""
    if choice.use is None:
        return None
    n_before = len(problems)
    try:
        entry = catalog.find(kind, choice.use)
        chosen = check_options(config, choice, entry, catalog, problems)
        if missing := missing_packages(entry.spec):
            # the module of its options may have failed for the same reason
            problems[n_before:] = [each for each in problems[n_before:] if each.code != "HR-PLUGIN-05"]
            raise needs(entry, missing)
    except PluginError as error:
        said = f"{error.message}, as '{choice.key}.use'" + (f" ({choice.where})" if choice.where else "") + " asks"
        problems.append(PluginError(error.code, said, error.help))
        return None
    return chosen


def check_options(
    config: Config, choice: Choice, entry: Entry[S], catalog: Catalog, problems: list[HeadraceError]
) -> Chosen[S] | None:
    """Check a choice's options against the model that its plugin names."""
    tree = Tree(origin=dict(config.paths))
    path = choice.path
    label = f"{kind_of(type(entry.spec))} '{entry.spec.name}'"
    if entry.spec.options is None:
        for key in choice.options:
            message = f"unknown key {at((*path, key), tree)}"
            problems.append(ConfigError("HR-CONFIG-03", message, f"{label} has no options"))
        return None if choice.options else Chosen(choice, entry, None)
    try:
        model = catalog.load_object(entry.spec.options, entry)
    except PluginError as error:
        problems.append(error)
        return None
    if not (isinstance(model, type) and issubclass(model, Options)):
        message = f"the options of {entry} ('{entry.spec.options}') are not a subclass of headrace.config.Options"
        problems.append(PluginError("HR-PLUGIN-07", message, f"report it to the authors of {entry.plugin.dist}"))
        return None
    try:
        options = validate(model, choice.options, path, tree, label, problems, _ELSEWHERE)
    except FAULTS as error:
        message = f"the options of {entry} ('{entry.spec.options}') could not be checked: {why(error)}"
        problems.append(PluginError("HR-PLUGIN-07", message, f"report it to the authors of {entry.plugin.dist}"))
        return None
    return Chosen(choice, entry, options) if options is not None else None
