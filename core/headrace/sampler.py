"""The general sampling path: rows with any mix of parameters, masks, drafts and wants (see `headrace.sampling`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace import logprobs
from headrace.filters import survivors
from headrace.noise import FEW, KIND_SAMPLE, few_bits, gumbel, noise_bits, noise_row, race
from headrace.types import WANT_LOGITS, WANT_LOGPROBS, MaskBatch, SparseRows, StepPlan, StepResult

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


def step_result(tokens: NDArray[np.int32], emitted: NDArray[np.int32]) -> StepResult:
    """tokens: all emitted ones in plan order; emitted: [R] how many each row has."""
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


class StepSampler:
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
        self.params = [table.host[i] for i in seq.tolist()]
        self.bias, self.banned, self.counts = _spans(table.bias), _spans(table.banned), _spans(table.counts)
        self.emitted: list[list[int]] = [[] for _ in self.rows]
        self.status: dict[int, str] = {}
        self.logprobs: list[list[tuple[int, list[int], list[float]]]] = [[] for _ in self.rows]
        self.raw: list[list[Floats]] = [[] for _ in self.rows]

    def run(self) -> StepResult:
        alive: Sequence[int] = range(len(self.rows))
        j = 0
        while alive:
            picks = [pick for i in alive if (pick := self._prepare(i, j)) is not None]
            self._race([pick for pick in picks if pick.token < 0])
            alive = [pick.i for pick in picks if self._commit(pick, j)]
            j += 1
        emitted = np.zeros(len(self.plan.seq), np.int32)
        emitted[self.rows] = [len(tokens) for tokens in self.emitted]
        result = step_result(np.array([token for tokens in self.emitted for token in tokens], np.int32), emitted)
        result.status = self.status
        if any(self.logprobs):
            entries = [(r, *entry) for r, found in zip(self.rows, self.logprobs, strict=True) for entry in found]
            result.logprobs = logprobs.collect(entries)
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
        changes = r in self.bias or r in self.banned or self.params[i].penalties != (1.0, 0.0, 0.0)
        wants, greedy = self.wants[i], self.params[i].temperature < GREEDY_BELOW
        if wants & WANT_LOGITS:
            self.raw[i].append(row.copy())
        if wants & WANT_LOGPROBS and not self.params[i].filtered:
            pick.shown = row.copy() if changes or bits is not None else row
        if changes:
            self._transform(i, j, row)
            at = int(row.argmax())
        if bits is not None:
            # argmax first: its bit alone decides a greedy row, the full mask is needed only on a miss
            hit = _allows(bits, at)
            if not hit or not greedy or (wants & WANT_LOGPROBS and self.params[i].filtered):
                apply_mask(row, bits)
                at = at if hit else int(row.argmax())
        if not self._sane(i, j, row[at]):
            return None
        if greedy:
            pick.token = at
            return pick
        pick.inv_t = np.float32(1.0 / self.params[i].temperature)
        pick.ids = survivors(row, pick.inv_t, *self.params[i].filters)
        if pick.ids is None and bits is not None:
            pick.ids = np.flatnonzero(row > -np.inf)  # often few
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
        repetition, presence, frequency = self.params[i].penalties
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
                params = self.params[pick.i]
                bits = noise_row(params.seed, pick.position, params.sample_index, KIND_SAMPLE, pick.row.size)
                won = race(pick.values, bits if pick.ids is None else bits[pick.ids])
                pick.token = won if pick.ids is None else int(pick.ids[won])
            else:
                few.append(pick)
        if len(few) == 1:
            pick, params = few[0], self.params[few[0].i]
            ids = np.arange(pick.row.size) if pick.ids is None else pick.ids
            draw = (params.seed, pick.position, params.sample_index, KIND_SAMPLE)
            if ids.size <= FEW:
                bits = np.array(few_bits(*draw, ids.tolist()), np.uint32)
            else:
                bits = noise_bits(*draw, ids)
            noise = gumbel(bits)
            noise += pick.values
            pick.token = int(ids[noise.argmax()])
        elif few:
            self._race_few(few)

    def _race_few(self, few: list[_Pick]) -> None:
        sizes = [pick.values.size for pick in few]
        ids = np.concatenate([np.arange(pick.row.size) if pick.ids is None else pick.ids for pick in few])
        seeds = np.repeat(np.array([self.params[pick.i].seed for pick in few], np.uint64), sizes)
        positions = np.repeat(np.array([pick.position for pick in few]), sizes)
        samples = np.repeat(np.array([self.params[pick.i].sample_index for pick in few]), sizes)
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
            found = logprobs.entry(values, at, self.params[i].n_logprobs)
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


def apply_mask(row: Floats, bits: NDArray[np.int32]) -> None:
    """Set the tokens that the mask excludes, and those beyond its end, to -inf. row: [vocab], bits: [W] int32."""
    allowed = np.unpackbits(np.ascontiguousarray(bits, "<i4").view(np.uint8), bitorder="little")[: row.size]
    np.putmask(row[: allowed.size], allowed == 0, -np.inf)
    row[allowed.size :] = -np.inf
