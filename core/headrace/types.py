"""Types that cross boundaries: between front door and engine, engine and executor, core and plugins.

Stdlib only at run time (numpy appears under TYPE_CHECKING). Everything is frozen but `Sequence`, which the engine owns.
Positions are absolute, ranges are half-open, sizes carry their unit in the name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.contracts import Matcher
    from headrace.ops import Candidate
    from headrace.reports import PromptLogits

DEFAULT_SEED = 20261017
"""Seed of a request that sets none: output repeats by default, between processes too. `seed="random"` opts out."""

FinishReason = Literal["stop", "length", "abort", "error", "deadline", "tool_calls"]


# --- models and machines ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model lies, found from its URI before any backend is chosen."""

    uri: str
    path: str
    """Local file or folder; empty for sources that have none (`toy://`)."""
    format: str
    """"gguf", "safetensors", "toy", ...; what `BackendSpec.formats` is matched with."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the engine and front doors must know of a loaded model."""

    uri: str
    format: str
    architecture: str
    fingerprint: str
    """Hex digest that names weights and tokenizer; part of every KV store key."""
    vocab_size: int
    context_tokens: int
    """Largest position count one sequence may reach in this deployment (not the model's training length)."""
    eos_ids: frozenset[int]
    bos_id: int | None = None
    chat_template: str | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams` fields that the model's own metadata recommends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    kind: str
    arch: str
    index: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInfo:
    devices: tuple[DeviceInfo, ...]
    host_memory_bytes: int
    available_memory_bytes: int
    physical_cores: int
    """Physical cores that this process may use (affinity and cgroup quota applied), at least 1."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A backend can serve the model. Higher scores win; ties are broken by name."""

    score: int
    why: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the probe read of the model, for `config explain`: context, tokenizer, EOS set, ... Three are read by name:
    `sampling_defaults`, `architecture` and `chat_template` (not shown), what the fields of `ModelSpec` will be."""


@dataclass(frozen=True, slots=True)
class Reject:
    why: str
    help: str = ""


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the generated text. kind: json_schema, json_object, regex, ebnf, gbnf, lark, choice, tagged, or
    what else a plugin offers."""

    kind: str
    text: str
    trigger: str | None = None
    """The grammar holds for what follows this text (a special token's name, or plain text); before it anything may be
    said, but not the end. None: it holds from the first token on."""
    trigger_budget: int | None = None
    """Most tokens before the trigger: then it is forced. None: no bound."""

    def __post_init__(self) -> None:
        for name in ("kind", "text"):
            if not isinstance(getattr(self, name), str):
                raise _bad(f"constraint.{name}", getattr(self, name), "text")
        if self.trigger is not None and (not isinstance(self.trigger, str) or not self.trigger):
            raise _bad("constraint.trigger", self.trigger, "text of at least one character")
        _in_range("constraint.trigger_budget", self.trigger_budget, 0, 2**31 - 1, True)
        if self.trigger_budget is not None and self.trigger is None:
            raise _bad("constraint.trigger_budget", self.trigger_budget, "left out where there is no trigger")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that a schema allows. RequestError HR-CONSTRAINT-02 for what can't be written as JSON."""
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            why = "it is nested too deep, or holds itself" if isinstance(error, RecursionError) else error
            message = f"the JSON schema can't be written as JSON: {why}"
            raise RequestError(
                "HR-CONSTRAINT-02", message, "a schema is made of dict, list, str, numbers, bool and None"
            ) from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, *texts: str) -> Grammar:
        """One of these texts."""
        return cls("choice", json.dumps(texts, ensure_ascii=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. `None` means: the config's `[sampling]`, else the model's own default, else ours
    (`FALLBACK_SAMPLING`). The order of transforms is written down in `headrace.sampling`."""

    max_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy: the true argmax, lowest id on ties."""
    top_k: int | None = None
    """0 is off."""
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    n: int = 1
    seed: int | Literal["random"] | None = None
    logprobs: int | None = None
    """Number of alternatives per generated token (0 = the chosen token alone)."""
    logprobs_mode: Literal["raw", "filtered"] = "raw"
    """raw: the model's own distribution; filtered: what was sampled from, after every transform."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token. The request then computes its whole prompt: no prefix hit serves it, since a
    hit has no logits."""
    constraint: Grammar | None = None
    skip_special_tokens: bool = True
    deadline_s: float | None = None
    """Seconds from submission after which the request ends with finish_reason "deadline"."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "stop_token_ids":
                value = (value,)
            elif value is not None and (isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable)):
                raise _bad(name, value, "a list")
            object.__setattr__(self, name, () if value is None else tuple(value))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "true or false")
        for name, (low, high, integral) in _RANGES.items():
            _in_range(name, getattr(self, name), low, high, integral)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise _bad(f"an entry of {name}", text, "a non-empty string")
        if len(self.stop) > MAX_STOPS:
            raise _bad("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS}")
        for token in self.stop_token_ids:
            _in_range("stop_token_ids", token, 0, 2**31 - 1, True)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _bad("logit_bias", self.logit_bias, "a table of token id to bias")
            if len(self.logit_bias) > MAX_BIASES:
                raise _bad("logit_bias", f"{len(self.logit_bias)} ids", f"at most {MAX_BIASES}")
            for token, bias in self.logit_bias.items():
                _in_range("logit_bias id", token, 0, 2**31 - 1, True)
                _in_range(f"logit_bias[{token}]", bias, -math.inf, math.inf, False)
        if isinstance(self.seed, str) and self.seed != "random":
            raise _bad("seed", self.seed, 'an integer from 0 to 2**64 - 1, or "random"')
        if self.seed is not None and self.seed != "random":
            _in_range("seed", self.seed, 0, 2**64 - 1, True)
        if self.logprobs_mode not in ("raw", "filtered"):
            raise _bad("logprobs_mode", self.logprobs_mode, '"raw" or "filtered"')
        if self.constraint is not None and not isinstance(self.constraint, Grammar):
            raise _bad("constraint", self.constraint, "a Grammar")
        for name in ("n", "min_tokens"):
            if getattr(self, name) is None:
                raise _bad(name, None, "a whole number")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")

    def resolved(self, *defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill every `None` of the sampling fields from `defaults` (first one wins), then from `FALLBACK_SAMPLING`."""
        filled = {}
        for name in FALLBACK_SAMPLING:
            if getattr(self, name) is None:
                for source in (*defaults, FALLBACK_SAMPLING):
                    if source.get(name) is not None:
                        filled[name] = source[name]
                        break
        return replace(self, **filled) if filled else self


MAX_STOPS = 16
MAX_BIASES = 4096
MAX_LOGPROBS = 1024

FALLBACK_SAMPLING: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 0.95,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": DEFAULT_SEED,
}

# name -> (lowest, highest, integral). Infinities are refused everywhere but in logit_bias, where -inf is a ban.
_RANGES: Mapping[str, tuple[float, float, bool]] = {
    "max_tokens": (0, 2**31 - 1, True),
    "temperature": (0.0, 100.0, False),
    "top_k": (0, 2**31 - 1, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, False),
    "repetition_penalty": (0.01, 100.0, False),
    "presence_penalty": (-100.0, 100.0, False),
    "frequency_penalty": (-100.0, 100.0, False),
    "min_tokens": (0, 2**31 - 1, True),
    "n": (1, 1024, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
    "deadline_s": (0.0, 1e9, False),
}


def _bad(name: str, value: object, want: str) -> RequestError:
    try:
        shown = f"{value!r:.100}"
    except ValueError:  # an integer of thousands of digits
        shown = "a huge number"
    return RequestError("HR-REQUEST-01", f"{name} = {shown} is not allowed", f"{name} must be {want}")


def _in_range(name: str, value: object, low: float, high: float, integral: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if integral else (int, float)):
        # numpy scalars are welcome: they know how to be a Python number
        item = getattr(value, "item", None)
        value = item() if callable(item) and not isinstance(value, (bool, str)) else value
        if isinstance(value, bool) or not isinstance(value, int if integral else (int, float)):
            raise _bad(name, value, "a whole number" if integral else "a number")
    if value != value or not low <= value <= high:
        raise _bad(name, value, f"from {low} to {high}" if integral else f"from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to generate for. Immutable; `n > 1` becomes n sequences."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """Resolved: no `None` among the sampling fields."""
    priority: int = 0
    """Lower runs first; ties by arrival."""
    arrival_s: float = 0.0
    """Engine clock at submission."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of one salt."""
    adapter: tuple[str, float] | None = None
    media: tuple[Any, ...] = ()
    extra_keys: tuple[str, ...] = ()
    """Anything else that changes the KV of equal tokens; part of the prefix key."""
    want_text: bool = True
    """False: token ids only; no detokeniser runs unless stop strings need one."""
    prefill_chunk_tokens: int | None = None
    """Most prompt tokens in one step; None: the engine's own."""
    want_logits: bool = False
    """Keep the logits of every prompt position (see `LLM.logits`)."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text though `skip_special_tokens` is on: the marks of a chat's dialect."""


class Sequence:
    """One generation of one request: the only mutable type here, owned by the engine thread.

    Invariant: positions [0, computed) of `tokens` have valid KV; `tokens[n_prompt:]` were generated. `draft` holds
    proposed tokens beyond `tokens`, never committed before they were verified.
    """

    __slots__ = (
        "arrival", "cached", "compiled", "computed", "counts", "deadline", "draft", "error", "extras",
        "finish_reason", "index", "leader", "limit", "logprobs", "matcher", "n_forced", "n_prompt", "n_start",
        "params", "preemptions",
        "prompt_logits", "prompt_logprobs", "request", "sample_index", "skipped", "slot", "status", "stop_ids",
        "stop_reason", "stream", "times", "tokens", "wants",
    )  # fmt: skip

    def __init__(self, request: Request, sample_index: int, limit: int) -> None:
        self.request = request
        self.params = request.params
        self.sample_index = sample_index
        self.tokens: list[int] = list(request.prompt_ids)
        self.n_prompt = len(self.tokens)
        self.computed = 0
        self.draft: list[int] = []
        self.cached = 0
        """Prompt tokens that a prefix hit saved at first admission: not computed, nor replayed."""
        self.n_forced = 0
        """Generated tokens that the grammar forced, appended without a model step."""
        self.n_start = 0
        """Those of them that came before the first step; they are computed with the prompt."""
        self.limit = limit
        """Total token count at which the sequence ends with "length"."""
        self.index = -1
        """Row of the engine's sampling table while running, else -1."""
        self.slot = -1
        """Slot (or paged table row) while it holds KV, else -1."""
        self.status: Literal["waiting", "compiling", "running", "finished"] = "waiting"
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.matcher: Matcher | None = None
        self.compiled: Any = None
        self.stream: Any = None
        self.counts: dict[int, int] | None = None
        """Token -> occurrences in prompt and output; kept only when a penalty is on."""
        self.extras: Any = None
        """Bias, bans and other things that few requests have (`headrace.admission.Extras`), or None."""
        self.stop_ids: frozenset[int] = frozenset()
        self.stop_reason: str | int | None = None
        self.wants = 0
        self.logprobs: list[Any] | None = None
        self.prompt_logprobs: list[Any] | None = None
        self.prompt_logits: PromptLogits | None = None
        self.leader: Sequence | None = None
        self.arrival: tuple[float, ...] = ()
        """Order of service: (priority, submission number)."""
        self.deadline = math.inf
        self.preemptions = 0
        self.skipped = 0
        self.times: list[float] = [request.arrival_s, 0.0, 0.0, 0.0, 0.0]
        """[submitted, first scheduled, first token, finished, first sampled token], engine clock, seconds."""

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt


# --- KV operations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trim:
    """Keep positions [0, keep) of the slot."""

    slot: int
    keep: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Make dst hold positions [0, upto) of src; dst's old content goes."""

    src: int
    dst: int
    upto: int


@dataclass(frozen=True, slots=True)
class Free:
    slot: int


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy one paged block, for a writer that shares a part-filled block."""

    group: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the slot's rings, and from which position on they hold anything, to place dst of the snapshots."""

    slot: int
    group: int
    """Which set of rings; 0 = all of them."""
    dst: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Make the slot's rings what a snapshot kept."""

    slot: int
    group: int
    src: int


@dataclass(frozen=True, slots=True)
class Load:
    slot: int
    handle: int


@dataclass(frozen=True, slots=True)
class Save:
    slot: int
    upto: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A sequence starts (or starts over) in this slot: its rings hold nothing before the start of its next row, unless
    Restore follows."""

    slot: int


KVOp = Trim | Fork | Free | CopyBlock | Snapshot | Restore | Load | Save | Begin


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """States that are kept in grains of one size. paged: a grain is a block. ring: a grain is what one sequence has of
    them, the last positions only, in the slot of its row."""

    name: str
    grain_bytes: int
    kind: Literal["paged", "ring"] = "paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How much KV an open executor has. paged: `n_blocks` of `block_tokens`; slots: `n_slots` of `slot_tokens`."""

    fingerprint: str
    groups: tuple[KVGroup, ...] = ()
    n_blocks: int = 0
    block_tokens: int = 16
    n_slots: int = 0
    slot_tokens: int = 0
    n_snapshots: int = 0
    """paged, with rings: how many copies of a sequence's rings the executor can keep (Snapshot, Restore)."""
    replay_tokens: int = 0
    """paged, with rings and no snapshots: tokens before a prefix hit that run again to rebuild the rings."""
    rerun_tokens: int = 0
    """paged: the last n tokens of a prompt always run, a hit ends before them."""
    slack_tokens: int = 0
    """paged, with rings: tokens that they hold beyond what the next token reads. So many may be written and taken back
    (rejected drafts), and a snapshot is whole up to so many tokens after the boundary that it is for."""

    @property
    def has_rings(self) -> bool:
        return any(group.kind == "ring" for group in self.groups)


# --- one step --------------------------------------------------------------------------------------------------------

WANT_TOKEN = 1
WANT_LOGPROBS = 2
WANT_PROMPT_LOGPROBS = 4
WANT_LOGITS = 8
WANT_PROMPT_LOGITS = 16
WANT_ALL_POSITIONS = WANT_PROMPT_LOGPROBS | WANT_PROMPT_LOGITS
"""A row with one of these has the logits of every token it feeds computed, not only of those it samples after."""


@dataclass(slots=True, kw_only=True)
class SparseRows:
    """CSR rows: entries [starts[i], starts[i+1]) of `ids` and `values` belong to plan row `rows[i]`."""

    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    ids: NDArray[np.int32]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HostRow:
    """One row of the sampling table, rounded as its columns are."""

    seed: int
    sample_index: int
    temperature: float
    filters: tuple[int, float, float, float]
    """(top_k, top_p, min_p, typical_p)"""
    penalties: tuple[float, float, float]
    """(repetition, presence, frequency)"""
    n_logprobs: int
    filtered: bool


@dataclass(slots=True, kw_only=True)
class SamplingTable:
    """Sampling columns. Dense ones are indexed by `plan.seq` (not by row), so that a step copies nothing.

    Dense, [max_sequences]: seed uint64, sample_index int32, temperature, top_p, min_p, typical_p float32, top_k int32,
    repetition, presence, frequency float32, n_logprobs int32 (-1 = none), filtered_logprobs bool.
    Sparse, per plan row, only rows that need them: bias (added to logits), banned (value unused),
    counts (token occurrences in prompt and output before the row's first sampled position).
    """

    seed: NDArray[np.uint64]
    sample_index: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    typical_p: NDArray[np.float32]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    n_logprobs: NDArray[np.int32]
    n_prompt_logprobs: NDArray[np.int32]
    filtered_logprobs: NDArray[np.bool_]
    host: list[HostRow] = field(default_factory=list)
    """The same rows as Python numbers, for samplers on the host: a step there gathers no column."""
    bias: SparseRows | None = None
    banned: SparseRows | None = None
    counts: SparseRows | None = None


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one step computes, as a struct of arrays. Valid until the step was collected.

    Row r feeds `length[r]` tokens, `tokens[offset[r]:offset[r+1]]`, at positions [start, start + length). The last
    `n_draft` of them are unverified drafts. A row with `sample` set yields 1 + n_draft sampled positions: the logits
    after token `length - 1 - n_draft + j` give the token at absolute position `start + length - n_draft + j`.
    R may be 0 (a lock-step rank without work).
    """

    step: int
    seq: NDArray[np.int32]
    """[R] row of the sampling table."""
    slot: NDArray[np.int32]
    """[R] slot, or row of the paged table."""
    start: NDArray[np.int32]
    length: NDArray[np.int32]
    n_draft: NDArray[np.int32]
    offset: NDArray[np.int32]
    """[R + 1] prefix sum of `length`."""
    tokens: NDArray[np.int32]
    """[T] flat."""
    sample: NDArray[np.bool_]
    wants: NDArray[np.uint8]
    """[R] WANT_* bits."""
    sampling: SamplingTable
    kv_ops: tuple[KVOp, ...] = ()
    """Applied in order before any row runs."""
    blocks: NDArray[np.int32] | None = None
    """[R, B] block table, -1 padded; None on slot executors."""
    write_from: NDArray[np.int32] | None = None
    """[R] paged writes below this position are suppressed; None = write all."""
    rank: NDArray[np.int32] | None = None
    """[R] data-parallel rank; None = all 0."""
    targets: NDArray[np.int32] | None = None
    """[T] next token of each position (-1 unknown); present when a row wants ALL_POSITIONS."""
    history: NDArray[np.int32] | None = None
    """[R, h] tokens at positions start - 1 .. start - h, -1 before the start; present when caps.history_tokens = h."""
    n_prompt: NDArray[np.int32] | None = None
    """[R] prompt tokens of the row's request; present when layout.rerun_tokens is set."""
    adapters: tuple[tuple[str, float] | None, ...] | None = None
    embeds: tuple[tuple[int, int, int], ...] = ()
    """(row, offset, handle) of media embeddings."""

    def row(self, i: int) -> str:
        """A readable view of row i, for logs and debuggers."""
        a, b = int(self.offset[i]), int(self.offset[i + 1])
        return (
            f"row {i}: seq {self.seq[i]} slot {self.slot[i]} positions [{self.start[i]}, {self.start[i] + b - a}) "
            f"drafts {self.n_draft[i]} sample {bool(self.sample[i])} tokens {self.tokens[a:b].tolist()}"
        )


@dataclass(slots=True, kw_only=True)
class MaskBatch:
    """Allowed tokens. `starts[r]:starts[r+1]` are plan row r's mask rows: none, or 1 + n_draft of them."""

    starts: NDArray[np.int32]
    """[R + 1]"""
    bits: NDArray[np.int32]
    """[M, ceil(vocab / 32)]; bit 1 = allowed, bit i of word w is token 32 w + i."""


@dataclass(slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities: entry m has the chosen (or given) token in column 0, alternatives, best first, after it."""

    row: NDArray[np.int32]
    """[M] plan row, ascending."""
    position: NDArray[np.int32]
    """[M] absolute position of the token described."""
    ids: list[list[int]]
    values: list[list[float]]


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step produced; arrays are valid until the next collect.

    tokens/starts: emitted tokens of row r are `tokens[starts[r]:starts[r+1]]`: none for rows that don't sample, else
    accepted drafts plus one. status[r]: empty, or why the row failed (its request ends, all others go on).
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int32]
    accepted: NDArray[np.int32]
    """[R] drafts accepted."""
    processed: NDArray[np.int32] | None = None
    """[R] tokens that were fed, at most the plan's length: a device may cut drafts off. None = as planned."""
    status: Mapping[int, str] = field(default_factory=dict)
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    arrays: Mapping[str, tuple[NDArray[np.int32], NDArray[Any]]] = field(default_factory=dict)
    """name -> (plan row of each entry [M] int32, ascending; values). "logits": [M, vocab] float32 of sampled positions,
    for rows that want LOGITS; "prompt_logits": the same of every position, for rows that want PROMPT_LOGITS."""
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    """Drafts of a fused drafter, by row."""


@dataclass(frozen=True, slots=True)
class Proposal:
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    """Per draft, conditional on the earlier ones being accepted; empty = unknown."""
    distribution: Literal["one_hot", "device"] = "one_hot"
    """Where the drafts came from: chosen outright, or drawn from a distribution that stays on the device."""


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a host drafter sees of one sequence. `tokens` is the engine's own list: read, never keep or change."""

    index: int
    tokens: Seq[int]
    max_draft: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an executor can do, read before anything is built on it. Every default is the conservative answer."""

    kv: Literal["paged", "slots"]
    max_rows: int
    max_tokens: int
    """Largest sum of row lengths in one step."""
    overlap: Literal[0, 1] = 0
    blocking_forward: bool = False
    """forward() returns when the device is done (llama.cpp)."""
    row_invariant: bool = False
    """Logits of a row don't depend on which rows share the step, nor on chunking."""
    deterministic: bool = False
    partial_trim: bool = False
    """Trim may keep any prefix; else only 0 (recurrent memory)."""
    fork: bool = False
    drafts: bool = False
    """Rows with n_draft > 0 are supported."""
    logprobs: bool = False
    masks: bool = False
    native_constraints: frozenset[str] = frozenset()
    fused_drafters: frozenset[str] = frozenset()
    adapters: Literal["none", "per_step", "per_row"] = "none"
    export_kv: bool = False
    graph_sizes: tuple[int, ...] = ()
    prompt_logits: bool = False
    """Rows may ask for the logits of every position (WANT_PROMPT_LOGITS)."""
    history_tokens: int = 0
    """Tokens before each row's start that plans must carry."""
    approximations: tuple[str, ...] = ()
    """What makes the same request differ between runs: a sentence each, with the option behind it as the config writes
    it, 'a prefix hit rebuilds windows from the tokens before it (backend.prefix = "replay")'."""
    departures: tuple[str, ...] = ()
    """What makes logits differ from those of the whole model, though every run has the same bits: a sentence each."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """SamplingParams field -> why this executor can't honour it (then a request that sets it is refused)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The `[engine]` table, resolved."""

    max_sequences: int = 64
    max_batch_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    max_waiting: int = 1024
    prefix_cache: bool = True
    block_tokens: int = 16
    aging_skips: int = 64
    """How often later requests may overtake a waiting one that does not fit yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a factory gets beside the model and its own options."""

    engine: EngineOptions
    machine: MachineInfo
    determinism: Literal["off", "seeded", "batch-invariant"] = "off"
    report: Callable[[str, float], None] = lambda phase, fraction: None
    """Progress of a load: phase name and 0..1."""
    kernels: Callable[[str], Seq[Candidate]] = lambda device: ()
    """Every kernel that plugins offer for a device kind, for `headrace.ops.bind`. Default: none."""
    architecture: Callable[[str], Any] | None = None
    """The factory of a model architecture, by the name in config.json; ModelError for one that no plugin knows.
    None: this build knows no plugins."""


# --- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """Alternatives, best first: (id, text, logprob)."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    forced_tokens: int = 0
    """Completion tokens that the grammar forced: no model step was run for them alone."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. queue: submission to first schedule; first_token: submission to first token; total: to the end.

    The prompt (and what a grammar forces at once) counts as prefilled, up to the first token that the model chooses;
    what comes after that token is decoded, forced or not."""

    queue_s: float
    first_token_s: float
    total_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One of a request's n samples."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or id that ended it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The result of one prompt; attribute access of `completions[0]` is offered for the common n = 1."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """[n_prompt, vocab], for a request with `want_logits` that read its whole prompt."""

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.completions[0].logprobs

    @property
    def error(self) -> Exception | None:
        return next((c.error for c in self.completions if c.error), None)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. Concatenated `text` equals the final text; chunks are never empty but the last."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """For observers: one step."""

    step: int
    n_rows: int
    n_tokens: int
    n_running: int
    n_waiting: int
    kv_used_ratio: float
    preemptions: int
    drafted: int
    accepted: int
    seconds: Mapping[str, float]
    """Phase -> seconds: schedule, forward, mask, sample, update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """For observers: one finished sequence."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


def field_names(cls: type) -> tuple[str, ...]:
    """Names of a dataclass's fields, in order."""
    return tuple(f.name for f in fields(cls))
