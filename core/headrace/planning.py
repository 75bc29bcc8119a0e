"""Turns chosen rows into a `StepPlan`: lists in, numpy columns out. Called once per step, kept free of branches that
most rows don't need."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.contracts import KVSpace
from headrace.scheduler import Rows
from headrace.types import WANT_TOKEN, KVOp, SamplingTable, Sequence, SparseRows, StepPlan


def build_plan(
    step: int,
    rows: Rows,
    table: SamplingTable,
    ops: tuple[KVOp, ...],
    kv: KVSpace,
    *,
    n_history: int = 0,
    with_prompts: bool = False,
) -> StepPlan:
    """The plan of `rows`. A row samples iff it reaches the end of its tokens (and drafts) and wants a token.

    n_history: width of `StepPlan.history`, 0 = none. with_prompts: fill `StepPlan.n_prompt`."""
    seqs, lengths, drafts = rows.seqs, rows.lengths, rows.drafts
    tokens: list[int] = []
    index, slot, start, wants, sample = [], [], [], [], []
    for seq, n, n_draft in zip(seqs, lengths, drafts, strict=True):
        base = seq.computed
        own = seq.tokens
        index.append(seq.index)
        slot.append(seq.slot)
        start.append(base)
        wants.append(seq.wants)
        if n == 1:
            tokens.append(own[base])
        else:
            tokens += own[base : base + n - n_draft]
            if n_draft:
                tokens += seq.draft[:n_draft]
        sample.append(base + n - n_draft == len(own) and seq.wants & WANT_TOKEN)
    length = np.array(lengths, np.int32)
    offset = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(length, out=offset[1:])
    slots = np.array(slot, np.int32)
    return StepPlan(
        step=step,
        seq=np.array(index, np.int32),
        slot=slots,
        start=np.array(start, np.int32),
        length=length,
        n_draft=np.array(drafts, np.int32),
        offset=offset,
        tokens=np.array(tokens, np.int32),
        sample=np.array(sample, np.bool_),
        wants=np.array(wants, np.uint8),
        sampling=table,
        kv_ops=ops,
        blocks=kv.table(slots),
        write_from=kv.write_from(slots),
        history=tokens_before(seqs, n_history) if n_history else None,
        n_prompt=np.array([seq.n_prompt for seq in seqs], np.int32) if with_prompts else None,
    )


def tokens_before(seqs: Iterable[Sequence], n: int) -> NDArray[np.int32]:
    """[R, n] the tokens before each sequence's `computed`, nearest first, -1 before the start."""
    flat: list[int] = []
    for seq in seqs:
        start = seq.computed
        if start < n:
            flat += [-1] * (n - start)
        flat += seq.tokens[max(0, start - n) : start]
    return np.ascontiguousarray(np.array(flat, np.int32).reshape(-1, n)[:, ::-1])


def next_targets(plan: StepPlan, seqs: Iterable[Sequence]) -> NDArray[np.int32]:
    """[T] the prompt token that follows each position, -1 where none does."""
    targets = np.full(len(plan.tokens), -1, np.int32)
    for r, seq in enumerate(seqs):
        a, base = int(plan.offset[r]), int(plan.start[r])
        known = seq.tokens[base + 1 : min(base + int(plan.length[r]) + 1, seq.n_prompt)]
        targets[a : a + len(known)] = known
    return targets


def sparse_columns(seqs: list[Sequence]) -> tuple[SparseRows | None, SparseRows | None, SparseRows | None]:
    """(bias, banned, counts) of the rows that have any."""
    bias, banned, counts = _Builder(), _Builder(), _Builder()
    for r, seq in enumerate(seqs):
        if seq.extras is not None:
            if seq.extras.bias_ids:
                bias.add(r, seq.extras.bias_ids, seq.extras.bias_values)
            ids = seq.extras.banned_now(seq)
            if ids:
                banned.add(r, ids, [0.0] * len(ids))
        if seq.counts is not None:
            counts.add(r, list(seq.counts), list(seq.counts.values()))
    return bias.build(), banned.build(), counts.build()


class _Builder:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.starts: list[int] = [0]
        self.ids: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, ids: Iterable[int], values: Iterable[float]) -> None:
        self.rows.append(row)
        self.ids += ids
        self.values += values
        self.starts.append(len(self.ids))

    def build(self) -> SparseRows | None:
        if not self.rows:
            return None
        return SparseRows(
            rows=np.array(self.rows, np.int32),
            starts=np.array(self.starts, np.int32),
            ids=np.array(self.ids, np.int32),
            values=np.array(self.values, np.float32),
        )
