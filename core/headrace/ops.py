# mypy: disable-error-code="empty-body"
"""Op contracts: what kernels promise to models, caches, samplers and verifiers, and how they are bound.

An op is declared below as a function without a body: its signature is what kernels must accept, its docstring gives
shapes, types and invariants. `act` is the compute type of the model (float32 or bfloat16); "one rounding" means
that everything before it is computed in float32. A kernel that is `exact` gives every row the same bits whatever rows
share the call, however many there are.

A backend binds once, when it opens its device: `bind` chooses a kernel per op and returns frozen `Ops`, whose groups
hold plain callables (`ops.norm.rms`). Nothing is looked up in a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headrace.hooks import KernelSpec
    from headrace.modeling import Cache, Tensor, Weight
    from headrace.types import MaskBatch, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class OpContract:
    name: str
    signature: inspect.Signature
    text: str


OPS: dict[str, OpContract] = {}
"""Every op, by name."""


def _op(declaration: Callable[..., Any]) -> Callable[..., Any]:
    group, _, verb = declaration.__name__.partition("_")
    name = f"{group}.{verb}"
    OPS[name] = OpContract(name, inspect.signature(declaration), inspect.getdoc(declaration) or "")
    return declaration


# --- norms, rotations, linear layers ---------------------------------------------------------------------------------


@_op
def embed_lookup(weight: Weight, ids: Tensor) -> Tensor:
    """Rows of a table. weight: [v, d] or Quantised fp8_row; ids: [...] int64. -> [..., d] act."""


@_op
def norm_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x rsqrt(mean(x^2) + eps) weight over the last axis, one rounding. x: [..., d] act or float32; weight: [d].
    -> [..., d] act."""


@_op
def rope_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin of float32(position) float32(frequency). positions: [n] int64; inv_freq: [r] float32.
    -> two [n, r] float32."""


@_op
def rope_apply(
    x: Tensor, cos: Tensor, sin: Tensor, layout: Literal["pairs", "halves"] = "pairs", inverse: bool = False
) -> Tensor:
    """Rotate the last 2r channels, one rounding; the others pass. pairs: (2i, 2i + 1); halves: (i, i + r).
    inverse: by the negated angle. x: [n, d] or [n, h, d] act; cos, sin: [n, r]. -> like x."""


@_op
def linear_dense(x: Tensor, weight: Weight, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x weight^T + bias. x: [n, k] act; weight: [m, k] act or Quantised; bias: [m].
    -> [n, m] act, or float32 without rounding when `wide`."""


@_op
def linear_grouped(x: Tensor, weight: Weight) -> Tensor:
    """One matrix per group. x: [n, g, k] act; weight: [g m, k], rows of group 0 first. -> [n, g, m] act."""


@_op
def quant_activation(x: Tensor) -> Tensor:
    """Round to e4m3 with a ue8m0 scale 2^ceil(log2(max(amax, 1e-4) / 448)) per 32 channels, and back.
    x: [..., d] act. -> like x. Spec: DeepInfer's per-token activation quantisation."""


# --- mixture of experts ----------------------------------------------------------------------------------------------


@_op
def act_swiglu(gate: Tensor, up: Tensor, limit: float | None = None, weight: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) clip(up, -limit, limit) weight, one rounding. gate, up: [n, m] act or float32;
    weight: [n] float32. -> [n, m] act."""


@_op
def moe_route(logits: Tensor, bias: Tensor, top: int, scale: float) -> tuple[Tensor, Tensor]:
    """s = sqrt(softplus(logits)); the `top` largest of s + bias, descending, lower expert first on ties; weights
    scale s / (sum s + 1e-20). logits: [n, e] float32; bias: [e] or [n, e] float32.
    -> ids [n, top] int64, weights [n, top] float32."""


@_op
def moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Seq[Weight], w3: Seq[Weight], w2: Seq[Weight],
    limit: float | None = None, quantise: bool = False,
) -> Tensor:  # fmt: skip
    """Sum over the chosen experts, in the order of their slots, in float32, of w2 swiglu(w1 x, w3 x, limit, weight).
    quantise: x and the inner activation pass through quant.activation. x: [n, h] act; ids, weights: [n, top];
    w1, w3: [m, h] per expert; w2: [h, m] per expert. -> [n, h] float32."""


# --- manifold-constrained hyper-connections --------------------------------------------------------------------------


@_op
def mhc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of s residual streams: pre, post, and a doubly stochastic comb by Sinkhorn.
    streams: [n, s, h] act; fn: [s (s + 2), s h] float32; base: [s (s + 2)] float32; scale: [3] float32.
    -> pre [n, s], post [n, s], comb [n, s, s], float32; comb[i, j] goes from stream i to stream j."""


@_op
def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre[j] streams[j], one rounding. streams: [n, s, h] act; pre: [n, s] float32. -> [n, h] act."""


@_op
def mhc_update(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[j] out + sum_i comb[i, j] streams[i], one rounding. streams: [n, s, h] act; out: [n, h] act;
    post: [n, s]; comb: [n, s, s] float32. -> [n, s, h] act."""


# --- Engram ----------------------------------------------------------------------------------------------------------


@_op
def engram_hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each token: for n = 2 .. g, (XOR_{r < n} c_r mult_r) mod prime + offset,
    products wrapping in int64, remainders non-negative. ngrams: [n, g] int64, compressed ids, newest first;
    multipliers: [g] int64; primes, offsets: [(g - 1) heads] int64, all heads of n = 2 first.
    -> [n, (g - 1) heads] int64."""


@_op
def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, skip: Tensor | None = None
) -> Tensor:
    """streams[j] + sigmoid(sign(d_j) sqrt(max(|d_j|, 1e-6))) value, one rounding, where
    d_j = h^-0.5 sum(streams_j q_weight_j key_j k_weight_j) rstd(streams_j) rstd(key_j). Rows with `skip` are unchanged.
    streams: [n, s, h] act; kv: [n, s + 1, h] act, the value last; q_weight, k_weight: [s, h]; skip: [n] bool.
    -> [n, s, h] act."""


# --- caches ----------------------------------------------------------------------------------------------------------


@_op
def kv_store(cache: Cache, slots: Tensor, values: Tensor) -> None:
    """Write entries in the cache's format, byte-exact. slots: [n] int64 flat addresses, -1 = don't; values: [n, width]
    act or float32. Of two values for one address the later wins."""


@_op
def kv_load(cache: Cache, slots: Tensor) -> Tensor:
    """Read entries. slots: [...] int64, -1 gives zeros. -> [..., width] act (float32 for a float32 cache)."""


@_op
def compress_pool(cache: Cache, latent: Tensor, score: Tensor, slot: Tensor, positions: Tensor) -> Tensor:
    """Pool pairs of tokens: at an odd position, per channel, the softmax over both scores weighs both latents, float32
    to act; 0 at even positions. The cache, float32, width 2d, is a ring of (score, latent) per position; it gives the
    partner that is not in this call, and takes every token of the call. latent, score: [n, d] float32; slot, positions:
    [n] int64, ascending per slot, one run each. -> [n, d] act."""


@_op
def index_window(slot: Tensor, positions: Tensor, first: Tensor, window: int, ring: int) -> Tensor:
    """Flat addresses of the window max(first, p - window + 1) .. p of a ring cache, oldest first, right-padded by -1.
    slot, positions, first: [n] int64. -> [n, window] int64."""


@_op
def index_entries(entries: Tensor, table: Tensor, row: Tensor, grain: int) -> Tensor:
    """Flat addresses of paged entries. entries: [n, k] int64, -1 = none; table: [R, B] int64; row: [n] int64; grain:
    entries per block. -> [n, k] int64."""


@_op
def index_score(
    q: Tensor, weights: Tensor, keys: Cache, table: Tensor, row: Tensor, visible: Tensor,
    blocks: Tensor | None = None, block: int = 0,
) -> Tensor:  # fmt: skip
    """sum_h w_h relu(q_h . k_i) rounded to act, for entries i < visible of the token's own row, else -inf.
    blocks: only entries of these candidate blocks of `block` entries, others -inf: [n, c] int64, -1 padded.
    q: [n, h, d] act; weights: [n, h] act; table: [R, B]; row, visible: [n] int64. -> [n, m] act, m >= max(visible)."""


@_op
def index_topk(scores: Tensor, k: int) -> Tensor:
    """The k best of each row, lower index first on ties, -inf never. scores: [n, m].
    -> [n, k] int64, ascending, right-padded by -1."""


@_op
def index_candidates(scores: Tensor, visible: Tensor, block: int, top: int) -> Tensor:
    """The `top` best blocks by their best score, the last visible block always among them.
    scores: [n, m]; visible: [n] int64. -> [n, top] int64, ascending, right-padded by -1."""


# --- attention -------------------------------------------------------------------------------------------------------


@_op
def attn_sparse(
    q: Tensor, window: Cache, window_index: Tensor, compressed: Cache | None, compressed_index: Tensor | None,
    sink: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Attention with K = V over entries of two caches together: one softmax over both and a sink logit per head. A row
    without any key gives 0. q: [n, h, d] act; indices: flat addresses [n, w], [n, k] int64, -1 = none; sink: [h]
    float32. -> [n, h, d] act."""


@_op
def attn_paged(
    q: Tensor, keys: Cache, values: Cache, table: Tensor, row: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Causal attention of grouped queries over all positions <= p of the token's own row. Caches of width kv_heads d.
    q: [n, heads, d] act; table: [R, B]; row, positions: [n] int64. -> [n, heads, d] act."""


# --- drafting and sampling -------------------------------------------------------------------------------------------


@_op
def draft_feature(streams: Tensor) -> Tensor:
    """Mean over the streams, one rounding. streams: [n, s, h] act. -> [n, h] act."""


@_op
def draft_index(slot: Tensor, positions: Tensor, first: Tensor, window: int, ring: int, gamma: int) -> Tensor:
    """Flat addresses that the gamma draft rows after an anchor at `positions` share: up to `window` entries before it,
    then gamma of its own. slot, positions, first: [R] int64. -> [R, window + gamma] int64, right-padded by -1."""


@_op
def draft_confidence(hidden: Tensor, embed: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """sigmoid(clamp(weight . [hidden; embed] / temperature, -60, 60)). hidden: [n, h] act; embed: [n, r] act; weight:
    [1, h + r]. -> [n] float32."""


@_op
def sample_step(plan: StepPlan, logits: Any, masks: MaskBatch | None) -> StepResult:
    """Mask, transform, filter, draw and verify by match, as `headrace.sampling` defines. logits: float32 rows [vocab]
    of every sampled position, in plan order; may be overwritten."""


# --- binding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext:
    """What a kernel is made for: `KernelSpec.factory(context)` gives the callable, `KernelSpec.when` names
    `predicate(context) -> str`, why it can't serve; empty = it can."""

    device: str
    compute: Literal["float32", "bfloat16"] = "float32"
    exact: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the backend knows of device and model: "arch", "head_dim", ..."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that a plugin offers."""

    spec: KernelSpec
    source: str
    """Plugin, distribution and version."""
    load: Callable[[str], Any]
    """load("module:attribute") imports it, PluginError when that fails."""


@dataclass(frozen=True, slots=True)
class BoundOp:
    """Which kernel serves an op, and why."""

    op: str
    kernel: str
    source: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(kernel, why it lost)"""


class Ops:
    """Bound kernels: `ops.norm.rms(...)`. Frozen."""

    __slots__ = ("_groups", "bound")

    def __init__(self, kernels: Mapping[str, Callable[..., Any]], bound: Iterable[BoundOp] = ()) -> None:
        groups: dict[str, dict[str, Callable[..., Any]]] = {}
        for name, kernel in kernels.items():
            group, _, verb = name.partition(".")
            groups.setdefault(group, {})[verb] = kernel
        object.__setattr__(self, "_groups", {name: SimpleNamespace(**verbs) for name, verbs in groups.items()})
        object.__setattr__(self, "bound", tuple(bound))

    def __getattr__(self, group: str) -> Any:
        try:
            return self._groups[group]
        except KeyError:
            raise AttributeError(f"no op of the group '{group}' was bound; the model must name it in `needs`") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Ops are bound once")


def bind(
    needed: Iterable[str],
    candidates: Iterable[Candidate],
    context: KernelContext,
    overrides: Mapping[str, str] | None = None,
) -> Ops:
    """Choose a kernel for every needed op: the one that `overrides` names, else the highest priority of those that
    serve the context (and are exact if it asks for that). Raises ConfigError that lists the candidates of every op
    that none serves, PluginError for a kernel whose signature is wrong."""
    raise NotImplementedError
