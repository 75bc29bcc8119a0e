"""Dense decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3) on the op table. Copy this file to add your own.

A model says what it needs: ops (`needs`), tensors (`tensors()`) and caches (`states()`). The backend loads, allocates
and hands it batches; `forward` is straight-line code over `ops`. Nothing here names a device or a tensor library's
kernels, so a backend with faster ops serves the model unchanged.

Shapes: T tokens of the step, M positions whose logits are wanted, H hidden, h query heads, g key-value heads, d head.
Source: the papers of these models and the layout of their Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.modeling import Batch, Cache, CacheFormat, Model, ModelContext, StateSpec, TensorSpec, Weight
from headrace.ops import Ops

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LARGEST = (1 << 31) - 1
"""Of any size; with fewer bounds a damaged config takes hours, or all memory, before its weights are looked at."""
MOST_LAYERS = 4096
LARGEST_NUMBER = 1e30


class Dense(Model):
    """x += attention(norm(x)); x += mlp(norm(x)), L times; then norm and head."""

    needs = ("embed.lookup", "norm.rms", "rope.table", "rope.apply", "linear.dense", "act.swiglu", "kv.store",
             "index.entries", "attn.paged")  # fmt: skip

    def __init__(self, config: Mapping[str, Any], ops: Ops, context: ModelContext) -> None:
        self.ops, self.context = ops, context
        name = _architecture(config)
        self.n_layers = _positive(config, "num_hidden_layers", most=MOST_LAYERS)
        self.hidden = _positive(config, "hidden_size")
        self.inner = _positive(config, "intermediate_size")
        self.heads = _positive(config, "num_attention_heads")
        self.kv_heads = _positive(config, "num_key_value_heads", self.heads)
        self.head_dim = _positive(config, "head_dim", self.hidden // self.heads)
        self.vocab_size = _positive(config, "vocab_size")
        self.context_tokens = _positive(config, "max_position_embeddings")
        self.eps = _number(config, "rms_norm_eps", 1e-6)
        self.tied = _flag(config, "tie_word_embeddings")
        self.qk_norm = name == "Qwen3ForCausalLM"
        biased = _flag(config, "attention_bias")
        self.qkv_bias = name == "Qwen2ForCausalLM" or biased
        self.out_bias = name != "Qwen2ForCausalLM" and biased
        self.mlp_bias = _flag(config, "mlp_bias")
        if context.draft:
            raise ModelError(
                "HR-DENSE-02", f"draft = true, and a {name} has no drafter of its own",
                "remove draft, or choose another drafter",
            )  # fmt: skip
        if context.quantise_activations:
            raise ModelError(
                "HR-DENSE-02", f"quantise_activations = true, and a {name} has no packed matrices",
                "set quantise_activations = false",
            )  # fmt: skip
        if self.heads % self.kv_heads:
            raise _refused(
                f"num_attention_heads = {self.heads}", f"it is no multiple of {self.kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise _refused(f"head_dim = {self.head_dim}", "rope turns pairs of channels, so it must be even")
        if config.get("hidden_act", "silu") != "silu":
            raise _refused(f"hidden_act = {config['hidden_act']!r}", "only silu is known")
        # Qwen2 and Qwen3 configs carry a window that use_sliding_window = false switches off
        if config.get("sliding_window") and _flag(config, "use_sliding_window", name == "MistralForCausalLM"):
            raise _refused(f"sliding_window = {config['sliding_window']}", "only full attention is known")
        if config.get("quantization_config"):
            raise _refused(f"quantization_config = {config['quantization_config']}", "only plain weights are known")
        self.inv_freq = _frequencies(config, self.head_dim)
        self.weights: Mapping[str, Weight] = {}

    # --- what it needs -----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterable[TensorSpec]:
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield TensorSpec(name="embed_tokens.weight", shape=(self.vocab_size, hidden))
        for i in range(self.n_layers):
            layer = f"layers.{i}."
            yield TensorSpec(name=layer + "input_layernorm.weight", shape=(hidden,))
            yield from _linear(layer + "self_attn.q_proj", q, hidden, self.qkv_bias)
            yield from _linear(layer + "self_attn.k_proj", kv, hidden, self.qkv_bias)
            yield from _linear(layer + "self_attn.v_proj", kv, hidden, self.qkv_bias)
            yield from _linear(layer + "self_attn.o_proj", hidden, q, self.out_bias)
            if self.qk_norm:
                yield TensorSpec(name=layer + "self_attn.q_norm.weight", shape=(self.head_dim,))
                yield TensorSpec(name=layer + "self_attn.k_norm.weight", shape=(self.head_dim,))
            yield TensorSpec(name=layer + "post_attention_layernorm.weight", shape=(hidden,))
            yield from _linear(layer + "mlp.gate_proj", self.inner, hidden, self.mlp_bias)
            yield from _linear(layer + "mlp.up_proj", self.inner, hidden, self.mlp_bias)
            yield from _linear(layer + "mlp.down_proj", hidden, self.inner, self.mlp_bias)
        yield TensorSpec(name="norm.weight", shape=(hidden,))
        if not self.tied:
            yield TensorSpec(name="lm_head.weight", shape=(self.vocab_size, hidden))

    def states(self) -> Iterable[StateSpec]:
        form = CacheFormat(self.context.compute, self.kv_heads * self.head_dim)
        for i in range(self.n_layers):
            yield StateSpec(name=f"k{i}", kind="paged", format=form)
            yield StateSpec(name=f"v{i}", kind="paged", format=form)

    def ignored(self, name: str) -> bool:
        # old checkpoints store the rotation frequencies; tied ones may store the head, which is the embedding
        return name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")

    def load(self, weights: Mapping[str, Weight]) -> None:
        self.weights = weights

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, caches: Mapping[str, Cache]) -> Tensor:
        ops, weights = self.ops, self.weights
        x = ops.embed.lookup(weights["embed_tokens.weight"], batch.tokens)  # [T, H]
        cos, sin = ops.rope.table(batch.positions, self.inv_freq)  # [T, d / 2]
        # where this step's keys and values go; one entry per token, and -1 for those that are in a shared block already
        entries = batch.positions if batch.store is None else torch.where(batch.store, batch.positions, -1)
        slots = ops.index.entries(entries[:, None], batch.table, batch.row, batch.block_tokens)[:, 0]  # [T]
        for i in range(self.n_layers):
            layer = f"layers.{i}."
            normed = ops.norm.rms(x, weights[layer + "input_layernorm.weight"], self.eps)
            x = x + self._attention(i, normed, cos, sin, slots, batch, caches)
            normed = ops.norm.rms(x, weights[layer + "post_attention_layernorm.weight"], self.eps)
            x = x + self._mlp(layer, normed)
        x = ops.norm.rms(x[batch.wanted], weights["norm.weight"], self.eps)  # [M, H]
        head = weights["embed_tokens.weight" if self.tied else "lm_head.weight"]
        logits: Tensor = ops.linear.dense(x, head, wide=True)  # [M, vocab] float32
        return logits

    def _attention(
        self, i: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, batch: Batch, caches: Mapping[str, Cache]
    ) -> Tensor:
        """x: [T, H] -> [T, H]. Writes the step's keys and values, then reads all up to each position."""
        ops, layer = self.ops, f"layers.{i}.self_attn."
        q = self._linear(layer + "q_proj", x).view(len(x), self.heads, self.head_dim)
        k = self._linear(layer + "k_proj", x).view(len(x), self.kv_heads, self.head_dim)
        v = self._linear(layer + "v_proj", x)  # [T, g d]
        if self.qk_norm:
            q = ops.norm.rms(q, self.weights[layer + "q_norm.weight"], self.eps)
            k = ops.norm.rms(k, self.weights[layer + "k_norm.weight"], self.eps)
        q = ops.rope.apply(q, cos, sin, "halves")
        k = ops.rope.apply(k, cos, sin, "halves")
        keys, values = caches[f"k{i}"], caches[f"v{i}"]
        ops.kv.store(keys, slots, k.reshape(len(x), -1))
        ops.kv.store(values, slots, v)
        out = ops.attn.paged(q, keys, values, batch.table, batch.row, batch.positions, self.head_dim**-0.5)  # [T, h, d]
        return self._linear(layer + "o_proj", out.reshape(len(x), -1))

    def _mlp(self, layer: str, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]"""
        gate, up = self._linear(layer + "mlp.gate_proj", x), self._linear(layer + "mlp.up_proj", x)  # [T, inner]
        return self._linear(layer + "mlp.down_proj", self.ops.act.swiglu(gate, up))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = self.ops.linear.dense(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))
        return out


# --- reading config.json ---------------------------------------------------------------------------------------------


def _linear(name: str, m: int, k: int, bias: bool) -> Iterable[TensorSpec]:
    yield TensorSpec(name=name + ".weight", shape=(m, k))
    if bias:
        yield TensorSpec(name=name + ".bias", shape=(m,))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [""]
    if names[0] not in ARCHITECTURES:
        raise _refused(f"architectures = {names}", f"known: {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _positive(config: Mapping[str, Any], key: str, default: int | None = None, most: int = LARGEST) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _refused(f"{key} = {value!r:.60}", f"it must be a whole number from 1 to {most}")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise _refused(f"{key} = {value!r:.60}", "it must be true or false")
    return value


def _refused(what: str, why: str) -> ModelError:
    return ModelError("HR-DENSE-01", f"{what} in config.json can't be served: {why}", "use another model or backend")


def _frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """[d / 2] float32 rotation frequencies: theta^(-2 i / d), scaled as rope_scaling says. Newer configs keep both in
    rope_parameters."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise _refused(f"rope_scaling = {scaling!r}", "it must be a table")
    theta = _number(scaling if "rope_theta" in scaling else config, "rope_theta", 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    share = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise _refused(f"partial_rotary_factor = {share}", "only whole heads are rotated")
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return inv_freq
    if kind not in ("linear", "llama3"):
        raise _refused(f"rope type '{kind}'", "known: default, linear, llama3")
    if kind == "linear":
        return inv_freq / _number(scaling, "factor")
    return _llama3(inv_freq, scaling)


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_NUMBER:
        raise _refused(f"{key} = {value!r:.60}", f"it must be a number above 0 and below {LARGEST_NUMBER}")
    return float(value)


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are slowed down by `factor`, short ones kept, those between interpolated (the Llama 3.1 release)."""
    factor, low, high = (_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise _refused(f"high_freq_factor = {high} of the rope scaling", f"it must be above low_freq_factor, {low}")
    waves = 2 * math.pi / inv_freq
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(waves > original / low, inv_freq / factor, inv_freq)
    is_between = (waves >= original / high) & (waves <= original / low)
    return torch.where(is_between, between, scaled)
