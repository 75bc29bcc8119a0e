"""The configs in examples/ are right, also with the lines in that they show commented out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from headrace.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.toml"))
SHOWN = re.compile(r"^# (?=\[?[a-z_.]+(\]| = ))", re.MULTILINE)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


@pytest.mark.parametrize("name", NAMES)
def test_example_checks(name: str, examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(examples / name)]) == 0, capsys.readouterr()


@pytest.mark.parametrize("name", NAMES)
def test_example_checks_with_all_that_it_shows(name: str, examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = examples / name
    text, n_shown = SHOWN.subn("", path.read_text(encoding="utf-8"))
    assert n_shown >= 3
    path.write_text(text, encoding="utf-8")
    assert main(["config", "check", str(path)]) == 0, capsys.readouterr()


def test_a_wrong_line_would_be_seen(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = examples / "toy.toml"
    path.write_text(path.read_text(encoding="utf-8") + "# max_drafts = 3\n", encoding="utf-8")
    path.write_text(SHOWN.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    assert main(["config", "check", str(path)]) != 0
    assert "max_drafts" in "".join(capsys.readouterr())
