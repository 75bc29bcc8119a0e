"""`headrace plugins new`: what it writes works, and it refuses what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import EXIT_PLUGIN, EXIT_USAGE, PluginError
from headrace.testing.scaffold import KINDS, render, write_plugin


def run(argv: Sequence[str | Path], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "PYTEST_"))}
    return subprocess.run(
        [str(part) for part in argv], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_files(kind: str, tmp_path: Path) -> None:
    paths = write_plugin(kind, "my-idea", tmp_path)
    root = tmp_path / "headrace-my-idea"
    assert {str(path.relative_to(root)) for path in paths} == {
        "pyproject.toml",
        "README.md",
        "headrace_my_idea/__init__.py",
        f"headrace_my_idea/{kind}.py",
        "headrace_my_idea/py.typed",
        "tests/test_conformance.py",
    }
    assert all(path.is_file() for path in paths)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["name"] == "headrace-my-idea"
    assert project["entry-points"]["headrace"] == {"my-idea": "headrace_my_idea"}
    article = "An" if kind == "observer" else "A"
    assert project["description"].startswith(f"{article} {kind} plugin for Headrace: ")
    assert f"\n{article} {kind} for [Headrace]" in (root / "README.md").read_text()
    for path in paths:
        assert "$" not in path.read_text(), f"{path} holds an unfilled placeholder"


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", ["x", "redis-2"])
def test_python_compiles(kind: str, name: str) -> None:
    for path, text in render(kind, name).items():
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert max(map(len, text.splitlines()), default=0) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_plugin_passes_its_own_tests(kind: str, tmp_path: Path) -> None:
    """Not installed, only importable. The name is that of the kind, where a class could shadow its contract."""
    write_plugin(kind, kind, tmp_path)
    root = tmp_path / f"headrace-{kind}"
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], root, PYTHONPATH=str(root))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "code", "says"),
    [
        ("draftr", "mine", "HR-SCAFFOLD-01", "did you mean 'drafter'?"),
        ("model", "mine", "HR-SCAFFOLD-01", "docs/models.md"),
        ("drafter", "", "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "My", "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "2fast", "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "a--b", "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "a/../b", "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "a\n", "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "x" * 41, "HR-SCAFFOLD-02", "lower-case"),
        ("drafter", "headrace-mine", "HR-SCAFFOLD-02", "leave the prefix out: mine"),
        ("drafter", "plugins", "HR-SCAFFOLD-02", "try my-plugins"),
    ],
)
def test_refusals(kind: str, name: str, code: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        write_plugin(kind, name, tmp_path)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert caught.value.exit_code == EXIT_PLUGIN
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "headrace-mine"
    target.mkdir()
    with pytest.raises(PluginError, match="HR-SCAFFOLD-03"):
        write_plugin("store", "mine", tmp_path)
    assert list(target.iterdir()) == []


def test_dangling_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "headrace-mine").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PluginError, match="HR-SCAFFOLD-03"):
        write_plugin("store", "mine", tmp_path)


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PluginError, match="HR-SCAFFOLD-04"):
        write_plugin("store", "mine", tmp_path / "file")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["drafter", "ngram"], EXIT_PLUGIN, "HR-SCAFFOLD-05"),
        (["drafter", "plugins"], EXIT_PLUGIN, "HR-SCAFFOLD-02"),
        (["command", "doctor"], EXIT_PLUGIN, "the name 'doctor' is in use by plugin 'builtin'"),
        (["draftr", "mine"], EXIT_PLUGIN, "did you mean 'drafter'?"),
        (["drafter", "mine", "--dir", "/dev/null"], EXIT_PLUGIN, "HR-SCAFFOLD-04"),
        (["drafter"], EXIT_USAGE, "HR-USAGE-01"),
    ],
)
def test_command_refuses(
    argv: list[str], code: int, says: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", *argv]) == code
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_command_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", "store", "mine", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "headrace-mine" / "pyproject.toml") in out
    assert "pip install -e" in out
    assert (tmp_path / "headrace-mine" / "headrace_mine" / "store.py").is_file()


@pytest.mark.slow
def test_third_party_plugin_in_a_fresh_environment(tmp_path: Path) -> None:
    """Written, built and installed by pip into a new venv; passes its suite there and drafts for a configured run.

    Offline: the venv sees this environment's packages through a .pth file (site.addsitedir, so that editable installs
    are followed), and pip builds without isolation.
    """
    pytest.importorskip("hatchling", reason="pip needs hatchling here to build the plugin offline")
    new = run([sys.executable, "-m", "headrace", "plugins", "new", "drafter", "fresh", "--dir", tmp_path], tmp_path)
    assert new.returncode == 0, new.stderr
    root, venv = tmp_path / "headrace-fresh", tmp_path / "venv"
    made = run([sys.executable, "-m", "venv", "--without-pip", venv], tmp_path)
    assert made.returncode == 0, made.stderr
    python = venv / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _site_packages()]
    Path(own, "borrowed.pth").write_text("".join(lines))

    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--disable-pip-version-check",
        "--no-cache-dir",
        "install",
    ]
    installed = run([*pip, "--no-index", "--no-build-isolation", "--no-deps", root], tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert Path(own, "headrace_fresh", "drafter.py").is_file()

    suite = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider"], root)
    assert suite.returncode == 0, suite.stdout + suite.stderr

    shown = run([python, "-m", "headrace", "plugins", "show", "fresh"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "headrace-fresh" in shown.stdout

    config = tmp_path / "pipeline.toml"
    config.write_text('model = "toy://vocab=320,repeat=0.9"\n[drafter]\nuse = "fresh"\nperiod = 2\n')
    explained = run([python, "-m", "headrace", "config", "explain", config], tmp_path)
    assert explained.returncode == 0, explained.stderr
    assert "fresh" in explained.stdout
    plain = tmp_path / "plain.toml"
    plain.write_text('model = "toy://vocab=320,repeat=0.9"\n')
    drafted, undrafted = (
        run([python, "-m", "headrace", "run", file, "hello", "--max-tokens", "24"], tmp_path)
        for file in (config, plain)
    )
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout.strip()
    assert drafted.stdout == undrafted.stdout, "a drafter may change the speed, never the text"


def _site_packages() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
