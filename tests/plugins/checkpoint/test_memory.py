"""Loading takes little more memory than what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="checkpoints are loaded with PyTorch")

from headrace.modeling import TensorSpec  # noqa: E402
from headrace_plugins.checkpoint import random_checkpoint  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

FIXED_BYTES = 24 << 20
"""What torch loads of itself, whatever the size: the bar of 1.1 is meant for 1 GB, where this is little."""


def _specs() -> Iterator[TensorSpec]:
    yield TensorSpec(name="embed.weight", shape=(4000, 1024))
    for layer in range(2):
        yield TensorSpec(name=f"layers.{layer}.norm.weight", shape=(1024,))
        yield TensorSpec(name=f"layers.{layer}.wq.weight", shape=(8192, 1024), packing="fp8_block")
        yield TensorSpec(name=f"layers.{layer}.table.weight", shape=(40_000, 256), packing="fp8_row")
        for expert in range(4):
            yield TensorSpec(name=f"layers.{layer}.{expert}.w1.weight", shape=(2048, 1024), packing="fp4_row")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for quantised in (True, False):
        random_checkpoint(root / str(quantised), _specs(), {}, quantised=quantised, shard_bytes=20 << 20)
    return {quantised: root / str(quantised) for quantised in (True, False)}


def _measured(folder: Path, weights: str, compute: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace_plugins.checkpoint.measure", str(folder)]
    run = subprocess.run(
        [*command, "--weights", weights, "--compute", compute], capture_output=True, text=True, check=True
    )
    return dict(json.loads(run.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantised", "weights", "compute", "held"),
    [
        (True, "dequant", "float32", 4 * 58_000_000),
        (True, "dequant", "bfloat16", 2 * 58_000_000),
        (True, "quantised", "bfloat16", 54_000_000),
        (False, "dequant", "bfloat16", 2 * 58_000_000),
    ],
)
def test_peak_growth(folders: dict[bool, Path], quantised: bool, weights: str, compute: str, held: int) -> None:
    """Also when every page of what is kept was touched; files that are unpacked must not stay resident."""
    measured = _measured(folders[quantised], weights, compute)
    assert measured["held_bytes"] == pytest.approx(held, rel=0.05)
    assert measured["growth_bytes"] <= measured["touched_bytes"] <= 1.05 * measured["held_bytes"] + FIXED_BYTES
    if weights == "quantised":  # packed weights stay in the file until they are used
        assert measured["growth_bytes"] < 0.7 * measured["held_bytes"]


@pytest.mark.slow
def test_many_matrices_leave_no_holes(tmp_path: Path) -> None:
    """Of a size that a heap takes from its arena, between scratch that it gives back: holes as large as the scratch."""
    specs = [TensorSpec(name=f"{i}.weight", shape=(1024, 1024), packing="fp4_row") for i in range(64)]
    random_checkpoint(tmp_path / "it", specs, {}, quantised=True)
    measured = _measured(tmp_path / "it", "dequant", "float32")
    assert measured["growth_bytes"] <= 1.05 * measured["held_bytes"] + FIXED_BYTES
