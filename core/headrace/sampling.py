"""Sampling semantics: what every backend computes from logits, and its numpy reference.

Order of transforms for one position:

    1. bans        tokens that the mask or the banned list excludes get -inf (nothing below brings them back)
    2. bias        logit += logit_bias
    3. penalties   over the tokens of prompt and output so far, c = occurrences > 0:
                   repetition (logit / r if logit > 0 else logit * r), then - presence - frequency * c
    4. temperature z = logit * float32(1 / T), float32; T < 1e-5 is greedy
    5. filters     typical_p, then top_k, top_p, min_p (see `headrace.filters`)
    6. the race    of the tokens that are left, the one with the largest z + g wins, float32, lowest id on ties;
                   g is the Gumbel noise of (seed, position, sample index, token), see `headrace.noise`

Bias and penalties come before temperature, as in vLLM, HF transformers and the OpenAI API, so their scale does not
depend on it. Greedy rows take the largest logit after step 3, lowest id on ties; filters don't matter. The winner
depends on the row's own logits, parameters and position only: not on the rows beside it, nor on which shortcut found
it.

Drafts are verified by match: a draft is accepted iff it equals the token sampled at its place with the same noise, so
drafting never changes the output. Position j of a row counts drafts 1 .. j in its penalties and has its own mask row.
A row ends at its first mismatch, after its last mask row, or before a position that can't be sampled; it emits
`accepted + 1` tokens. Only the first position of a row can fail it: the next step meets later ones again as a first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.logprobs import prompt_logits, prompt_logprobs
from headrace.sampler import GREEDY_BELOW, INFINITE, NAN, NOTHING, StepSampler, apply_mask, step_result
from headrace.types import (
    DEFAULT_SEED,
    WANT_LOGITS,
    WANT_LOGPROBS,
    HostRow,
    MaskBatch,
    SamplingParams,
    SamplingTable,
    StepPlan,
    StepResult,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

__all__ = [
    "GREEDY_BELOW",
    "INFINITE",
    "NAN",
    "NOTHING",
    "apply_mask",
    "new_table",
    "prompt_logits",
    "prompt_logprobs",
    "resolve_seed",
    "sample_step",
    "set_row",
    "step_result",
]

# --- the table -------------------------------------------------------------------------------------------------------


def new_table(max_sequences: int) -> SamplingTable:
    """A table of neutral rows: greedy, no filter, no penalty, no logprobs."""

    def column(dtype: type[np.generic], value: float) -> NDArray[np.generic]:
        return np.full(max_sequences, value, dtype)

    columns = {name: column(dtype, value) for name, (dtype, value) in _NEUTRAL.items()}
    table = SamplingTable(**columns)  # type: ignore[arg-type]
    table.host = [_host_row(table, 0)] * max_sequences
    return table


def _host_row(table: SamplingTable, i: int) -> HostRow:
    return HostRow(
        seed=int(table.seed[i]),
        sample_index=int(table.sample_index[i]),
        temperature=float(table.temperature[i]),
        filters=(int(table.top_k[i]), float(table.top_p[i]), float(table.min_p[i]), float(table.typical_p[i])),
        penalties=(float(table.repetition[i]), float(table.presence[i]), float(table.frequency[i])),
        n_logprobs=int(table.n_logprobs[i]),
        filtered=bool(table.filtered_logprobs[i]),
    )


_NEUTRAL: dict[str, tuple[type[np.generic], float]] = {
    "seed": (np.uint64, DEFAULT_SEED),
    "sample_index": (np.int32, 0),
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "typical_p": (np.float32, 1.0),
    "repetition": (np.float32, 1.0),
    "presence": (np.float32, 0.0),
    "frequency": (np.float32, 0.0),
    "n_logprobs": (np.int32, -1),
    "n_prompt_logprobs": (np.int32, -1),
    "filtered_logprobs": (np.bool_, False),
}


_COLUMNS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}


def set_row(table: SamplingTable, index: int, params: SamplingParams, sample_index: int) -> None:
    """Write one sequence's parameters into the table. params must be resolved, its seed an integer (`resolve_seed`)."""
    if params.seed is None or isinstance(params.seed, str):
        raise ValueError(f"seed = {params.seed!r} must be resolved first: a sequence keeps one seed while it lives")
    table.seed[index] = params.seed
    table.sample_index[index] = sample_index
    for column, name in _COLUMNS.items():
        getattr(table, column)[index] = getattr(params, name)
    table.n_logprobs[index] = -1 if params.logprobs is None else params.logprobs
    table.n_prompt_logprobs[index] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
    table.filtered_logprobs[index] = params.logprobs_mode == "filtered"
    table.host[index] = _host_row(table, index)


def resolve_seed(params: SamplingParams) -> int:
    """The request's seed: its own, a fresh random one for "random", else the documented default."""
    if params.seed == "random":
        return secrets.randbits(64)
    return DEFAULT_SEED if params.seed is None else int(params.seed)


# --- one step --------------------------------------------------------------------------------------------------------


def sample_step(plan: StepPlan, logits: Sequence[Floats] | Floats, masks: MaskBatch | None = None) -> StepResult:
    """Sample every position of the plan that samples, and verify its drafts.

    logits: one [vocab] float32 row per sampled position, in plan order (a list of views or an [M, vocab] array). Rows
    with bias, bans, penalties or a mask are changed in place; plain rows are only read.
    """
    rows = np.flatnonzero(plan.sample)
    if masks is None and _plain(plan, rows):
        result = _greedy_step(plan, rows, logits)
        if result is not None:
            return result
    # Tiny temperatures send far tokens to -inf, rightly. A bias of +inf on -inf gives a NaN, which fails its row.
    with np.errstate(over="ignore", invalid="ignore"):
        return StepSampler(plan, logits, masks, rows).run()


def _plain(plan: StepPlan, rows: NDArray[np.intp]) -> bool:
    table = plan.sampling
    return (
        bool((table.temperature[plan.seq[rows]] < GREEDY_BELOW).all())
        and table.bias is None
        and table.banned is None
        and table.counts is None
        and not (plan.wants[rows] & (WANT_LOGPROBS | WANT_LOGITS)).any()
    )


def _greedy_step(plan: StepPlan, rows: NDArray[np.intp], logits: Sequence[Floats] | Floats) -> StepResult | None:
    """All rows greedy and plain: one argmax per row and a check of its value. None if a row needs a closer look."""
    if isinstance(logits, np.ndarray):
        sampled = logits.argmax(axis=1) if len(logits) else np.empty(0, np.intp)
        values = logits[np.arange(len(logits)), sampled]
    else:
        found = [int(row.argmax()) for row in logits]  # argmax gives a NaN's index if there is one
        sampled = np.array(found, np.intp)
        values = np.array([row[i] for row, i in zip(logits, found, strict=True)], np.float32)
    if not np.isfinite(values).all():
        return None
    drafts = plan.n_draft[rows]
    emitted = np.zeros(len(plan.seq), np.int32)
    if drafts.any():
        first = np.cumsum(drafts + 1) - (drafts + 1)
        agreed = _leading_matches(plan, rows, drafts, first, sampled)
        emitted[rows] = agreed + 1
        ends = np.cumsum(agreed + 1)
        sampled = sampled[np.arange(ends[-1]) + np.repeat(first - (ends - agreed - 1), agreed + 1)]
    else:
        emitted[rows] = 1
    return step_result(sampled.astype(np.int32), emitted)


def _leading_matches(
    plan: StepPlan,
    rows: NDArray[np.intp],
    drafts: NDArray[np.int32],
    first: NDArray[np.integer],
    sampled: NDArray[np.intp],
) -> NDArray[np.int32]:
    """How many leading drafts of each row equal what was sampled at their place."""
    agreed = drafts.copy()
    some = np.flatnonzero(drafts)
    counts = drafts[some]
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    proposed = plan.tokens[np.repeat(plan.offset[rows[some] + 1] - counts, counts) + within]
    same = sampled[np.repeat(first[some], counts) + within] == proposed
    mismatch = np.where(same, np.iinfo(np.int32).max, within)
    agreed[some] = np.minimum(np.minimum.reduceat(mismatch, starts), counts)
    return agreed
