# mypy: disable-error-code="empty-body"
"""Op contracts: what kernels promise to models, caches, samplers and verifiers, and how they are bound.

An op is declared below as a function without a body: its signature is what kernels must accept, its docstring gives
shapes, types and invariants. `act` is the compute type of the model (float32 or bfloat16); "one rounding" means
that everything before it is computed in float32. A kernel that is `exact` gives every row the same bits whatever rows
share the call, however many there are.

A backend binds once, when it is built: `bind` chooses a kernel per op and returns frozen `Ops`, whose groups hold plain
callables (`ops.norm.rms`). Nothing is looked up in a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from headrace.contracts import signature_problem
from headrace.errors import FAULTS, ConfigError, HeadraceError, PluginError, did_you_mean, why

if TYPE_CHECKING:
    from headrace.hooks import KernelSpec
    from headrace.modeling import Cache, Tensor, Weight
    from headrace.types import MaskBatch, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class OpContract:
    """One op: what a kernel has to accept, and what it promises."""

    name: str
    signature: inspect.Signature
    text: str
    """Shapes, types and invariants."""

    def __str__(self) -> str:
        """As it is called: rope.apply(x, cos, sin, layout='pairs', inverse=False)."""
        bare = [each.replace(annotation=each.empty) for each in self.signature.parameters.values()]
        return f"{self.name}{inspect.Signature(bare)}"


def _op(declaration: Callable[..., Any]) -> OpContract:
    group, _, verb = declaration.__name__.partition("_")
    return OpContract(f"{group}.{verb}", inspect.signature(declaration), inspect.getdoc(declaration) or "")


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
    blocks: [n, c] int64, -1 padded: only entries of these candidate blocks of `block` entries, others -inf.
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
    without any key gives 0. q: [n, h, d] act; window_index: [n, w] int64; compressed_index: [n, k] int64, both flat
    addresses, -1 = none; sink: [h] float32. -> [n, h, d] act."""


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
    then gamma of its own. slot, positions, first: [n] int64. -> [n, window + gamma] int64, right-padded by -1."""


@_op
def draft_confidence(hidden: Tensor, embed: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """sigmoid(clamp(weight . [hidden; embed] / temperature, -60, 60)). hidden: [n, h] act; embed: [n, r] act; weight:
    [1, h + r]. -> [n] float32."""


@_op
def sample_step(plan: StepPlan, logits: Any, masks: MaskBatch | None) -> StepResult:
    """Mask, transform, filter, draw and verify by match, as `headrace.sampling` defines. logits: float32 rows [vocab]
    of every sampled position, in plan order; may be overwritten."""


OPS: Mapping[str, OpContract] = MappingProxyType(
    {each.name: each for each in list(vars().values()) if isinstance(each, OpContract)}
)
"""Every op, by name."""


# --- binding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext:
    """What a kernel is made for: `KernelSpec.factory(context)` gives the callable, `KernelSpec.when` names
    `predicate(context) -> str`, why it can't serve; empty = it can."""

    device: str
    compute: Literal["float32", "bfloat16"] = "float32"
    exact: bool = False
    """Only exact kernels may be bound."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the backend says of device and model; "arch" is the model's architecture. A fact may be missing."""

    def __str__(self) -> str:
        return f"{'exact ' if self.exact else ''}{self.compute} on '{self.device}'"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that a plugin offers."""

    spec: KernelSpec
    source: str
    """Plugin, distribution and version."""
    load: Callable[[str], Any]
    """load("module:attribute") imports it, PluginError when that fails."""
    missing: tuple[str, ...] = ()
    """Packages of spec.requires that are not installed."""


@dataclass(frozen=True, slots=True)
class BoundOp:
    """Which kernel serves an op, and why."""

    op: str
    kernel: str
    source: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(kernel, why it lost)"""


class _Frozen:
    """Attributes set once, plain ones: reading them costs nothing."""

    def __init__(self, values: Mapping[str, Any], absent: str) -> None:
        self.__dict__.update(values, _absent=absent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"op '{self._absent.format(name)}' was not bound; the model must name it in `needs`")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("ops are bound once")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("ops are bound once")


class Ops(_Frozen):
    """Bound kernels: `ops.norm.rms(...)`. Frozen."""

    bound: tuple[BoundOp, ...]
    """What was chosen, in the order that was asked for."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]], bound: Iterable[BoundOp] = ()) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for name, kernel in kernels.items():
            group, _, verb = name.partition(".")
            groups.setdefault(group, {})[verb] = kernel
        frozen = {group: _Frozen(verbs, group + ".{}") for group, verbs in groups.items()}
        super().__init__({**frozen, "bound": tuple(bound)}, "{}.*")


def bind(
    needed: Iterable[str],
    candidates: Iterable[Candidate],
    context: KernelContext,
    overrides: Mapping[str, str] | None = None,
) -> Ops:
    """Choose a kernel for every needed op and make it: the one that `overrides` (op -> kernel name) names, else the
    highest priority of those that serve the context, ties by name. Only the chosen ones are imported.

    ConfigError, with every op that no kernel serves (HR-OPS-01) and every override that names no op (02), no kernel
    (03) or one that can't serve (04). PluginError: a kernel that can't be loaded or made, or has another signature than
    its op (05); the chosen kernel is offered twice (06); an op that doesn't exist is needed (07).
    """
    overrides = overrides or {}
    wanted = tuple(dict.fromkeys(needed))
    offered: dict[str, list[Candidate]] = {name: [] for name in OPS}
    for candidate in sorted(candidates, key=lambda each: (-each.spec.priority, each.spec.name)):
        offered.get(candidate.spec.op, []).append(candidate)
    for name in wanted:
        if name not in OPS:
            raise PluginError("HR-OPS-07", f"the model needs the op '{name}', which this headrace does not have",
                              f"{did_you_mean(name, OPS)}ops: {', '.join(OPS)}")  # fmt: skip
    problems = _override_problems(overrides, offered)
    chosen: list[tuple[Candidate, BoundOp]] = []
    for name in wanted:
        found = _choose(name, offered[name], context, overrides.get(name))
        if isinstance(found, HeadraceError):
            problems.append(found)
        elif found is not None:
            chosen.append(found)
    if problems:
        first = problems[0]
        raise ConfigError(first.code, first.message, first.help, problems)
    return Ops({each.op: _make(candidate, context) for candidate, each in chosen}, (each for _, each in chosen))


def _override_problems(overrides: Mapping[str, str], offered: Mapping[str, list[Candidate]]) -> list[HeadraceError]:
    """Names that lead nowhere, whether the model needs the op or not."""
    problems: list[HeadraceError] = []
    for op, kernel in overrides.items():
        asked = f"kernel '{kernel}' was chosen for op '{op}'"
        if op not in OPS:
            help = f"{did_you_mean(op, OPS)}ops: {', '.join(OPS)}"
            problems.append(ConfigError("HR-OPS-02", f"{asked}, and there is no such op", help))
            continue
        names = sorted({each.spec.name for each in offered[op]})
        if kernel not in names:
            help = f"{did_you_mean(kernel, names)}kernels of {op}: {', '.join(names) or 'none is installed'}"
            problems.append(ConfigError("HR-OPS-03", f"{asked}, and no plugin offers it", help))
    return problems


def _choose(
    op: str, candidates: list[Candidate], context: KernelContext, asked: str | None
) -> tuple[Candidate, BoundOp] | HeadraceError | None:
    """The kernel of one op, or what is wrong; None when the override names none that exists (told elsewhere).
    candidates: best first."""
    best: Candidate | None = None
    lost: list[tuple[Candidate, str]] = []
    for each in candidates:
        if asked is not None and each.spec.name != asked:
            lost.append((each, f"the config chose '{asked}'"))
        elif best is not None:
            order = "comes later by name" if each.spec.priority == best.spec.priority else "lower"
            lost.append((each, f"priority {each.spec.priority}, {order}"))
        elif problem := _unfit(each, context):
            lost.append((each, problem))
        else:
            best = each
    if best is None:
        return _unserved(op, lost, context, asked)
    twins = [each for each in candidates if each.spec.name == best.spec.name]
    if len(twins) > 1:
        owners = " and ".join(each.source for each in twins)
        return PluginError(
            "HR-OPS-06", f"kernel '{best.spec.name}' of op '{op}' is offered more than once: by {owners}",
            "disable one of them: [plugins] disable = [...]",
        )  # fmt: skip
    if asked is not None:
        reason = "the config chose it"
    elif len(candidates) == 1:
        reason = "the only one installed"
    else:
        reason = f"the highest priority ({best.spec.priority}) that serves {context}"
    return best, BoundOp(op, best.spec.name, best.source, reason, tuple((each.spec.name, text) for each, text in lost))


def _unfit(candidate: Candidate, context: KernelContext) -> str:
    """Why a kernel can't serve, "" when it can. A predicate that fails is a reason too, told with the rejected ones."""
    spec = candidate.spec
    if context.exact and not spec.exact:
        return "not exact"
    if candidate.missing:
        return f"needs {', '.join(candidate.missing)}, not installed"
    if spec.when is None:
        return ""
    try:
        answer = candidate.load(spec.when)(context)
    except FAULTS as error:
        return f"its predicate failed with {why(error)}"
    return answer if isinstance(answer, str) else f"its predicate answered {answer!r:.60} instead of a text"


def _unserved(
    op: str, lost: list[tuple[Candidate, str]], context: KernelContext, asked: str | None
) -> ConfigError | None:
    named = [(each, problem) for each, problem in lost if asked in (None, each.spec.name)]
    if asked is not None and not named:
        return None
    told = "; ".join(f"{each.spec.name} of {each.source} ({problem})" for each, problem in named)
    helps = [f"pip install {' '.join(each.missing)}" if not each.spec.install else each.spec.install
             for each, problem in named if each.missing and problem != "not exact"]  # fmt: skip
    if any(problem == "not exact" for _, problem in named):
        helps.append("determinism = 'seeded' takes kernels that are not exact")
    if asked is not None:
        helps.append(f"{'or ' if helps else ''}leave the choice for {op} out")
        return ConfigError("HR-OPS-04", f"the kernel chosen for op '{op}' can't serve {context}: {told}",
                           "; ".join(helps))  # fmt: skip
    message = f"no kernel serves op '{op}' as {context}; candidates: {told or 'none is installed'}"
    return ConfigError("HR-OPS-01", message, "; ".join(helps) or "see `headrace plugins list` for what is installed")


def _make(candidate: Candidate, context: KernelContext) -> Callable[..., Any]:
    """The callable of a chosen kernel, checked against its op."""
    spec, contract = candidate.spec, OPS[candidate.spec.op]
    title = f"kernel '{spec.name}' of op '{spec.op}', from plugin {candidate.source},"
    help = "report it to its authors, or choose another kernel for this op"
    try:
        made = candidate.load(spec.factory)(context)
    except HeadraceError:
        raise
    except FAULTS as error:
        raise PluginError("HR-OPS-05", f"{title} could not be made: {why(error)}", help) from error
    if not callable(made):
        raise PluginError("HR-OPS-05", f"the factory of {title} gave a {type(made).__name__}, not a callable", help)
    problem = kernel_problem(contract, made)
    if problem:
        raise PluginError("HR-OPS-05", f"{title} does not match {contract}: {problem}", help)
    kernel: Callable[..., Any] = made
    return kernel


def kernel_problem(contract: OpContract, kernel: Callable[..., Any]) -> str:
    """Why a callable can't be a kernel of the op, judged by its signature; "" when it can. One of a compiled library
    that has no signature passes."""
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return ""
    problem = signature_problem(contract.signature, signature)
    if problem:
        return problem
    for name, param in contract.signature.parameters.items():
        got = signature.parameters.get(name)
        if got is not None and param.default is not param.empty and got.default != param.default:
            return f"parameter '{name}' defaults to {got.default!r}, not {param.default!r}"
    return ""
