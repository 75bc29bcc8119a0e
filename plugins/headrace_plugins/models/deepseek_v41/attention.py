"""Attention over a window and shared compressed keys, with the compressor and the indexer that feed it.

Source: DeepSeek-V4.1 model description, "Attention" (DeepInfer `v4_modules/attn.py`, `mla_attn.py`), "Compressor"
(`compress.py`) and "Indexer" (`index_attn.py`). Shapes: n tokens, H hidden, D head_dim; one head of keys = values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.modeling import CacheFormat, Weight
from headrace.ops import Ops
from headrace_plugins.models.deepseek_v41.config import LayerPlan, TextConfig
from headrace_plugins.models.deepseek_v41.step import Rotation, Step, scratch_cache

SCORES_PER_SLICE = 1 << 26
"""Index scores that are held at once (tokens x entries); more tokens are scored in slices."""


class Projections:
    """What layers of every ratio and draft stages have: queries, window keys, output."""

    def __init__(self, ops: Ops, config: TextConfig, prefix: str, quantise: bool) -> None:
        self.ops = ops
        self.prefix = prefix
        self.quantise = quantise
        self.heads, self.head_dim, self.groups = config.heads, config.head_dim, config.o_groups
        self.eps = config.eps
        self.scale = config.head_dim**-0.5

    def load(self, weights: Mapping[str, Weight]) -> None:
        at = self.prefix
        self.wq_a, self.wq_b = weights[at + "wq_a.weight"], weights[at + "wq_b.weight"]
        self.wkv = weights[at + "wkv.weight"]
        self.wo_a, self.wo_b = weights[at + "wo_a.weight"], weights[at + "wo_b.weight"]
        self.q_norm, self.kv_norm = weights[at + "q_norm.weight"], weights[at + "kv_norm.weight"]
        self.sink = weights[at + "attn_sink"]

    def rounded(self, x: Tensor) -> Tensor:
        """Input of an fp8 linear. x: [..., k] -> like x."""
        return self.ops.quant.activation(x) if self.quantise else x

    def latent(self, x: Tensor) -> Tensor:
        """qn = norm(Wq_a x). x: [n, H], rounded -> [n, q_rank], rounded."""
        return self.rounded(self.ops.norm.rms(self.ops.linear.dense(x, self.wq_a), self.q_norm, self.eps))

    def queries(self, latent: Tensor, rotation: Rotation) -> Tensor:
        """q = rope(Wq_b qn), without a norm per head. latent: [n, q_rank], rounded -> [n, heads, D]."""
        q = self.ops.linear.dense(latent, self.wq_b).unflatten(1, (self.heads, self.head_dim))
        return self.ops.rope.apply(q, *rotation)

    def keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """kv = rope(norm(Wkv x)), not yet in the format of the cache. x: [n, H], rounded -> [n, D]."""
        kv = self.ops.norm.rms(self.ops.linear.dense(x, self.wkv), self.kv_norm, self.eps)
        return self.ops.rope.apply(kv, *rotation)

    def output(self, o: Tensor, rotation: Rotation) -> Tensor:
        """Wo_b concat_g(Wo_a[g] o_g) of the outputs, turned back. o: [n, heads, D] -> [n, H]."""
        o = self.ops.rope.apply(o, *rotation, inverse=True)
        grouped = self.rounded(o.reshape(len(o), self.groups, -1))
        inner = self.ops.linear.grouped(grouped, self.wo_a).flatten(1)
        return self.ops.linear.dense(self.rounded(inner), self.wo_b)


class Compressor:
    """Compressed keys of a kv source, and its index keys, for the tokens of a step."""

    def __init__(self, ops: Ops, config: TextConfig, plan: LayerPlan, prefix: str) -> None:
        self.ops, self.ratio, self.prefix, self.eps = ops, plan.ratio, prefix, config.eps
        self.name = f"layers.{plan.index}."

    def load(self, weights: Mapping[str, Weight]) -> None:
        at = self.prefix
        self.wkv = weights[at + "compressor.wkv.weight"]
        self.wgate = weights[at + "compressor.wgate.weight"] if self.ratio > 1 else None
        self.norm = weights[at + "compressor.norm.weight"]
        self.wk, self.k_norm = weights[at + "indexer.wk.weight"], weights[at + "indexer.k_norm.weight"]

    def store(self, step: Step, x: Tensor) -> None:
        """z_i = norm(c_i), of which key = rope(z_i) and index key = rope(norm(Wk z_i)) at position i ratio.
        x: [n, H], the attention input, not rounded."""
        ops, caches = self.ops, step.caches
        entries = step.entries(self.ratio)
        if self.wgate is None:
            pooled = ops.linear.dense(x, self.wkv)
        else:
            latent, score = ops.linear.dense(x, self.wkv, wide=True), ops.linear.dense(x, self.wgate, wide=True)
            ring = caches[self.name + "compressor"]
            pooled = ops.compress.pool(ring, latent, score, step.batch.slot, step.batch.positions)
        if entries.closing is not None:
            if not len(entries.closing):
                return
            pooled = pooled[entries.closing]
        z = ops.norm.rms(pooled, self.norm, self.eps)
        ops.kv.store(caches[self.name + "compressed"], entries.address, ops.rope.apply(z, *entries.rotation))
        key = ops.norm.rms(ops.linear.dense(z, self.wk), self.k_norm, self.eps)
        ops.kv.store(caches[self.name + "index_keys"], entries.address, ops.rope.apply(key, *entries.rotation))


class Indexer:
    """Chooses the compressed entries that a layer and the ones after it attend to."""

    def __init__(self, ops: Ops, config: TextConfig, plan: LayerPlan, prefix: str) -> None:
        self.ops, self.plan, self.prefix = ops, plan, prefix
        self.heads, self.dim, self.top = config.index_heads, config.index_dim, config.index_top
        self.block, self.blocks = config.candidate_block, config.candidate_blocks
        self.keys = f"layers.{plan.kv_source}.index_keys"

    def load(self, weights: Mapping[str, Weight]) -> None:
        self.wq_b = weights[self.prefix + "indexer.wq_b.weight"]
        self.weights_proj = weights[self.prefix + "indexer.weights_proj.weight"]

    def select(self, step: Step, x: Tensor, latent: Tensor) -> None:
        """logit_i = sum_h w_h relu(q_h . k_i) over the complete entries, or those of the candidate blocks.
        x: [n, H], the attention input, not rounded; latent: [n, q_rank], rounded."""
        ops, batch, plan = self.ops, step.batch, self.plan
        q = ops.linear.dense(latent, self.wq_b).unflatten(1, (self.heads, self.dim))
        q = self._rounded(step, ops.rope.apply(q, *step.rotation(yarn=True)))
        weights = ops.linear.dense(x, self.weights_proj)
        visible, longest = step.visible(plan.ratio)
        limits = step.candidates[plan.candidate_source] if plan.candidate_source >= 0 else None
        size = max(SCORES_PER_SLICE // max(longest, 1), 1)
        chosen, candidates = [], []
        for begin in range(0, len(x), size):
            part = slice(begin, begin + size)
            scores = ops.index.score(
                q[part], weights[part], step.caches[self.keys], batch.table, batch.row[part], visible[part],
                None if limits is None else limits[part], self.block,
            )  # fmt: skip
            chosen.append(ops.index.topk(scores, self.top))
            if plan.publishes_candidates:
                candidates.append(ops.index.candidates(scores, visible[part], self.block, self.blocks))
        entries = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        grain = step.caches[self.keys].grain
        step.selected[plan.index] = ops.index.entries(entries, batch.table, batch.row, grain)
        if candidates:
            step.candidates[plan.index] = candidates[0] if len(candidates) == 1 else torch.cat(candidates)
        if step.trace is not None:
            step.trace[f"topk.{plan.index}"] = entries

    def _rounded(self, step: Step, q: Tensor) -> Tensor:
        """Queries in the format of the keys. q: [n, h, d] -> like q."""
        if step.caches[self.keys].format.name != "qm":
            return q
        cache = scratch_cache(CacheFormat("qm", self.dim), len(q) * self.heads, q.device)
        address = torch.arange(cache.grain, device=q.device)
        self.ops.kv.store(cache, address, q.flatten(0, 1))
        return self.ops.kv.load(cache, address).to(q.dtype).view_as(q)


class Attention:
    """The attention of one backbone layer."""

    def __init__(self, ops: Ops, config: TextConfig, plan: LayerPlan, quantise: bool) -> None:
        prefix = f"layers.{plan.index}.attn."
        self.ops, self.plan, self.window = ops, plan, config.window
        self.projections = Projections(ops, config, prefix, quantise)
        self.compressor = Compressor(ops, config, plan, prefix) if plan.owns_kv else None
        self.indexer = Indexer(ops, config, plan, prefix) if plan.selects else None
        self.ring = f"layers.{plan.index}.window"
        self.compressed = f"layers.{plan.kv_source}.compressed"

    def load(self, weights: Mapping[str, Weight]) -> None:
        self.projections.load(weights)
        for part in (self.compressor, self.indexer):
            if part is not None:
                part.load(weights)

    def publish(self, step: Step, x: Tensor) -> None:
        """Store what other layers and later tokens read of this layer's compressed keys. x: [n, H]."""
        if self.compressor is not None:
            self.compressor.store(step, x)

    def attend(self, step: Step, x: Tensor) -> Tensor:
        """One softmax over the window, the selected compressed entries and a sink per head. x: [n, H] -> [n, H]."""
        parts, plan = self.projections, self.plan
        rotation = step.rotation(yarn=plan.ratio > 0)
        rounded = parts.rounded(x)
        latent = parts.latent(rounded)
        ring = step.caches[self.ring]
        windows = step.windows(self.window, ring.grain, tail=plan.consumer)
        window = windows.put(self.ops, ring, parts.keys(rounded, rotation))
        compressed, selected = None, None
        if plan.ratio:
            if self.indexer is not None:
                self.indexer.select(step, x, latent)
            compressed, selected = step.caches[self.compressed], step.selected[plan.index_source]
        q = parts.queries(latent, rotation)
        o = self.ops.attn.sparse(q, window, windows.index, compressed, selected, parts.sink, parts.scale)
        return parts.output(o, rotation)
