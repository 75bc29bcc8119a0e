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

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.filters import best, survivors, weights
from headrace.noise import KIND_SAMPLE, gumbel, noise_bits, noise_row
from headrace.types import (
    DEFAULT_SEED,
    WANT_LOGITS,
    WANT_LOGPROBS,
    LogprobRows,
    MaskBatch,
    SamplingParams,
    SamplingTable,
    SparseRows,
    StepPlan,
    StepResult,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: z would leave the range where float32 can tell tokens apart."""

NAN = "logits hold NaN"
INFINITE = "logits hold +inf"
NOTHING = "no token is allowed"

_MANY = 1024
"""Survivors from which on the race compares bits with thresholds before it takes logarithms."""


# --- the table -------------------------------------------------------------------------------------------------------


def new_table(max_sequences: int) -> SamplingTable:
    """A table of neutral rows: greedy, no filter, no penalty, no logprobs."""

    def column(dtype: type[np.generic], value: float) -> NDArray[np.generic]:
        return np.full(max_sequences, value, dtype)

    columns = {name: column(dtype, value) for name, (dtype, value) in _NEUTRAL.items()}
    return SamplingTable(**columns)  # type: ignore[arg-type]


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
        return _Step(plan, logits, masks, rows).run()


def _plain(plan: StepPlan, rows: NDArray[np.intp]) -> bool:
    table = plan.sampling
    return (
        table.bias is None
        and table.banned is None
        and table.counts is None
        and not (plan.wants[rows] & (WANT_LOGPROBS | WANT_LOGITS)).any()
        and bool((table.temperature[plan.seq[rows]] < GREEDY_BELOW).all())
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
    return _result(sampled.astype(np.int32), emitted)


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


def _result(tokens: NDArray[np.int32], emitted: NDArray[np.int32]) -> StepResult:
    starts = np.zeros(len(emitted) + 1, np.int32)
    np.cumsum(emitted, out=starts[1:])
    return StepResult(tokens=tokens, starts=starts, accepted=np.maximum(emitted - 1, 0))


class _Pick:
    """One position being sampled."""

    __slots__ = ("i", "ids", "inv_t", "position", "row", "shown", "token", "values")

    def __init__(self, i: int, position: int, row: Floats) -> None:
        self.i = i
        self.position = position
        self.row = row
        self.token = -1
        self.inv_t = np.float32(0)
        """0 for greedy rows."""
        self.ids: NDArray[np.intp] | None = None
        """Tokens in the race, ascending; None = all."""
        self.values = row
        """z of the tokens in the race."""
        self.shown: Floats | None = None
        """Raw logits that log-probabilities are taken of; None: filtered ones, or none wanted."""


class _Step:
    """The general path, in waves: position j of every row that is still in, with one draw of noise per wave."""

    def __init__(
        self, plan: StepPlan, logits: Sequence[Floats] | Floats, masks: MaskBatch | None, rows: NDArray[np.intp]
    ) -> None:
        table, seq = plan.sampling, plan.seq[rows]
        self.plan, self.logits, self.masks = plan, logits, masks
        self.rows: list[int] = rows.tolist()
        drafts = plan.n_draft[rows]
        self.n_draft: list[int] = drafts.tolist()
        self.first: list[int] = (np.cumsum(drafts + 1) - (drafts + 1)).tolist()
        self.position: list[int] = (plan.start[rows] + plan.length[rows] - drafts).tolist()
        self.draft_at: list[int] = (plan.offset[rows + 1] - drafts).tolist()
        self.wants: list[int] = plan.wants[rows].tolist()
        self.seed: list[int] = table.seed[seq].tolist()
        self.sample_index: list[int] = table.sample_index[seq].tolist()
        self.temperature: list[float] = table.temperature[seq].tolist()
        filters = (table.top_k, table.top_p, table.min_p, table.typical_p)
        self.filters = list(zip(*(column[seq].tolist() for column in filters), strict=True))
        penalties = (table.repetition, table.presence, table.frequency)
        self.penalties = list(zip(*(column[seq].tolist() for column in penalties), strict=True))
        self.n_logprobs: list[int] = table.n_logprobs[seq].tolist()
        self.filtered: list[bool] = table.filtered_logprobs[seq].tolist()
        self.bias, self.banned, self.counts = _spans(table.bias), _spans(table.banned), _spans(table.counts)
        self.emitted: list[list[int]] = [[] for _ in self.rows]
        self.status: dict[int, str] = {}
        self.logprobs: list[list[tuple[int, list[int], list[float]]]] = [[] for _ in self.rows]
        self.raw: list[list[Floats]] = [[] for _ in self.rows]

    def run(self) -> StepResult:
        alive = range(len(self.rows))
        j = 0
        while alive:
            picks = [pick for i in alive if (pick := self._prepare(i, j)) is not None]
            self._race([pick for pick in picks if pick.token < 0])
            alive = [pick.i for pick in picks if self._commit(pick, j)]  # type: ignore[assignment]
            j += 1
        emitted = np.zeros(len(self.plan.seq), np.int32)
        emitted[self.rows] = [len(tokens) for tokens in self.emitted]
        result = _result(np.array([token for tokens in self.emitted for token in tokens], np.int32), emitted)
        result.status = self.status
        if any(self.logprobs):
            entries = [(r, *entry) for r, found in zip(self.rows, self.logprobs, strict=True) for entry in found]
            result.logprobs = _logprob_rows(entries)
        if any(self.raw):
            index = [r for r, found in zip(self.rows, self.raw, strict=True) for _ in found]
            values = [row for found in self.raw for row in found]
            result.arrays = {"logits": (np.array(index, np.int32), np.stack(values))}
        return result

    def _prepare(self, i: int, j: int) -> _Pick | None:
        """Transform and filter position j of row i; greedy rows get their token. None: the row ends before it."""
        r = self.rows[i]
        bits = None
        if self.masks is not None and self.masks.starts[r + 1] > self.masks.starts[r]:
            m = int(self.masks.starts[r]) + j
            if m >= self.masks.starts[r + 1]:
                return None
            bits = self.masks.bits[m]
        row = self.logits[self.first[i] + j]
        at = int(row.argmax())  # the index of a NaN if there is one
        if not self._sane(i, j, row[at]):
            return None
        pick = _Pick(i, self.position[i] + j, row)
        changes = r in self.bias or r in self.banned or self.penalties[i] != (1.0, 0.0, 0.0)
        wants, greedy = self.wants[i], self.temperature[i] < GREEDY_BELOW
        if wants & WANT_LOGITS:
            self.raw[i].append(row.copy())
        if wants & WANT_LOGPROBS and not self.filtered[i]:
            pick.shown = row.copy() if changes or bits is not None else row
        if changes:
            self._transform(i, j, row)
            at = int(row.argmax())
        if bits is not None:
            # argmax first: its bit alone decides a greedy row, the full mask is needed only on a miss
            hit = _allows(bits, at)
            if not hit or not greedy or (wants & WANT_LOGPROBS and self.filtered[i]):
                _apply_mask(row, bits)
                at = at if hit else int(row.argmax())
        if not self._sane(i, j, row[at]):
            return None
        if greedy:
            pick.token = at
            return pick
        pick.inv_t = np.float32(1.0 / self.temperature[i])
        pick.ids = survivors(row, pick.inv_t, *self.filters[i])
        if pick.ids is None:
            pick.values = row * pick.inv_t
        else:
            pick.values = row[pick.ids] * pick.inv_t
            if pick.ids.size == 1:
                pick.token = int(pick.ids[0])
        return pick

    def _sane(self, i: int, j: int, largest: np.float32) -> bool:
        if -math.inf < largest < math.inf:
            return True
        if j == 0:
            self.status[self.rows[i]] = NOTHING if largest == -math.inf else INFINITE if largest > 0 else NAN
        del self.raw[i][len(self.emitted[i]) :]
        return False

    def _transform(self, i: int, j: int, row: Floats) -> None:
        """Bias, penalties and bans, in place. Bans come last in time: -inf absorbs whatever came before."""
        r, table = self.rows[i], self.plan.sampling
        if (span := self.bias.get(r)) is not None and table.bias is not None:
            row[table.bias.ids[span]] += table.bias.values[span]
        repetition, presence, frequency = self.penalties[i]
        if (repetition, presence, frequency) != (1.0, 0.0, 0.0):
            ids, counts = self._counts(i, j)
            values = row[ids]
            values = np.where(values > 0, values / np.float32(repetition), values * np.float32(repetition))
            row[ids] = values - (np.float32(presence) + np.float32(frequency) * counts)
        if (span := self.banned.get(r)) is not None and table.banned is not None:
            row[table.banned.ids[span]] = -np.inf

    def _counts(self, i: int, j: int) -> tuple[NDArray[np.int32], Floats]:
        """Tokens that occurred before position j of row i, and how often."""
        table, span = self.plan.sampling, self.counts.get(self.rows[i])
        ids, counts = np.empty(0, np.int32), np.empty(0, np.float32)
        if table.counts is not None and span is not None:
            ids, counts = table.counts.ids[span], table.counts.values[span]
        if j:
            drafts = self.plan.tokens[self.draft_at[i] : self.draft_at[i] + j]
            ids, where = np.unique(np.concatenate((ids, drafts)), return_inverse=True)
            counts = np.bincount(where, np.concatenate((counts, np.ones(j)))).astype(np.float32)
        occurred = counts > 0
        return (ids, counts) if occurred.all() else (ids[occurred], counts[occurred])

    def _race(self, picks: list[_Pick]) -> None:
        """Draw the winner of every pick: noise for all rows with few survivors at once, large fields one by one."""
        few = []
        for pick in picks:
            if pick.values.size > _MANY:
                bits = noise_row(
                    self.seed[pick.i], pick.position, self.sample_index[pick.i], KIND_SAMPLE, pick.row.size
                )
                won = _winner(pick.values, bits if pick.ids is None else bits[pick.ids])
                pick.token = won if pick.ids is None else int(pick.ids[won])
            else:
                few.append(pick)
        if not few:
            return
        sizes = [pick.values.size for pick in few]
        ids = np.concatenate([np.arange(pick.row.size) if pick.ids is None else pick.ids for pick in few])
        seeds = np.repeat(np.array([self.seed[pick.i] for pick in few], np.uint64), sizes)
        positions = np.repeat(np.array([pick.position for pick in few]), sizes)
        samples = np.repeat(np.array([self.sample_index[pick.i] for pick in few]), sizes)
        noise = gumbel(noise_bits(seeds, positions, samples, KIND_SAMPLE, ids))
        noise += np.concatenate([pick.values for pick in few])
        end = 0
        for pick, size in zip(few, sizes, strict=True):
            start, end = end, end + size
            pick.token = int(ids[start + int(noise[start:end].argmax())])

    def _commit(self, pick: _Pick, j: int) -> bool:
        """Record the token of position j; True if it was a draft that is accepted, so position j + 1 follows."""
        i, token = pick.i, pick.token
        self.emitted[i].append(token)
        if self.wants[i] & WANT_LOGPROBS:
            values, ids = (pick.values, pick.ids) if pick.shown is None else (pick.shown, None)
            at = token if ids is None else int(np.searchsorted(ids, token))
            found = _logprobs(values, at, self.n_logprobs[i])
            names = found[0] if ids is None else ids[found[0]].tolist()
            self.logprobs[i].append((pick.position, names, found[1]))
        return j < self.n_draft[i] and token == self.plan.tokens[self.draft_at[i] + j]


def _spans(sparse: SparseRows | None) -> dict[int, slice]:
    if sparse is None:
        return {}
    starts = sparse.starts.tolist()
    return {r: slice(a, b) for r, a, b in zip(sparse.rows.tolist(), starts, starts[1:], strict=False) if b > a}


def _allows(bits: NDArray[np.int32], token: int) -> bool:
    return token >> 5 < bits.size and bool(int(bits[token >> 5]) >> (token & 31) & 1)


def _apply_mask(row: Floats, bits: NDArray[np.int32]) -> None:
    """Set the tokens that the mask excludes, and those beyond its end, to -inf."""
    allowed = np.unpackbits(np.ascontiguousarray(bits, "<i4").view(np.uint8), bitorder="little")[: row.size]
    np.putmask(row[: allowed.size], allowed == 0, -np.inf)
    row[allowed.size :] = -np.inf


def _winner(z: Floats, bits: NDArray[np.uint32]) -> int:
    """Index of the largest z + gumbel(bits), lowest on ties, without the logarithms of tokens that can't win.

    The largest score lies around log(sum(exp(z))). With a guess `bound` below that, only tokens with
    v <= exp(z - bound) can reach it (`headrace.noise`), about exp(margin) of them; if one of those does reach it, the
    best of them has won, else the guess was too high. `slack` covers every rounding: float32 z, exp and logarithms.
    """
    largest = float(z.max())
    most = weights(z, np.float32(1))
    total = float(most.sum(dtype=np.float64))
    slack = 1e-4 + (abs(largest) + 64.0) * 2.0**-20
    r = bits.astype(np.float32)
    rounds = ((2.0, 2.0**32 * math.exp(2.0 + slack) / total), (6.0, math.exp(4.0))) if slack < 10.0 else ()
    for margin, factor in rounds:
        bound = largest + math.log(total) - margin
        most *= np.float32(factor)
        some = np.flatnonzero(r <= most)
        if some.size:
            scores = z[some] + gumbel(bits[some])
            at = int(scores.argmax())
            if scores[at] >= bound:
                return int(some[at])
    return int((z + gumbel(bits)).argmax())


# --- log-probabilities -----------------------------------------------------------------------------------------------


def _logprobs(values: Floats, at: int, n: int) -> tuple[list[int], list[float]]:
    """([at, best indices ...], their log-softmax) for the entry at `at` and the n best; -inf entries are left out."""
    largest = float(values.max())
    norm = largest + math.log(float(weights(values, np.float32(1)).sum(dtype=np.float64)))
    ids = [at, *best(values, n).tolist()]
    found = (values[ids].astype(np.float64) - norm).tolist()
    kept = [k for k, value in enumerate(found) if k == 0 or value > -math.inf]
    return [ids[k] for k in kept], [found[k] for k in kept]


def _logprob_rows(entries: list[tuple[int, int, list[int], list[float]]]) -> LogprobRows:
    return LogprobRows(
        row=np.array([entry[0] for entry in entries], np.int32),
        position=np.array([entry[1] for entry in entries], np.int32),
        ids=[entry[2] for entry in entries],
        values=[entry[3] for entry in entries],
    )


def prompt_logprobs(plan: StepPlan, rows: Iterable[tuple[int, Floats]]) -> LogprobRows:
    """Log-probabilities of the prompt's own tokens, from the model's distribution.

    rows: (plan row, [length, vocab] logits of all its positions), ascending. The logits at a position describe its
    target (`plan.targets`) at the position after it; positions whose target is -1 are skipped.
    """
    entries = []
    for r, logits in rows:
        targets = [] if plan.targets is None else plan.targets[plan.offset[r] : plan.offset[r + 1]].tolist()
        n = int(plan.sampling.n_prompt_logprobs[plan.seq[r]])
        for i, target in enumerate(targets):
            if target >= 0:
                entries.append((r, int(plan.start[r]) + i + 1, *_logprobs(logits[i], target, n)))
    return _logprob_rows(entries)
