"""The catalog: which plugins are installed, what each offers, and what is wrong with the broken ones.

Plugins are found through entry points of group `headrace`, sorted by name so that lists are stable. A plugin that
fails in any way (its import, its API number, an unknown hook, a wrong record) is remembered with its error and offers
nothing; it becomes fatal only when something is asked for that the others don't offer. Hooks are called here, while
the catalog loads or a pipeline is built, and nowhere else.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar, cast

import pluggy

from headrace import __version__, hooks
from headrace.errors import FAULTS, HeadraceError, ModelError, PluginError, did_you_mean, why
from headrace.hooks import HOOKS, PROJECT, BackendSpec, CommandSpec, HookSpecs, KernelSpec, Spec, kind_of
from headrace.types import ModelSource

GROUP = "headrace"
ENV_DISABLE = "HEADRACE_DISABLE_PLUGINS"
NONE = "none"
"""Reserved: `use = "none"` in a config drops a choice that a base file made."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
_OBJECT = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*\Z")
_PLAIN: Mapping[str, type] = {"str": str, "int": int, "bool": bool}
"""Annotation -> the type that a record's field has to be of."""
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*\Z")

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One plugin, working or not."""

    name: str
    dist: str
    """Distribution that brought it; several when they clash over the name; "in-process" for registered modules."""
    version: str
    module: str
    status: str
    """ok | broken | disabled"""
    error: str = ""
    help: str = ""
    trace: str = ""
    """Traceback of the failure, for `plugins show`."""
    specs: tuple[Spec, ...] = ()

    def __str__(self) -> str:
        return f"'{self.name}' ({f'{self.dist} {self.version}'.strip()})"


@dataclass(frozen=True, slots=True)
class Entry(Generic[S]):
    """A record and the plugin that offers it."""

    spec: S
    plugin: PluginInfo

    def __str__(self) -> str:
        serves = f" for {self.spec.op}" if isinstance(self.spec, KernelSpec) else ""
        return f"{kind_of(type(self.spec))} '{self.spec.name}'{serves} of plugin {self.plugin}"


@dataclass(frozen=True, slots=True)
class _Found:
    """An entry point before its module was imported."""

    name: str
    value: Any
    """Module name, or the module itself for in-process plugins."""
    dist: str
    version: str


class _Broken(Exception):
    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


@dataclass(frozen=True)
class Catalog:
    """What is installed. Immutable: `without` gives a smaller one. Make one with `Catalog.load`."""

    plugins: tuple[PluginInfo, ...]
    manager: pluggy.PluginManager = field(repr=False, compare=False)
    unknown_disabled: tuple[tuple[str, str], ...] = ()
    """(name, where it was said) of plugins that were to be disabled but don't exist."""

    @classmethod
    def load(cls, disable: Iterable[str] = (), extra: Mapping[str, Any] | None = None) -> Catalog:
        """Find, import and check every plugin but the disabled ones. Never raises for a plugin's sake.

        disable: plugin names; those of HEADRACE_DISABLE_PLUGINS (comma separated) are added.
        extra: in-process plugins, name -> module.
        """
        asked = [(name, "--no-plugin or [plugins] disable") for name in disable]
        asked += [(name.strip(), ENV_DISABLE) for name in os.environ.get(ENV_DISABLE, "").split(",") if name.strip()]
        disabled = {name for name, _ in asked}
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookSpecs)
        by_name: dict[str, list[_Found]] = {}
        for found in [
            *_entry_points(),
            *(_Found(name, module, "in-process", "") for name, module in (extra or {}).items()),
        ]:
            by_name.setdefault(found.name, []).append(found)
        plugins = tuple(_load(by_name[name], name in disabled, manager) for name in sorted(by_name))
        return cls(plugins, manager, tuple((name, where) for name, where in asked if name not in by_name))

    def without(self, names: Iterable[str]) -> Catalog:
        """The same catalog with more plugins disabled. PluginError for a name that isn't installed."""
        names = set(names)
        known = [plugin.name for plugin in self.plugins]
        for name in sorted(names - set(known)):
            raise unknown_plugin(name, known, "can't be disabled")
        plugins = tuple(
            replace(plugin, status="disabled", specs=()) if plugin.name in names else plugin for plugin in self.plugins
        )
        return Catalog(plugins, self.manager, self.unknown_disabled)

    def specs(self, spec_type: type[S]) -> list[Entry[S]]:
        """Every record of one kind, sorted by name, then by plugin."""
        found = [Entry(spec, plugin) for plugin in self.plugins for spec in plugin.specs if isinstance(spec, spec_type)]
        return sorted(found, key=lambda entry: (entry.spec.name, entry.plugin.name))

    def kernels(self, device: str) -> list[Entry[KernelSpec]]:
        """Kernels for one device kind, sorted by name. PluginError for a plugin that fails to list its own."""
        found = [entry for plugin in self.plugins for entry in self.kernels_of(plugin, device)]
        return sorted(found, key=lambda entry: (entry.spec.name, entry.plugin.name))

    def kernels_of(self, plugin: PluginInfo, device: str) -> list[Entry[KernelSpec]]:
        """Kernels of one plugin, in its order; none of one that does not work."""
        if plugin.status != "ok":
            return []
        try:
            specs = list(_records(self.manager, plugin.name, "headrace_kernels", device=device))
        except FAULTS as error:
            told, help = (str(error), error.help) if isinstance(error, _Broken) else (why(error), "")
            help += f"{'; ' if help else ''}disable it with --no-plugin {plugin.name}, or report it to its authors"
            raise PluginError(
                "HR-PLUGIN-01", f"plugin {plugin} failed to list kernels for '{device}': {told}", help
            ) from error
        return [Entry(cast(KernelSpec, spec), plugin) for spec in specs]

    def find(self, spec_type: type[S], name: str) -> Entry[S]:
        """The one record of that name. PluginError when there is none, or more than one."""
        kind = kind_of(spec_type)
        entries = self.specs(spec_type)
        match [entry for entry in entries if entry.spec.name == name]:
            case [entry]:
                return entry
            case []:
                raise PluginError("HR-PLUGIN-03", f"no {kind} named '{name}' is installed", self._advice(name, entries))
            case several:
                owners = " and ".join(str(entry.plugin) for entry in several)
                raise PluginError(
                    "HR-PLUGIN-04", f"{kind} '{name}' is offered by more than one plugin: {owners}",
                    f"disable one of them: --no-plugin {several[-1].plugin.name}, or [plugins] disable = [...]",
                )  # fmt: skip

    def _advice(self, name: str, entries: list[Entry[S]]) -> str:
        """What to do about a missing record: near names, what exists, pip lines, broken and disabled plugins."""
        known = sorted({entry.spec.name for entry in entries})
        lines = [did_you_mean(name, known) + (f"installed: {', '.join(known)}." if known else "none is installed.")]
        if name in extras():
            lines.append(f"pip install 'headrace[{name}]'")
        for plugin in self.plugins:
            if plugin.status == "broken":
                lines.append(f"plugin {plugin} is broken, so what it offers is missing: {plugin.error}")
                lines += [plugin.help] if plugin.help else []
            elif plugin.status == "disabled":
                lines.append(f"plugin {plugin} is disabled")
        return "\n  ".join(lines)

    def load_object(self, target: str, entry: Entry[Any]) -> Any:
        """Import "module:attribute" (or "module") for an entry.

        PluginError: a package that it needs is missing (with the pip line), its import fails, no such attribute.
        """
        if target == entry.spec.factory and (missing := missing_packages(entry.spec)):
            raise needs(entry, missing)
        module_name, _, attribute = target.partition(":")
        try:
            value = import_module(module_name)
            for part in attribute.split(".") if attribute else ():
                value = getattr(value, part)
        except HeadraceError:
            raise
        except ModuleNotFoundError as error:
            missing_name = (error.name or "").partition(".")[0]
            if missing_name and missing_name != module_name.partition(".")[0]:
                raise needs(entry, [missing_name]) from error
            raise _bad_object(entry, target, error) from error
        except FAULTS as error:
            raise _bad_object(entry, target, error) from error
        return value

    def resolve(self, uri: str) -> ModelSource:
        """Find a model's files. The first plugin that knows the URI answers (pluggy's order).

        ModelError when nobody does; PluginError when a plugin fails with anything but a HeadraceError.
        """
        working = {plugin.name: plugin for plugin in self._working()}
        for impl in reversed(self.manager.hook.headrace_resolve.get_hookimpls()):
            if impl.plugin_name not in working:
                continue
            plugin = working[impl.plugin_name]
            try:
                source = _caller(self.manager, plugin.name, "headrace_resolve")(uri=uri)
            except HeadraceError:
                raise
            except FAULTS as error:
                raise PluginError(
                    "HR-PLUGIN-01", f"plugin {plugin} failed to resolve '{uri}': {why(error)}",
                    f"disable it with --no-plugin {plugin.name}, or report it to its authors",
                ) from error  # fmt: skip
            if source is not None and not isinstance(source, ModelSource):
                raise PluginError(
                    "HR-PLUGIN-01", f"plugin {plugin} resolved '{uri}' to a {type(source).__name__}, not a ModelSource"
                )
            if source is not None:
                return source
        scheme = f"scheme '{uri.partition('://')[0]}://'" if "://" in uri else "path"
        raise ModelError(
            "HR-MODEL-01", f"no plugin knows the {scheme} of model '{uri}'",
            "give a file path, pkg://PACKAGE/FILE or hf://OWNER/REPO/FILE; see `headrace plugins list`",
        )  # fmt: skip

    def broken(self) -> list[PluginInfo]:
        return [plugin for plugin in self.plugins if plugin.status == "broken"]

    def _working(self) -> Iterator[PluginInfo]:
        return (plugin for plugin in self.plugins if plugin.status == "ok")


def missing_packages(spec: Spec) -> list[str]:
    """What the record requires and is not installed. Nothing is imported but parents of dotted names."""
    return [name for name in spec.requires if not _installed(name)]


def install_line(spec: Spec, missing: Iterable[str]) -> str:
    """The command that brings them."""
    return spec.install or f"pip install {' '.join(missing)}"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def extras() -> frozenset[str]:
    """Names that `pip install 'headrace[NAME]'` knows."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return frozenset(metadata("headrace").get_all("Provides-Extra") or ())
    except PackageNotFoundError:  # run from a source tree that was never installed
        return frozenset()


def unknown_plugin(name: str, known: Iterable[str], what: str, where: str = "") -> PluginError:
    known = sorted(known)
    return PluginError(
        "HR-PLUGIN-08", f"plugin '{name}' {what}: it is not installed" + (f" ({where})" if where else ""),
        f"{did_you_mean(name, known)}installed: {', '.join(known) or 'none'}",
    )  # fmt: skip


def _entry_points() -> list[_Found]:
    from importlib.metadata import entry_points

    try:
        points = entry_points(group=GROUP)
    except Exception as error:
        raise _damaged_installation(error) from error
    found = []
    for point in points:
        try:
            owner = (point.dist.name or "unknown", point.dist.version or "") if point.dist else ("unknown", "")
        except Exception:  # its metadata is damaged: only who brought it is lost, the module may be fine
            owner = ("unknown", "")
        found.append(_Found(point.name, point.value, *owner))
    return sorted(found, key=lambda each: (each.name, each.dist))


def _damaged_installation(error: Exception) -> PluginError:
    """The distribution whose entry points can't be read: it hides those of all others."""
    from importlib.metadata import distributions

    for dist in distributions():
        try:
            list(dist.entry_points)
        except Exception:
            folder = getattr(dist, "_path", "unknown")
            return PluginError("HR-PLUGIN-02", f"the entry points of {folder} can't be read: {why(error)}",
                               "install that package again, or remove the folder")  # fmt: skip
    return PluginError("HR-PLUGIN-02", f"the installed packages can't be read: {why(error)}", "see `pip check`")


def _load(found: list[_Found], disabled: bool, manager: pluggy.PluginManager) -> PluginInfo:
    """Import and check the plugin of one name; whatever goes wrong ends up in its record."""
    first = found[0]
    info = PluginInfo(
        name=first.name,
        dist=" and ".join(f"{each.dist} {each.version}".strip() for each in found) if found[1:] else first.dist,
        version="" if found[1:] else first.version,
        module=first.value if isinstance(first.value, str) else getattr(first.value, "__name__", "?"),
        status="disabled" if disabled else "ok",
    )
    if disabled:
        return info
    try:
        if found[1:]:
            raise _Broken(
                f"duplicate name: the plugin name '{info.name}' is claimed by {info.dist}; none of them was loaded",
                "uninstall all but one of them",
            )
        if ":" in info.module:
            raise _Broken(f"entry point '{info.name} = {info.module}' must name a module, not an object in it")
        module = import_module(first.value) if isinstance(first.value, str) else first.value
        _check_api(info, module)
        _register(info, module, manager)
        return replace(info, specs=_collect(info, manager))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit while it is imported
        if manager.has_plugin(info.name):
            manager.unregister(name=info.name)
        return replace(
            info,
            status="broken",
            error=str(error) if isinstance(error, _Broken) else why(error),
            help=error.help if isinstance(error, _Broken) else _import_help(info, error),
            trace="" if isinstance(error, _Broken) else traceback.format_exc(),
        )


def _import_help(info: PluginInfo, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"pip install {error.name.partition('.')[0]}, or disable it with --no-plugin {info.name}"
    return f"disable it with --no-plugin {info.name}; `headrace plugins show {info.name}` has the traceback"


def _check_api(info: PluginInfo, module: Any) -> None:
    api = getattr(module, "headrace_api", None)
    current = hooks.API
    if api is None:
        raise _Broken(
            f"plugin {info}: module '{info.module}' does not say which hook API it speaks",
            f"its authors should add: headrace_api = {current}",
        )
    if isinstance(api, bool) or not isinstance(api, int):
        raise _Broken(f"plugin {info}: headrace_api = {api!r} is not a number", f"write headrace_api = {current}")
    if not max(1, current - 1) <= api <= current:
        way = "Upgrade it" if api < current else "Upgrade headrace"
        raise _Broken(
            f"plugin {info} speaks hook API {api}; this headrace {__version__} needs {max(current - 1, 1)}-{current}",
            f"{way}, or disable it with --no-plugin {info.name}",
        )


def _register(info: PluginInfo, module: Any, manager: pluggy.PluginManager) -> None:
    try:
        manager.register(module, info.name)
    except pluggy.PluginValidationError as error:
        raise _Broken(
            f"plugin {info} implements a hook with arguments that headrace {__version__} does not pass: "
            + " ".join(str(error).split()),
            "a hook may take fewer arguments than its specification, never others",
        ) from error
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = sorted(
            name
            for name, caller in vars(manager.hook).items()
            if not name.startswith("_") and not caller.has_spec() and caller.get_hookimpls()
        )
        listed = ", ".join(f"'{name}'" for name in unknown)
        raise _Broken(
            f"plugin {info} implements {listed}, which headrace {__version__} (hook API {hooks.API}) does not have",
            f"{did_you_mean(unknown[0], HOOKS)}A hook of a newer headrace needs `pip install -U headrace`; "
            "@hookimpl(optionalhook=True) marks hooks that may be unknown",
        ) from error


def _caller(manager: pluggy.PluginManager, name: str, hook: str) -> pluggy.HookCaller:
    others = [plugin for other, plugin in manager.list_name_plugin() if other != name and plugin is not None]
    return manager.subset_hook_caller(hook, others)


def _records(manager: pluggy.PluginManager, name: str, hook: str, **kwargs: Any) -> Iterator[Spec]:
    """What one plugin yields from one hook, each record checked. _Broken for a wrong one."""
    wanted = HOOKS[hook]
    assert wanted is not None
    for result in _caller(manager, name, hook)(**kwargs):
        if result is None:
            continue
        if isinstance(result, (str, bytes, Mapping, Spec)) or not isinstance(result, Iterable):
            raise _Broken(f"{hook} gave a {type(result).__name__}, not a series of {wanted.__name__}", "use `yield`")
        for record in result:
            _check_record(hook, wanted, record)
            yield record


def _check_record(hook: str, wanted: type[Spec], record: Any) -> None:
    if not isinstance(record, wanted):
        raise _Broken(f"{hook} yielded {record!r:.80}, a {type(record).__name__}; it must yield {wanted.__name__}")
    if not isinstance(record.name, str) or not _NAME.match(record.name) or record.name == NONE:
        raise _Broken(
            f"{hook} yielded a {wanted.__name__} with the name {record.name!r}",
            f"letters, digits, '_', '-' and '.'; '{NONE}' is reserved",
        )
    for each in fields(record):
        value = getattr(record, each.name)
        plain = _PLAIN.get(str(each.type))
        if plain and type(value) is not plain:
            raise _Broken(f"{hook}: {each.name} = {value!r:.80} of '{record.name}' must be of type {plain.__name__}")
        if str(each.type).startswith("tuple") and not (
            isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        ):
            raise _Broken(f"{hook}: {each.name} = {value!r} of '{record.name}' must be a tuple of strings")
    targets = {"factory": record.factory, "options": record.options}
    targets |= {name: getattr(record, name, None) for name in ("probe", "when")}
    for attribute, target in targets.items():
        if target is None and attribute != "factory":
            continue
        module_ok = attribute == "factory" and isinstance(record, CommandSpec)
        if not isinstance(target, str) or not (_OBJECT.match(target) or (module_ok and _MODULE.match(target))):
            raise _Broken(
                f"{hook}: {attribute} = {target!r} of '{record.name}' is not of the form \"module:attribute\""
            )
    if isinstance(record, KernelSpec):
        _check_op(record)
    if isinstance(record, BackendSpec) and not record.formats:
        raise _Broken(f"{hook}: backend '{record.name}' names no model formats, so it could never be chosen")


def _check_op(record: KernelSpec) -> None:
    from headrace.ops import OPS

    if record.op not in OPS:
        raise _Broken(
            f"kernel '{record.name}' is for the op '{record.op}', which headrace {__version__} does not have",
            f"{did_you_mean(record.op, OPS)}ops: {', '.join(OPS)}",
        )


def _collect(info: PluginInfo, manager: pluggy.PluginManager) -> tuple[Spec, ...]:
    """All records of one plugin but its kernels, which depend on the device (`Catalog.kernels`)."""
    specs: list[Spec] = []
    for hook, wanted in HOOKS.items():
        if wanted is None or hook == "headrace_kernels":
            continue
        mine: dict[str, Spec] = {}
        for record in _records(manager, info.name, hook):
            if record.name in mine:
                raise _Broken(f"plugin {info} offers two records of {wanted.__name__} named '{record.name}'")
            mine[record.name] = record
        specs += mine.values()
    return tuple(specs)


def needs(entry: Entry[Any], missing: list[str]) -> PluginError:
    packages = " and ".join(f"'{name}'" for name in missing)
    return PluginError(
        "HR-PLUGIN-05", f"{entry} needs the package {packages}, which is not installed",
        install_line(entry.spec, missing),
    )  # fmt: skip


def _bad_object(entry: Entry[Any], target: str, error: BaseException) -> PluginError:
    return PluginError(
        "HR-PLUGIN-06", f"{entry} can't be loaded: '{target}' failed with {why(error)}",
        f"upgrade {entry.plugin.dist}, report it to its authors, or disable it with --no-plugin {entry.plugin.name}",
    )  # fmt: skip
