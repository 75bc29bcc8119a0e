"""DSpark: a drafter of a few blocks that proposes gamma tokens at once, and the heads that choose among them.

Source: DeepSeek-V4.1 model description, "Drafter architecture" (DeepInfer `models/mtp/dflash.py`,
`v4_modules/heads.py`). The loop that verifies and the bookkeeping of drafts are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.modeling import Cache, Weight
from headrace.ops import Ops
from headrace_plugins.models.deepseek_v41.attention import Projections
from headrace_plugins.models.deepseek_v41.block import Block, Experts, start_streams
from headrace_plugins.models.deepseek_v41.config import DraftConfig, TextConfig
from headrace_plugins.models.deepseek_v41.step import Rotary, Rotation, Step


@dataclass(frozen=True, slots=True)
class Draft:
    """What one round proposes, before a token is chosen. Row k of a request predicts the token at P + k + 1."""

    base: Tensor
    """[R, gamma, vocab] float32, logits without the Markov head."""
    hidden: Tensor
    """[R, gamma, H], before the last norm: what the confidence head reads."""


class Stage:
    """One block of the drafter, and its ring of keys."""

    def __init__(self, ops: Ops, config: TextConfig, draft: DraftConfig, index: int, quantise: bool) -> None:
        prefix = f"mtp.{index}."
        self.ops, self.name = ops, prefix + "window"
        self.projections = Projections(ops, config, prefix + "attn.", quantise)
        experts = Experts(ops, config, prefix + "ffn.", draft.n_experts, draft.top_experts, quantise)
        self.block = Block(ops, config, prefix, experts)

    def load(self, weights: Mapping[str, Weight]) -> None:
        self.projections.load(weights)
        self.block.load(weights)

    def attend(self, x: Tensor, ring: Cache, store: Tensor, index: Tensor, rotation: Rotation) -> Tensor:
        """Every row sees the window before the anchor and all rows of its request. x: [R gamma, H]; store: [R gamma]
        and index: [R gamma, window + gamma] int64 addresses. -> [R gamma, H]"""
        parts = self.projections
        rounded = parts.rounded(x)
        self.ops.kv.store(ring, store, parts.keys(rounded, rotation))
        q = parts.queries(parts.latent(rounded), rotation)
        o = self.ops.attn.sparse(q, ring, index, None, None, parts.sink, parts.scale)
        return parts.output(o, rotation)


class Drafter:
    """The draft stages with their heads; embedding and output head are the backbone's."""

    def __init__(self, ops: Ops, config: TextConfig, draft: DraftConfig, quantise: bool) -> None:
        self.ops, self.config, self.settings, self.quantise = ops, config, draft, quantise
        self.stages = [Stage(ops, config, draft, index, quantise) for index in range(draft.stages)]

    def load(self, weights: Mapping[str, Weight], rotary: Rotary) -> None:
        self.rotary = rotary
        last = f"mtp.{self.settings.stages - 1}."
        self.embed, self.head = weights["embed.weight"], weights["head.weight"]
        self.main_proj, self.main_norm = weights["mtp.0.main_proj.weight"], weights["mtp.0.main_norm.weight"]
        self.norm = weights[last + "norm.weight"]
        self.markov_embed = weights[last + "markov_head.embed.weight"]
        self.markov_head = weights[last + "markov_head.head.weight"]
        self.confidence = weights[last + "confidence_head.proj.weight"]
        for stage in self.stages:
            stage.load(weights)

    def remember(self, step: Step, features: Sequence[Tensor]) -> None:
        """Write the keys of processed tokens: g = norm(main_proj [f; f; ..]), and per stage rope(norm(Wkv g)). Keys of
        tokens that are rejected later are overwritten by the ones that come in their place.
        features: per target layer, [n, H]."""
        joined = torch.cat(list(features), 1)
        joined = self.ops.quant.activation(joined) if self.quantise else joined
        g = self.ops.norm.rms(self.ops.linear.dense(joined, self.main_proj), self.main_norm, self.config.eps)
        g = self.ops.quant.activation(g) if self.quantise else g
        rotation = step.rotation(yarn=False)
        for stage in self.stages:
            ring = step.caches[stage.name]
            self.ops.kv.store(ring, step.ring_slots(ring.grain), stage.projections.keys(g, rotation))

    def draft(
        self, anchors: Tensor, positions: Tensor, slot: Tensor, first: Tensor, caches: Mapping[str, Cache]
    ) -> Draft:
        """Run the gamma rows [anchor, noise, ..] at positions P .. P + gamma - 1 through the stages.

        anchors: the newest accepted token of each request, not yet processed by the backbone; positions: its P; first:
        lowest position whose keys are in the rings (`Batch.first`, and `Batch.tail` where features of tokens before it
        were left out); all [R] int64. The rows' own keys lie in the rings until the tokens at these positions run."""
        ops, settings, config = self.ops, self.settings, self.config
        n, gamma = len(anchors), settings.gamma
        ring = caches[self.stages[0].name].grain
        tokens = torch.full((n, gamma), settings.noise_token, dtype=torch.int64, device=anchors.device)
        tokens[:, 0] = anchors
        rows = (positions[:, None] + torch.arange(gamma, device=positions.device)).flatten()
        store = slot.repeat_interleave(gamma) * ring + rows % ring
        index = ops.draft.index(slot, positions, first, config.window, ring, gamma).repeat_interleave(gamma, 0)
        rotation = ops.rope.table(rows, self.rotary.base)
        streams, pre = start_streams(ops.embed.lookup(self.embed, tokens.flatten()), config.streams)
        for stage in self.stages:
            x = stage.block.enter(streams, pre)
            attend = partial(stage.attend, ring=caches[stage.name], store=store, index=index, rotation=rotation)
            streams, pre = stage.block.finish(streams, x, attend, None)
        hidden = ops.mhc.collapse(streams, pre)
        base = ops.linear.dense(ops.norm.rms(hidden, self.norm, config.eps), self.head, wide=True)
        return Draft(base.view(n, gamma, -1), hidden.view(n, gamma, -1))

    def heads(self, base: Tensor, hidden: Tensor, previous: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Logits b + W2 W1[previous] and confidence sigmoid(w . [h; W1[previous]] / T) of single rows.
        base: [n, vocab] float32; hidden: [n, H]; previous: [n] int64. -> [n, vocab], [n], float32"""
        ops = self.ops
        embed = ops.embed.lookup(self.markov_embed, previous)
        logits = base + ops.linear.dense(embed, self.markov_head, wide=True)
        return logits, ops.draft.confidence(hidden, embed, self.confidence, temperature)

    def greedy(
        self, draft: Draft, anchors: Tensor, temperatures: Sequence[float] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sequential head with the best token each time; of equal ones the lowest. anchors: [R] int64;
        temperatures: of the confidences, one per position, or none for 1.
        -> tokens [R, gamma] int64, logits [R, gamma, vocab], confidences [R, gamma], float32"""
        previous = anchors
        tokens, logits, confidences = [], [], []
        for k in range(draft.base.shape[1]):
            temperature = temperatures[k] if temperatures else 1.0
            row, confidence = self.heads(draft.base[:, k], draft.hidden[:, k], previous, temperature)
            previous = row.argmax(-1)
            tokens.append(previous)
            logits.append(row)
            confidences.append(confidence)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidences, 1)
