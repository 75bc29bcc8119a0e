"""Drives an executor by hand, without scheduler or engine: what the conformance classes and backend authors test with.

A rig keeps per sequence how many positions are valid, builds plans (block tables included) and runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import sampling
from headrace.contracts import Executor
from headrace.types import (
    WANT_ALL_POSITIONS,
    WANT_TOKEN,
    Begin,
    CopyBlock,
    Fork,
    Free,
    KVOp,
    LogprobRows,
    MaskBatch,
    Restore,
    SamplingParams,
    Snapshot,
    SparseRows,
    StepPlan,
    StepResult,
    Trim,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, kw_only=True)
class RigRow:
    """One row: `tokens` at positions [start, ...) of sequence `seq`; start None = where the sequence ends now."""

    seq: int
    tokens: Seq[int]
    start: int | None = None
    n_draft: int = 0
    sample: bool = True
    wants: int = WANT_TOKEN
    params: SamplingParams = GREEDY
    sample_index: int = 0
    bias: Mapping[int, float] | None = None
    banned: Seq[int] = ()
    counts: Mapping[int, int] | None = None
    masks: Seq[Seq[int]] = ()
    """Allowed ids of each of the 1 + n_draft sampled positions; empty = unconstrained."""
    write_from: int = 0
    """Paged writes below this position are suppressed."""
    targets: Seq[int] = ()
    """Next token of each position, for PROMPT_LOGPROBS."""


class Rig:
    """n_sequences share the KV in equal parts (paged: the block tables are interleaved, so that a mix-up shows)."""

    def __init__(self, executor: Executor, n_sequences: int = 4) -> None:
        self.executor = executor
        caps, layout = executor.caps, executor.layout
        if caps.kv == "slots":
            n_sequences = min(n_sequences, layout.n_slots)
        self.n_sequences = min(n_sequences, caps.max_rows)
        self.lengths = [0] * self.n_sequences
        self._fed: list[list[int]] = [[] for _ in self.lengths]
        """Tokens at the positions of each sequence; those from its length on are left over."""
        self.ops: list[KVOp] = []
        """Go with the next step."""
        self.capacity = executor.model.context_tokens
        self.tables: NDArray[np.int32] | None = None
        if caps.kv == "paged":
            per = layout.n_blocks // self.n_sequences
            self.tables = np.arange(per * self.n_sequences, dtype=np.int32).reshape(per, self.n_sequences).T.copy()
            self.capacity = min(self.capacity, per * layout.block_tokens)
        else:
            self.capacity = min(self.capacity, layout.slot_tokens)
        self._step = 0

    # --- KV

    def trim(self, seq: int, keep: int) -> None:
        self.ops.append(Trim(seq, keep))
        self.lengths[seq] = keep

    def free(self, seq: int) -> None:
        self.ops.append(Free(seq))
        self.lengths[seq] = 0

    def fork(self, src: int, dst: int, upto: int) -> None:
        """dst gets positions [0, upto) of src: Fork on slots; shared full blocks and a copied one when paged, and rings
        by way of the first snapshot, where there is one."""
        if self.tables is None:
            self.ops.append(Fork(src, dst, upto))
        else:
            size = self.executor.layout.block_tokens
            full = upto // size
            if upto % size:
                self.ops.append(CopyBlock(0, int(self.tables[src, full]), int(self.tables[dst, full])))
            self.tables[dst, :full] = self.tables[src, :full]
            if self.executor.layout.n_snapshots:
                self.ops += [Snapshot(src, 0, 0), Begin(dst), Restore(dst, 0, 0)]
        self._fed[dst] = self._fed[src][:upto]
        self.lengths[dst] = upto

    # --- steps

    def step(self, *rows: RigRow) -> StepResult:
        """Run one step. Afterwards the sequence holds its row's positions, accepted drafts included and rejected ones
        trimmed with the next step."""
        if self.executor.layout.has_rings:
            self.ops += [
                Begin(row.seq) for row in rows if not (self.lengths[row.seq] if row.start is None else row.start)
            ]
        plan = self.plan(rows)
        handle = self.executor.forward(plan)
        self.executor.sample(handle, self.masks(rows))
        result = self.executor.collect(handle)
        for r, row in enumerate(rows):
            base = int(plan.start[r])
            self._fed[row.seq][base:] = row.tokens
            keep = base + len(row.tokens) - row.n_draft + int(result.accepted[r])
            if keep < base + len(row.tokens):
                self.trim(row.seq, keep)
            self.lengths[row.seq] = keep
        return result

    def plan(self, rows: Iterable[RigRow]) -> StepPlan:
        rows = list(rows)
        table = sampling.new_table(max(1, self.n_sequences))
        for row in rows:
            sampling.set_row(table, row.seq, row.params.resolved(), row.sample_index)
        table.bias = _sparse([row.bias for row in rows])
        table.banned = _sparse([dict.fromkeys(row.banned, 0.0) for row in rows])
        table.counts = _sparse([row.counts for row in rows])
        slots = [row.seq for row in rows]
        starts = [self.lengths[row.seq] if row.start is None else row.start for row in rows]
        flat = [token for row in rows for token in row.tokens]
        targets = [t for row in rows for t in [*row.targets, *[-1] * len(row.tokens)][: len(row.tokens)]]
        ops, self.ops = tuple(self.ops), []
        self._step += 1
        return StepPlan(
            step=self._step,
            seq=_ints(slots),
            slot=_ints(slots),
            start=_ints(starts),
            length=_ints([len(row.tokens) for row in rows]),
            n_draft=_ints([row.n_draft for row in rows]),
            offset=_prefix_sum([len(row.tokens) for row in rows]),
            tokens=_ints(flat),
            sample=np.array([row.sample for row in rows], np.bool_),
            wants=np.array([row.wants for row in rows], np.uint8),
            sampling=table,
            kv_ops=ops,
            blocks=None if self.tables is None else self.tables[slots],
            targets=_ints(targets) if any(row.targets or row.wants & WANT_ALL_POSITIONS for row in rows) else None,
            write_from=_ints([row.write_from for row in rows]) if any(row.write_from for row in rows) else None,
            history=self._history(rows, starts),
            n_prompt=_ints([0] * len(rows)) if self.executor.layout.rerun_tokens else None,
        )

    def _history(self, rows: Seq[RigRow], starts: Seq[int]) -> NDArray[np.int32] | None:
        n = self.executor.caps.history_tokens
        if not n:
            return None
        before = [[-1] * n + self._fed[row.seq][:start] for row, start in zip(rows, starts, strict=True)]
        return _ints([token for tokens in before for token in tokens[: -n - 1 : -1]]).reshape(-1, n)

    def masks(self, rows: Iterable[RigRow]) -> MaskBatch | None:
        rows = list(rows)
        if not any(row.masks for row in rows):
            return None
        allowed = np.zeros(
            (sum(len(row.masks) for row in rows), -(-self.executor.model.vocab_size // 32) * 32), np.uint8
        )
        m = 0
        for row in rows:
            for ids in row.masks:
                allowed[m, list(ids)] = 1
                m += 1
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return MaskBatch(starts=_prefix_sum([len(row.masks) for row in rows]), bits=bits)

    def generate(self, prompt: Seq[int], n: int, *, seq: int = 0, chunk: int | None = None, **row: Any) -> list[int]:
        """Prefill (in chunks) from an empty sequence and decode n tokens one by one; EOS is a token like any other."""
        tokens = self.prefill(prompt, seq=seq, chunk=chunk, **row)
        while len(tokens) < n:
            tokens += emitted(self.step(RigRow(seq=seq, tokens=tokens[-1:], **row)))[0]
        return tokens[:n]

    def prefill(self, prompt: Seq[int], *, seq: int = 0, chunk: int | None = None, **row: Any) -> list[int]:
        """Feed the prompt from where the sequence ends; returns the first sampled token, in a list."""
        rest = list(prompt)
        chunk = min(chunk or len(rest), self.executor.caps.max_tokens)
        while len(rest) > chunk:
            self.step(RigRow(seq=seq, tokens=rest[:chunk], **row | {"sample": False}))
            del rest[:chunk]
        return emitted(self.step(RigRow(seq=seq, tokens=rest, **row)))[0]


def emitted(result: StepResult) -> list[list[int]]:
    """Emitted tokens per row."""
    tokens, starts = result.tokens.tolist(), result.starts.tolist()
    return [tokens[a:b] for a, b in pairwise(starts)]


def logprob_rows(rows: LogprobRows | None, row: int) -> list[tuple[int, list[int], list[float]]]:
    """(position, ids, values) of one plan row."""
    assert rows is not None, "the executor returned no logprobs though a row wanted them"
    picked = np.flatnonzero(rows.row == row).tolist()
    return [(int(rows.position[m]), rows.ids[m], rows.values[m]) for m in picked]


def _ints(values: Seq[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _prefix_sum(lengths: Seq[int]) -> NDArray[np.int32]:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _sparse(entries: Seq[Mapping[int, Any] | None]) -> SparseRows | None:
    rows = [r for r, entry in enumerate(entries) if entry]
    if not rows:
        return None
    picked = [entries[r] or {} for r in rows]
    return SparseRows(
        rows=_ints(rows),
        starts=_prefix_sum([len(entry) for entry in picked]),
        ids=_ints([token for entry in picked for token in entry]),
        values=np.array([value for entry in picked for value in entry.values()], np.float32),
    )
