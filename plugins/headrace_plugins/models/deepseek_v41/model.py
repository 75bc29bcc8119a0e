"""DeepSeek-V4.1 as a `headrace.modeling.Model`: what it loads, what it caches, how a step runs.

Source: DeepSeek-V4.1 model description, "Whole forward", "YOCO split" (DeepInfer `v4_modules/yoco.py`), "What state a
sequence has" (`worker/cache_engine.py`) and "SWA bounded replay".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.modeling import Batch, Cache, CacheFormat, Model, ModelContext, StateSpec, TensorSpec, Weight
from headrace.ops import Ops
from headrace_plugins.models.deepseek_v41.attention import Attention
from headrace_plugins.models.deepseek_v41.block import Block, Experts, start_streams
from headrace_plugins.models.deepseek_v41.config import LayerPlan, TextConfig, read_config
from headrace_plugins.models.deepseek_v41.draft import Drafter
from headrace_plugins.models.deepseek_v41.engram import Engram, Grams, primes
from headrace_plugins.models.deepseek_v41.rotary import inverse_frequencies
from headrace_plugins.models.deepseek_v41.step import Rotary, Step
from headrace_plugins.models.deepseek_v41.tensors import backbone_tensors, draft_tensors

OTHER_ENCODERS = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
"""Tensors of the vision tower, which gives embeddings to this model and is none of its business."""


class Layer:
    """A block of the backbone with its attention and, in some layers, Engram."""

    def __init__(self, ops: Ops, config: TextConfig, plan: LayerPlan, quantise: bool) -> None:
        prefix = f"layers.{plan.index}."
        self.plan = plan
        experts = Experts(ops, config, prefix + "ffn.", config.n_experts, config.top_experts, quantise)
        self.block = Block(ops, config, prefix, experts)
        self.attention = Attention(ops, config, plan, quantise)
        self.engram = Engram(ops, config, plan.index, quantise) if plan.engram >= 0 else None


class DeepseekV41(Model):
    """The text backbone, with embeddings of images as input where a batch has them, and the drafter."""

    needs: ClassVar[tuple[str, ...]] = (
        "embed.lookup", "norm.rms", "rope.table", "rope.apply", "linear.dense", "linear.grouped", "quant.activation",
        "act.swiglu", "moe.route", "moe.experts", "mhc.mix", "mhc.collapse", "mhc.update", "engram.hash", "engram.gate",
        "kv.store", "kv.load", "compress.pool", "index.window", "index.entries", "index.score", "index.topk",
        "index.candidates", "attn.sparse", "draft.feature", "draft.index", "draft.confidence",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any], ops: Ops, context: ModelContext) -> None:
        self.config = text = read_config(config)
        self.context = context
        self.ops = ops
        self.vocab_size, self.context_tokens = text.vocab_size, text.context
        self.history_tokens = text.engram.max_ngram - 1 if text.engram else 0
        self.replay_tokens = text.window
        self.rerun_tokens = _check_context(text, context)
        quantise = context.quantise_activations
        self.layers = [Layer(ops, text, plan, quantise) for plan in text.layers]
        self.drafter: Drafter | None = None
        """The draft forward and its heads; None unless the context asks for them."""
        if context.draft:
            assert text.draft is not None
            self.drafter = Drafter(ops, text, text.draft, quantise)
        self._targets = frozenset(text.draft.targets) if text.draft and context.draft else frozenset()
        self._last_target = max(self._targets, default=-1)
        self._cut = text.boundary if context.replay == "compact" else None
        self._grams: Grams | None = None

    def tensors(self) -> Iterable[TensorSpec]:
        yield from backbone_tensors(self.config)
        if self.context.draft:
            yield from draft_tensors(self.config)

    def ignored(self, name: str) -> bool:
        return name.startswith(OTHER_ENCODERS) or (not self.context.draft and name.startswith("mtp."))

    def states(self) -> Iterable[StateSpec]:
        """Per layer a ring of window keys; per kv source compressed keys, index keys and, where entries take two
        tokens, a ring of the last scores and latents."""
        config, slack = self.config, self.context.slack_tokens
        window = self._format("q8", config.head_dim)
        for plan in config.layers:
            prefix = f"layers.{plan.index}."
            yield StateSpec(name=prefix + "window", kind="ring", format=window, entries=config.window + slack)
            if not plan.owns_kv:
                continue
            compressed = self._format("q4" if config.fp4_cache else "q8", config.head_dim)
            keys = self._format("qm", config.index_dim)
            yield StateSpec(name=prefix + "compressed", kind="paged", format=compressed, ratio=plan.ratio)
            yield StateSpec(name=prefix + "index_keys", kind="paged", format=keys, ratio=plan.ratio)
            if plan.ratio > 1:
                pairs = CacheFormat("float32", 2 * config.head_dim)
                entries = plan.ratio + slack - 1
                yield StateSpec(name=prefix + "compressor", kind="ring", format=pairs, entries=entries)
        if self.context.draft and config.draft is not None:
            # The gamma rows of a draft lie behind the window, until the tokens in their place have run.
            entries = config.window + slack + config.draft.gamma
            for stage in range(config.draft.stages):
                yield StateSpec(name=f"mtp.{stage}.window", kind="ring", format=window, entries=entries)

    def _format(self, name: str, width: int) -> CacheFormat:
        plain = self.context.cache == "plain"
        return CacheFormat(self.context.compute if plain else name, width)  # type: ignore[arg-type]

    def load(self, weights: Mapping[str, Weight]) -> None:
        config = self.config
        self.norm, self.head, self.embed = weights["norm.weight"], weights["head.weight"], weights["embed.weight"]
        device = self.norm.device
        self.rotary = Rotary(
            base=inverse_frequencies(config.rope_dim, config.rope_theta).to(device),
            yarn=inverse_frequencies(config.rope_dim, config.compress_theta, config.yarn).to(device),
        )
        if config.engram is not None:
            self._load_engram(weights, device)
        for layer in self.layers:
            layer.block.load(weights)
            layer.attention.load(weights)
        if self.drafter is not None:
            self.drafter.load(weights, self.rotary)

    def _load_engram(self, weights: Mapping[str, Weight], device: torch.device) -> None:
        engram, tokenizer = self.config.engram, self.context.tokenizer
        assert engram is not None
        assert tokenizer is not None
        self._grams = Grams(engram, self.config, tokenizer, device)
        for layer, moduli in zip((layer for layer in self.layers if layer.engram), primes(engram), strict=True):
            if sum(moduli) > engram.table_rows[layer.plan.engram]:
                raise ModelError(
                    "HR-MODEL-22",
                    f"the n-gram table of layer {layer.plan.index} has {engram.table_rows[layer.plan.engram]} rows"
                    f" (config.json, engram_num_embeddings), its hash functions address {sum(moduli)}",
                    "is engram_vocab_size, engram_n_heads or engram_max_ngram_size of another checkpoint?",
                )
            assert layer.engram is not None
            layer.engram.load(weights, engram, moduli)

    def forward(self, batch: Batch, caches: Mapping[str, Cache]) -> Tensor:
        if self.context.replay == "off" and batch.tail is not None:
            batch = replace(batch, tail=None)
        step = Step(self.ops, self.rotary, batch, caches)
        wanted = batch.wanted
        streams, pre = start_streams(self._embed(batch), self.config.streams)
        grams = self._grams(batch) if self._grams else None
        taps: list[Tensor] = []
        for layer in self.layers:
            index = layer.plan.index
            _trace(step, f"trunk.{index}", streams)
            if layer.engram is not None and grams is not None:
                streams = layer.engram(streams, grams, step.batch.image, step.trace)
            if index in self._targets:
                taps.append(self.ops.draft.feature(streams))
                _trace(step, f"feature.{index}", taps[-1])
            x = layer.block.enter(streams, pre)
            layer.attention.publish(step, x)
            if index == self._cut and (keep := _kept(batch)) is not None:
                wanted = _among(keep, wanted)
                if not len(keep):
                    return torch.zeros(0, self.vocab_size, device=streams.device)
                step, streams, x, taps = step.take(keep), streams[keep], x[keep], [tap[keep] for tap in taps]
            if index == self._last_target and self.drafter is not None:
                self.drafter.remember(step, taps)
            streams, pre = layer.block.finish(streams, x, partial(layer.attention.attend, step), step.batch.image)
        _trace(step, f"trunk.{len(self.layers)}", streams)
        return self._logits(streams[wanted], pre[wanted])

    def _embed(self, batch: Batch) -> Tensor:
        """-> [T, H]"""
        tokens, image = batch.tokens, batch.image
        if image is None or batch.embeds is None:
            x: Tensor = self.ops.embed.lookup(self.embed, tokens)
            return x
        # Tokens in an image may be placeholders beyond the vocabulary.
        x = self.ops.embed.lookup(self.embed, tokens.masked_fill(image, 0))
        return torch.where(image[:, None], batch.embeds.to(x.dtype), x)

    def _logits(self, streams: Tensor, pre: Tensor) -> Tensor:
        """streams: [M, s, H]; pre: [M, s], of the last sublayer. -> [M, vocab] float32"""
        ops = self.ops
        h = ops.norm.rms(ops.mhc.collapse(streams, pre), self.norm, self.config.eps)
        logits: Tensor = ops.linear.dense(h, self.head, wide=True)
        return logits


def _kept(batch: Batch) -> Tensor | None:
    """Tokens that the second half computes: [K] int64, None = all."""
    if batch.tail is None:
        return None
    keep = (batch.positions >= batch.tail).nonzero()[:, 0]
    return None if len(keep) == len(batch.positions) else keep


def _among(keep: Tensor, wanted: Tensor) -> Tensor:
    """Where the wanted tokens are in `keep`. Raises ValueError for one that isn't."""
    at = torch.searchsorted(keep, wanted)
    if len(wanted) and (len(keep) <= int(at[-1]) or not torch.equal(keep[at], wanted)):
        raise ValueError("compact replay computes no logits before Batch.tail, and some were wanted")
    return at


def _trace(step: Step, name: str, value: Tensor) -> None:
    if step.trace is not None:
        step.trace[name] = value


def _check_context(config: TextConfig, context: ModelContext) -> int:
    """-> the least tokens at the end of a prompt that the second half has to run, 0 = as many as the first. Raises
    ModelError."""
    if config.engram is not None and context.tokenizer is None:
        raise ModelError(
            "HR-MODEL-22",
            "Engram reads n-grams of normalised text, and there is no tokenizer to normalise with",
            "put the tokenizer.json of the checkpoint beside its config.json",
        )
    ratio = max(plan.ratio for plan in config.layers)
    if ratio and context.block_tokens % ratio:
        raise _refused(
            f"blocks of {context.block_tokens} tokens don't hold whole entries of {ratio}", "use an even block_tokens"
        )
    if context.draft and config.draft is None:
        raise _refused(
            "draft = true, and the checkpoint has no draft stages (config.json, num_nextn_predict_layers = 0)",
            "remove draft, or choose another drafter",
        )
    if context.quantise_activations:
        _check_groups(config)
    if context.replay == "off":
        return 0
    boundary = config.boundary
    why = f"replay = '{context.replay}' runs the layers from the first of compress ratio 1 on for a prompt's end only"
    if boundary is None:
        raise _refused(f"{why}, and config.json, compress_ratios has none", "set replay = 'off'")
    if any(plan.consumer and plan.engram >= 0 for plan in config.layers):
        raise _refused(f"{why}, and config.json, engram_layer_ids has one of them", "set replay = 'off'")
    late = [plan.index for plan in config.layers if plan.owns_kv and plan.index > boundary]
    if late:
        raise _refused(
            f"{why}, and config.json, kv_source_layer_ids has {late} after it, whose keys of skipped tokens would be"
            " missing",
            "set replay = 'off'",
        )
    if context.draft and config.draft and len({target >= boundary for target in config.draft.targets}) > 1:
        raise _refused(
            f"{why}, and config.json, dspark_target_layer_ids = {list(config.draft.targets)} lie on both sides of layer"
            f" {boundary}",
            "set replay = 'off' or draft = false",
        )
    return config.window + context.slack_tokens


def _check_groups(config: TextConfig) -> None:
    """Inputs of packed matrices are rounded in groups of 32 channels."""
    widths = {
        "hidden_size": config.hidden,
        "q_lora_rank": config.q_rank,
        "o_groups * o_lora_rank": config.o_groups * config.o_rank,
        "moe_intermediate_size": config.expert_width,
    }
    if config.engram is not None:
        widths["(engram_max_ngram_size - 1) * engram_n_heads * engram_head_dim"] = config.engram.width
    for name, width in widths.items():
        if width % 32:
            raise _refused(
                f"quantise_activations rounds groups of 32 channels, and config.json has {name} = {width}",
                "set quantise_activations = false",
            )


def _refused(message: str, help: str) -> ModelError:
    return ModelError("HR-MODEL-23", message, help)
