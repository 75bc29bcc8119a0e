"""Names, shapes and packings of the checkpoint's tensors. Source: DeepSeek-V4.1 model description, "Checkpoint tensor
names" (DeepInfer `hugging_face/names.py`) and "Quantised linear layers"."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.modeling import TensorSpec
from headrace_plugins.models.deepseek_v41.config import LayerPlan, TextConfig


def backbone_tensors(config: TextConfig) -> Iterator[TensorSpec]:
    yield TensorSpec(name="embed.weight", shape=(config.vocab_size, config.hidden))
    yield TensorSpec(name="head.weight", shape=(config.vocab_size, config.hidden))
    yield TensorSpec(name="norm.weight", shape=(config.hidden,))
    for plan in config.layers:
        prefix = f"layers.{plan.index}."
        yield from _block(config, prefix, config.n_experts)
        if plan.owns_kv:
            yield from _compressor(config, plan, prefix + "attn.")
        if plan.selects:
            yield _packed(prefix + "attn.indexer.wq_b", config.index_heads * config.index_dim, config.q_rank)
            yield _plain(prefix + "attn.indexer.weights_proj", config.index_heads, config.hidden)
        if plan.engram >= 0:
            yield from _engram(config, plan, prefix + "engram.")


def draft_tensors(config: TextConfig) -> Iterator[TensorSpec]:
    draft, hidden, vocab = config.draft, config.hidden, config.vocab_size
    if draft is None:
        return
    for stage in range(draft.stages):
        yield from _block(config, f"mtp.{stage}.", draft.n_experts)
    yield _packed("mtp.0.main_proj", hidden, len(draft.targets) * hidden)
    yield _plain("mtp.0.main_norm", hidden)
    last = f"mtp.{draft.stages - 1}."
    yield _plain(last + "norm", hidden)
    yield _plain(last + "markov_head.embed", vocab, draft.markov_rank)
    yield _plain(last + "markov_head.head", vocab, draft.markov_rank)
    yield _plain(last + "confidence_head.proj", 1, hidden + draft.markov_rank)


def _plain(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name + ".weight", shape=shape)


def _packed(name: str, rows: int, columns: int) -> TensorSpec:
    return TensorSpec(name=name + ".weight", shape=(rows, columns), packing="fp8_block")


def _wide(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32")


def _block(config: TextConfig, prefix: str, n_experts: int) -> Iterator[TensorSpec]:
    hidden, streams, width = config.hidden, config.streams, config.expert_width
    coefficients = streams * (streams + 2)
    for sublayer in ("hc_attn", "hc_ffn"):
        yield _wide(f"{prefix}{sublayer}_fn", coefficients, streams * hidden)
        yield _wide(f"{prefix}{sublayer}_base", coefficients)
        yield _wide(f"{prefix}{sublayer}_scale", 3)
    yield _plain(prefix + "attn_norm", hidden)
    yield _plain(prefix + "ffn_norm", hidden)
    yield from _projections(config, prefix + "attn.")
    yield _plain(prefix + "ffn.gate", n_experts, hidden)
    yield _wide(prefix + "ffn.gate.bias", n_experts)
    yield _wide(prefix + "ffn.gate.bias_vl", n_experts)
    for expert in range(n_experts):
        for name, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
            yield TensorSpec(name=f"{prefix}ffn.experts.{expert}.{name}.weight", shape=shape, packing="fp4_row")
    yield _packed(prefix + "ffn.shared_experts.w1", width, hidden)
    yield _packed(prefix + "ffn.shared_experts.w2", hidden, width)
    yield _packed(prefix + "ffn.shared_experts.w3", width, hidden)


def _projections(config: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    heads, dim = config.heads, config.head_dim
    yield _wide(prefix + "attn_sink", heads)
    yield _packed(prefix + "wq_a", config.q_rank, config.hidden)
    yield _plain(prefix + "q_norm", config.q_rank)
    yield _packed(prefix + "wq_b", heads * dim, config.q_rank)
    yield _packed(prefix + "wkv", dim, config.hidden)
    yield _plain(prefix + "kv_norm", dim)
    yield _packed(prefix + "wo_a", config.o_groups * config.o_rank, heads * dim // config.o_groups)
    yield _packed(prefix + "wo_b", config.hidden, config.o_groups * config.o_rank)


def _compressor(config: TextConfig, plan: LayerPlan, prefix: str) -> Iterator[TensorSpec]:
    yield _plain(prefix + "compressor.wkv", config.head_dim, config.hidden)
    if plan.ratio > 1:
        yield _plain(prefix + "compressor.wgate", config.head_dim, config.hidden)
    yield _plain(prefix + "compressor.norm", config.head_dim)
    yield _plain(prefix + "indexer.wk", config.index_dim, config.head_dim)
    yield _plain(prefix + "indexer.k_norm", config.index_dim)


def _engram(config: TextConfig, plan: LayerPlan, prefix: str) -> Iterator[TensorSpec]:
    engram = config.engram
    assert engram is not None
    rows = engram.table_rows[plan.engram]
    yield TensorSpec(name=prefix + "embed.weight", shape=(rows, engram.head_dim), packing="fp8_row")
    yield _packed(prefix + "wkv", (config.streams + 1) * config.hidden, engram.width)
    yield _wide(prefix + "q_weight", config.streams, config.hidden)
    yield _wide(prefix + "k_weight", config.streams, config.hidden)
