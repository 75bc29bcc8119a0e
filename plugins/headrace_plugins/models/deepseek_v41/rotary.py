"""Frequencies of the rotary embeddings.

Source: DeepSeek-V4.1 model description, "RoPE" (DeepInfer `v4_modules/rope.py`).
Computed in float32, step by step as the source does: at position 60000 the last bit of a frequency moves an angle by
0.004.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace_plugins.models.deepseek_v41.config import Yarn


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """theta^(-2i / dim), with YaRN's interpolation of the slow ones if given (no magnitude factor).

    -> [dim / 2] float32."""
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return plain
    low = max(math.floor(_turning_dim(yarn.beta_fast, dim, theta, yarn.original)), 0)
    high = min(math.ceil(_turning_dim(yarn.beta_slow, dim, theta, yarn.original)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _turning_dim(rotations: float, dim: int, theta: float, original: int) -> float:
    """The channel pair that turns `rotations` times over the original context."""
    return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))
