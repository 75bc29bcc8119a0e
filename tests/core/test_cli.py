"""The command line: dispatch, global flags, exit codes, and that one broken plugin hurts nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from plugin_text import plugin_module

from headrace import __version__
from headrace.catalog import Catalog
from headrace.cli import main
from headrace.errors import (
    EXIT_CHECK,
    EXIT_CONFIG,
    EXIT_INTERNAL,
    EXIT_INTERRUPT,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_OUTPUT,
    EXIT_PLUGIN,
    EXIT_USAGE,
    ModelError,
)
from headrace_plugins.commands import plugins

PLUGIN = """
from headrace.hooks import *
from headrace.hooks import hookimpl
headrace_api = 1
@hookimpl
def headrace_commands():
    yield CommandSpec(name="act", factory="fake_command", summary="does what a test says", order=1)
    yield CommandSpec(name="needs", factory="fake_command", summary="", requires=("no_such",), install="pip install it")
    yield CommandSpec(name="hollow", factory="json", summary="")
@hookimpl
def headrace_backends():
    yield BackendSpec(name="new", formats=("new",), probe="json:loads", factory="json:loads", summary="a new device")
@hookimpl
def headrace_drafters():
    yield DrafterSpec(name="lacking", factory="json:loads", summary="", requires=("no_such",), install="pip install it")
@hookimpl
def headrace_stores():
    yield StoreSpec(name="kept", factory="json:loads", summary="")
@hookimpl
def headrace_checks():
    yield CheckSpec(name="mine", factory="fake_command:check", summary="")
"""
BROKEN = "raise RuntimeError('this plugin is broken')"

Run = Callable[..., tuple[int, str, str]]


class Act:
    """The fake sub-command."""

    def __init__(self) -> None:
        self.do: Callable[[Any], Any] = lambda args: 0
        self.check: Callable[[], Any] = list

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("words", nargs="*")
        parser.add_argument("--mode", choices=("fast", "slow"))


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Act:
    """Two plugins on sys.path: one with sub-commands, one that fails to import."""
    act = Act()
    command = ModuleType("fake_command")
    vars(command).update(
        add_arguments=act.add_arguments, run=lambda args: act.do(args), check=lambda: act.check()
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "fake_command", command)
    for name, code in {"acting": PLUGIN, "shattered": BROKEN}.items():
        (tmp_path / f"cli_{name}.py").write_text(code)
        info = tmp_path / f"headrace_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headrace-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[headrace]\n{name} = cli_{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    return act


@pytest.fixture
def run(act: Act, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    sys.modules.pop("cli_acting", None)


def test_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "load", None)
    assert run("--version") == (EXIT_OK, f"headrace {__version__}\n", "")


def test_help_lists_commands_in_order_and_broken_plugins_at_the_end(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (EXIT_OK, "")
    names = [line.split()[0] for line in out.partition("commands:\n")[2].partition("\n\n")[0].splitlines()]
    assert names[0] == "act"
    assert names.index("run") < names.index("config") < names.index("completion")
    assert out.splitlines()[-1] == "broken plugins: 'shattered' (headrace-shattered 1.2); see `headrace plugins list`"
    code, out, _ = run()
    assert (code, out.startswith("usage: headrace")) == (EXIT_USAGE, True)


def test_a_command_gets_its_arguments_and_the_global_ones(run: Run, act: Act) -> None:
    seen: list[Any] = []
    act.do = seen.append
    flags = ["--log-level", "error", "-q", "--no-plugin", "gguf", "--no-plugin=shattered"]
    for line in (["act", "a", *flags, "b", "--mode", "fast"], [*flags, "act", "--mode=fast", "a", "b"]):
        assert run(*line)[0] == EXIT_OK
        args = seen.pop()
        assert (args.words, args.mode, args.quiet, args.log_level) == (["a", "b"], "fast", True, "error")
        assert {plugin.name for plugin in args.catalog.plugins if plugin.status == "disabled"} == {"gguf", "shattered"}


def test_nothing_after_two_dashes_is_a_flag(run: Run, act: Act) -> None:
    seen: list[Any] = []
    act.do = lambda args: seen.append(args.words)
    assert run("act", "--", "--log-json", "-q")[0] == EXIT_OK
    assert seen == [["--log-json", "-q"]]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["acct"], EXIT_USAGE, "did you mean 'act'?"),
        (["--frob", "act"], EXIT_USAGE, "unknown option '--frob'"),
        (["act", "--mode", "fasst"], EXIT_USAGE, "did you mean 'fast'?"),
        (["act", "--mod", "fast"], EXIT_USAGE, "--mod"),
        (["act", "--log-level", "loud"], EXIT_USAGE, "invalid choice: 'loud'"),
        (["--no-plugin", "bultin", "act"], EXIT_USAGE, "did you mean 'builtin'?"),
        (["needs"], EXIT_PLUGIN, "help: pip install it"),
        (["hollow"], EXIT_PLUGIN, "has no function 'add_arguments'"),
        (["plugins", "lst"], EXIT_USAGE, "did you mean 'list'?"),
        (["plugins", "show", "nothing"], EXIT_PLUGIN, "is named 'nothing'"),
        (["config", "check", "gone.toml"], EXIT_CONFIG, "no such config file: gone.toml"),
        (["config", "explain", "s4://x"], EXIT_MODEL, "scheme 's4://'"),
        (["toy://"], EXIT_USAGE, "headrace run toy://"),
    ],
)
def test_errors_and_exit_codes(run: Run, argv: list[str], code: int, text: str) -> None:
    got, out, err = run(*argv)
    assert (got, out) == (code, "")
    assert err.startswith("HR-")
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "near", "usage"),
    [
        ("run toy:// hi --max-token 5", "--max-tokens", "headrace run "),
        ("run --max-token=5 toy:// hi", "--max-tokens", "headrace run "),
        ("chat toy:// --max-turn 3", "--max-turns", "headrace chat "),
        ("config explain toy:// --jsn", "--json", "headrace config explain "),
        ("config check toy:// --bakend toy", "--backend", "headrace config check "),
        ("act --log-lvl debug", "--log-level", "headrace act "),
        ("config check a.toml b.toml", "", "headrace config check "),
        ("plugins list --zzz", "", "headrace plugins list "),
    ],
)
def test_unknown_options_name_the_one_that_was_meant(run: Run, line: str, near: str, usage: str) -> None:
    code, out, err = run(*line.split())
    message, help = err.splitlines()
    assert (code, out) == (EXIT_USAGE, "")
    assert message.startswith(f"HR-USAGE-01: {usage.strip()}: unrecognized arguments: ")
    assert help.startswith(f"help: did you mean '{near}'? usage: {usage}" if near else f"help: usage: {usage}")


def test_the_argument_of_config_explain_has_one_name(run: Run) -> None:
    for verb in ("check", "explain"):
        out = run("config", verb, "--help")[1]
        assert "[FILE]" in out
        assert "a config file whose name does not end in .toml" in out
        assert "MODEL_OR_CONFIG" not in out


def test_an_unknown_command_mentions_broken_and_disabled_plugins(run: Run) -> None:
    assert "plugin 'shattered' (headrace-shattered 1.2) is broken" in run("serve")[2]
    assert "plugin 'acting' (headrace-acting 1.2) is disabled" in run("act", "--no-plugin", "acting")[2]


def test_typed_errors_of_a_command(run: Run, act: Act) -> None:
    act.do = fail(ModelError("HR-X-01", "it broke", "mend it"))
    assert run("act") == (EXIT_MODEL, "", "HR-X-01: it broke\nhelp: mend it\n")
    _, _, err = run("act", "--log-json")
    assert json.loads(err) == {"level": "error", "code": "HR-X-01", "message": "it broke", "help": "mend it"}


def test_bugs_have_a_traceback_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_plugins.commands.doctor.run", fail(ValueError("oops")))
    code, _, err = run("doctor")
    assert (code, err.splitlines()[0]) == (EXIT_INTERNAL, "HR-INTERNAL: unexpected ValueError: oops")
    assert "--log-level debug" in err
    assert "Traceback" not in err
    assert "Traceback" in run("doctor", "--log-level", "debug")[2]
    lines = [json.loads(line) for line in run("doctor", "--log-level", "debug", "--log-json")[2].splitlines()]
    assert "Traceback" in lines[0]["traceback"]
    assert lines[-1]["code"] == "HR-INTERNAL"


@pytest.mark.parametrize("error", [ValueError("oops"), OSError(5, "oops"), SystemExit("oops"), SystemExit(3)])
def test_faults_of_others_commands_are_theirs(run: Run, act: Act, error: BaseException) -> None:
    act.do = fail(error)
    code, out, err = run("act")
    assert (code, out) == (EXIT_PLUGIN, "")
    assert "HR-PLUGIN-09: command 'act' of plugin 'acting' (headrace-acting 1.2) failed" in err
    assert "report it to the authors of headrace-acting" in err
    assert "Traceback" in run("act", "--log-level", "debug")[2]


@pytest.mark.parametrize("returned", ["0", True, 1.5])
def test_exit_codes_are_whole_numbers(run: Run, act: Act, returned: object) -> None:
    act.do = lambda args: returned
    code, _, err = run("act")
    assert code == EXIT_PLUGIN
    assert f"returned {returned!r}, which is no exit code" in err


def test_an_interrupt(run: Run, act: Act) -> None:
    act.do = fail(KeyboardInterrupt())
    assert run("act") == (EXIT_INTERRUPT, "", "")


def test_an_interrupt_that_trips_what_cleans_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*args: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("save_nargs")

    monkeypatch.setattr("argparse.ArgumentParser.parse_intermixed_args", parse)
    assert run("run", "toy://", "hi") == (EXIT_INTERRUPT, "", "")


def test_log_json_writes_one_object_a_line(run: Run, act: Act, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setenv("HEADRACE_DISABLE_PLUGINS", "gone")
    act.do = lambda args: logging.getLogger("headrace.x").warning("two\nlines %d", 3)
    first, second = [json.loads(line) for line in run("act", "--log-json")[2].splitlines()]
    assert "HEADRACE_DISABLE_PLUGINS" in first["message"]
    assert (second["logger"], second["message"], second["level"]) == ("headrace.x", "two\nlines 3", "warning")
    assert run("act", "-q")[2].startswith("warning: plugin 'gone' can't be disabled")


def fail(error: BaseException) -> Callable[[Any], Any]:
    def do(args: Any) -> Any:
        raise error

    return do


# --- in a process of its own -----------------------------------------------------------------------------------------


def headrace(*argv: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    code = "import sys; from headrace.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False, **kwargs)


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import sys; from headrace.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, "plugins", "show", "toy"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == EXIT_OK


@pytest.mark.parametrize(
    "argv", [["--version"], ["--help"], ["plugins", "list"], ["run", "toy://", "hi", "--max-tokens", "3"]]
)
def test_closed_and_full_streams(argv: list[str]) -> None:
    code = "import sys; from headrace.cli import main; sys.exit(main())"

    def shell(redirect: str) -> subprocess.CompletedProcess[str]:
        line = f'exec "$0" "$@" {redirect}'
        words = ["sh", "-c", line, sys.executable, "-c", code, *argv]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    assert shell("<&- >&- 2>&-").returncode == EXIT_OK
    assert shell("2>&-").returncode == EXIT_OK
    if Path("/dev/full").exists():
        full = shell(">/dev/full")
        assert full.returncode == EXIT_OUTPUT
        assert full.stderr.splitlines()[-2].startswith("HR-OUTPUT-01: the output can't be written: No space left")
        assert "Traceback" not in full.stderr


def test_a_full_stderr_leaves_the_exit_code() -> None:
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            code = "import sys; from headrace.cli import main; sys.exit(main())"
            done = subprocess.run([sys.executable, "-c", code, "nope"], stderr=full, check=False)
        assert done.returncode == EXIT_USAGE


def test_bytes_that_are_no_text() -> None:
    """In the arguments, on stdin, and for a terminal without the letters."""
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = headrace("run", "toy://", "--raw", "--max-tokens", "3", input=b"\xff".decode("latin-1"), env=environ)
    assert "HR-INTERNAL" not in done.stderr
    done = headrace("config", "check", os.fsdecode(b"\xff.toml"), env=environ)
    assert (done.returncode, done.stderr.splitlines()[0]) == (3, "HR-CONFIG-01: no such config file: \\udcff.toml")
    environ["PYTHONIOENCODING"] = "ascii"
    for command in (["doctor"], ["doctor", "--json"], ["run", "toy://", "hi", "--json", "--max-tokens", "3"]):
        done = headrace(*command, env=environ)
        assert "HR-INTERNAL" not in done.stderr
        if "--json" in command:
            json.loads(done.stdout)


@pytest.mark.parametrize(
    ("argv", "never"),
    [
        (["--version"], {"headrace.catalog", "pluggy", "logging", "numpy", "pydantic", "asyncio"}),
        (["--help"], {"numpy", "pydantic", "asyncio", "torch", "llama_cpp", "rich", "jinja2", "headrace.config"}),
        (["plugins", "list"], {"numpy", "pydantic", "asyncio", "torch", "llama_cpp", "headrace.config"}),
    ],
)
def test_light_commands_load_light_modules(argv: list[str], never: set[str]) -> None:
    code = "import sys; from headrace.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert not set(done.stderr.split()) & never


# --- first-party commands --------------------------------------------------------------------------------------------


def test_plugins_list(run: Run) -> None:
    code, out, _ = run("plugins", "list")
    assert code == EXIT_OK
    assert "plugin 'shattered' (headrace-shattered 1.2) is broken: RuntimeError: this plugin is broken" in out
    assert "a new device (UNVERIFIED on any hardware)" in out
    listed = {each["name"]: each for each in json.loads(run("plugins", "list", "--json")[1])}
    assert listed["shattered"]["status"] == "broken"
    assert {"kind": "backend", "name": "new"}.items() <= listed["acting"]["offers"][0].items()


def test_plugins_show(run: Run) -> None:
    code, out, _ = run("plugins", "show", "toy")
    assert code == EXIT_OK
    assert "backend toy (plugin builtin, headrace" in out
    assert "How KV is kept" in out
    assert "Traceback" in run("plugins", "show", "shattered")[1]
    shown = json.loads(run("plugins", "show", "ngram", "--json")[1])
    assert {row["name"] for row in shown["offers"][0]["options"]} >= {"max_draft"}


def test_plugins_list_and_show_kernels(run: Run) -> None:
    out = run("plugins", "list")[1]
    assert re.search(r"^OP +KERNEL +DEVICE +PLUGIN +PRIORITY +EXACT +SUMMARY$", out, re.M)
    assert re.search(r"^norm\.rms +torch +cpu +builtin +0 +yes +RMS norm", out, re.M)
    assert re.search(r"^model +dense +builtin +dense decoders", out, re.M)
    listed = {each["name"]: each for each in json.loads(run("plugins", "list", "--json")[1])}
    kernels = [each for each in listed["builtin"]["offers"] if each["kind"] == "kernel"]
    assert {"op": "norm.rms", "name": "torch", "device": "cpu", "exact": True, "priority": 0}.items() <= next(
        each for each in kernels if each["op"] == "norm.rms"
    ).items()
    out = run("plugins", "show", "norm.rms")[1]
    assert out.startswith("op norm.rms(x, weight, eps)\n\nx rsqrt(mean(x^2) + eps) weight")
    assert "linear.dense" not in out
    assert run("plugins", "show", "dense")[1].startswith("model dense (")
    assert run("plugins", "show", "torch-tiled")[1].startswith("OP ")
    assert json.loads(run("plugins", "show", "norm.rms", "--json")[1])["op"]["call"] == "norm.rms(x, weight, eps)"
    assert re.search(r"^linear\.dense +torch-tiled", run("plugins", "show", "torch-tiled")[1], re.M)
    assert "did you mean 'rope.apply'" in run("plugins", "show", "rope.aply")[2]


def test_a_plugin_that_cannot_list_its_kernels_hides_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    bad = plugin_module("@hookimpl\ndef headrace_kernels(device):\n    1 / 0\n")
    catalog = Catalog.load(extra={"bad": bad})
    for verb in ("list", "show"):
        plugins.run(argparse.Namespace(verb=verb, name="norm.rms", json=False, catalog=catalog))
        out = capsys.readouterr().out
        assert re.search(r"^norm\.rms +torch ", out, re.M)
        assert "HR-PLUGIN-01: plugin 'bad' (in-process) failed to list kernels for 'cpu': ZeroDivisionError" in out
        assert "--no-plugin bad" in out


def test_config_check_and_explain(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('model = "toy://"\n[drafter]\nuse = "ngram"\nmax_drafts = 3\n[engine]\nx = 1\n')
    code, _, err = run("config", "check", str(path))
    assert code == EXIT_CONFIG
    assert "did you mean 'max_draft'" in err
    assert "c.toml:6)" in err
    assert len([json.loads(line) for line in run("config", "check", str(path), "--log-json")[2].splitlines()]) == 2
    path.write_text('model = "toy://"\n[drafter]\nuse = "ngram"\nmax_draft = 3\n')
    assert run("config", "check", str(path)) == (EXIT_OK, f"{path}: no problems\n", "")
    code, out, _ = run("config", "explain", str(path))
    assert code == EXIT_OK
    assert "backend = toy  [builtin (headrace" in out
    assert "not new: reads new; the model is toy" in out
    assert "c.toml:3)" in out
    decisions = {each["key"]: each for each in json.loads(run("config", "explain", str(path), "--json")[1])}
    assert decisions["drafter"]["facts"]["option max_draft"] == 3


def test_config_check_takes_a_model_but_no_other_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.cfg"
    path.write_text('model = "toy://"\n')
    code, _, err = run("config", "check", str(path))
    assert code == EXIT_USAGE
    assert f"headrace config check --config {path}" in err
    assert run("config", "check", "--config", str(path))[0] == EXIT_OK
    assert run("config", "check", str(tmp_path / "gone"))[0] == EXIT_MODEL
    assert run("config", "check", "toy://")[0] == EXIT_OK


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        ('model = "gone.gguf"', EXIT_MODEL, "HR-SOURCE-01: no such file"),
        ('model = "bad.gguf"', EXIT_MODEL, "bad.gguf"),
        ('model = "bad.gguf"\n[backend]\nuse = "toy"', EXIT_MODEL, "reads toy; the model is gguf"),
        ('model = "pkg://no_such_models/m.gguf"', EXIT_MODEL, "HR-SOURCE-05"),
        ('model = "toy://"\n[drafter]\nuse = "lacking"', EXIT_PLUGIN, "HR-PLUGIN-05: drafter 'lacking'"),
        ('model = "toy://"\n[drafter]\nuse = "lacking"', EXIT_PLUGIN, "c.toml:3) asks\nhelp: pip install it"),
        ('model = "toy://"\n[store]\nuse = "kept"', EXIT_CONFIG, "[store] use = 'kept'"),
        ("[engine]\nmax_sequences = 4", EXIT_CONFIG, 'help: put model = "..." at the top of '),
    ],
)
def test_config_check_and_explain_refuse_what_run_would(
    run: Run, tmp_path: Path, text: str, code: int, found: str
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and no more")
    path = tmp_path / "c.toml"
    path.write_text(text)
    for verb in ("check", "explain"):
        got, out, err = run("config", verb, str(path))
        assert (got, out) == (code, "")
        assert found in err
    assert found in run("run", str(path), "hi")[2]


def test_config_check_downloads_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*args: Any, local_files_only: bool = False, **kwargs: Any) -> str:
        assert local_files_only
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    code, out, _ = run("config", "check", "hf://a/b/m.gguf")
    assert (code, out.count("\n")) == (EXIT_OK, 1)
    assert "no problems; the model hf://a/b/m.gguf itself was not looked at" in out


@pytest.mark.parametrize("name", ["", "3", 'x"', "a.b=c", "{}"])
def test_backend_names_are_never_read_as_toml(run: Run, name: str) -> None:
    code, _, err = run("config", "check", "toy://", "--backend", name)
    assert code in (EXIT_CONFIG, EXIT_PLUGIN)
    assert repr(name) in err


def test_config_init(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    assert run("config", "init", str(path), "--model", "toy://vocab=300", "--from", "toy")[0] == EXIT_OK
    assert run("config", "check", str(path))[0] == EXIT_OK
    assert 'model = "toy://vocab=300"' in path.read_text()
    code, _, err = run("config", "init", str(path))
    assert (code, "exists already" in err) == (EXIT_CONFIG, True)
    assert run("config", "init", str(path), "--force", "-q")[:2] == (EXIT_OK, "")
    assert "did you mean 'laptop'" in run("config", "init", str(path), "--force", "--from", "labtop")[2]
    assert "no such folder" in run("config", "init", str(tmp_path / "no/x.toml"))[2]


def test_config_init_starts_from_the_kind_of_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    for model, backend in ((str(tmp_path), "reference"), ("other.gguf", "gguf")):
        assert run("config", "init", str(path), "--force", "--model", model)[0] == EXIT_OK
        assert tomllib.loads(path.read_text())["backend"] == {"use": backend}


def test_doctor(run: Run, act: Act) -> None:
    from headrace.hooks import CheckResult

    act.check = lambda: [CheckResult("mine", "warn", "so so", "do this")]
    code, out, _ = run("doctor")
    assert code == EXIT_CHECK  # a plugin is broken
    assert "plugin shattered: disable it with --no-plugin shattered" in out
    assert "mine: do this" in out
    assert "UNVERIFIED  backend new" in out
    code, out, _ = run("doctor", "--json", "--no-plugin", "shattered")
    result = json.loads(out)
    checks = {each["name"]: each for each in result["checks"]}
    assert (code, result["ok"]) == (EXIT_OK, True), [each for each in result["checks"] if each["status"] == "fail"]
    assert checks["backend new"]["status"] == "unverified"
    assert checks["python"]["status"] == "ok"
    act.check = fail(ValueError("bad check"))  # type: ignore[assignment]
    checks = {each["name"]: each for each in json.loads(run("doctor", "--json")[1])["checks"]}
    assert checks["mine"]["status"] == "fail"


def test_doctor_survives_every_check(run: Run, act: Act) -> None:
    from headrace.hooks import CheckResult

    def noisy() -> Iterator[CheckResult]:
        print("noise")
        yield CheckResult("noisy", "ok", "fine", facts={(1, 2): float("nan"), "set": {3}, "text": "\udcff"})
        sys.exit(3)

    odd: list[Any] = [CheckResult("mine", "odd", "x"), CheckResult("mine", "ok", None), 5]  # type: ignore[arg-type]
    for check in (noisy, lambda: None, fail(SystemExit(3)), *(lambda each=each: [each] for each in odd)):
        act.check = check  # type: ignore[assignment]
        code, out, _ = run("doctor", "--json", "--no-plugin", "shattered")
        checks = {each["name"]: each for each in json.loads(out)["checks"]}
        assert (code, checks["mine"]["status"]) == (EXIT_CHECK, "fail")
        assert "the check itself failed" in checks["mine"]["detail"]
        if check is noisy:
            assert checks["noisy"]["facts"] == {"(1, 2)": None, "set": [3], "text": "\udcff"}


def test_what_plugins_print_is_not_in_the_output(run: Run, act: Act, tmp_path: Path) -> None:
    (tmp_path / "cli_acting.py").write_text("print('noise')\n" + PLUGIN)
    code, out, err = run("plugins", "list", "--json")
    assert (code, err) == (EXIT_OK, "noise\n")
    assert json.loads(out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_parse(run: Run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert (code, "explain" in out) == (EXIT_OK, True)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("headrace pl", {"plugins"}),
        ("headrace plugins s", {"show"}),
        ("headrace -q config ", {"check", "explain", "init"}),
        ("headrace config init --f", {"--from", "--force"}),
        ("headrace act --lo", {"--log-level", "--log-json"}),
        ("headrace completion f", {"fish"}),
    ],
)
def test_bash_completes(run: Run, tmp_path: Path, line: str, words: set[str]) -> None:
    script = run("completion", "bash")[1]
    typed = line.split(" ")
    script += f"\nCOMP_WORDS=({' '.join(repr(word) for word in typed)})\nCOMP_CWORD={len(typed) - 1}\n_headrace\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    (tmp_path / "empty").mkdir()
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True, cwd=tmp_path / "empty")
    got = set(done.stdout.split())
    assert words <= got
    assert all(word.startswith(typed[-1]) for word in got)
