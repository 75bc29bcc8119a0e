"""Inputs for tests of kernels. Needs torch, and `cases` safetensors: its users ask for them first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden import op_cases


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal ones, float32, the same for each shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float32)


def cases(op: str, of: str = "", without: str = "?") -> Any:
    """A test runs for every golden case of the op that has `of` in its name, and not `without`."""
    chosen = [case for case in op_cases(op) if of in case.name and without not in case.name]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])
