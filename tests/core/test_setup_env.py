"""The set-up of a checkout: the wheel cache, progress, and when a second run does nothing. Nothing is built here."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from headrace.home import cache_home

ROOT = Path(__file__).resolve().parents[2]
PINNED = '[project]\nname = "x"\ndependencies = ["llama-cpp-python==0.3.36"]\n'


@pytest.fixture(scope="module")
def env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_env"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class FakeBuilder:
    """Leaves a small wheel that passes for one of llama-cpp-python; counts its calls."""

    def __init__(self, n_wheels: int = 1, library: str = "llama_cpp/lib/libllama.so") -> None:
        self.calls = 0
        self.n_wheels = n_wheels
        self.library = library
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, build: object, into: Path, log: Path) -> None:
        self.calls += 1
        self.entered.set()
        assert self.go_on.wait(10)
        for i in range(self.n_wheels):
            with zipfile.ZipFile(into / f"llama_cpp_python-0.3.{i}-py3-none-any.whl", "w") as archive:
                archive.writestr(self.library, b"machine code" * 100)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "backends/gguf").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "y"\n[tool.ruff]\nline-length = 100\n')
    (tmp_path / "backends/gguf/pyproject.toml").write_text(PINNED)
    return tmp_path


def test_wheel_is_built_once(env: ModuleType, tmp_path: Path) -> None:
    build, builder = env.Build("0.3.36", "-DA=ON", "Linux-x86_64-glibc2.36"), FakeBuilder()
    first = env.ensure_wheel(build, tmp_path, builder)
    assert first == env.ensure_wheel(build, tmp_path, builder)
    assert builder.calls == 1
    assert first.parent == tmp_path / "wheels" / build.folder
    assert [path.name for path in first.parent.iterdir()] == [first.name], "a temporary folder was left"


def test_other_flags_or_machine_are_another_wheel(env: ModuleType) -> None:
    build = env.Build("0.3.36", "-DA=ON", "Linux-x86_64-glibc2.36")
    others = [
        env.Build("0.3.37", build.flags, build.machine),
        env.Build(build.version, "-DA=OFF", build.machine),
        env.Build(build.version, build.flags, "Linux-aarch64-glibc2.36"),
    ]
    assert len({one.folder for one in [build, *others]}) == 4


@pytest.mark.parametrize("damage", ["truncated", "flipped byte", "empty"])
def test_damaged_wheel_is_built_again(env: ModuleType, tmp_path: Path, damage: str) -> None:
    build, builder = env.Build("0.3.36", "", ""), FakeBuilder()
    wheel = env.ensure_wheel(build, tmp_path, builder)
    data = bytearray(wheel.read_bytes())
    if damage == "flipped byte":
        data[200] ^= 1
    wheel.write_bytes({"truncated": data[:500], "empty": b""}.get(damage, bytes(data)))
    assert env.wheel_problem(wheel) is not None
    assert env.wheel_problem(env.ensure_wheel(build, tmp_path, builder)) is None
    assert builder.calls == 2


@pytest.mark.parametrize("builder", [FakeBuilder(n_wheels=0), FakeBuilder(n_wheels=2), FakeBuilder(library="a.py")])
def test_useless_build_is_not_kept(env: ModuleType, tmp_path: Path, builder: FakeBuilder) -> None:
    build = env.Build("0.3.36", "", "")
    with pytest.raises(env.SetupError, match="no usable wheel"):
        env.ensure_wheel(build, tmp_path, builder)
    assert not list((tmp_path / "wheels" / build.folder).iterdir())


def test_killed_build_leaves_nothing_behind(env: ModuleType, tmp_path: Path) -> None:
    build = env.Build("0.3.36", "", "")
    slot = tmp_path / "wheels" / build.folder
    (slot / "build-killed").mkdir(parents=True)
    (slot / "build-killed" / "half.whl").write_bytes(b"PK")
    env.ensure_wheel(build, tmp_path, FakeBuilder())
    assert not (slot / "build-killed").exists()


def test_two_set_ups_build_once(env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the lock of the first and then finds its wheel."""
    build, builder = env.Build("0.3.36", "", ""), FakeBuilder()
    builder.go_on.clear()
    waits = threading.Event()
    monkeypatch.setattr(env, "say", lambda text: waits.set() if "waiting" in text else None)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(env.ensure_wheel(build, tmp_path, builder))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert builder.entered.wait(10)
    assert waits.wait(10)
    builder.go_on.set()
    for thread in threads:
        thread.join(10)
    assert builder.calls == 1
    assert len(found) == 2
    assert found[0] == found[1]


def test_cache_folder_that_cannot_be_made(env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wheels").write_text("a file")
    with pytest.raises(env.SetupError) as caught:
        env.ensure_wheel(env.Build("0.3.36", "", ""), tmp_path, FakeBuilder())
    assert "HEADRACE_HOME" in caught.value.help


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HEADRACE_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"HEADRACE_HOME": "~/a"}, "~/a"),
        ({"HEADRACE_HOME": "", "XDG_CACHE_HOME": "/b"}, "/b/headrace"),
        ({}, "~/.cache/headrace"),
    ],
)
def test_cache_home(env: ModuleType, environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule, said twice: the set-up runs before Headrace can be imported."""
    for name in ("HEADRACE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert env.cache_home(environ) == cache_home() == Path(folder).expanduser()


def test_build_comes_from_the_pin(env: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.platform, "machine", lambda: "x86_64")
    build = env.wanted_build(checkout, {})
    assert build.version == "0.3.36"
    assert "GGML_NATIVE=OFF" in build.flags
    assert "GGML_AVX2=ON" in build.flags
    assert env.wanted_build(checkout, {"CMAKE_ARGS": "-DGGML_CUDA=ON"}).flags == f"{build.flags} -DGGML_CUDA=ON"
    monkeypatch.setattr(env.platform, "machine", lambda: "aarch64")
    assert env.wanted_build(checkout, {}).flags == "-DGGML_NATIVE=OFF"
    (checkout / "backends/gguf/pyproject.toml").write_text(PINNED.replace("==0.3.36", ">=0.3"))
    with pytest.raises(env.SetupError, match="pins no"):
        env.wanted_build(checkout, {})


def test_pin_of_this_repository(env: ModuleType) -> None:
    assert env.wanted_build(ROOT, {}).version


def test_missing_tools_are_named(env: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(env.SetupError, match=r"C\+\+ compiler, cmake") as caught:
        env.check_compiler({"PATH": str(tmp_path)})
    assert "apt install g++ cmake" in caught.value.help
    for name in ("my-c++", "cmake"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    env.check_compiler({"PATH": str(tmp_path), "CXX": "my-c++ -m64"})


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("  [1/193] Building C\n  [57/193] Building CXX object x[3/4].o\n", "step 57 of 193"),
        ("[  7%] Building C\n[ 34%] Building CXX object\n", "34 %"),
        ("Collecting llama-cpp-python\n", None),
        ("", None),
    ],
)
def test_progress_of_a_build(env: ModuleType, tmp_path: Path, text: str, want: str | None) -> None:
    log = tmp_path / "build.log"
    log.write_text("x" * 70_000 + "\n" + text)
    assert env.progress(log) == want


def test_failed_command_shows_why(
    env: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "LOG_TAIL_LINES", 3)
    lines = ["early", "x.cpp:1: error: no such type", *(f"line {i}" for i in range(9))]
    script = "".join(f"print({line!r});" for line in lines) + "raise SystemExit(3)"
    with pytest.raises(env.SetupError, match=r"compiling failed \(status 3\)"):
        env.run_logged([sys.executable, "-c", script], what="compiling", log=tmp_path / "log")
    assert capsys.readouterr().err.splitlines() == ["x.cpp:1: error: no such type", "...", "line 6", "line 7", "line 8"]


def test_long_command_says_that_it_goes_on(
    env: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends only when it was heard of twice, so the test cannot pass by luck."""
    heard: list[str] = []
    read, write = os.pipe()

    def say(text: str) -> None:
        heard.append(text)
        if len(heard) == 2:
            os.write(write, b"x")

    monkeypatch.setattr(env, "say", say)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    opener = threading.Thread(target=lambda: gate.write_bytes(os.read(read, 1)))
    opener.start()
    script = f"print('[2/9] Building', flush=True); open({str(gate)!r}).read()"
    env.run_logged([sys.executable, "-c", script], what="building", log=tmp_path / "log", heartbeat_s=0.2)
    opener.join(10)
    os.close(read)
    os.close(write)
    assert heard[1].startswith("building: step 2 of 9, 0:0")


def test_command_ends_with_its_set_up(env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def interrupt(log: Path) -> str:
        text = log.read_text()
        if not text.endswith("\n"):
            return ""
        pids.append(int(text))
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "progress", interrupt)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        env.run_logged([sys.executable, "-c", script], what="waiting", log=tmp_path / "log", heartbeat_s=0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_stamp_follows_what_pip_acts_on(env: ModuleType, checkout: Path) -> None:
    build = env.wanted_build(checkout, {})
    stamp = env.stamp_of(checkout, build)
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace("100", "120"))
    assert env.stamp_of(checkout, build) == stamp, "a linter's setting must not ask for the network"
    project.write_text(project.read_text().replace('"y"', '"z"'))
    assert env.stamp_of(checkout, build) != stamp


def finished(env: ModuleType, root: Path, torch: bool = False) -> None:
    """Lay out an environment as a complete set-up leaves it."""
    bin_folder = root / ".venv/bin"
    bin_folder.mkdir(parents=True)
    for name in ("python", "headrace", "pytest"):
        (bin_folder / name).write_text("")
    stamp = env.stamp_of(root, env.wanted_build(root, os.environ), torch)
    (root / ".venv/setup.json").write_text(env.json.dumps(stamp))


def test_second_run_starts_no_process(env: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(env, checkout)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(env.subprocess, "run", refuse)
    monkeypatch.setattr(env.subprocess, "Popen", refuse)
    env.setup(checkout, checkout / "home")
    assert not (checkout / "home").exists()
    (checkout / ".venv/bin/headrace").unlink()
    with pytest.raises(AssertionError, match="venv"):
        env.setup(checkout, checkout / "home")


@pytest.mark.parametrize(("has", "asked", "runs"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)])
def test_torch_is_installed_when_asked_for(
    env: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, has: int, asked: int, runs: int
) -> None:
    finished(env, checkout, bool(has))
    build = env.ensure_wheel(env.wanted_build(checkout, os.environ), checkout / "home", FakeBuilder())
    commands: list[list[str]] = []
    monkeypatch.setattr(env, "run_logged", lambda command, **kwargs: commands.append(command))
    env.setup(checkout, checkout / "home", torch=bool(asked))
    assert any(env.TORCH in command and env.TORCH_INDEX in command for command in commands) == bool(runs)
    assert bool(commands) == bool(runs)
    if runs:
        editable = next(command for command in commands if str(build) in command)
        assert env.TORCH in editable, "the extra alone would let pip replace the CPU build"
        assert env.read_stamp(checkout / ".venv")["torch"] == "yes"


@pytest.mark.parametrize("damage", ["none", "not json", "a list"])
def test_unfinished_environment_counts_as_none(env: ModuleType, checkout: Path, damage: str) -> None:
    finished(env, checkout)
    assert env.read_stamp(checkout / ".venv")
    stamp = checkout / ".venv/setup.json"
    if damage == "none":
        stamp.unlink()
    else:
        stamp.write_text({"not json": "{", "a list": "[]"}[damage])
    assert env.read_stamp(checkout / ".venv") == {}
