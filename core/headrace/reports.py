"""What is reported beside tokens: log-probabilities and logits of a step, usage and times of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.sampling import NAN
from headrace.types import WANT_PROMPT_LOGITS, WANT_PROMPT_LOGPROBS, LogprobRows, Sequence, StepPlan, Timings, Usage

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PromptLogits:
    """Logits of one prompt, filled from its start. Steps that run again (after preemption or a failure) add nothing."""

    __slots__ = ("n_filled", "values")

    def __init__(self, n_prompt: int, vocab_size: int) -> None:
        self.values = np.empty((n_prompt, vocab_size), np.float32)
        """[n_prompt, vocab] float32; rows from `n_filled` on are not set yet."""
        self.n_filled = 0

    def add(self, start: int, found: NDArray[np.float32]) -> None:
        """Take [n, vocab] logits of positions [start, start + n); what is there already stays."""
        skip, n_missing = self.n_filled - start, len(self.values) - self.n_filled
        fresh = found[skip : skip + n_missing] if skip >= 0 else found[:0]
        self.values[self.n_filled : self.n_filled + len(fresh)] = fresh
        self.n_filled += len(fresh)

    @property
    def complete(self) -> bool:
        return self.n_filled == len(self.values)


def take_logprobs(found: LogprobRows, seqs: list[Sequence]) -> None:
    for row, ids, values in zip(found.row.tolist(), found.ids, found.values, strict=True):
        have = seqs[row].logprobs
        if have is not None:
            have.append((ids, values))


def take_prompt_logprobs(found: LogprobRows, seqs: list[Sequence]) -> dict[int, str]:
    """Entries come once per position; those that a replay brings again are dropped. Returns rows that fail."""
    unsound: dict[int, str] = {}
    for row, position, ids, values in zip(
        found.row.tolist(), found.position.tolist(), found.ids, found.values, strict=True
    ):
        have = seqs[row].prompt_logprobs
        if values[0] != values[0]:
            unsound[row] = NAN  # a chunk that samples nothing has no other sign of it
        elif have is not None and position == len(have):
            have.append((ids, values))
            if len(have) == seqs[row].n_prompt:
                seqs[row].wants &= ~WANT_PROMPT_LOGPROBS
    return unsound


def take_prompt_logits(
    row: NDArray[np.int32], values: NDArray[np.float32], plan: StepPlan, seqs: list[Sequence]
) -> dict[int, str]:
    """row: [M] plan rows, ascending; values: [M, vocab], one for each position of the row. Returns rows that fail."""
    unsound: dict[int, str] = {}
    owners, starts = np.unique(row, return_index=True)
    for r, found in zip(owners.tolist(), np.split(values, starts[1:]), strict=True):
        seq = seqs[r]
        if np.isnan(found).any():
            unsound[r] = NAN
        elif seq.prompt_logits is not None:
            seq.prompt_logits.add(int(plan.start[r]), found)
            if seq.prompt_logits.complete:
                seq.wants &= ~WANT_PROMPT_LOGITS
    return unsound


def usage_of(seqs: list[Sequence]) -> Usage:
    """Tokens of the n samples of one request."""
    first = seqs[0]
    n_generated, n_forced = sum(seq.n_generated for seq in seqs), sum(seq.n_forced for seq in seqs)
    return Usage(first.n_prompt, n_generated, first.cached, n_forced)


def timings_of(seqs: list[Sequence]) -> Timings:
    """From the engine clock; rates are 0 where nothing was measured."""
    submitted, scheduled, first, _, prefilled = seqs[0].times
    ended = max(seq.times[3] for seq in seqs)
    n_computed = seqs[0].n_prompt + seqs[0].n_start - seqs[0].cached
    n_decoded = sum(max(0, seq.n_generated - seq.n_start - 1) for seq in seqs)
    return Timings(
        queue_s=max(0.0, scheduled - submitted) if scheduled else 0.0,
        first_token_s=first - submitted if first else 0.0,
        total_s=ended - submitted,
        prefill_tokens_per_s=n_computed / (prefilled - scheduled) if prefilled > scheduled else 0.0,
        decode_tokens_per_s=n_decoded / (ended - prefilled) if prefilled and ended > prefilled else 0.0,
    )
