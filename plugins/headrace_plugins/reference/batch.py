"""From a step's plan to the batch that a model runs: index columns in numpy, one copy-free tensor each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.modeling import Batch
from headrace.types import WANT_ALL_POSITIONS, StepPlan

NO_BLOCK = np.full((1, 1), -1, np.int64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which positions of a step have logits, and for whom. M entries, in the order of the flat tokens."""

    index: NDArray[np.int64]
    """[M] into the flat tokens, ascending."""
    sampled: NDArray[np.int64] | None
    """Which of the M are sampled; None: all."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """(row, first, end) of rows that want all their positions: their part of the M."""


def wanted_positions(plan: StepPlan) -> Wanted:
    """A row that samples wants its last 1 + n_draft positions, one that wants its prompt scored all of them."""
    ends = plan.offset[1:].astype(np.int64)
    whole = (plan.wants & WANT_ALL_POSITIONS) != 0
    if not whole.any() and not plan.n_draft.any():
        return Wanted(ends[plan.sample] - 1, None)
    n_sampled = np.where(plan.sample, 1 + plan.n_draft, 0)
    n_wanted = np.where(whole, plan.length, n_sampled)
    stops = np.cumsum(n_wanted)
    within = np.arange(stops[-1]) - np.repeat(stops - n_wanted, n_wanted)
    index = np.repeat(ends - n_wanted, n_wanted) + within
    if not whole.any():
        return Wanted(index, None)
    is_sampled = within >= np.repeat(n_wanted - n_sampled, n_wanted)
    spans = tuple((int(r), int(stops[r] - n_wanted[r]), int(stops[r])) for r in np.flatnonzero(whole))
    return Wanted(index, np.flatnonzero(is_sampled), spans)


def make_batch(
    plan: StepPlan, wanted: Wanted, first: NDArray[np.int64], block_tokens: int, *, history: int = 0, keep: int = 0
) -> Batch:
    """The plan as tensors. first: [R] lowest position whose ring entries a row may read. history: tokens before each
    position that the model wants. keep: tokens at the end of a prompt that the second half of a split model computes;
    0 = all."""
    n_tokens, length = len(plan.tokens), plan.length
    row = np.repeat(np.arange(len(plan.seq)), length)
    positions = np.arange(n_tokens) + (plan.start - plan.offset[:-1]).astype(np.int64)[row]
    table = plan.blocks.astype(np.int64) if plan.blocks is not None and plan.blocks.shape[1] else NO_BLOCK
    batch = Batch(
        tokens=torch.from_numpy(plan.tokens.astype(np.int64)),
        positions=torch.from_numpy(positions),
        row=torch.from_numpy(row),
        slot=torch.from_numpy(plan.slot.astype(np.int64)[row]),
        first=torch.from_numpy(first[row]),
        table=torch.from_numpy(table),
        block_tokens=block_tokens,
        wanted=torch.from_numpy(wanted.index),
    )
    if plan.write_from is not None:
        batch.store = torch.from_numpy(positions >= plan.write_from[row])
    if keep:
        assert plan.n_prompt is not None, "a layout with rerun_tokens gets plans with n_prompt"
        batch.tail = torch.from_numpy(np.maximum(0, plan.n_prompt.astype(np.int64) - keep)[row])
    if history:
        batch.history = torch.from_numpy(_history(plan, row, history))
    return batch


def _history(plan: StepPlan, row: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """[T, n] tokens before each one, nearest first; -1 before the start. From the row's own tokens, then the plan's."""
    assert plan.history is not None, "an executor with caps.history_tokens gets plans with history"
    within = np.arange(len(row)) - plan.offset[:-1].astype(np.int64)[row]
    back = within[:, None] - np.arange(1, n + 1)
    """Index into the row's tokens; -1 - k is entry k of the plan's history."""
    flat = plan.offset[:-1].astype(np.int64)[row][:, None] + np.maximum(back, 0)
    earlier = plan.history[row[:, None], np.clip(-1 - back, 0, n - 1)]
    return np.where(back >= 0, plan.tokens[flat], earlier).astype(np.int64)
