"""A block: attention and experts between single-pass hyper-connections. Backbone layers and draft stages are blocks.

Source: DeepSeek-V4.1 model description, "Whole forward", "mHC mix" (DeepInfer `v4_modules/hc_blocks.py`, `mhc_ops.py`)
and "MoE" (`v4_modules/moe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.modeling import Weight
from headrace.ops import Ops
from headrace_plugins.models.deepseek_v41.config import TextConfig


class Experts:
    """The routed experts of a block and its shared one."""

    def __init__(self, ops: Ops, config: TextConfig, prefix: str, n_experts: int, top: int, quantise: bool) -> None:
        self.ops, self.prefix, self.n_experts, self.top, self.quantise = ops, prefix, n_experts, top, quantise
        self.scale, self.limit = config.route_scale, config.swiglu_limit

    def load(self, weights: Mapping[str, Weight]) -> None:
        at = self.prefix
        self.gate = weights[at + "gate.weight"]
        self.bias, self.bias_image = weights[at + "gate.bias"], weights[at + "gate.bias_vl"]
        self.w1, self.w2, self.w3 = (
            [weights[f"{at}experts.{expert}.{name}.weight"] for expert in range(self.n_experts)]
            for name in ("w1", "w2", "w3")
        )
        self.shared_w1, self.shared_w2, self.shared_w3 = (
            weights[f"{at}shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")
        )

    def __call__(self, x: Tensor, image: Tensor | None) -> Tensor:
        """x: [n, H]; image: [n] bool, routed by the bias for images. -> [n, H]"""
        ops = self.ops
        logits = ops.linear.dense(x, self.gate, wide=True)
        bias = self.bias if image is None else torch.where(image[:, None], self.bias_image, self.bias)
        ids, shares = ops.moe.route(logits, bias, self.top, self.scale)
        routed = ops.moe.experts(x, ids, shares, self.w1, self.w3, self.w2, self.limit, self.quantise)
        return (routed + self._shared(x)).to(x.dtype)

    def _shared(self, x: Tensor) -> Tensor:
        """x: [n, H] -> [n, H] float32"""
        ops = self.ops
        x = ops.quant.activation(x) if self.quantise else x
        inner = ops.act.swiglu(ops.linear.dense(x, self.shared_w1), ops.linear.dense(x, self.shared_w3), self.limit)
        inner = ops.quant.activation(inner) if self.quantise else inner
        return ops.linear.dense(inner, self.shared_w2, wide=True)


class Mix:
    """The hyper-connection of one sublayer."""

    def __init__(self, ops: Ops, config: TextConfig, prefix: str) -> None:
        self.ops, self.prefix = ops, prefix
        self.eps, self.hc_eps, self.iters = config.eps, config.hc_eps, config.sinkhorn_iters

    def load(self, weights: Mapping[str, Weight]) -> None:
        self.fn, self.base, self.scale = (weights[f"{self.prefix}_{name}"] for name in ("fn", "base", "scale"))

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams: [n, s, H] -> pre [n, s], post [n, s], comb [n, s, s], float32"""
        return self.ops.mhc.mix(streams, self.fn, self.base, self.scale, self.eps, self.hc_eps, self.iters)


class Block:
    """Two sublayers on the streams. `pre`, the weights that collapse the streams into a sublayer's input, come from
    the sublayer before: each mix is computed from the streams that its own sublayer reads, and hands its `pre` on."""

    def __init__(self, ops: Ops, config: TextConfig, prefix: str, experts: Experts) -> None:
        self.ops, self.prefix, self.eps, self.experts = ops, prefix, config.eps, experts
        self.mix_attention = Mix(ops, config, prefix + "hc_attn")
        self.mix_experts = Mix(ops, config, prefix + "hc_ffn")

    def load(self, weights: Mapping[str, Weight]) -> None:
        self.attn_norm = weights[self.prefix + "attn_norm.weight"]
        self.ffn_norm = weights[self.prefix + "ffn_norm.weight"]
        for part in (self.mix_attention, self.mix_experts, self.experts):
            part.load(weights)

    def enter(self, streams: Tensor, pre: Tensor) -> Tensor:
        """The attention input. streams: [n, s, H]; pre: [n, s] -> [n, H]"""
        return self.ops.norm.rms(self.ops.mhc.collapse(streams, pre), self.attn_norm, self.eps)

    def finish(
        self, streams: Tensor, x: Tensor, attend: Callable[[Tensor], Tensor], image: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Both sublayers. streams: [n, s, H]; x: [n, H] from `enter`; image: [n] bool. -> streams, pre for the next
        block."""
        mhc = self.ops.mhc
        pre, post, comb = self.mix_attention(streams)
        streams = mhc.update(streams, attend(x), post, comb)
        next_pre, post, comb = self.mix_experts(streams)
        x = self.ops.norm.rms(mhc.collapse(streams, pre), self.ffn_norm, self.eps)
        return mhc.update(streams, self.experts(x, image), post, comb), next_pre


def start_streams(x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Every stream starts as the embedding, and the first sublayer reads stream 0.
    x: [n, H] -> [n, s, H], pre [n, s] float32"""
    pre = torch.zeros(streams, dtype=torch.float32, device=x.device)
    pre[0] = 1.0
    return x[:, None].expand(-1, streams, -1).contiguous(), pre.expand(len(x), -1).contiguous()
