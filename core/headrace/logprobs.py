"""Log-probabilities of chosen and given tokens, with the best alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headrace.filters import best, weights
from headrace.types import LogprobRows, StepPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


def entry(values: Floats, at: int, n: int) -> tuple[list[int], list[float]]:
    """([at, best indices ...], their log-softmax) for the entry at `at` and the n best; -inf entries are left out."""
    largest = float(values.max())
    norm = largest + math.log(float(weights(values, np.float32(1)).sum(dtype=np.float64)))
    ids = [at, *best(values, n).tolist()]
    found = (values[ids].astype(np.float64) - norm).tolist()
    kept = [k for k, value in enumerate(found) if k == 0 or value > -math.inf]
    return [ids[k] for k in kept], [found[k] for k in kept]


def collect(entries: list[tuple[int, int, list[int], list[float]]]) -> LogprobRows:
    """entries: (plan row, position, ids, values), rows ascending."""
    return LogprobRows(
        row=np.array([found[0] for found in entries], np.int32),
        position=np.array([found[1] for found in entries], np.int32),
        ids=[found[2] for found in entries],
        values=[found[3] for found in entries],
    )


def prompt_logits(rows: Iterable[tuple[int, Floats]]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """`StepResult.arrays["prompt_logits"]` of (plan row, [row tokens, vocab] logits of its every position) pairs, by
    ascending row. The values are copies: sampling may change the logits in place."""
    rows = list(rows)
    index = np.repeat(np.array([row for row, _ in rows], np.int32), [len(logits) for _, logits in rows])
    return index, np.concatenate([logits for _, logits in rows], dtype=np.float32)


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
                entries.append((r, int(plan.start[r]) + i + 1, *entry(logits[i], target, n)))
    return collect(entries)
