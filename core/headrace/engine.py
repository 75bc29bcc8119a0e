"""The engine: one `step()` schedules rows, runs them on the executor, and commits what came back.

    schedule -> forward -> masks (while the device runs) -> sample -> collect -> commit -> draft

Single-threaded: one owner calls everything (`headrace.runner` gives it a thread). Nothing of a sequence changes between
forward and collect, so a step that fails leaves every sequence as it was. Hooks and configuration are never touched
here: the engine holds plain bound objects.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from itertools import count

from headrace.admission import Extras, admit_request, extras_of
from headrace.contracts import ConstraintEngine, Drafter, Executor, KVSpace, Observer
from headrace.errors import FAULTS, Busy, DeviceError, Fatal, HeadraceError, RequestError, StepFailed
from headrace.grammars import Grammars, forced, nothing_allowed, plugin_failure, verdict
from headrace.outputs import TextStream
from headrace.planning import build_plan, next_targets, sparse_columns
from headrace.reports import (
    PromptLogits,
    take_logprobs,
    take_prompt_logits,
    take_prompt_logprobs,
    timings_of,
    usage_of,
)
from headrace.sampling import NOTHING, new_table, resolve_seed, set_row
from headrace.scheduler import Rows, Scheduler
from headrace.types import (
    WANT_ALL_POSITIONS,
    WANT_LOGPROBS,
    WANT_PROMPT_LOGITS,
    WANT_PROMPT_LOGPROBS,
    WANT_TOKEN,
    DraftView,
    EngineOptions,
    FinishReason,
    KVOp,
    Proposal,
    Request,
    RequestStats,
    Sequence,
    StepPlan,
    StepResult,
    StepStats,
)

log = logging.getLogger(__name__)

COMPILE_WAIT_S = 0.005
"""How long an otherwise idle step waits for a grammar to compile before it returns to its caller, who takes in new
requests between steps."""


class Engine:
    """Drives one executor. Not thread-safe but for `interrupt`."""

    def __init__(
        self,
        executor: Executor,
        kv: KVSpace,
        options: EngineOptions,
        *,
        drafter: Drafter | None = None,
        constraints: ConstraintEngine | None = None,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        caps = executor.caps
        self.executor = executor
        self.kv = kv
        self.options = options
        self.drafter = drafter if drafter is not None and caps.drafts else None
        self.constraints = constraints
        self.observers = list(observers)
        self.clock = clock
        n_rows = min(options.max_sequences, caps.max_rows)
        if caps.kv == "slots":
            n_rows = min(n_rows, executor.layout.n_slots)
        self.scheduler = Scheduler(
            kv, options, n_rows, min(options.max_batch_tokens, caps.max_tokens), self._forget_draft
        )
        self.table = new_table(n_rows)
        layout = executor.layout
        self._n_history, self._with_prompts = caps.history_tokens, layout.rerun_tokens > 0
        self._most_drafts = layout.slack_tokens if layout.has_rings else sys.maxsize
        """Drafts of one row that can be taken back."""
        self.n_steps = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.n_failed_steps = 0
        self._ops: list[KVOp] = []
        kv.reset(self._ops)  # an earlier engine may have used this executor
        self._by_id: dict[str, list[Sequence]] = {}
        self._numbers = count()
        self._ending: dict[Sequence, FinishReason] = {}
        """Sequences that end at the start of the next step, when nobody iterates over them, and why."""
        self._timed: set[Sequence] = set()
        """Unfinished sequences with a deadline."""
        self._touched: list[Sequence] = []
        self._suspects: list[list[Sequence]] = []
        """Groups of rows of a failed step, searched for the culprit by halves; last one first."""
        self._interrupted = False
        self._dead: HeadraceError | None = None
        self.jumps = True
        """Append what a grammar forces without a model step. Output is the same without."""
        self._grammars = Grammars(constraints, executor.model.vocab_size) if constraints is not None else None

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request: its n sequences, in sample order. Raises RequestError, or Busy when the queue is full."""
        if self._dead is not None:
            raise self._dead.with_traceback(None)
        n = request.params.n
        n_waiting = len(self.scheduler.waiting)
        if n_waiting + n > self.options.max_waiting:
            raise Busy(
                "HR-BUSY-01",
                f"{n_waiting} requests are waiting, the queue holds {self.options.max_waiting}",
                "retry later, or raise engine.max_waiting",
            )
        if request.id in self._by_id:
            raise RequestError("HR-REQUEST-09", f"request id {request.id!r} is in use", "give every request its own id")
        limit = admit_request(request, self.executor, self.kv, self.constraints)
        params = replace(request.params, seed=resolve_seed(request.params))
        request = replace(request, params=params)
        extras, counts = extras_of(request, self.executor)
        seqs: list[Sequence] = []
        for i in range(n):
            seq = Sequence(request, i, limit)
            seq.arrival = (request.priority, next(self._numbers))
            self._prepare(seq, extras, counts)
            if i:
                seq.leader = seqs[0]
            seqs.append(seq)
        if self._grammars is not None and params.constraint is not None:
            self._grammars.compile(params.constraint, seqs)
        # from here on nothing fails: an id or a deadline whose sequence is nowhere in line would be found later
        self._by_id[request.id] = seqs
        if params.deadline_s is not None:
            self._timed.update(seqs)
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    def _prepare(self, seq: Sequence, extras: Extras | None, counts: bool) -> None:
        params, model = seq.params, self.executor.model
        seq.extras = extras
        seq.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else model.eos_ids)
        if counts:
            seq.counts = {}
            for token in seq.tokens:
                seq.counts[token] = seq.counts.get(token, 0) + 1
        if seq.limit > seq.n_prompt:
            seq.wants |= WANT_TOKEN
        if params.logprobs is not None:
            seq.wants |= WANT_LOGPROBS
            seq.logprobs = []
        if params.prompt_logprobs is not None and seq.sample_index == 0:
            seq.wants |= WANT_PROMPT_LOGPROBS
            seq.prompt_logprobs = [None]
        if seq.request.want_logits and seq.sample_index == 0:
            seq.wants |= WANT_PROMPT_LOGITS
            seq.prompt_logits = PromptLogits(seq.n_prompt, model.vocab_size)
        if seq.request.want_text or params.stop:
            seq.stream = TextStream(
                self.executor.tokenizer, params.stop, params.skip_special_tokens, seq.request.shown_ids
            )
        if params.deadline_s is not None:
            seq.deadline = seq.request.arrival_s + params.deadline_s

    def cancel(self, request_id: str) -> bool:
        """End a request with "abort" at the next step. False if it is unknown or has ended."""
        if request_id not in self._by_id:
            return False
        self._end(request_id, "abort")
        return True

    def _end(self, request_id: str, reason: FinishReason) -> None:
        for seq in self._by_id[request_id]:
            self._ending.setdefault(seq, reason)

    def interrupt(self) -> None:
        """From any thread: end a running forward soon. The step's rows are computed again, minus those cancelled."""
        self._interrupted = True
        self.executor.interrupt()

    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._touched)

    def close(self) -> None:
        """End everything with "abort" and stop helper threads. The executor stays open: its owner closes it."""
        for request_id in self._by_id:
            self._end(request_id, "abort")
        self._end_some()
        if self._grammars is not None:
            self._grammars.close()
        self._tell(lambda observer: observer.close())
        self.observers = []

    # --- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Sequence]:
        """Run one step; the sequences that got tokens or ended in it. Never raises for a request's sake."""
        started = self.clock()
        if self._ending or self._timed:
            self._end_some()
        only = self._suspects[-1] if self._suspects else None
        rows = self.scheduler.schedule(self._ops, self._ready, self._admitted, only)
        if rows.seqs:
            self._run(rows, started)
        elif only is not None:
            self._suspects.pop()
        elif not self._touched and self.scheduler.waiting:
            self._idle()
        touched, self._touched = self._touched, []
        return touched

    def _run(self, rows: Rows, started: float) -> None:
        ops, self._ops = self._ops, []
        plan = build_plan(
            self.n_steps,
            rows,
            self.table,
            tuple(ops),
            self.kv,
            n_history=self._n_history,
            with_prompts=self._with_prompts,
        )
        self._add_rare_columns(plan, rows)
        self.n_steps += 1
        executor, grammars, clock = self.executor, self._grammars, self.clock
        scheduled = clock()
        constrained = [r for r, seq in enumerate(rows.seqs) if seq.matcher is not None and plan.sample[r]]
        masks, early = None, None
        try:
            if grammars is not None and constrained and executor.caps.blocking_forward:
                early = grammars.fill_aside(constrained, rows)
            step = executor.forward(plan)
            forwarded = clock()
            if grammars is not None and constrained:
                masks = early.result() if early is not None else grammars.fill(constrained, rows)
            masked = clock()
            executor.sample(step, masks)
            result = executor.collect(step)
        except FAULTS as error:
            if early is not None:
                wait([early])  # it reads matchers, which are about to be used again
            self._failed(error, rows)
            return
        collected = clock()
        drafted, accepted = self._commit(result, plan, rows, constrained)
        self._interrupted = False
        if self._suspects:
            self._suspects.pop()
        if self.drafter is not None:
            self._tell_drafter(lambda drafter: self._draft(drafter, rows, plan.sample.tolist()))
        if result.proposals:
            self._take_proposals(result.proposals, rows)
        if self.observers:
            seconds = {
                "schedule": scheduled - started,
                "forward": forwarded - scheduled,
                "mask": masked - forwarded,
                "sample": collected - masked,
                "update": clock() - collected,
            }
            self._observe(plan, seconds, drafted, accepted)

    def _ready(self, seq: Sequence) -> bool:
        """May this waiting sequence start? Not before its grammar is compiled, nor, as one of n samples, before the
        first of them has the prompt's KV to share."""
        if seq.status == "compiling":
            if not seq.compiled.done():
                return False
            self._start(seq)
        if self._ending and seq in self._ending:
            return False
        leader = seq.leader
        return leader is None or leader.finish_reason is not None or leader.n_generated > leader.n_start

    def _start(self, seq: Sequence) -> None:
        """Its grammar is compiled, or refused. What the grammar forces at once comes before the first step."""
        seq.status = "waiting"
        assert self._grammars is not None
        try:
            reason = "stop" if self._grammars.start(seq) else self._jump(seq)
        except HeadraceError as error:
            for sample in self._by_id[seq.request.id]:
                sample.error = error
            self._end(seq.request.id, "error")
            return
        seq.n_start = seq.n_generated
        if reason is not None:
            self._ending[seq] = reason

    def _admitted(self, seq: Sequence) -> None:
        set_row(self.table, seq.index, seq.params, seq.sample_index)
        if seq.times[1] == 0.0:
            seq.times[1] = self.clock()
            seq.cached = min(seq.computed, seq.n_prompt)

    def _add_rare_columns(self, plan: StepPlan, rows: Rows) -> None:
        """Columns that most steps don't have: sparse sampling rows, and the targets of rows that want all positions."""
        self.table.bias = self.table.banned = self.table.counts = None
        if any(seq.extras is not None or seq.counts is not None for seq in rows.seqs):
            self.table.bias, self.table.banned, self.table.counts = sparse_columns(rows.seqs)
        if self.executor.caps.adapters == "per_row":
            plan.adapters = tuple(seq.request.adapter for seq in rows.seqs)
        if any(seq.wants & WANT_ALL_POSITIONS for seq in rows.seqs):
            plan.targets = next_targets(plan, rows.seqs)

    # --- commit ----------------------------------------------------------------------------------------------------

    def _commit(self, result: StepResult, plan: StepPlan, rows: Rows, constrained: list[int]) -> tuple[int, int]:
        """Append what was sampled, move `computed`, end what is complete. Returns drafts (verified, accepted)."""
        if result.logprobs is not None:
            take_logprobs(result.logprobs, rows.seqs)
        status = result.status
        if result.prompt_logprobs is not None:
            status = {**take_prompt_logprobs(result.prompt_logprobs, rows.seqs), **status}
        if "prompt_logits" in result.arrays:
            status = {**take_prompt_logits(*result.arrays["prompt_logits"], plan, rows.seqs), **status}
        tokens, starts = result.tokens.tolist(), result.starts.tolist()
        lengths, drafts = _processed(result, rows)
        failures = self._failures(status, rows, constrained)
        commit, ops, touched = self.kv.commit, self._ops, self._touched
        drafted = accepted = 0
        for r, seq in enumerate(rows.seqs):
            if failures and r in failures:
                self._finish(seq, "error", error=failures[r], reuse=False)
                continue
            base = seq.computed
            a, b = starts[r], starts[r + 1]
            if a == b:  # a prefill chunk, or the end of a prompt that only wanted to be read
                seq.computed = base + lengths[r]
                commit(seq, seq.computed, ops)
                if seq.computed >= seq.limit:
                    self._finish(seq, "length")
                continue
            seq.draft = []
            if drafts[r]:
                drafted += drafts[r]
                accepted += b - a - 1
                self._observe_draft(seq, drafts[r], b - a - 1)
            if seq.times[4] == 0.0:
                seq.times[4] = self.clock()
                seq.times[2] = seq.times[2] or seq.times[4]
            touched.append(seq)
            reason = self._append(seq, tokens[a:b]) if b - a > 1 else self._append_one(seq, tokens[a])
            seq.computed = keep = min(base + lengths[r] - drafts[r] + (b - a - 1), len(seq.tokens))
            commit(seq, keep, ops)
            if seq.matcher is not None and reason is None:
                reason = self._jump(seq)
            if reason is not None:
                self._finish(seq, reason)
        self.n_drafted += drafted
        self.n_accepted += accepted
        return drafted, accepted

    def _failures(self, status: Mapping[int, str], rows: Rows, constrained: list[int]) -> dict[int, Exception]:
        """Rows that end with an error: what the executor reports of them, or their matcher's exception."""
        failures: dict[int, Exception] = {}
        for r, why in status.items():
            seq = rows.seqs[r]
            if why == NOTHING and seq.matcher is not None:
                failures[r] = nothing_allowed(seq)
            else:
                failures[r] = RequestError("HR-STEP-02", f"request {seq.request.id!r} failed: {why}", _STATUS_HELP)
        for r in constrained:
            if (error := rows.seqs[r].error) is not None:
                failures[r] = error
        return failures

    def _append(self, seq: Sequence, tokens: Iterable[int]) -> FinishReason | None:
        for token in tokens:
            reason = self._append_one(seq, token)
            if reason is not None:
                return reason
        return None

    def _append_one(self, seq: Sequence, token: int) -> FinishReason | None:
        """Take one sampled token; why the sequence ends with it, or None."""
        seq.tokens.append(token)
        if token in seq.stop_ids:
            seq.stop_reason = token
            return "stop"
        if seq.counts is not None:
            seq.counts[token] = seq.counts.get(token, 0) + 1
        if seq.stream is not None:
            try:
                if seq.stream.push(token):
                    seq.stop_reason = seq.stream.stopped
                    return "stop"
            except FAULTS as error:
                seq.error = plugin_failure("tokenizer", error)
                return "error"
        if seq.matcher is not None:
            try:
                if not seq.matcher.accept(token):
                    raise ValueError(f"token {token} is outside its own mask")
                if seq.matcher.done():
                    return "stop"
            except FAULTS as error:
                seq.error = plugin_failure("constraint engine", error)
                return "error"
        return "length" if len(seq.tokens) >= seq.limit else None

    def _jump(self, seq: Sequence) -> FinishReason | None:
        """Append what the grammar forces after seq's tokens: the next step computes it, and samples after it."""
        while self.jumps and (tokens := forced(seq)):
            seq.times[2] = seq.times[2] or self.clock()
            n_before = len(seq.tokens)
            reason = self._append(seq, tokens)
            seq.n_forced += len(seq.tokens) - n_before
            if reason is not None:
                return reason
        return None if seq.error is None else "error"

    def _finish(
        self, seq: Sequence, reason: FinishReason, *, error: Exception | None = None, reuse: bool = True
    ) -> None:
        """End a sequence: give everything back and tell whoever waits for it."""
        self.scheduler.finish(seq, self._ops, reuse)
        seq.error = error or seq.error
        if seq.matcher is not None and reason == "stop":
            seq.error = verdict(seq, self.executor.model.eos_ids)
            reason = "stop" if seq.error is None else "error"
        seq.matcher = None
        seq.times[3] = self.clock()
        if seq.stream is not None:
            seq.stream.finish()
        if seq.logprobs is not None:
            del seq.logprobs[seq.n_generated :]
        seq.finish_reason = reason  # last: readers in other threads then find all of the above
        self._timed.discard(seq)
        if not self._touched or self._touched[-1] is not seq:
            self._touched.append(seq)
        seqs = self._by_id[seq.request.id]
        if all(other.finish_reason is not None for other in seqs):
            del self._by_id[seq.request.id]
            if seq.compiled is not None:
                seq.compiled.cancel()  # if it did not start, it need not
        if self.observers:
            stats = RequestStats(
                request_id=seq.request.id, finish_reason=reason, usage=usage_of([seq]), timings=timings_of([seq])
            )
            self._tell(lambda observer: observer.on_finish(stats))

    def _end_some(self) -> None:
        """End what was cancelled, could not start or is past its deadline."""
        ending, self._ending = self._ending, {}
        for seq, reason in ending.items():
            if seq.finish_reason is None:
                self._finish(seq, reason)
        if self._timed:
            now = self.clock()
            for seq in [seq for seq in self._timed if now >= seq.deadline]:
                self._finish(seq, "deadline")

    def _idle(self) -> None:
        """Nothing could be scheduled though requests wait: a grammar compiles, or (a bug) nothing can ever run."""
        pending = [seq.compiled for seq in self.scheduler.waiting if seq.status == "compiling"]
        if pending:
            wait(pending, timeout=COMPILE_WAIT_S, return_when="FIRST_COMPLETED")
        elif not self.scheduler.running and not self._ending:
            head = self.scheduler.waiting[0]
            error = RequestError("HR-STEP-04", f"request {head.request.id!r} can't be scheduled: no room in the KV")
            self._finish(head, "error", error=error)

    # --- drafts ----------------------------------------------------------------------------------------------------

    def _draft(self, drafter: Drafter, rows: Rows, sampled: list[bool]) -> None:
        """Ask the host drafter for every row that is at its end, and what was forced after it."""
        most = min(drafter.max_draft, self._most_drafts)
        seqs: list[Sequence] = []
        views: list[DraftView] = []
        for seq, at_end in zip(rows.seqs, sampled, strict=True):
            room = min(most, _draft_room(seq)) if at_end else 0
            if room > 0:
                seqs.append(seq)
                views.append(DraftView(seq.index, seq.tokens, room))
        if views:
            for seq, view, proposal in zip(seqs, views, drafter.propose(views), strict=True):
                seq.draft = self._valid(proposal.tokens[: view.max_draft])

    def _take_proposals(self, proposals: Mapping[int, Proposal], rows: Rows) -> None:
        """Drafts that a fused drafter made on the device, by row."""
        for r, proposal in proposals.items():
            seq = rows.seqs[r]
            if len(seq.tokens) - seq.computed != 1:
                continue  # it goes on from the sampled token, after which others were forced
            seq.draft = self._valid(proposal.tokens[: max(0, min(self._most_drafts, _draft_room(seq)))])

    def _valid(self, tokens: Iterable[int]) -> list[int]:
        valid: list[int] = []
        for token in tokens:
            if not 0 <= token < self.executor.model.vocab_size:
                break
            valid.append(int(token))
        return valid

    def _observe_draft(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._tell_drafter(lambda drafter: drafter.observe(seq.index, drafted, accepted))

    def _forget_draft(self, index: int) -> None:
        self._tell_drafter(lambda drafter: drafter.forget(index))

    def _tell_drafter(self, call: Callable[[Drafter], object]) -> None:
        """A drafter that raises is switched off. Acceptable: drafts change speed, never output."""
        if self.drafter is None:
            return
        try:
            call(self.drafter)
        except FAULTS as error:
            log.warning("the drafter failed and is switched off for this engine: %r", error)
            log.debug("the drafter's traceback", exc_info=True)
            self.drafter = None

    # --- failure ---------------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException, rows: Rows) -> None:
        """A step raised. Bring every slot back to its base, then end only who is to blame.

        Rows that the executor names end at once. Otherwise the step's rows are suspects: they run again by halves
        until the failing row is alone. An interrupt blames nobody.
        """
        if isinstance(error, Fatal):
            self._lost(error)
            return
        self.n_failed_steps += 1
        for seq in rows.seqs:
            seq.draft = []
            self.kv.rollback(seq, self._ops)
        interrupted, self._interrupted = self._interrupted, False
        if interrupted and isinstance(error, StepFailed):
            return
        if self._suspects:
            self._suspects.pop()
        blamed = set(error.rows if isinstance(error, StepFailed) else ())
        named = [seq for r, seq in enumerate(rows.seqs) if r in blamed]
        suspects = [seq for seq in rows.seqs if seq not in named]
        if not named and len(rows.seqs) == 1:
            named, suspects = rows.seqs, []
        elif not named:
            log.warning("a step of %d rows failed, looking for the row: %s", len(rows.seqs), error)
        for seq in named:
            text = f"request {seq.request.id!r} failed in the executor: {error}"
            reason = RequestError("HR-STEP-01", text, _STEP_HELP)
            reason.__cause__ = error
            self._finish(seq, "error", error=reason, reuse=False)
        if not named:
            middle = len(suspects) // 2
            self._suspects += [suspects[middle:], suspects[:middle]]

    def _lost(self, error: Fatal) -> None:
        """The device is gone: what runs ends with an error, the executor is reopened for what waits."""
        log.error("the executor failed, reopening it: %s", error)
        self._suspects.clear()
        failure = DeviceError("HR-DEVICE-01", f"the device failed: {error}", "see the log; waiting requests go on")
        for seq in list(self.scheduler.running):
            self._finish(seq, "error", error=failure, reuse=False)
        self._ops.clear()
        self.kv.reset(self._ops)
        try:
            self.executor.close()
            self.executor.open()
        except FAULTS as reopening:
            self._dead = DeviceError(
                "HR-DEVICE-02", f"the executor could not be reopened: {reopening}", "restart the process"
            )
            for seq in list(self.scheduler.waiting):
                self._finish(seq, "error", error=self._dead)

    # --- observers -------------------------------------------------------------------------------------------------

    def _observe(self, plan: StepPlan, seconds: dict[str, float], drafted: int, accepted: int) -> None:
        stats = StepStats(
            step=plan.step,
            n_rows=len(plan.seq),
            n_tokens=len(plan.tokens),
            n_running=len(self.scheduler.running),
            n_waiting=len(self.scheduler.waiting),
            kv_used_ratio=self.kv.used_ratio(),
            preemptions=self.scheduler.n_preemptions,
            drafted=drafted,
            accepted=accepted,
            seconds=seconds,
        )
        self._tell(lambda observer: observer.on_step(stats))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in list(self.observers):
            try:
                call(observer)
            except FAULTS as error:
                # acceptable: an observer's loss touches no request
                log.warning("observer %s failed and was removed: %r", type(observer).__name__, error)
                log.debug("the observer's traceback", exc_info=True)
                self.observers.remove(observer)


_STATUS_HELP = "the other requests are not affected; a NaN means damaged weights or an unstable KV type"
_STEP_HELP = "the other requests are not affected; see the log for the executor's own message"


def _processed(result: StepResult, rows: Rows) -> tuple[list[int], list[int]]:
    """(tokens fed, drafts among them) per row: as planned, unless the device says that it cut drafts off."""
    if result.processed is None:
        return rows.lengths, rows.drafts
    lengths: list[int] = result.processed.tolist()
    return lengths, [d - (n - fed) for d, n, fed in zip(rows.drafts, rows.lengths, lengths, strict=True)]


def _draft_room(seq: Sequence) -> int:
    """How many drafts seq may get: none once it ended, or where its bans differ from position to position."""
    if seq.status != "running":
        return 0
    if seq.extras is not None and seq.extras.depends_on_position(seq):
        return 0
    return seq.limit - len(seq.tokens) - 1
