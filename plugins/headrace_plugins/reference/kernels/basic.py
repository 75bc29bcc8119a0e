"""Embedding, norm, rotary positions, linear layers and mixture of experts. Contracts: `headrace.ops`.

Each factory takes the `KernelContext` and gives a function with the op's signature. Where matrix products are needed
there are two of them: `x` with torch's own product, `x_tiled` with one that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from headrace import sampling
from headrace.modeling import Quantised, Weight
from headrace.ops import KernelContext
from headrace_plugins.reference.kernels import formats, rowwise
from headrace_plugins.reference.kernels.rowwise import Product

Kernel = Callable[..., Any]

WIDEN = 1 << 21
"""Numbers of a weight that are converted at a time: 8 MiB of float32 stay in a cache, a whole head would not."""


# --- embedding, norm, rotary positions -------------------------------------------------------------------------------


def embed_lookup(context: KernelContext) -> Kernel:
    act = formats.act_dtype(context)

    def lookup(weight: Weight, ids: Tensor) -> Tensor:
        if isinstance(weight, Quantised):
            return formats.unpack_rows(weight, ids.flatten(), act).unflatten(0, ids.shape)
        return functional.embedding(ids, weight).to(act)

    return lookup


def norm_rms(context: KernelContext) -> Kernel:
    act = formats.act_dtype(context)

    def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(act)

    return rms


def rope_table(context: KernelContext) -> Kernel:
    def table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.float()[:, None] * inv_freq
        return angle.cos(), angle.sin()

    return table


def rope_apply(context: KernelContext) -> Kernel:
    def apply(
        x: Tensor, cos: Tensor, sin: Tensor, layout: Literal["pairs", "halves"] = "pairs", inverse: bool = False
    ) -> Tensor:
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        if inverse:
            sin = -sin
        r = cos.shape[-1]
        head, tail = x.split((x.shape[-1] - 2 * r, 2 * r), -1)
        if layout == "pairs":
            a, b = tail.float().unflatten(-1, (r, 2)).unbind(-1)
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = tail.float().split(r, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        turned = turned.to(x.dtype)
        return torch.cat((head, turned), -1) if head.shape[-1] else turned

    return apply


# --- linear layers ---------------------------------------------------------------------------------------------------


def linear_dense(context: KernelContext) -> Kernel:
    return _linear_dense(context, rowwise.plain)


def linear_dense_tiled(context: KernelContext) -> Kernel:
    return _linear_dense(context, rowwise.tiled)


def _linear_dense(context: KernelContext, product: Product) -> Kernel:
    def dense(x: Tensor, weight: Weight, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        return _multiply(product, x, weight, bias, wide)

    return dense


def linear_grouped(context: KernelContext) -> Kernel:
    return _linear_grouped(context, rowwise.plain)


def linear_grouped_tiled(context: KernelContext) -> Kernel:
    return _linear_grouped(context, rowwise.tiled)


def _linear_grouped(context: KernelContext, product: Product) -> Kernel:
    def grouped(x: Tensor, weight: Weight) -> Tensor:
        per_group = _unpacked(weight, x.dtype).unflatten(0, (x.shape[1], -1))
        return torch.stack([_multiply(product, x[:, i], each) for i, each in enumerate(per_group.unbind())], 1)

    return grouped


def _multiply(
    product: Product, x: Tensor, weight: Weight, bias: Tensor | None = None, wide: bool = False
) -> Tensor:  # fmt: skip
    """x weight^T + bias. -> [n, m] like x; float32 without rounding when `wide`."""
    weight = _unpacked(weight, x.dtype)
    if weight.dtype == x.dtype and (x.dtype == torch.float32 or not wide):
        return product(x, weight, None if bias is None else bias.to(x.dtype))
    # A product of bfloat16 numbers is exact in float32, so this is the bfloat16 product before it is rounded.
    parts = [product(x.float(), rows, None) for rows in _widened(weight)]
    y = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    if bias is not None:
        y = y + bias
    return y if wide else y.to(x.dtype)


def _unpacked(weight: Weight, dtype: torch.dtype) -> Tensor:
    return formats.unpack(weight, dtype) if isinstance(weight, Quantised) else weight


def _widened(weight: Tensor) -> Iterator[Tensor]:
    """The rows of a weight as float32, in pieces whose bounds depend on its shape only."""
    if weight.dtype == torch.float32:
        yield weight
        return
    for rows in weight.split(max(1, WIDEN // max(1, weight.shape[1]))):
        yield rows.float()


def quant_activation(context: KernelContext) -> Kernel:
    def activation(x: Tensor) -> Tensor:
        return formats.round_activation(x)

    return activation


# --- mixture of experts ----------------------------------------------------------------------------------------------


def act_swiglu(context: KernelContext) -> Kernel:
    act = formats.act_dtype(context)

    def swiglu(gate: Tensor, up: Tensor, limit: float | None = None, weight: Tensor | None = None) -> Tensor:
        gate, up = gate.float(), up.float()
        if limit is not None:
            gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
        h = rowwise.silu(gate).mul_(up)
        return (h if weight is None else h.mul_(weight[:, None])).to(act)

    return swiglu


def moe_route(context: KernelContext) -> Kernel:
    def route(logits: Tensor, bias: Tensor, top: int, scale: float) -> tuple[Tensor, Tensor]:
        s = rowwise.softplus(logits).sqrt_()
        # Not topk: which of two equal scores it takes is not defined.
        ids = torch.sort(s + bias, dim=-1, descending=True, stable=True).indices[:, :top]
        chosen = s.gather(1, ids)
        return ids, chosen.mul(scale).div_(chosen.sum(-1, keepdim=True).add_(1e-20))

    return route


def moe_experts(context: KernelContext) -> Kernel:
    return _moe_experts(context, rowwise.plain)


def moe_experts_tiled(context: KernelContext) -> Kernel:
    return _moe_experts(context, rowwise.tiled)


def _moe_experts(context: KernelContext, product: Product) -> Kernel:
    swiglu = act_swiglu(context)

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, w1: Sequence[Weight], w3: Sequence[Weight], w2: Sequence[Weight],
        limit: float | None = None, quantise: bool = False,
    ) -> Tensor:  # fmt: skip
        if quantise:
            x = formats.round_activation(x)
        n, top = ids.shape
        # All (token, slot) pairs, by expert; `stable`: tokens of one expert stay in order.
        by_expert, order = torch.sort(ids.flatten(), stable=True)
        inputs, scales = x[order // top], weights.flatten()[order]
        outputs = x.new_empty((n * top, x.shape[1]), dtype=torch.float32)
        numbers, counts = torch.unique_consecutive(by_expert, return_counts=True)
        start = 0
        for expert, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            mine = slice(start, start + count)
            start += count
            gate = _multiply(product, inputs[mine], w1[expert])
            up = _multiply(product, inputs[mine], w3[expert])
            h = swiglu(gate, up, limit, scales[mine])
            if quantise:
                h = formats.round_activation(h)
            outputs[order[mine]] = _multiply(product, h, w2[expert], wide=True)
        # One addition per slot: torch's own sum over an axis takes them in another order.
        slots = outputs.unflatten(0, (n, top)).unbind(1)
        total = slots[0].clone()
        for slot in slots[1:]:
            total += slot
        return total

    return experts


# --- sampling --------------------------------------------------------------------------------------------------------


def sample_step(context: KernelContext) -> Kernel:
    return sampling.sample_step
