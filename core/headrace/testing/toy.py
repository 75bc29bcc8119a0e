"""A toy model and two toy executors that read nothing but their own KV.

The logits at a position are an integer hash of every (position, token) pair that the executor finds in its KV, so that
a wrong block table, a stale trim or an overwritten shared block changes the output or fails an assertion. No float is
ever summed: results are bit-equal for any batching, chunking and machine. Start here to write a backend of your own.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace import sampling
from headrace.contracts import Executor
from headrace.errors import StepFailed
from headrace.testing.toy_model import Recent, ToyModel
from headrace.testing.toy_parts import ToyConstraint, ToyObserver, ToyOracle, ToyStore, ToyStrategy
from headrace.testing.toy_rings import RingCorrupt, ToyRings
from headrace.testing.toy_tokenizer import BOS, EOS, ToyTokenizer
from headrace.types import (
    WANT_ALL_POSITIONS,
    WANT_PROMPT_LOGITS,
    WANT_PROMPT_LOGPROBS,
    Begin,
    Capabilities,
    CopyBlock,
    Fork,
    Free,
    KVGroup,
    KVLayout,
    KVOp,
    MaskBatch,
    Restore,
    Snapshot,
    StepPlan,
    StepResult,
    Trim,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BOS",
    "EOS",
    "KVCorrupt",
    "ToyConstraint",
    "ToyModel",
    "ToyObserver",
    "ToyOracle",
    "ToyPaged",
    "ToySlots",
    "ToyStore",
    "ToyStrategy",
    "ToyTokenizer",
]

EMPTY = -1
"""A KV cell that nobody wrote, or that was freed. Else a cell is position << 32 | token, int64."""


class KVCorrupt(AssertionError):
    """The plan makes the executor read KV that is not what it should be: a bug in the bookkeeping."""


class _Step:
    """An open step: its plan and the logits of its sampled positions."""

    __slots__ = ("logits", "plan", "prompt", "result")

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.logits: list[NDArray[np.float32]] = []
        self.prompt: list[tuple[int, NDArray[np.float32]]] = []
        self.result: StepResult | None = None


class _ToyExecutor(Executor):
    """What both toys share. Subclasses say where a row's cells lie and what KV operations do.

    Fault injection: `fail(plan)` returns an exception to raise (StepFailed, Fatal) or None, after part of the batch was
    written as garbage; `fail_at` says from which call. `nan(plan, row)` poisons a row's logits. `on_forward(plan)`
    runs inside forward, after the KV operations; `interrupt()` from there (or another thread) fails the step.
    """

    def __init__(
        self,
        model: ToyModel,
        caps: Capabilities,
        layout: KVLayout,
        *,
        uri: str = "",
        fail: Callable[[StepPlan], Exception | None] | None = None,
        fail_at: Literal["forward", "sample", "collect"] = "forward",
        nan: Callable[[StepPlan, int], bool] | None = None,
        on_forward: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.toy, self.caps, self.layout = model, caps, layout
        self.fail, self.fail_at, self.nan, self.on_forward = fail, fail_at, nan, on_forward
        self.model = model.spec(uri)
        self.tokenizer = ToyTokenizer(model.vocab)
        self.n_forward = 0
        """Steps started since construction."""
        self._step: _Step | None = None
        self._opened = False
        self._failure: Exception | None = None
        self._interrupted = threading.Event()

    # -- the contract

    def open(self) -> None:
        self._clear()
        self._opened, self._step = True, None

    def close(self) -> None:
        self._opened, self._step = False, None

    def forward(self, plan: StepPlan) -> _Step:
        assert self._opened, "forward on a closed executor"
        assert self._step is None, "forward before the last step was collected, and caps.overlap is 0"
        self._interrupted.clear()  # an interrupt is for the forward that is running, not for the next one
        self.n_forward += 1
        step = _Step(plan)
        if not self.toy.fast:
            self._check(plan)
            for op in plan.kv_ops:
                self._apply(op)
        if self.on_forward is not None:
            self.on_forward(plan)
        self._failure = self.fail(plan) if self.fail is not None else None
        if not self.toy.fast:
            self._run(plan, step)
        self._raise_at("forward")
        self._step = step
        return step

    def sample(self, step: Any, masks: MaskBatch | None) -> None:
        current = self._current(step)
        assert current.result is None, "sample was called twice for one step"
        self._raise_at("sample")
        if self.toy.fast:
            current.result = _null_result(current.plan)
            return
        try:
            current.result = sampling.sample_step(current.plan, current.logits, masks)
            if current.prompt:
                self._report_prompts(current.plan, current.prompt, current.result)
        except Exception:
            self._step = None  # the step is over, whatever failed
            raise

    def _report_prompts(
        self, plan: StepPlan, prompts: list[tuple[int, NDArray[np.float32]]], result: StepResult
    ) -> None:
        scored = [(row, logits) for row, logits in prompts if plan.wants[row] & WANT_PROMPT_LOGPROBS]
        if scored:
            result.prompt_logprobs = sampling.prompt_logprobs(plan, scored)
        kept = [(row, logits) for row, logits in prompts if plan.wants[row] & WANT_PROMPT_LOGITS]
        if kept:
            result.arrays = {**result.arrays, "prompt_logits": sampling.prompt_logits(kept)}

    def collect(self, step: Any) -> StepResult:
        current = self._current(step)
        self._raise_at("collect")
        assert current.result is not None, "collect before sample"
        self._step = None
        return current.result

    def interrupt(self) -> None:
        self._interrupted.set()

    def describe(self) -> Mapping[str, str]:
        where = (
            f"{self.layout.n_blocks} blocks of {self.layout.block_tokens}"
            if self.caps.kv == "paged"
            else f"{self.layout.n_slots} slots of {self.layout.slot_tokens}"
        )
        return {"kv": f"{self.caps.kv}, {where} tokens", "vocab": str(self.toy.vocab)}

    # -- where cells lie

    @abstractmethod
    def _clear(self) -> None: ...

    @abstractmethod
    def _apply(self, op: KVOp) -> None: ...

    @abstractmethod
    def _place(self, plan: StepPlan, row: int, end: int) -> NDArray[np.int64]:
        """Flat cell numbers of positions [0, end) of a row: [end] int64. Raises KVCorrupt."""

    def _wrote(self, plan: StepPlan, row: int, end: int) -> None:
        """Positions up to `end` of a row were written."""

    def _recent(self, plan: StepPlan, row: int, prefix: NDArray[np.int64]) -> Recent | None:
        """What the row reads beside its cells, which hold `prefix` below its start."""
        return None

    def _keep_recent(self, plan: StepPlan, row: int, new: NDArray[np.int64]) -> None:
        """The cells of positions [start, start + len(new)) belong to the row's last ones now."""

    # -- one step

    def _current(self, step: Any) -> _Step:
        current = self._step
        if current is None or current is not step:
            raise AssertionError("sample or collect on a step that is not open")
        return current

    def _raise_at(self, where: str) -> None:
        failure = self._failure
        if failure is not None and self.fail_at == where:
            self._failure, self._step = None, None
            raise failure

    def _check(self, plan: StepPlan) -> None:
        rows, n_tokens = len(plan.seq), int(plan.offset[-1])
        assert rows <= self.caps.max_rows, f"{rows} rows, caps.max_rows is {self.caps.max_rows}"
        assert n_tokens <= self.caps.max_tokens, f"{n_tokens} tokens, caps.max_tokens is {self.caps.max_tokens}"
        assert len(plan.tokens) == n_tokens
        assert np.array_equal(np.diff(plan.offset, prepend=0), np.concatenate([[0], plan.length]))
        assert (plan.length > 0).all(), "a row feeds no token"
        assert ((plan.n_draft >= 0) & (plan.n_draft < plan.length)).all(), "n_draft is not below length"
        assert self.caps.drafts or not plan.n_draft.any(), "drafts in the plan, caps.drafts is False"
        assert ((plan.tokens >= 0) & (plan.tokens < self.toy.vocab)).all(), "a token outside the vocabulary"
        assert (plan.start + plan.length <= self.toy.context).all(), f"positions beyond {self.toy.context}"

    def _run(self, plan: StepPlan, step: _Step) -> None:
        """Read every row's prefix, write every row's new cells, then hash. Rows never see each other's writes."""
        places, prefixes = [], []
        written = np.zeros(self._kv.size, bool)
        for row in range(len(plan.seq)):
            start = int(plan.start[row])
            place = self._place(plan, row, start + int(plan.length[row]))
            low = start if plan.write_from is None else max(start, int(plan.write_from[row]))
            if written[place[low:]].any():
                raise KVCorrupt(f"two rows write the same KV cell: {plan.row(row)}")
            written[place[low:]] = True
            places.append((place, low))
            prefixes.append(self._kv[place[:start]])
        for row, (place, low) in enumerate(places):
            if self._interrupted.is_set():
                raise StepFailed("interrupted")
            start, n_draft = int(plan.start[row]), int(plan.n_draft[row])
            if written[place[:low]].any():
                raise KVCorrupt(f"another row writes KV that this row reads: {plan.row(row)}")
            new = self.toy.cells(plan.tokens[plan.offset[row] : plan.offset[row + 1]], start)
            recent = self._recent(plan, row, prefixes[row])
            if not np.array_equal(self._kv[place[start:low]], new[: low - start]):
                raise KVCorrupt(f"KV below write_from differs from what is replayed: {plan.row(row)}")
            if self._failure is not None and self.fail_at == "forward":
                self._scribble(plan, row, place, low)
                if 2 * row >= len(places) - 1:
                    return
                continue
            self._kv[place[low:]] = new[low - start :]
            self._keep_recent(plan, row, new)
            self._wrote(plan, row, len(place))
            cells = np.concatenate([prefixes[row], new])
            if not np.array_equal(cells >> 32, np.arange(len(cells))):
                wrong = int(np.flatnonzero(cells >> 32 != np.arange(len(cells)))[0])
                raise KVCorrupt(f"position {wrong} holds the KV of position {cells[wrong] >> 32}: {plan.row(row)}")
            self._hash(plan, row, cells, n_draft, recent, step)
            if self._failure is not None:  # raised later, by then nothing that this step wrote is to be trusted
                self._kv[place[low:]] ^= 1
                self._keep_recent(plan, row, new ^ 1)

    def _hash(
        self, plan: StepPlan, row: int, cells: NDArray[np.int64], n_draft: int, recent: Recent | None, step: _Step
    ) -> None:
        whole = bool(plan.wants[row] & WANT_ALL_POSITIONS)
        if not plan.sample[row] and not whole:
            return
        logits = self.toy.logits_from(cells, int(plan.start[row]) if whole else len(cells) - 1 - n_draft, recent)
        if self.nan is not None and self.nan(plan, row):
            logits[:] = np.nan
        if whole:
            step.prompt.append((row, logits.copy()))
        if plan.sample[row]:
            step.logits.extend(logits[len(logits) - 1 - n_draft :])

    def _scribble(self, plan: StepPlan, row: int, place: NDArray[np.int64], low: int) -> None:
        """What a failed step may leave behind: cells of the right position with a wrong token."""
        start = int(plan.start[row])
        half = place[start : start + (len(place) - start + 1) // 2]
        garbage = self.toy.cells(np.full(len(half), (7 * start + row) % 256), start)
        self._kv[half[low - start :]] = garbage[low - start :]
        self._keep_recent(plan, row, garbage)
        self._wrote(plan, row, start + len(half))

    _kv: NDArray[np.int64]
    """Flat cells, EMPTY where invalid."""


def _null_result(plan: StepPlan) -> StepResult:
    """One constant-time token per sampling row: 'a' + position mod 16."""
    tokens = (97 + (plan.start + plan.length)[plan.sample] % 16).astype(np.int32)
    return sampling.step_result(tokens, plan.sample.astype(np.int32))


class ToyPaged(_ToyExecutor):
    """KV in blocks that core allocates; a row's cells are found through its block table only.

    window: each position reads the last so many positions, itself included, from a ring of its slot in place of the
    blocks, 0 = no rings. slack, n_snapshots, replay_tokens, rerun_tokens: as in `KVLayout`. Rebuilding by replay is
    exact here from window - 1 tokens on. history_tokens: as in `Capabilities`; plans are checked for it.
    """

    def __init__(
        self,
        model: ToyModel,
        *,
        n_blocks: int = 256,
        block_tokens: int = 16,
        max_rows: int = 64,
        max_tokens: int = 2048,
        row_invariant: bool = True,
        window: int = 0,
        slack: int = 8,
        n_snapshots: int = 0,
        replay_tokens: int = 0,
        rerun_tokens: int = 0,
        history_tokens: int = 0,
        **faults: Any,
    ) -> None:
        if window == 1 or (not window and (n_snapshots or replay_tokens)):
            raise ValueError(f"window = {window}: rings take 2 or more; snapshots and replay are for rings")
        caps = _caps(model, "paged", max_rows, max_tokens, row_invariant, partial_trim=True, fork=False)
        rebuilt = "a prefix hit rebuilds windows from too few tokens"
        caps = replace(
            caps,
            history_tokens=history_tokens,
            drafts=caps.drafts and not (window and slack < 1),
            approximations=(rebuilt,) if not n_snapshots and 0 < replay_tokens < window - 1 else (),
        )
        groups = [KVGroup(name="kv", grain_bytes=8 * block_tokens)]
        if window:
            groups.append(KVGroup(name="window", grain_bytes=8 * (window + slack), kind="ring"))
        layout = KVLayout(
            fingerprint=model.spec().fingerprint,
            groups=tuple(groups),
            n_blocks=n_blocks,
            block_tokens=block_tokens,
            n_snapshots=n_snapshots,
            replay_tokens=replay_tokens,
            rerun_tokens=rerun_tokens,
            slack_tokens=slack if window else 0,
        )
        self._window = window
        super().__init__(model, caps, layout, **faults)

    def _clear(self) -> None:
        layout = self.layout
        self._kv = np.full(layout.n_blocks * layout.block_tokens, EMPTY, np.int64)
        self._rings = ToyRings(self.caps.max_rows, self._window, layout.slack_tokens, layout.n_snapshots, EMPTY)

    def _apply(self, op: KVOp) -> None:
        size = self.layout.block_tokens
        if self._window and isinstance(op, (Begin, Snapshot, Restore)):
            try:
                self._rings.apply(op)
            except RingCorrupt as error:
                raise KVCorrupt(str(error)) from error
        elif isinstance(op, CopyBlock):
            if not (0 <= op.src < self.layout.n_blocks and 0 <= op.dst < self.layout.n_blocks):
                raise KVCorrupt(f"{op} is outside {self.layout.n_blocks} blocks")
            self._kv[op.dst * size : (op.dst + 1) * size] = self._kv[op.src * size : (op.src + 1) * size]
        elif not isinstance(op, (Trim, Free)):  # those say what the block table says already
            raise KVCorrupt(f"{op} means nothing to a paged executor")

    def _place(self, plan: StepPlan, row: int, end: int) -> NDArray[np.int64]:
        size = self.layout.block_tokens
        if plan.blocks is None:
            raise KVCorrupt("a plan without block table reached a paged executor")
        table = plan.blocks[row, : -(-end // size)].astype(np.int64)
        if len(table) * size < end or (len(table) and (table.min() < 0 or table.max() >= self.layout.n_blocks)):
            raise KVCorrupt(f"block table {table.tolist()} does not cover {end} positions: {plan.row(row)}")
        if len(np.unique(table)) != len(table):
            raise KVCorrupt(f"block table {table.tolist()} names a block twice: {plan.row(row)}")
        return (table[:, None] * size + np.arange(size)).reshape(-1)[:end]

    def _recent(self, plan: StepPlan, row: int, prefix: NDArray[np.int64]) -> Recent | None:
        n, start, slot = self.caps.history_tokens, int(plan.start[row]), int(plan.slot[row])
        if n:
            known = np.full(n, -1, np.int64)
            known[: min(n, start)] = prefix[::-1][:n] & 0xFFFFFFFF
            if plan.history is None or not np.array_equal(plan.history[row], known):
                raise KVCorrupt(f"history differs from the tokens {known.tolist()} before it: {plan.row(row)}")
        if not self._window:
            return None
        rerun = self.layout.rerun_tokens
        latest = max(0, int(plan.n_prompt[row]) - rerun) if plan.n_prompt is not None else -1
        if rerun and self._rings.begun[slot] and start > latest:
            raise KVCorrupt(f"starts within the last {rerun} tokens of its prompt: {plan.row(row)}")
        try:
            return Recent(start, self._window, self._rings.read(slot, start))
        except RingCorrupt as error:
            raise KVCorrupt(f"{error}: {plan.row(row)}") from error

    def _keep_recent(self, plan: StepPlan, row: int, new: NDArray[np.int64]) -> None:
        if self._window:
            self._rings.write(int(plan.slot[row]), int(plan.start[row]), new)


class ToySlots(_ToyExecutor):
    """KV in slots that the executor owns; core may only trim, fork and free. A row must start where its slot ends."""

    def __init__(
        self,
        model: ToyModel,
        *,
        n_slots: int = 8,
        slot_tokens: int = 1024,
        max_rows: int = 64,
        max_tokens: int = 2048,
        row_invariant: bool = True,
        partial_trim: bool = True,
        fork: bool = True,
        **faults: Any,
    ) -> None:
        super().__init__(
            model,
            _caps(model, "slots", min(max_rows, n_slots), max_tokens, row_invariant, partial_trim, fork),
            KVLayout(fingerprint=model.spec().fingerprint, n_slots=n_slots, slot_tokens=slot_tokens),
            **faults,
        )

    def _clear(self) -> None:
        self._kv = np.full(self.layout.n_slots * self.layout.slot_tokens, EMPTY, np.int64)
        self._length = [0] * self.layout.n_slots

    def _slot(self, slot: int) -> NDArray[np.int64]:
        if not 0 <= slot < self.layout.n_slots:
            raise KVCorrupt(f"slot {slot} of {self.layout.n_slots}")
        return self._kv[slot * self.layout.slot_tokens : (slot + 1) * self.layout.slot_tokens]

    def _apply(self, op: KVOp) -> None:
        match op:
            case Trim(slot, keep):
                cells, length = self._slot(slot), self._length[slot]
                if 0 < keep < length and not self.caps.partial_trim:
                    raise KVCorrupt(f"{op} of {length} positions, but caps.partial_trim is False")
                cells[keep:] = EMPTY
                self._length[slot] = min(keep, length)  # trims may be repeated, so they may find less than they keep
            case Fork(src, dst, upto):
                length = self._length[src]
                if not self.caps.fork or src == dst or not 0 <= upto <= length:
                    raise KVCorrupt(f"{op}: fork is {self.caps.fork}, the source holds {length} positions")
                if 0 < upto < length and not self.caps.partial_trim:
                    raise KVCorrupt(f"{op} of {length} positions, but caps.partial_trim is False")
                target = self._slot(dst)
                target[:] = EMPTY
                target[:upto] = self._slot(src)[:upto]
                self._length[dst] = upto
            case Free(slot):
                self._slot(slot)[:] = EMPTY
                self._length[slot] = 0
            case _:
                raise KVCorrupt(f"{op} means nothing to a slot executor")

    def _check(self, plan: StepPlan) -> None:
        super()._check(plan)
        if len(set(plan.slot.tolist())) != len(plan.slot):
            raise KVCorrupt(f"two rows share a slot: {plan.slot.tolist()}")

    def _place(self, plan: StepPlan, row: int, end: int) -> NDArray[np.int64]:
        slot, start = int(plan.slot[row]), int(plan.start[row])
        self._slot(slot)
        if start != self._length[slot]:
            raise KVCorrupt(f"the slot holds {self._length[slot]} positions: {plan.row(row)}")
        if end > self.layout.slot_tokens:
            raise KVCorrupt(f"{end} positions in a slot of {self.layout.slot_tokens}: {plan.row(row)}")
        return slot * self.layout.slot_tokens + np.arange(end)

    def _wrote(self, plan: StepPlan, row: int, end: int) -> None:
        self._length[int(plan.slot[row])] = end


def _caps(
    model: ToyModel,
    kv: Literal["paged", "slots"],
    max_rows: int,
    max_tokens: int,
    row_invariant: bool,
    partial_trim: bool,
    fork: bool,
) -> Capabilities:
    full = not model.fast
    return Capabilities(
        kv=kv,
        max_rows=max_rows,
        max_tokens=max_tokens,
        row_invariant=row_invariant,
        deterministic=True,
        partial_trim=partial_trim,
        fork=fork,
        drafts=full and partial_trim,
        logprobs=full,
        masks=full,
        prompt_logits=full,
    )
