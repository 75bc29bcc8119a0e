"""Plugins that work, plugins that don't, and what the catalog says about each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from plugin_text import HEAD, plugin_module

from headrace import hooks
from headrace.catalog import Catalog, PluginInfo
from headrace.errors import ModelError, PluginError
from headrace.hooks import BackendSpec, CommandSpec, DrafterSpec, KernelSpec, StoreSpec
from headrace.types import ModelSource

STORE = HEAD + "@hookimpl\ndef headrace_stores():\n    yield StoreSpec(name={name!r}, factory='m:F', summary='s')\n"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one entry point on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def add(name: str, code: str, dist: str | None = None, version: str = "0.4", module: str | None = None) -> None:
        dist = dist or f"headrace-{name}"
        module = module or f"plug_{dist.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[headrace]\n{name} = {module}\n")

    yield add
    for module in set(sys.modules) - before:
        if module.startswith("plug_"):
            del sys.modules[module]


def plugin(catalog: Catalog, name: str) -> PluginInfo:
    return next(each for each in catalog.plugins if each.name == name)


def in_process(code: str, api: Any = 1) -> ModuleType:
    module = plugin_module(code)
    module.headrace_api = api  # type: ignore[attr-defined]
    return module


def broken(code: str, api: Any = 1) -> PluginInfo:
    catalog = Catalog.load(extra={"mine": in_process(code, api)})
    info = plugin(catalog, "mine")
    assert info.status == "broken"
    assert not info.specs
    assert plugin(catalog, "builtin").status == "ok"
    return info


def test_records_are_found_by_kind_and_name(install: Install) -> None:
    install("redis", STORE.format(name="redis"))
    catalog = Catalog.load()
    entry = catalog.find(StoreSpec, "redis")
    assert (entry.plugin.name, entry.plugin.dist, entry.plugin.version) == ("redis", "headrace-redis", "0.4")
    assert [each.name for each in catalog.plugins] == sorted(each.name for each in catalog.plugins)
    with pytest.raises(PluginError, match="no drafter named 'redis'"):
        catalog.find(DrafterSpec, "redis")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_failing_import_is_remembered(install: Install, code: str, error: str) -> None:
    install("bad", HEAD + code)
    catalog = Catalog.load()
    assert plugin(catalog, "bad").status == "broken"
    assert error in plugin(catalog, "bad").error
    assert "Traceback" in plugin(catalog, "bad").trace
    assert catalog.find(CommandSpec, "plugins")
    with pytest.raises(PluginError) as raised:  # fatal only now, and then with the reason
        catalog.find(StoreSpec, "bad")
    assert error in raised.value.help


def test_a_missing_package_brings_its_pip_line(install: Install) -> None:
    install("bad", HEAD + "import no_such_package.inner")
    assert "pip install no_such_package," in plugin(Catalog.load(), "bad").help


def test_an_interrupt_is_not_swallowed(install: Install) -> None:
    install("bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Catalog.load()


def test_a_duplicate_name_breaks_both(install: Install) -> None:
    install("twin", STORE.format(name="one"), dist="headrace-a")
    install("twin", STORE.format(name="two"), dist="headrace-b", version="2.0")
    catalog = Catalog.load()
    assert [each.name for each in catalog.plugins].count("twin") == 1
    info = plugin(catalog, "twin")
    assert info.status == "broken"
    assert "headrace-a 0.4 and headrace-b 2.0" in info.error
    assert not [name for name in sys.modules if name.startswith("plug_")]
    with pytest.raises(PluginError, match="no store") as raised:
        catalog.find(StoreSpec, "one")
    assert "duplicate name" in raised.value.help


def test_a_name_offered_twice_is_an_error_when_selected(install: Install) -> None:
    install("a", STORE.format(name="same"))
    install("b", STORE.format(name="same"))
    catalog = Catalog.load()
    with pytest.raises(PluginError, match=r"'a' \(headrace-a 0.4\) and 'b' \(headrace-b 0.4\)"):
        catalog.find(StoreSpec, "same")
    assert catalog.without(["b"]).find(StoreSpec, "same").plugin.name == "a"


@pytest.mark.parametrize(
    ("api", "current", "text", "help"),
    [
        (None, 1, "does not say which hook API", "headrace_api = 1"),
        (1, 3, "speaks hook API 1; this headrace", "Upgrade it"),
        (4, 3, "needs 2-3", "Upgrade headrace"),
        ("1", 1, "is not a number", "headrace_api = 1"),
        (True, 1, "is not a number", "headrace_api = 1"),
    ],
)
def test_other_apis_are_refused(monkeypatch: pytest.MonkeyPatch, api: Any, current: int, text: str, help: str) -> None:
    monkeypatch.setattr(hooks, "API", current)
    info = plugin(Catalog.load(extra={"mine": in_process("", api)}), "mine")
    assert (info.status, text in info.error, help in info.help) == ("broken", True, True), info


@pytest.mark.parametrize("api", [2, 3])
def test_this_api_and_the_one_before_are_served(monkeypatch: pytest.MonkeyPatch, api: int) -> None:
    monkeypatch.setattr(hooks, "API", 3)
    assert plugin(Catalog.load(extra={"mine": in_process("", api)}), "mine").status == "ok"


def test_an_unknown_hook_is_named(install: Install) -> None:
    info = broken("@hookimpl\ndef headrace_store():\n    return ()")
    assert "'headrace_store', which headrace" in info.error
    assert "did you mean 'headrace_stores'?" in info.help
    assert plugin(
        Catalog.load(extra={"mine": in_process("@hookimpl(optionalhook=True)\ndef headrace_later(): pass")}), "mine"
    ).status == "ok"  # fmt: skip


def test_hook_arguments_are_checked() -> None:
    assert "headrace_stores" in broken("@hookimpl\ndef headrace_stores(device):\n    return ()").error


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("yield 3", "yielded 3, a int; it must yield StoreSpec"),
        ("yield DrafterSpec(name='x', factory='m:F', summary='')", "it must yield StoreSpec"),
        ("return StoreSpec(name='x', factory='m:F', summary='')", "not a series of StoreSpec"),
        ("yield StoreSpec(name='x', factory='m.F', summary='')", 'not of the form "module:attribute"'),
        ("yield StoreSpec(name='x', factory='m:F', options='m', summary='')", "options = 'm'"),
        ("yield StoreSpec(name='x y', factory='m:F', summary='')", "the name 'x y'"),
        ("yield StoreSpec(name='none', factory='m:F', summary='')", "the name 'none'"),
        ("yield StoreSpec(name='x', factory='m:F', summary='', requires='redis')", "must be a tuple of strings"),
        ("yield StoreSpec(name='x', factory='m:F', summary=3)", "summary = 3 of 'x' must be of type str"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise type('Odd', (Exception,), {'__str__': None})", "Odd"),
        ("for i in 1, 2: yield StoreSpec(name='x', factory='m:F', summary='')", "two records"),
    ],
)
def test_wrong_records_break_their_plugin_only(body: str, error: str) -> None:
    assert error in broken(f"@hookimpl\ndef headrace_stores():\n    {body}").error


def test_kernels_are_asked_for_a_device() -> None:
    code = """
@hookimpl
def headrace_kernels(device):
    if device == "boom":
        1 / 0
    yield KernelSpec(name="mine", op="norm.rms", factory="m:f", summary=device)
"""
    catalog = Catalog.load(extra={"mine": in_process(code)})
    assert catalog.specs(KernelSpec) == []
    assert [entry.spec.summary for entry in catalog.kernels("npu")] == ["npu"]
    with pytest.raises(PluginError, match=r"'mine' .*failed to list kernels for 'boom': ZeroDivisionError"):
        catalog.kernels("boom")


def test_disabling(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("a", "raise RuntimeError('a disabled plugin is not imported')")
    install("b", STORE.format(name="b"))
    monkeypatch.setenv("HEADRACE_DISABLE_PLUGINS", " b, nowhere ,")
    catalog = Catalog.load(disable=["a", "nothing"])
    assert [plugin(catalog, name).status for name in "ab"] == ["disabled", "disabled"]
    assert [name for name, _ in catalog.unknown_disabled] == ["nothing", "nowhere"]
    assert catalog.unknown_disabled[1][1] == "HEADRACE_DISABLE_PLUGINS"
    with pytest.raises(PluginError) as raised:
        catalog.find(StoreSpec, "b")
    assert "plugin 'b' (headrace-b 0.4) is disabled" in raised.value.help
    with pytest.raises(PluginError, match="'bultin' can't be disabled") as raised:
        catalog.without(["bultin"])
    assert "did you mean 'builtin'" in raised.value.help


def test_an_unknown_backend_names_the_extra() -> None:
    catalog = Catalog.load().without(["builtin"])
    catalog = catalog.without(["gguf"]) if "gguf" in {each.name for each in catalog.plugins} else catalog
    with pytest.raises(PluginError) as raised:
        catalog.find(BackendSpec, "gguf")
    assert "pip install 'headrace[gguf]'" in raised.value.help


def test_loading_objects() -> None:
    code = """
@hookimpl
def headrace_stores():
    yield StoreSpec(name="ok", factory="collections:OrderedDict.fromkeys", summary="")
    yield StoreSpec(name="missing", factory="json:loads", summary="", requires=("no_such",), install="pip install it")
    yield StoreSpec(name="attribute", factory="json:nothing", summary="")
    yield StoreSpec(name="module", factory="json.nowhere:x", summary="")
"""
    catalog = Catalog.load(extra={"mine": in_process(code)})

    def load(name: str) -> Any:
        entry = catalog.find(StoreSpec, name)
        return catalog.load_object(entry.spec.factory, entry)

    assert load("ok")(["a"]) == {"a": None}
    for name, error in [("attribute", "json:nothing"), ("module", "json.nowhere"), ("missing", "'no_such'")]:
        with pytest.raises(PluginError, match=error) as raised:
            load(name)
        assert "'mine' (in-process)" in raised.value.message
    assert raised.value.help == "pip install it"


def test_a_factory_that_needs_a_package(install: Install, tmp_path: Path) -> None:
    install("a", STORE.format(name="a").replace("m:F", "plug_impl:F"))
    (tmp_path / "plug_impl.py").write_text("import no_such_package.deep")
    catalog = Catalog.load()
    entry = catalog.find(StoreSpec, "a")
    with pytest.raises(PluginError, match="needs the package 'no_such_package'") as raised:
        catalog.load_object(entry.spec.factory, entry)
    assert raised.value.help == "pip install no_such_package"


def test_resolving() -> None:
    code = """
from headrace.types import ModelSource
@hookimpl
def headrace_resolve(uri):
    if uri == "mine://bad":
        return "path"
    if uri == "mine://boom":
        1 / 0
    if uri == "mine://exit":
        raise SystemExit(3)
    if uri.startswith("mine://"):
        return ModelSource(uri=uri, path="", format="mine")
"""
    catalog = Catalog.load(extra={"mine": in_process(code)})
    assert catalog.resolve("mine://x") == ModelSource(uri="mine://x", path="", format="mine")
    assert catalog.resolve("toy://").format == "toy"
    for uri in ("mine://bad", "mine://boom", "mine://exit"):
        with pytest.raises(PluginError, match="plugin 'mine' "):
            catalog.resolve(uri)
    with pytest.raises(ModelError, match="no plugin knows the scheme 's4://'"):
        catalog.resolve("s4://x")
    with pytest.raises(ModelError):
        catalog.without(["mine"]).resolve("mine://x")


def test_no_hook_is_called_after_the_catalog_was_loaded() -> None:
    catalog = Catalog.load()
    calls: list[str] = []
    stop = catalog.manager.add_hookcall_monitoring(lambda name, *_: calls.append(name), lambda *_: None)
    entry = catalog.find(BackendSpec, "toy")
    catalog.load_object(entry.spec.probe, entry)
    assert not calls
    catalog.resolve("toy://")
    stop()
    assert set(calls) == {"headrace_resolve"}


@pytest.mark.parametrize("metadata", [None, b"", b"Name: x\n", b"\xff\xfe"])
def test_a_plugin_without_readable_metadata_is_a_plugin_all_the_same(
    metadata: bytes | None, install: Install, tmp_path: Path
) -> None:
    install("bare", HEAD)
    path = tmp_path / "headrace_bare-0.4.dist-info" / "METADATA"
    path.unlink() if metadata is None else path.write_bytes(metadata)
    assert plugin(Catalog.load(), "bare").status == "ok"


def test_entry_points_that_can_not_be_read_are_named(install: Install, tmp_path: Path) -> None:
    install("torn", HEAD)
    (tmp_path / "headrace_torn-0.4.dist-info" / "entry_points.txt").write_bytes(b"[headrace]\ntorn = \xff\n")
    with pytest.raises(PluginError, match=r"HR-PLUGIN-02: the entry points of .*headrace_torn-0.4.dist-info"):
        Catalog.load()
