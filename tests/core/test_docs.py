"""Generated and hand-written docs agree with the code."""

from __future__ import annotations

import re
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


def _code(document: str, holding: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)
    return next(block for block in blocks if holding in block)


@pytest.mark.parametrize("document", ["README.md", "docs/plugins.md"])
def test_the_smallest_plugin_works_as_it_is_printed(document: str, tmp_path: Path) -> None:
    (tmp_path / "headrace_again.py").write_text(_code(document, "headrace_api"), encoding="utf-8")
    script = (
        "import headrace_again\n"
        "from headrace.catalog import Catalog\n"
        "from headrace.config import load_config\n"
        "from headrace.llm import LLM\n"
        "from headrace.pipeline import build\n"
        "from headrace.types import SamplingParams\n"
        "params = SamplingParams(max_tokens=40, temperature=0)\n"
        "catalog = Catalog.load(extra={'again': headrace_again})\n"
        "pipeline = build(load_config(None, model='toy://seed=1', sets=['drafter.use=\"again\"']), catalog=catalog)\n"
        "asked = []\n"
        "propose = pipeline.drafter.propose\n"
        "pipeline.drafter.propose = lambda views: asked.append(len(views)) or propose(views)\n"
        "from headrace.types import Request\n"
        "engine = pipeline.engine()\n"
        "seq = engine.add(Request(id='r', prompt_ids=(97, 98), params=params.resolved()))[0]\n"
        "while engine.has_work(): engine.step()\n"
        "assert asked, 'the drafter was never asked'\n"
        "assert engine.n_drafted, 'no draft was verified'\n"
        "assert seq.stream.text == LLM('toy://seed=1').generate([[97, 98]], params)[0].text\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernel_example_works_as_it_is_printed(tmp_path: Path) -> None:
    """Bound from a catalog where it is asked for, not where another type is computed; and its own conformance tests."""
    (tmp_path / "headrace_steps.py").write_text(_code("docs/plugins.md", "def headrace_kernels"), encoding="utf-8")
    (tmp_path / "test_steps.py").write_text(_code("docs/plugins.md", "class TestSteps"), encoding="utf-8")
    script = (
        "import headrace_steps, numpy as np\n"
        "from functools import partial\n"
        "from headrace.catalog import Catalog\n"
        "from headrace.errors import ConfigError\n"
        "from headrace.ops import Candidate, KernelContext, bind\n"
        "catalog = Catalog.load(extra={'steps': headrace_steps})\n"
        "offers = [Candidate(e.spec, 'x', partial(catalog.load_object, entry=e)) for e in catalog.kernels('cpu')]\n"
        "asked = {'norm.rms': 'steps'}\n"
        "ops = bind(['norm.rms'], offers, KernelContext(device='cpu'), asked)\n"
        "x = np.full((2, 4), 3, np.float32)\n"
        "assert np.allclose(ops.norm.rms(x, np.ones(4, np.float32), 0.0), 1)\n"
        "try: bind(['norm.rms'], offers, KernelContext(device='cpu', compute='bfloat16'), asked)\n"
        "except ConfigError as error: assert 'computes in float32, not bfloat16' in str(error)\n"
        "else: raise AssertionError\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_steps.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_options_example_works_as_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_code("docs/plugins.md", "class MyOptions"), encoding="utf-8")
    script = "import mine; assert mine.MyOptions(capacity='2MiB').capacity == 2 * 2**20"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
