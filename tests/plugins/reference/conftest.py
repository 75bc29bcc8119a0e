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
