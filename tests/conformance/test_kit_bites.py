"""A check that can't fail checks nothing: every mutant must fail its conformance class."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MUTANTS = Path(__file__).with_name("mutants.py")


def test_every_mutant_is_caught(tmp_path: Path) -> None:
    """One run over all of them, in a process of its own."""
    argv = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider"]
    argv += [f"--rootdir={tmp_path}", "--import-mode=importlib", "-c", "/dev/null", str(MUTANTS)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    mutants = set(re.findall(r"^class (Test\w+)", MUTANTS.read_text(encoding="utf-8"), re.MULTILINE))
    caught = set(re.findall(r"^FAILED \S*?::(Test\w+)::", done.stdout, re.MULTILINE))
    assert mutants
    assert mutants - caught == set(), done.stdout[-3000:]
