"""Building blocks whose result for a row has the same bits whatever rows are beside it.

Torch on a CPU breaks that in two ways (2.13, AVX-512):

* a matrix product takes another path for 1, 3 and 8 rows: `tiled` always multiplies 8;
* float32 `sigmoid`, `silu`, `softplus`, `exp2` and `logaddexp` use one polynomial in vectors and libm in the remainder
  of a vector, so a number's bits depend on its place: here they are made of `exp` and `log1p`, which don't.

Reductions over a last axis of fixed length or over up to four streams, softmax over a last axis, exp, log, log1p, sin,
cos, rsqrt, and elementwise arithmetic and rounding are safe as they are (tests/plugins/reference/test_rowwise.py holds
torch to that). A sum over a longer middle axis is not: its order depends on the columns that are left over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 8
"""Rows per matrix product of exact kernels. Few enough that a decode step of one row wastes little."""

COLUMN_STEP = 4
"""Columns of x and weight are padded to a multiple: below 12 outputs, MKL's bits depend on whether a row starts at a
multiple of 16 bytes."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [n, k], weight [m, k], bias [m] or None), one type -> x weight^T + bias [n, m]."""


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A Product, as quick as torch has it; a row's bits depend on the number of rows."""
    return functional.linear(x, weight, bias)


def tiled(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """An exact Product: every call of torch's has ROW_TILE rows, the last ones padded by zeros."""
    n, k = x.shape
    if k % COLUMN_STEP:
        x, weight = (torch.constant_pad_nd(each, (0, -k % COLUMN_STEP)) for each in (x, weight))
    if n % ROW_TILE:
        x = torch.constant_pad_nd(x, (0, 0, 0, -n % ROW_TILE))
    else:
        x = x.clone(memory_format=torch.contiguous_format)  # strides and alignment choose a path too
    if n <= ROW_TILE:
        return functional.linear(x, weight, bias)[:n]
    return torch.cat([functional.linear(tile, weight, bias) for tile in x.split(ROW_TILE)])[:n]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), float32."""
    return x / x.neg().exp_().add_(1)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), float32, without overflow."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0))
