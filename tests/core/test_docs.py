"""Generated and hand-written docs agree with the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace import errors

ROOT = Path(__file__).resolve().parents[2]


def test_config_docs_are_current() -> None:
    script = str(ROOT / "scripts" / "gen_config_docs.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(line.split("|")[1]) for line in text.splitlines() if line[:3].strip("| ").isdigit()
            or line.startswith("| 130")} == codes  # fmt: skip
