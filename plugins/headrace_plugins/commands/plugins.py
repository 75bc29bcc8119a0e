"""`headrace plugins`: what is installed, what it offers, what is wrong with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.catalog import install_line, missing_packages
from headrace.errors import EXIT_OK, FAULTS, PluginError, did_you_mean, why
from headrace.hooks import BackendSpec, KernelSpec, Spec, kind_of
from headrace.testing.scaffold import KINDS, write_plugin
from headrace_plugins.commands.text import as_json, table

if TYPE_CHECKING:
    from headrace.catalog import Catalog, PluginInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="every plugin and what it offers", description="List plugins.")
    listing.add_argument("--json", action="store_true", help="print JSON")
    show = verbs.add_parser("show", help="one plugin, offer or op, with its options", description="Show a plugin.")
    show.add_argument("name", metavar="NAME", help="name of a plugin, of something that a plugin offers, or of an op")
    show.add_argument("--json", action="store_true", help="print JSON")
    new = verbs.add_parser("new", help="write a plugin that works, to start from", description="Write a new plugin.")
    new.add_argument("kind", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    new.add_argument("name", metavar="NAME", help="what configs will call it; becomes the distribution headrace-NAME")
    new.add_argument("--dir", default=".", metavar="DIR", help="where to put the folder headrace-NAME (default: here)")


def run(args: argparse.Namespace) -> int:
    if args.verb == "list":
        _list(args.catalog, args.json)
    elif args.verb == "new":
        _new(args.catalog, args.kind, args.name, args.dir)
    else:
        _show(args.catalog, args.name, args.json)
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel as `plugins` shows it: one that serves several devices is there for each."""

    device: str
    plugin: PluginInfo
    spec: KernelSpec

    def as_json(self) -> dict[str, Any]:
        return _spec(self.spec) | {"exact": self.spec.exact, "priority": self.spec.priority, "device": self.device}


def _kernels(catalog: Catalog) -> tuple[list[_Kernel], list[PluginError]]:
    """Every kernel for the devices that backends know, by device and op; and what kept plugins from listing theirs."""
    from headrace.ops import OPS

    devices = {"cpu"} | {device for entry in catalog.specs(BackendSpec) for device in entry.spec.devices}
    found: list[_Kernel] = []
    problems: list[PluginError] = []
    for device in sorted(devices):
        for plugin in catalog.plugins:
            try:
                found += [_Kernel(device, plugin, entry.spec) for entry in catalog.kernels_of(plugin, device)]
            except PluginError as error:
                problems.append(error)
    order = {name: place for place, name in enumerate(OPS)}
    found.sort(key=lambda each: (each.device, order[each.spec.op], -each.spec.priority, each.spec.name))
    return found, problems


def _print_kernels(kernels: Iterable[_Kernel], gap: str = "\n") -> None:
    rows = [
        [each.spec.op, each.spec.name, each.device, each.plugin.name, str(each.spec.priority),
         "yes" if each.spec.exact else "no", _summary(each.spec)] for each in kernels
    ]  # fmt: skip
    if rows:
        print(gap + table(rows, ["OP", "KERNEL", "DEVICE", "PLUGIN", "PRIORITY", "EXACT", "SUMMARY"]))


def _list(catalog: Catalog, json: bool) -> None:
    kernels, problems = _kernels(catalog)
    if json:
        print(as_json([_plugin(plugin, kernels) for plugin in catalog.plugins]))
        return
    print(table([[each.name, each.dist, each.version, each.status] for each in catalog.plugins],
                ["PLUGIN", "DISTRIBUTION", "VERSION", "STATUS"]))  # fmt: skip
    rows = [[kind_of(type(spec)), spec.name, plugin.name, _summary(spec)] for plugin in catalog.plugins
            for spec in plugin.specs]  # fmt: skip
    if rows:
        print("\n" + table(sorted(rows), ["KIND", "NAME", "PLUGIN", "SUMMARY"]))
    _print_kernels(kernels)
    for problem in problems:
        print(f"\n{problem}")
    for plugin in catalog.broken():
        print(f"\nplugin {plugin} is broken: {plugin.error}" + (f"\n  help: {plugin.help}" if plugin.help else ""))


def _show(catalog: Catalog, name: str, json: bool) -> None:
    from headrace.ops import OPS

    plugins = [plugin for plugin in catalog.plugins if plugin.name == name]
    offers = [(plugin, spec) for plugin in catalog.plugins for spec in plugin.specs if spec.name == name]
    everything, problems = _kernels(catalog)
    kernels = [each for each in everything if name in (each.plugin.name, each.spec.op, each.spec.name)]
    contract = OPS.get(name)
    if not plugins and not offers and not kernels and contract is None:
        known = {plugin.name for plugin in catalog.plugins} | {
            spec.name for plugin in catalog.plugins for spec in plugin.specs
        }
        known |= {each.spec.name for each in everything} | set(OPS)
        raise PluginError(
            "HR-PLUGIN-03", f"no plugin, and nothing that a plugin offers, is named '{name}'",
            f"{did_you_mean(name, known)}`headrace plugins list` shows all",
        )  # fmt: skip
    shown = [(plugin, spec) for plugin in plugins for spec in plugin.specs] + [
        each for each in offers if each[0] not in plugins
    ]
    if json:
        found = [_plugin(plugin, everything) for plugin in plugins]
        described = [_spec(spec) | {"plugin": plugin.name} | _options(catalog, plugin, spec) for plugin, spec in shown]
        described += [each.as_json() | {"plugin": each.plugin.name} for each in kernels]
        op = {"op": {"call": str(contract), "text": contract.text}} if contract else {}
        print(as_json({"name": name, "plugins": found, "offers": described} | op))
        return
    if contract is not None:
        print(f"op {contract}\n\n{contract.text}")
    for plugin in plugins:
        print(f"plugin {plugin.name}: {plugin.dist} {plugin.version}, module {plugin.module}, {plugin.status}")
        if plugin.error:
            print(f"  error: {plugin.error}\n  help: {plugin.help}\n\n{plugin.trace}".rstrip())
    for i, (plugin, spec) in enumerate(shown):
        gap = "\n" * bool(plugins or contract or i)
        print(f"{gap}{kind_of(type(spec))} {spec.name} (plugin {plugin.name}, {plugin.dist} {plugin.version})")
        print(f"  {_summary(spec)}")
        print(
            table(
                [
                    [f"  {key}", ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)]
                    for key, value in _spec(spec).items()
                    if key not in ("name", "summary", "kind")
                ]
            )
        )
        options = _options(catalog, plugin, spec)
        if options.get("error"):
            print(f"  options: {options['error']}")
        elif options.get("options"):
            print("  options:")
            rows = [[f"    {row['name']}", row["type"], row["default"], row["doc"]] for row in options["options"]]
            print(table(rows, ["    NAME", "TYPE", "DEFAULT", ""]))
    _print_kernels(kernels, gap="\n" * bool(plugins or contract or shown))
    if contract is not None and not kernels:
        print("\nno plugin offers a kernel")
    for problem in problems:
        print(f"\n{problem}")


def _new(catalog: Catalog, kind: str, name: str, folder: str) -> None:
    for plugin in catalog.plugins:
        offered = {spec.name for spec in plugin.specs if kind_of(type(spec)) == kind}
        if name in offered or name == plugin.name:
            raise PluginError(
                "HR-SCAFFOLD-05", f"the name '{name}' is in use by plugin {plugin}", "choose another name for yours"
            )
    paths = write_plugin(kind, name, folder)
    for path in paths:
        print(path)
    root = paths[0].parent
    print(f"\nnext: pip install -e '{root}[test]' && pytest {root} && headrace plugins show {name}")


def _summary(spec: Spec) -> str:
    unverified = isinstance(spec, BackendSpec) and not spec.verified
    missing = missing_packages(spec)
    return (
        spec.summary
        + (" (UNVERIFIED on any hardware)" if unverified else "")
        + (f" (needs {', '.join(missing)}: {install_line(spec, missing)})" if missing else "")
    )


def _spec(spec: Spec) -> dict[str, Any]:
    """The fields of a record that say something."""
    return {"kind": kind_of(type(spec))} | {
        key: value for key, value in asdict(spec).items() if value not in (None, "", ())
    }


def _plugin(plugin: PluginInfo, kernels: Iterable[_Kernel]) -> dict[str, Any]:
    facts = {key: getattr(plugin, key) for key in ("name", "dist", "version", "module", "status", "error", "help")}
    offers = [_spec(spec) for spec in plugin.specs]
    return facts | {"offers": offers + [each.as_json() for each in kernels if each.plugin is plugin]}


def _options(catalog: Catalog, plugin: PluginInfo, spec: Spec) -> dict[str, Any]:
    """{"options": rows}, or {"error": why they can't be shown}."""
    from headrace.catalog import Entry
    from headrace.options import describe

    if spec.options is None:
        return {"options": []}
    try:
        return {"options": describe(catalog.load_object(spec.options, Entry(spec, plugin)))}
    except FAULTS as error:  # shown in place of the options
        return {"error": why(error)}
