"""Configs: layers, units, secrets, and errors that say where and what next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_text import plugin_module
from pydantic import Field, SecretStr, ValidationError

from headrace.catalog import Catalog
from headrace.config import Choice, Config, EngineTable, SamplingTable, choose, load_config
from headrace.errors import EXIT_CONFIG, EXIT_PLUGIN, ConfigError, HeadraceError
from headrace.hooks import StoreSpec
from headrace.options import ByteSize, Options, Seconds, describe
from headrace.tomlmap import key_lines
from headrace.types import FALLBACK_SAMPLING, EngineOptions, field_names

CATALOG = Catalog.load()
Write = Callable[..., Path]
PLUGIN = """
@hookimpl
def headrace_stores():
    yield StoreSpec(name="box", factory="fake_store:Box", options="fake_store:BoxOptions", summary="")
    yield StoreSpec(name="bare", factory="fake_store:Box", summary="")
    yield StoreSpec(name="plain", factory="fake_store:Box", options="fake_store:Box", summary="")
"""


class Ttl(Options):
    prefix: Seconds = 60.0
    state: Seconds = 1.0


class BoxOptions(Options):
    path: Path = Path("~/box")
    """Where it lies."""
    capacity: ByteSize = 1 << 20
    url: SecretStr = SecretStr("")
    ttl: Ttl = Ttl()
    size: int | None = None
    slots: int | str = 1
    names: tuple[str, ...] = ()
    extra: dict[str, str] = Field(default_factory=dict)
    needed: int = Field(description="How many.")


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    store = ModuleType("fake_store")
    store.BoxOptions = BoxOptions  # type: ignore[attr-defined]
    store.Box = object  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "fake_store", store)
    return Catalog.load(extra={"fake": plugin_module(PLUGIN)})


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "node.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def problems(path: Path | None, catalog: Catalog | None = None, **kwargs: Any) -> list[HeadraceError]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, catalog=catalog, **kwargs)
    return list(raised.value.problems)


def problem(path: Path | None, catalog: Catalog | None = None, **kwargs: Any) -> HeadraceError:
    (one,) = problems(path, catalog, **kwargs)
    return one


def box(config: Config, catalog: Catalog) -> BoxOptions:
    assert config.store is not None
    found: list[HeadraceError] = []
    chosen = choose(config, config.store, StoreSpec, catalog, found)
    assert chosen is not None, found
    assert isinstance(chosen.options, BoxOptions)
    return chosen.options


# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_whole_file(write: Write) -> None:
    path = write("""
        model = "toy://vocab=512"
        determinism = "off"
        [engine]
        max_sequences = 3
        [sampling]
        temperature = 0
        seed = "random"
        [backend]
        use = "toy"
        kv = "slots"
        [observers]
        log = { use = "x", level = 2 }
        [parallel]
        experts = { use = "ep", size = 4 }
        [plugins]
        disable = ["a"]
        [chat]
        system = "Hi."
        """)
    config = load_config(path)
    assert config.engine == EngineOptions(max_sequences=3)
    assert config.sampling == {"temperature": 0.0, "seed": "random"}
    assert config.backend is not None
    assert (config.backend.use, config.backend.options) == ("toy", {"kv": "slots"})
    assert config.observers == (
        Choice(
            path=("observers", "log"),
            use="x",
            options={"level": 2},
            where=config.origin["observers.log.use"],
        ),
    )
    assert config.parallel["experts"].options == {"size": 4}
    assert (config.plugins_disable, config.chat, config.determinism) == (("a",), {"system": "Hi."}, "off")
    assert config.origin["engine.max_sequences"].line == 5


def test_defaults_are_the_engines_own() -> None:
    assert load_config(None, model="toy://").engine == EngineOptions()
    assert set(EngineTable.model_fields) == set(field_names(EngineOptions))
    assert set(SamplingTable.model_fields) == set(FALLBACK_SAMPLING)


def test_observers_as_a_list(write: Write) -> None:
    config = load_config(write('model = "m://"\nobservers = [{ use = "a" }, { use = "b" }]'))
    assert [(each.key, each.use) for each in config.observers] == [("observers.0", "a"), ("observers.1", "b")]


def test_a_small_batch_lowers_the_default_chunk(write: Write) -> None:
    config = load_config(None, model="m://", sets=["engine.max_batch_tokens=100"])
    assert config.engine.prefill_chunk_tokens == 100
    error = problem(None, model="m://", sets=["engine.max_batch_tokens=100", "engine.prefill_chunk_tokens=200"])
    assert "prefill_chunk_tokens = 200 does not fit" in error.help


def test_the_default_file_is_that_of_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", str(write('model = "m://env"')))
    assert load_config(None).model == "m://env"
    assert load_config(None, model="m://mine").path is None
    monkeypatch.setenv("HEADRACE_CONFIG", "")
    assert problem(None).code == "HR-CONFIG-05"


def test_relative_paths_are_relative_to_their_file(write: Write, tmp_path: Path, catalog: Catalog) -> None:
    write('model = "m.gguf"\n[store]\nuse = "box"\nneeded = 1\npath = "here"', "base/base.toml")
    path = write('extends = "base/base.toml"\n[chat]\ntemplate = "t.jinja"')
    write("x", "t.jinja")
    config = load_config(path)
    assert config.model == str(tmp_path / "base/m.gguf")
    assert config.chat["template"] == str(tmp_path / "t.jinja")
    assert box(config, catalog).path == tmp_path / "base/here"
    config = load_config(path, model="other.gguf", sets=["store.path=there", "chat.template={{ x }}"])
    assert (config.model, config.chat["template"]) == ("other.gguf", "{{ x }}")
    assert box(config, catalog).path == Path("there")


def test_units_secrets_and_homes(write: Write, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOX_URL", "redis://s3cret")
    path = write("""
        model = "m://"
        [store]
        use = "box"
        needed = 1
        capacity = "1.5GiB"
        url = { env = "BOX_URL" }
        ttl = { prefix = "7d", state = "500ms" }
        extra = { env = "kept" }
        """)
    options = box(load_config(path, catalog=catalog), catalog)
    assert options.capacity == 3 << 29
    assert options.url.get_secret_value() == "redis://s3cret"
    assert "s3cret" not in repr(load_config(path)) + repr(options)
    assert (options.ttl.prefix, options.ttl.state) == (604800.0, 0.5)
    assert options.path == Path.home() / "box"
    assert options.extra == {"env": "kept"}


@pytest.mark.parametrize(
    ("text", "value"), [("64GiB", 64 << 30), ("500MB", 500 * 10**6), ("7B", 7), ("1 KiB", 1024), (12, 12)]
)
def test_sizes(text: Any, value: int) -> None:
    assert BoxOptions(needed=1, capacity=text).capacity == value


@pytest.mark.parametrize(("text", "value"), [("20s", 20), ("1h", 3600), ("5min", 300), ("5m", 300), (2, 2)])
def test_times(text: Any, value: float) -> None:
    assert Ttl(prefix=text).prefix == value


@pytest.mark.parametrize("text", ["64G", "GiB", "-1B", -1, "1e3B", True, "64gib", "", "9" * 400 + "GiB", 1 << 63])
def test_wrong_sizes(text: Any, write: Write, catalog: Catalog) -> None:
    error = problem(None, catalog, model="m://", overrides={"store": {"use": "box", "needed": 1, "capacity": text}})
    assert error.code == "HR-CONFIG-04"
    assert "size" in error.help


@pytest.mark.parametrize("text", ["20", "-1s", -1, float("inf"), float("nan"), 10**400, "9" * 400 + "s", True])
def test_wrong_times(text: Any) -> None:
    with pytest.raises(ValidationError, match="time"):
        Ttl(prefix=text)


# --- layers ----------------------------------------------------------------------------------------------------------


def test_extending_merges_key_by_key(write: Write) -> None:
    write('model = "m://base"\n[engine]\nmax_sequences = 1\nmax_waiting = 2\n[backend]\nuse = "a"\nx = 1', "base.toml")
    path = write('extends = "base.toml"\n[engine]\nmax_waiting = 3\n[backend]\nuse = "a"\ny = 2')
    config = load_config(path)
    assert (config.model, config.engine.max_sequences, config.engine.max_waiting) == ("m://base", 1, 3)
    assert config.backend is not None
    assert config.backend.options == {"x": 1, "y": 2}
    assert Path(config.origin["engine.max_sequences"].file).name == "base.toml"
    assert Path(config.origin["engine.max_waiting"].file).name == "node.toml"


def test_another_use_replaces_the_whole_table(write: Write) -> None:
    write('model = "m://"\n[backend]\nuse = "a"\nx = 1\n[drafter]\nuse = "d"', "base.toml")
    path = write('extends = "base.toml"\n[backend]\nuse = "b"\ny = 2\n[drafter]\nuse = "none"')
    config = load_config(path)
    assert config.backend is not None
    assert (config.backend.use, config.backend.options) == ("b", {"y": 2})
    assert "backend.x" not in config.origin
    assert config.drafter is None


def test_options_stay_when_only_one_side_names_a_plugin(write: Write) -> None:
    config = load_config(write('model = "m://"\n[backend]\nx = 1'), overrides={"backend": {"use": "a"}})
    assert config.backend is not None
    assert (config.backend.use, config.backend.options) == ("a", {"x": 1})


def test_extends_in_circles_and_into_nothing(write: Write) -> None:
    write('extends = "node.toml"', "b.toml")
    path = write('\nextends = "b.toml"')
    error = problem(path)
    assert error.code == "HR-CONFIG-06"
    assert "node.toml -> b.toml -> node.toml" in error.message
    assert "b.toml:1" in error.message
    error = problem(write('extends = "gone.toml"'))
    assert error.code == "HR-CONFIG-06"
    assert "gone.toml (extended by" in error.message
    assert problem(write("extends = 3")).code == "HR-CONFIG-04"


@pytest.mark.parametrize(
    ("text", "value"),
    [("x=1", 1), ("x=true", True), ("x=[1, 2]", [1, 2]), ("x=a b", "a b"), ('x="1"', "1"), ("x={a=1}", {"a": 1}),
     ("x=", ""), ("x=a=b", "a=b"), ("x = 1\ny = 2", "1\ny = 2"), ('"x.y"=1', None)],
)  # fmt: skip
def test_set_takes_toml_values_or_text(text: str, value: Any) -> None:
    config = load_config(None, model="m://", sets=[f"backend.{text}"])
    assert config.backend is not None
    assert config.backend.options == ({"x": value} if value is not None else {"x.y": 1})


def test_set_order_does_not_lose_options(write: Write) -> None:
    path = write('model = "m://"\n[backend]\nuse = "a"\nx = 1')
    config = load_config(path, sets=["backend.y=2", "backend.use=b"])
    assert config.backend is not None
    assert (config.backend.use, config.backend.options) == ("b", {"y": 2})


@pytest.mark.parametrize("text", ["engine", "=3", "a..b=1", "extends=x.toml", ""])
def test_malformed_sets(text: str) -> None:
    error = problem(None, model="m://", sets=[text])
    assert error.code == "HR-CONFIG-07"
    assert "--set" in error.message


def test_an_unknown_path_names_its_set(write: Write) -> None:
    error = problem(None, model="m://", sets=["engine.max_sequencs=4"])
    assert error.message == "unknown key 'engine.max_sequencs' (--set engine.max_sequencs=4)"
    assert "did you mean 'max_sequences'" in error.help
    error = problem(write('model = "m://"'), sets=["model.x=1"])
    assert error.message == 'model = {"x": 1} is not allowed (--set model.x=1)'
    assert "(argument)" in problem(None, model="m://", overrides={"engin": {}}).message
    assert load_config(None, model="m://", overrides={"engine.max_waiting": 5}).engine.max_waiting == 5


# --- errors ----------------------------------------------------------------------------------------------------------


def test_all_problems_are_shown_at_once(write: Write, catalog: Catalog) -> None:
    path = write("""
        model = "m://"
        determinsm = "off"
        determinism = "seded"
        max_sequences = 3
        [engine]
        max_waiting = "7"
        prefix_cache = 1
        [sampling]
        top_p = 3
        max_tokens = 4
        [store]
        use = "box"
        neded = 1
        slots = []
        path = { env = "HOME" }
        url = { env = "NO_SUCH_VARIABLE" }
        [drafter]
        use = "ngrm"
        [constraints]
        use = 1
        [observers]
        log = 1
        [plugins]
        disable = ["bultin"]
        """)
    for found in (problems(path), problems(path, catalog)):  # with problems, plugins are checked in any case
        text = "\n".join(map(str, found))
        for key, line in [("determinsm", 3), ("determinism", 4), ("max_sequences", 5), ("engine.max_waiting", 7),
                          ("engine.prefix_cache", 8), ("sampling.top_p", 10), ("sampling.max_tokens", 11),
                          ("constraints.use", 21), ("observers.log", 23)]:  # fmt: skip
            assert [each for each in found if key in each.message and f"node.toml:{line})" in each.message], (key, text)
    for key, line in [("store.neded", 14), ("store.needed", 12), ("store.slots", 15), ("store.path", 16),
                      ("store.url", 17), ("drafter.use", 19), ("bultin", 25)]:  # fmt: skip
        assert [each for each in found if key in each.message and f"node.toml:{line})" in each.message], (key, text)
    assert len(found) == 16, text
    assert "did you mean 'determinism'" in text
    assert "did you mean 'seeded'" in text
    assert "'max_sequences' belongs in [engine]" in text
    assert "did you mean 'needed'? store 'box' accepts: capacity, extra, names" in text
    assert "'store.path' (" in text
    assert "not a secret" in text
    assert "export NO_SUCH_VARIABLE=" in text
    assert "did you mean 'ngram'" in text
    assert "How many." in text


def test_a_required_option_and_a_plugin_without_options(catalog: Catalog) -> None:
    error = problem(None, catalog, model="m://", overrides={"store": {"use": "box"}})
    assert (error.code, error.help) == ("HR-CONFIG-05", "How many.")
    error = problem(None, catalog, model="m://", overrides={"store": {"use": "bare", "x": 1}})
    assert (error.code, error.help) == ("HR-CONFIG-03", "store 'bare' has no options")
    assert problem(None, catalog, model="m://", overrides={"store": {"use": "plain"}}).code == "HR-PLUGIN-07"


def test_nested_and_union_options_are_one_problem_each(catalog: Catalog) -> None:
    found = problems(None, catalog, model="m://", overrides={
        "store": {"use": "box", "needed": 1, "ttl": {"prefx": 1, "state": "x"}, "slots": 1.5, "names": ["a", 3]}
    })  # fmt: skip
    assert sorted(each.message.split(" (")[0] for each in found) == [
        "store.names.1 = 3 is not allowed",
        "store.slots = 1.5 is not allowed",
        'store.ttl.state = "x" is not allowed',
        "unknown key 'store.ttl.prefx'",
    ]
    assert any("did you mean 'prefix'? 'store.ttl' accepts: prefix, state" in each.help for each in found)
    assert any("integer, or it should be a valid string" in each.help for each in found)


def test_a_wrong_secret_is_not_shown(catalog: Catalog) -> None:
    error = problem(None, catalog, model="m://", overrides={"store": {"use": "box", "needed": 1, "url": ["s3cret"]}})
    assert "s3cret" not in str(error)


def test_secrets_stay_out_of_core_tables() -> None:
    assert problem(None, model="m://", overrides={"engine": {"max_waiting": {"env": "HOME"}}}).code == "HR-CONFIG-08"


def test_exit_codes(catalog: Catalog) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, model="m://", sets=["store.use=nothing"], catalog=catalog)
    assert raised.value.exit_code == EXIT_PLUGIN
    with pytest.raises(ConfigError) as raised:
        load_config(None, model="m://", sets=["store.use=nothing", "x=1"], catalog=catalog)
    assert raised.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ('model = "x"\nfoo = [1,\n', ":3:1 ", ""),
        ("a = 1\nb == 2\n", ":2:4 ", "Invalid value"),
        ("a = 1\na = 2\n", ":2:6 ", "Cannot overwrite"),
        ("model = x\n", ":1:9 ", "Invalid value"),
    ],
)
def test_syntax_errors_have_line_and_column(write: Write, text: str, place: str, reason: str) -> None:
    error = problem(write(text))
    assert error.code == "HR-CONFIG-02"
    assert f"node.toml{place}is not valid TOML: {reason}" in error.message


def test_files_that_are_no_config(write: Write, tmp_path: Path) -> None:
    write("", "near.toml")
    error = problem(tmp_path / "gone.toml")
    assert (error.code, "near.toml" in error.help) == ("HR-CONFIG-01", True)
    assert "is a folder" in problem(tmp_path).message
    (tmp_path / "m.gguf").write_bytes(b"GGUF\xff\xfe")
    assert "byte 4 is not UTF-8" in problem(tmp_path / "m.gguf").message
    assert problem(write("")).code == "HR-CONFIG-05"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('store = "box"', 'write [store], and use = "box" below'),
        ("engine = 3", "write [engine]"),
        ("[backend]\nuse = 3", "name of a plugin"),
        ("[parallel]\nnodes = []", "parallel.NAME"),
        ('[drafter]\nuse = "none"\nx = 1', "takes no options"),
        ('[chat]\ntemplate = "gone.jinja"', "Jinja"),
    ],
)
def test_tables_of_the_wrong_shape(write: Write, text: str, message: str) -> None:
    assert message in problem(write('model = "m://"\n' + text.replace("store =", "store ="))).help


_SCALARS = ["1", "true", "nan", "-inf", "1e400", "9" * 40, '"x"', '""', "1979-05-27", "07:32:00", "[]", "{}"]
_KEYS = ["use", "env", "x", '""', '"a.b"', "'q\"'", '"\\n\\u007f"', "slots", "0"]
_PLACES = [
    "model",
    "determinism",
    "backend",
    "drafter",
    "store",
    "engine",
    "sampling",
    "observers",
    "parallel",
    "chat",
    "plugins",
    "extends",
    "backend.kv",
    "engine.max_waiting",
    "sampling.top_p",
    "observers.a",
    "plugins.disable",
    "chat.template",
    "'we\\ird'",
    '"\\t"',
    'observers."a.b".use',
]


def _inline_table(pairs: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{key} = {value}" for key, value in pairs) + "}"


_VALUES = st.recursive(
    st.sampled_from(_SCALARS),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(_KEYS), inner), max_size=3, unique_by=lambda pair: pair[0]).map(
            _inline_table
        )
    ),
    max_leaves=8,
)


@given(place=st.sampled_from(_PLACES), value=_VALUES, backend=st.booleans())
def test_any_value_anywhere_is_a_config_or_a_config_error(place: str, value: str, backend: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "any.toml"
        path.write_text(f"{place} = {value}\n")
        with contextlib.suppress(ConfigError):
            load_config(
                path,
                model=None if place == "model" else "toy://",
                sets=["backend.use=toy"] if backend else [],
                catalog=CATALOG,
            )


# --- lines and descriptions ------------------------------------------------------------------------------------------


def test_lines_of_keys() -> None:
    text = '''# c
a = 1
b.c = """x
y = [ # not
"""
[t."q.r"]
z = { u = 1, v = [1, 2, { w = '}' }] } # c
arr = [
  1, # ]
  { k = "]\\"" },
]
[[obs]]
use = 'a'
[obs.sub]
x = 1
[[obs]]
use = 1979-05-27 07:32:00
\'''w # "\''' = 5
'''
    text = text.replace("'''w # \"''' = 5", "'w # \"' = 5")
    lines = key_lines(text)
    assert {key: lines[key] for key in [
        ("a",), ("b",), ("b", "c"), ("t", "q.r"), ("t", "q.r", "z", "u"), ("t", "q.r", "z", "v", "2", "w"),
        ("t", "q.r", "arr", "0"), ("t", "q.r", "arr", "1", "k"), ("obs", "0", "use"), ("obs", "0", "sub", "x"),
        ("obs", "1"), ("obs", "1", "use"), ("obs", "1", 'w # "'),
    ]} == {
        ("a",): 2, ("b",): 3, ("b", "c"): 3, ("t", "q.r"): 6, ("t", "q.r", "z", "u"): 7,
        ("t", "q.r", "z", "v", "2", "w"): 7, ("t", "q.r", "arr", "0"): 9, ("t", "q.r", "arr", "1", "k"): 10,
        ("obs", "0", "use"): 13, ("obs", "0", "sub", "x"): 15, ("obs", "1"): 16, ("obs", "1", "use"): 17,
        ("obs", "1", 'w # "'): 18,
    }  # fmt: skip


def test_lines_of_windows_files(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_bytes(b'model = "m://"\r\n\r\n[engine]\r\nx = """\r\na"""\r\ny = 1\r\n')
    assert ":6)" in problems(path)[1].message


def test_descriptions() -> None:
    rows = {row["name"]: row for row in describe(BoxOptions)}
    assert rows["path"] == {"name": "path", "type": "path", "default": '"~/box"', "doc": "Where it lies."}
    assert [rows[name]["type"] for name in ("capacity", "url", "ttl", "size", "slots", "names", "extra")] == [
        "size", "secret", "table", "integer", "integer or text", "list of text", "table of text"
    ]  # fmt: skip
    assert rows["needed"]["default"] == "required"
    assert rows["size"]["default"] == "unset"


def test_texts_that_are_no_utf8_are_named_among_the_other_problems() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, model="a\udcff", overrides={"engine": {"max_sequences": 0}})
    assert raised.value.code == "HR-CONFIG-04"
    assert "model (argument) is no UTF-8 text" in str(raised.value)
    assert "engine.max_sequences = 0" in str(raised.value)


def test_constraints_without_a_name_are_auto() -> None:
    """One option is enough: the engine is the one that a config without the table has."""
    chosen = load_config(None, model="toy://vocab=320", sets=["constraints.max_text=1KiB"]).constraints
    assert chosen is not None
    assert (chosen.use, dict(chosen.options)) == ("auto", {"max_text": "1KiB"})
