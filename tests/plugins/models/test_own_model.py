"""The model and the script that docs/models.md prints work as they are printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")
pytest.importorskip("safetensors", reason="the reference backend needs safetensors")

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "models.md"

SCRIPT = """
import numpy as np, headrace_bag
from headrace.catalog import Catalog
from headrace.llm import LLM
from headrace.types import SamplingParams

catalog = Catalog.load(extra={"bag": headrace_bag})
ids = np.random.default_rng(0).integers(0, 50, 45).tolist()
with LLM("model", catalog=catalog, determinism="batch-invariant") as llm:
    whole = llm.logits(ids)
    for chunk in (1, 7):
        assert np.array_equal(llm.logits(ids, chunk=chunk), whole), chunk
    assert not np.array_equal(llm.logits(ids[1:])[-1], whole[-1]), "it remembers its first token"
    greedy = SamplingParams(temperature=0, max_tokens=20)
    first = llm.generate([ids, ids[:20]], greedy)
    assert [out.token_ids for out in llm.generate([ids, ids[:20]], greedy)] == [out.token_ids for out in first]
"""


def _block(word: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    return str(next(block for block in blocks if word in block))


def test_the_script_that_writes_a_tiny_v41(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="DeepSeek-V4.1 hashes its tokenizer's tokens")
    from headrace.llm import LLM

    (tmp_path / "tests").symlink_to(DOCUMENT.parents[1] / "tests")
    done = subprocess.run(
        [sys.executable, "-c", _block("random_checkpoint")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with LLM(str(tmp_path / "tiny-v41"), backend={"use": "reference", "weights": "quantised", "draft": True}) as llm:
        assert llm.logits([5, 6, 7]).shape == (3, 312)


def test_the_smallest_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "headrace_bag.py").write_text(_block("headrace_api"))
    (tmp_path / "model").mkdir()
    config = {"architectures": ["BagForCausalLM"], "vocab_size": 50, "hidden_size": 32, "max_position_embeddings": 100}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(0)
    tensors = {"model.embed.weight": torch.randn(50, 32, generator=noise), "model.norm.weight": torch.ones(32)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
