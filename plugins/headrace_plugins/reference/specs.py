"""The kernels of this folder as records. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.hooks import KernelSpec

_FAST = 10
"""Priority of a quicker kernel that isn't exact."""

_EXACT = (
    ("embed.lookup", "basic:embed_lookup", "rows of a table, packed or not"),
    ("norm.rms", "basic:norm_rms", "RMS norm in float32, rounded once"),
    ("rope.table", "basic:rope_table", "cos and sin of float32 angles"),
    ("rope.apply", "basic:rope_apply", "rotation of pairs or halves in float32, rounded once"),
    ("quant.activation", "basic:quant_activation", "e4m3 with a power of two per 32 channels, and back"),
    ("act.swiglu", "basic:act_swiglu", "clamped SwiGLU in float32, rounded once"),
    ("moe.route", "basic:moe_route", "sqrt-softplus scores, stable sort"),
    ("mhc.collapse", "streams:mhc_collapse", "weighted sum of the streams in float32, rounded once"),
    ("mhc.update", "streams:mhc_update", "one small product per token in float32, rounded once"),
    ("engram.hash", "streams:engram_hash", "n-gram rows in wrapping int64"),
    ("engram.gate", "streams:engram_gate", "gated addition in float32, rounded once"),
    ("draft.feature", "streams:draft_feature", "mean over the streams in float32, rounded once"),
    ("draft.confidence", "streams:draft_confidence", "one dot product per row in float32"),
    ("kv.store", "cache:kv_store", "packed in the cache's format, the last write of an address wins"),
    ("kv.load", "cache:kv_load", "unpacked from the cache's format"),
    ("compress.pool", "cache:compress_pool", "softmax over two tokens in float32, rounded once"),
    ("index.window", "index:index_window", "addresses by arithmetic"),
    ("index.entries", "index:index_entries", "addresses from the block table"),
    ("index.topk", "index:index_topk", "stable choice around the k-th score"),
    ("index.candidates", "index:index_candidates", "best score of each block, then index.topk"),
    ("draft.index", "index:draft_index", "addresses by arithmetic"),
    ("sample.step", "basic:sample_step", "headrace.sampling, in numpy"),
)
"""(op, factory below kernels/, summary) of kernels whose rows are independent as they are."""

_PRODUCTS = (
    ("linear.dense", "basic:linear_dense", "x w^T; packed weights are unpacked per call"),
    ("linear.grouped", "basic:linear_grouped", "one product per group"),
    ("moe.experts", "basic:moe_experts", "tokens grouped by expert, summed in slot order"),
    ("mhc.mix", "streams:mhc_mix", "one product and Sinkhorn in float32"),
    ("index.score", "index:index_score", "products in float32, rounded once"),
    ("attn.sparse", "attention:attn_sparse", "gathered keys, softmax in float32, rounded once"),
    ("attn.paged", "attention:attn_paged", "gathered keys, online softmax in float32, rounded once"),
)
"""The same for kernels of two variants: `factory`, and `factory_tiled`, all of whose products have one shape."""


def kernels() -> Iterator[KernelSpec]:
    """Every kernel for a CPU."""
    for op, factory, summary in _EXACT:
        yield _spec("torch", op, factory, summary, exact=True)
    for op, factory, summary in _PRODUCTS:
        yield _spec("torch", op, factory, summary, priority=_FAST)
        yield _spec("torch-tiled", op, f"{factory}_tiled", f"{summary}; in tiles of a fixed shape", exact=True)


def _spec(name: str, op: str, factory: str, summary: str, *, exact: bool = False, priority: int = 0) -> KernelSpec:
    return KernelSpec(
        name=name,
        op=op,
        factory=f"headrace_plugins.reference.kernels.{factory}",
        summary=summary,
        exact=exact,
        priority=priority,
        requires=("torch",),
        install="pip install 'headrace[torch]'",
    )
