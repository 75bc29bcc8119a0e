"""Residual streams (mHC), Engram and the drafter's heads. Contracts: `headrace.ops`.

Formulas as in DeepInfer 0.1.0 (`v4_modules/mhc_ops.py`, `engram.py`) and tile-kernels 2.1.0 (`torch/mhc`,
`torch/engram`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops import KernelContext
from headrace_plugins.reference.kernels import rowwise
from headrace_plugins.reference.kernels.basic import Kernel
from headrace_plugins.reference.kernels.formats import act_dtype
from headrace_plugins.reference.kernels.rowwise import Product

# --- manifold-constrained hyper-connections --------------------------------------------------------------------------


def mhc_mix(context: KernelContext) -> Kernel:
    return _mhc_mix(context, rowwise.plain)


def mhc_mix_tiled(context: KernelContext) -> Kernel:
    return _mhc_mix(context, rowwise.tiled)


def _mhc_mix(context: KernelContext, product: Product) -> Kernel:
    def mix(
        streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        s = streams.shape[1]
        x = streams.float()
        # In two steps: over one axis of s h numbers, threads would share the sum of a lone row.
        rstd = x.square().mean(-1).mean(-1, keepdim=True).add_(eps).rsqrt_()
        mixes = product(x.flatten(1), fn, None) * rstd
        which = (torch.arange(s * (s + 2), device=scale.device) // s).clamp_(max=2)  # s of pre, s of post, s s of comb
        logits = mixes * scale[which] + base
        pre, post = rowwise.sigmoid(logits[:, : 2 * s]).split(s, 1)
        return pre + hc_eps, post * 2, sinkhorn(logits[:, 2 * s :].unflatten(1, (s, s)), hc_eps, iters)

    return mix


def sinkhorn(logits: Tensor, eps: float, iters: int) -> Tensor:
    """softmax over the last axis, plus eps, then `iters` times rows and columns divided by (their sum + eps), but the
    first time columns only. logits: [n, s, s] float32. -> [n, s, s]."""
    n, s, _ = logits.shape
    # A border of eps makes "sum + eps" one sum: half of all calls, and this loop has most calls of a decode step.
    bordered = logits.new_full((n, s + 1, s + 1), eps)
    rows, columns, inner = bordered[:, :s], bordered[:, :, :s], bordered[:, :s, :s]
    torch.add(logits.softmax(-1), eps, out=inner)
    inner.div_(columns.sum(1, keepdim=True))
    for _ in range(iters - 1):
        inner.div_(rows.sum(2, keepdim=True))
        inner.div_(columns.sum(1, keepdim=True))
    return inner.contiguous()


def mhc_collapse(context: KernelContext) -> Kernel:
    act = act_dtype(context)

    def collapse(streams: Tensor, pre: Tensor) -> Tensor:
        return (pre[..., None] * streams).sum(1).to(act)

    return collapse


def mhc_update(context: KernelContext) -> Kernel:
    act = act_dtype(context)

    def update(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        added = post[..., None] * out[:, None]
        return torch.baddbmm(added, comb.mT, streams.float()).to(act)

    return update


# --- Engram ----------------------------------------------------------------------------------------------------------


def engram_hash(context: KernelContext) -> Kernel:
    def hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
        products = ngrams * multipliers
        mixed = [products[:, 0]]
        for r in range(1, ngrams.shape[1]):
            mixed.append(mixed[-1] ^ products[:, r])
        orders = torch.stack(mixed[1:], 1)
        heads = primes.shape[0] // orders.shape[1]
        return torch.remainder(orders.repeat_interleave(heads, 1), primes).add_(offsets)

    return hash


def engram_gate(context: KernelContext) -> Kernel:
    act = act_dtype(context)

    def gate(
        streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, skip: Tensor | None = None
    ) -> Tensor:
        opened = engram_gates(streams, kv[:, :-1], q_weight, k_weight, eps)
        y = (streams.float() + opened[..., None] * kv[:, -1:]).to(act)
        return y if skip is None else torch.where(skip[:, None, None], streams, y)

    return gate


def engram_gates(streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """How far each stream opens to the value. streams, keys: [n, s, h]; q_weight, k_weight: [s, h].
    -> [n, s] float32."""
    r, k = streams.float(), keys.float()
    dot = (r * q_weight * k * k_weight).sum(-1)
    d = dot * streams.shape[-1] ** -0.5 * _rstd(r, eps) * _rstd(k, eps)
    return rowwise.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt())


def _rstd(x: Tensor, eps: float) -> Tensor:
    return x.square().mean(-1).add_(eps).rsqrt_()


# --- drafting --------------------------------------------------------------------------------------------------------


def draft_feature(context: KernelContext) -> Kernel:
    act = act_dtype(context)

    def feature(streams: Tensor) -> Tensor:
        return streams.float().mean(1).to(act)

    return feature


def draft_confidence(context: KernelContext) -> Kernel:
    def confidence(hidden: Tensor, embed: Tensor, weight: Tensor, temperature: float) -> Tensor:
        logit = (torch.cat((hidden, embed), -1).float() * weight.float()).sum(-1)
        return rowwise.sigmoid((logit / temperature).clamp(-60, 60))

    return confidence
