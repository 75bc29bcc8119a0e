"""Chooses the rows of each step.

One invariant, no prefill or decode phase: every step moves each running sequence's `computed` toward
`len(tokens) + len(draft)` within a token budget. A prefill chunk, a decode, a verification and a replay after
preemption are the same row with other numbers. (The idea is vLLM's, v1/core/sched/scheduler.py.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from operator import attrgetter

from headrace.contracts import KVSpace
from headrace.types import EngineOptions, KVOp, Sequence

_ARRIVAL = attrgetter("arrival")

MAX_MISFITS = 8
"""Waiting sequences that may fail to fit before admission gives up for this step."""


@dataclass(slots=True)
class Rows:
    """The rows of one step, as parallel lists; `drafts[r]` of the `lengths[r]` tokens are drafts."""

    seqs: list[Sequence] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


class Scheduler:
    """Owns the waiting and running lists, both in order of service (priority, then arrival)."""

    def __init__(
        self,
        kv: KVSpace,
        options: EngineOptions,
        max_running: int,
        max_batch_tokens: int,
        on_leave: Callable[[int], None] = lambda index: None,
    ) -> None:
        """on_leave(index): a sequence stopped running and its index will be used again."""
        self.kv = kv
        self.options = options
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.n_preemptions = 0
        self._on_leave = on_leave
        self._indices = list(range(max_running - 1, -1, -1))
        self._pressing: Sequence | None = None
        """First in line that found no KV in the last step."""

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_ARRIVAL)

    def finish(self, seq: Sequence, ops: list[KVOp], reuse: bool) -> None:
        """seq ends. reuse: its KV may serve later prefixes."""
        if seq.status == "running":
            self.running.remove(seq)
            self._leave(seq, ops, reuse)
        else:
            self.waiting.remove(seq)
        seq.status = "finished"

    def _leave(self, seq: Sequence, ops: list[KVOp], reuse: bool) -> None:
        self.kv.release(seq, ops, reuse)
        self._on_leave(seq.index)
        self._indices.append(seq.index)
        seq.index = -1
        seq.draft = []

    def schedule(
        self,
        ops: list[KVOp],
        ready: Callable[[Sequence], bool],
        admitted: Callable[[Sequence], None],
        only: Container[Sequence] | None = None,
    ) -> Rows:
        """Rows for one step. KV is reserved for them; `ops` got what the executor must do first.

        ready(seq): may this waiting sequence start? admitted(seq): called for each that does, before its row counts.
        only: restrict the step to these sequences and admit nobody (the engine isolates a failing row).
        """
        rows = Rows()
        if only is None and self.waiting:
            self._make_way(ops, ready)
        budget = self._continue_running(rows, ops, only)
        if only is None and self.waiting:
            self._admit(rows, budget, ops, ready, admitted)
        return rows

    def _continue_running(self, rows: Rows, ops: list[KVOp], only: Container[Sequence] | None) -> int:
        running, reserve = self.running, self.kv.reserve
        budget, chunk = self.max_batch_tokens, self.options.prefill_chunk_tokens
        add_seq, add_length, add_draft = rows.seqs.append, rows.lengths.append, rows.drafts.append
        i = 0
        while i < len(running):
            seq = running[i]
            i += 1
            if only is not None and seq not in only:
                continue
            pending = len(seq.tokens) - seq.computed
            n = pending + len(seq.draft)
            if n > 1:
                # every later sequence keeps a token of the budget, so a long prompt starves nobody
                n = min(n, chunk, max(1, budget - (len(running) - i)))
                if 1 < pending >= n:
                    n = self._chunk(seq, n)
            if n <= 0 or budget <= 0:
                continue
            while not reserve(seq, seq.computed + n, ops):
                if n > pending:
                    n = pending  # drafts are the first thing to give up
                elif running[-1] is seq:
                    self._preempt(running.pop(), ops)
                    break
                else:
                    self._preempt(running.pop(), ops)
            else:
                budget -= n
                add_seq(seq)
                add_length(n)
                add_draft(n - pending if n > pending else 0)
        return budget

    def _chunk(self, seq: Sequence, n: int) -> int:
        """How many of the n tokens without drafts that are due to feed."""
        own = seq.request.prefill_chunk_tokens
        if own is not None:
            n = min(n, own)
        return self.kv.chunk_end(seq, seq.computed + n) - seq.computed

    def _make_way(self, ops: list[KVOp], ready: Callable[[Sequence], bool]) -> None:
        """Preempt one running sequence of lower priority for the first in line, if that one found no room."""
        head = next((seq for seq in self.waiting[:MAX_MISFITS] if ready(seq)), None)
        if head is None or not self.running or self.running[-1].arrival[0] <= head.arrival[0]:
            return
        if len(self.running) >= self.max_running or head is self._pressing:
            self._preempt(self.running.pop(), ops)

    def _preempt(self, seq: Sequence, ops: list[KVOp]) -> None:
        """Give its KV back and put it in line again; its tokens are recomputed (or found in the prefix cache)."""
        self._leave(seq, ops, True)
        seq.status = "waiting"
        seq.preemptions += 1
        self.n_preemptions += 1
        insort(self.waiting, seq, key=_ARRIVAL)

    def _admit(
        self,
        rows: Rows,
        budget: int,
        ops: list[KVOp],
        ready: Callable[[Sequence], bool],
        admitted: Callable[[Sequence], None],
    ) -> None:
        misfits: list[Sequence] = []
        self._pressing = None
        i = 0
        most_skips = self.options.aging_skips
        while i < len(self.waiting) and budget > 0 and len(self.running) < self.max_running:
            if len(misfits) > MAX_MISFITS or any(seq.skipped >= most_skips for seq in misfits):
                break  # it was overtaken often enough: keep the room that becomes free for it
            seq = self.waiting[i]
            i += 1
            if not ready(seq):
                continue
            if not self.kv.admit(seq, ops, seq.prompt_logprobs is None and seq.prompt_logits is None):
                misfits.append(seq)
                self._pressing = self._pressing or seq
                continue
            for overtaken in misfits:
                overtaken.skipped += 1
            i -= 1
            del self.waiting[i]
            seq.status = "running"
            seq.index = self._indices.pop()
            insort(self.running, seq, key=_ARRIVAL)
            admitted(seq)
            n = self._chunk(seq, min(len(seq.tokens) - seq.computed, budget, self.options.prefill_chunk_tokens))
            if not self.kv.reserve(seq, seq.computed + n, ops):  # admit() made room for all of its tokens
                raise AssertionError("admitted without room")
            budget -= n
            rows.seqs.append(seq)
            rows.lengths.append(n)
            rows.drafts.append(0)
