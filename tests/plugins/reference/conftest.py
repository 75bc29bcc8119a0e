"""Tiny checkpoints, written once per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """dense(**config) -> the folder of a random dense decoder; the same for the same config."""
    made: dict[str, str] = {}

    def make(**config: Any) -> str:
        from dense_checkpoint import write_dense

        key = repr(sorted(config.items()))
        if key not in made:
            made[key] = write_dense(tmp_path_factory.mktemp("dense"), **config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def varying_products() -> None:
    """Skips where torch's own matrix products give a row the same bits in any company: then nothing is to be seen of
    the modes that don't promise it."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rows, matrix = torch.randn(45, 64, generator=generator), torch.randn(256, 64, generator=generator)
    whole = rows @ matrix.T
    if all(torch.equal(rows[i : i + n] @ matrix.T, whole[i : i + n]) for n in (1, 3, 8) for i in range(45 - n)):
        pytest.skip("on this CPU torch's products don't depend on the number of rows")
