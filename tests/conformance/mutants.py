"""Wrong implementations, one fault each. The conformance classes must fail every one: see test_kit_bites.py.

Not collected by itself (no test_ in the file name).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from headrace.contracts import ConstraintEngine, Drafter, Executor, KVSpace, Observer, Store, Strategy, Tokenizer
from headrace.kvspace import PagedSpace, SlotSpace
from headrace.testing.conformance import (
    ConstraintConformance,
    DrafterConformance,
    ExecutorConformance,
    KernelConformance,
    KVSpaceConformance,
    ObserverConformance,
    StoreConformance,
    StrategyConformance,
    TokenizerConformance,
)
from headrace.testing.toy import (
    ToyConstraint,
    ToyModel,
    ToyObserver,
    ToyOracle,
    ToyPaged,
    ToySlots,
    ToyStore,
    ToyStrategy,
    ToyTokenizer,
)
from headrace.testing.toy_parts import _ToyCompiled, _ToyMatcher
from headrace.types import (
    Begin,
    Capabilities,
    CopyBlock,
    Grammar,
    KVLayout,
    ModelSpec,
    Proposal,
    Restore,
    Snapshot,
    StepPlan,
    Trim,
)

# --- executors -------------------------------------------------------------------------------------------------------


class Paged(ExecutorConformance):
    executor_class: type[ToyPaged] = ToyPaged

    def make(self) -> Executor:
        return self.executor_class(ToyModel(), n_blocks=64, block_tokens=4)


class Slots(ExecutorConformance):
    executor_class: type[ToySlots] = ToySlots

    def make(self) -> Executor:
        return self.executor_class(ToyModel(), n_slots=4, slot_tokens=256)


class NoTrim(ToySlots):
    def _apply(self, op: Any) -> None:
        if not isinstance(op, Trim):
            super()._apply(op)


class TestNoTrim(Slots):
    executor_class = NoTrim


class Rings(ExecutorConformance):
    executor_class: type[ToyPaged] = ToyPaged

    def make(self) -> Executor:
        return self.executor_class(ToyModel(), n_blocks=64, block_tokens=8, window=6, slack=4, n_snapshots=2)


class SnapshotsLate(ToyPaged):
    """A snapshot is the ring as it is when it is restored."""

    def _clear(self) -> None:
        super()._clear()
        self.asked: dict[int, Snapshot] = {}

    def _apply(self, op: Any) -> None:
        if isinstance(op, Snapshot):
            self.asked[op.dst] = op
            return
        if isinstance(op, Restore):
            super()._apply(self.asked[op.src])
        super()._apply(op)


class TestSnapshotsLate(Rings):
    executor_class = SnapshotsLate


class NoRestore(ToyPaged):
    def _apply(self, op: Any) -> None:
        if not isinstance(op, Restore):
            super()._apply(op)


class TestNoRestore(Rings):
    executor_class = NoRestore


class LessSlack(ToyPaged):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layout = replace(self.layout, slack_tokens=self.layout.slack_tokens + 2)

    def _clear(self) -> None:
        super()._clear()
        self._rings.size -= 2


class TestLessSlack(Rings):
    executor_class = LessSlack


class WritesBelow(ToyPaged):
    """Rows that only rebuild their rings change shared blocks."""

    def forward(self, plan: StepPlan) -> Any:
        step = super().forward(plan)
        for row in range(len(plan.seq) if plan.write_from is not None else 0):
            self._kv[self._place(plan, row, int(plan.write_from[row]))[int(plan.start[row]) :]] ^= 1
        return step


class TestWritesBelow(Rings):
    executor_class = WritesBelow


class NoCopy(ToyPaged):
    def _apply(self, op: Any) -> None:
        if not isinstance(op, CopyBlock):
            super()._apply(op)


class TestNoCopy(Paged):
    executor_class = NoCopy


class MasksIgnored(ToyPaged):
    def sample(self, step: Any, masks: Any) -> None:
        super().sample(step, None)


class TestMasksIgnored(Paged):
    executor_class = MasksIgnored


def reseed(plan: StepPlan, seed: Callable[[int], int]) -> None:
    for row, seq in enumerate(plan.seq.tolist()):
        plan.sampling.seed[seq] = seed(row)
        plan.sampling.host[seq] = replace(plan.sampling.host[seq], seed=seed(row))


class NoiseByRow(ToyPaged):
    def sample(self, step: Any, masks: Any) -> None:
        reseed(step.plan, lambda row: step.plan.step + row)
        super().sample(step, masks)


class TestNoiseByRow(Paged):
    executor_class = NoiseByRow


class SeedIgnored(ToyPaged):
    def sample(self, step: Any, masks: Any) -> None:
        reseed(step.plan, lambda row: 1)
        super().sample(step, masks)


class TestSeedIgnored(Paged):
    executor_class = SeedIgnored


class ShortMemory(ToyModel):
    def logits_from(self, cells: Any, first: int, recent: Any = None) -> Any:
        cells = cells.copy()
        cells[: max(0, first - 1)] &= ~0xFFFFFFFF
        return super().logits_from(cells, first, recent)


class TestShortMemory(ExecutorConformance):
    """Forgets all but the last few tokens."""

    def make(self) -> Executor:
        return ToyPaged(ShortMemory(), n_blocks=64, block_tokens=4)


class KeepsOnReopen(ToySlots):
    def _clear(self) -> None:
        if not hasattr(self, "_length"):
            super()._clear()


class TestKeepsOnReopen(Slots):
    executor_class = KeepsOnReopen


class DraftsAccepted(ToyPaged):
    def collect(self, step: Any) -> Any:
        result = super().collect(step)
        result.accepted = np.array(step.plan.n_draft)
        return result


class TestDraftsAccepted(Paged):
    executor_class = DraftsAccepted


class BiasIgnored(ToyPaged):
    def sample(self, step: Any, masks: Any) -> None:
        step.plan.sampling.bias = None
        super().sample(step, masks)


class TestBiasIgnored(Paged):
    executor_class = BiasIgnored


class NoPromptLogprobs(ToyPaged):
    def sample(self, step: Any, masks: Any) -> None:
        step.prompt.clear()
        super().sample(step, masks)


class TestNoPromptLogprobs(Paged):
    executor_class = NoPromptLogprobs


# --- KV spaces -------------------------------------------------------------------------------------------------------


class PagedKV(KVSpaceConformance):
    space_class: type[PagedSpace] = PagedSpace

    def make(self, layout: KVLayout, caps: Capabilities) -> KVSpace:
        return self.space_class(layout, self.max_sequences)


class SlotKV(KVSpaceConformance):
    kv = "slots"
    space_class: type[SlotSpace] = SlotSpace

    def make(self, layout: KVLayout, caps: Capabilities) -> KVSpace:
        return self.space_class(layout, partial_trim=caps.partial_trim, fork=caps.fork)


class KeepsRejected(SlotSpace):
    def commit(self, seq: Any, keep: int, ops: Any) -> None:
        pass


class TestKeepsRejected(SlotKV):
    space_class = KeepsRejected


class NoRollback(SlotSpace):
    def rollback(self, seq: Any, ops: Any) -> None:
        pass


class TestNoRollback(SlotKV):
    space_class = NoRollback


class RingKV(PagedKV):
    rings: ClassVar[dict[str, int]] = {"window": 5, "slack": 3, "n_snapshots": 6}


class LateSnapshots(PagedSpace):
    def chunk_end(self, seq: Any, end: int) -> int:
        return end

    def _passes(self, seq: Any, keep: int, ops: Any) -> None:
        high, self._high[seq.slot] = self._high[seq.slot], 0
        super()._passes(seq, keep, ops)
        self._high[seq.slot] = high


class TestLateSnapshots(RingKV):
    space_class = LateSnapshots


class NeverBegins(PagedSpace):
    def admit(self, seq: Any, ops: Any, use_prefix: bool = True) -> bool:
        own: list[Any] = []
        admitted = super().admit(seq, own, use_prefix)
        ops += [op for op in own if not isinstance(op, Begin)]
        return admitted


class TestNeverBegins(RingKV):
    space_class = NeverBegins


class KeepsSnapshots(PagedSpace):
    """Of blocks that are forgotten."""

    def _forget(self, block: int) -> None:
        n, self.n_snapshots = self.n_snapshots, 0
        super()._forget(block)
        self.n_snapshots = n


class TestKeepsSnapshots(RingKV):
    space_class = KeepsSnapshots


class TrustsRings(PagedSpace):
    """After a failed step."""

    def rollback(self, seq: Any, ops: Any) -> None:
        self._high[seq.slot] = seq.computed


class TestTrustsRings(RingKV):
    space_class = TrustsRings


class RewritesShared(PagedSpace):
    def write_from(self, slots: Any) -> None:
        return None


class TestRewritesShared(PagedKV):
    rings: ClassVar[dict[str, int]] = {"window": 5, "slack": 3, "replay_tokens": 6}
    space_class = RewritesShared


class ReusesAnyway(PagedSpace):
    def release(self, seq: Any, ops: Any, reuse: bool = True) -> None:
        super().release(seq, ops, True)


class TestReusesAnyway(PagedKV):
    space_class = ReusesAnyway


class IgnoresUsePrefix(PagedSpace):
    def admit(self, seq: Any, ops: Any, use_prefix: bool = True) -> bool:
        return super().admit(seq, ops, True)


class TestIgnoresUsePrefix(PagedKV):
    space_class = IgnoresUsePrefix


class CommitsTooMuch(PagedSpace):
    """Indexes a block before its last token was verified."""

    def commit(self, seq: Any, keep: int, ops: Any) -> None:
        super().commit(seq, min(keep + 3, len(seq.tokens)), ops)


class TestCommitsTooMuch(PagedKV):
    space_class = CommitsTooMuch


class ForgetsNothing(PagedSpace):
    def reset(self, ops: Any) -> None:
        if not hasattr(self, "_ref"):
            super().reset(ops)


class TestForgetsNothing(PagedKV):
    space_class = ForgetsNothing


# --- the smaller ones ------------------------------------------------------------------------------------------------


class TooLong(ToyOracle):
    def propose(self, views: Any) -> Any:
        return [Proposal(tuple(view.tokens[-1:]) * (view.max_draft + 1)) for view in views]


class TestTooLong(DrafterConformance):
    def make(self, model: ModelSpec) -> Drafter:
        return TooLong(ToyModel().generate)


class MixesUp(ToyOracle):
    """One memory for all sequences."""

    def propose(self, views: Any) -> Any:
        out = []
        for view in views:
            out.append(Proposal(self.last[: view.max_draft]))
            self.last = tuple(view.tokens[-2:])
        return out

    last: tuple[int, ...] = ()


class TestMixesUp(DrafterConformance):
    def make(self, model: ModelSpec) -> Drafter:
        return MixesUp(ToyModel().generate)


class Constraint(ConstraintConformance):
    matcher_class: type[_ToyMatcher] = _ToyMatcher

    def make(self, tokenizer: Tokenizer) -> ConstraintEngine:
        matcher_class = self.matcher_class

        class Wrong(_ToyCompiled):
            def start(self) -> Any:
                return matcher_class(self)

        class Engine(ToyConstraint):
            def compile(self, grammar: Grammar, cancelled: Callable[[], bool] = lambda: False) -> Any:
                right = super().compile(grammar, cancelled)
                assert isinstance(right, _ToyCompiled)
                return Wrong(right.token_bytes, right.eos_ids, right.automaton)

        return Engine(tokenizer)

    def cases(self) -> list[tuple[Grammar, list[str], list[str]]]:
        return [
            (Grammar("choice", '["yes", "yesterday", "no"]'), ["yes", "no"], ["ye"]),
            (Grammar("charset", "abc{2,5}"), ["ab", "ccccc"], ["a"]),
        ]


class NotRolledBack(_ToyMatcher):
    def rollback(self, n: int) -> None:
        super().rollback(max(0, n - 1))


class TestNotRolledBack(Constraint):
    matcher_class = NotRolledBack


class EndsAnywhere(_ToyMatcher):
    def fill(self, bits: Any) -> None:
        super().fill(bits)
        bits[8] |= 1


class TestEndsAnywhere(Constraint):
    matcher_class = EndsAnywhere


class KeepsOldBits(_ToyMatcher):
    def fill(self, bits: Any) -> None:
        old = bits.copy()
        super().fill(bits)
        bits |= old


class TestKeepsOldBits(Constraint):
    matcher_class = KeepsOldBits


class PathMoves(_ToyMatcher):
    def fill_path(self, drafts: Any, bits: Any) -> int:
        rows = super().fill_path(drafts, bits)
        if drafts:
            self.accept(drafts[0])
        return rows


class TestPathMoves(Constraint):
    matcher_class = PathMoves


class Reversed(ToyStore):
    def get(self, keys: Any) -> Any:
        return super().get(keys)[::-1]


class TestReversed(StoreConformance):
    def make(self) -> Store:
        return Reversed()


class Immortal(ToyStore):
    def put(self, items: Any, ttl_s: float) -> int:
        return super().put(items, 1e9)


class TestImmortal(StoreConformance):
    def make(self) -> Store:
        return Immortal()


class DropsRows(ToyStrategy):
    def split(self, plan: Any) -> Any:
        return [rows[:3] for rows in super().split(plan)]


class TestDropsRows(StrategyConformance):
    def make(self) -> Strategy:
        return DropsRows()


class Fragile(ToyObserver):
    def on_finish(self, stats: Any) -> None:
        self.rate = stats.usage.completion_tokens / stats.timings.decode_tokens_per_s


class TestFragile(ObserverConformance):
    def make(self) -> Observer:
        return Fragile()


class TwoBos(ToyTokenizer):
    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return [257] * add_bos + super().encode(text, add_bos=False, parse_special=parse_special)


class TestTwoBos(TokenizerConformance):
    def make(self) -> Tokenizer:
        return TwoBos()


# --- kernels ---------------------------------------------------------------------------------------------------------


class Norm(KernelConformance):
    op = "norm.rms"
    exact = True
    kernel_under_test: Any

    def make(self, context: Any) -> Any:
        return type(self).kernel_under_test

    def inputs(self, n: int) -> dict[str, Any]:
        x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
        return {"x": x, "weight": np.linspace(0.5, 2, 24, dtype=np.float32), "eps": 0.25}

    def reference(self, x: Any, weight: Any, eps: float) -> Any:
        return norm(x, weight, eps)


def norm(x: Any, weight: Any, eps: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight


class TestNormOfAnotherRank(Norm):
    kernel_under_test = staticmethod(lambda x, weight, eps: norm(x, weight, eps)[..., None])


class TestNormOfAnotherType(Norm):
    kernel_under_test = staticmethod(lambda x, weight, eps: norm(x, weight, eps).astype(np.float64))


class TestNormWithoutEps(Norm):
    kernel_under_test = staticmethod(lambda x, weight, eps: norm(x, weight, 0.0))


class TestNormOfOtherNames(Norm):
    kernel_under_test = staticmethod(lambda x, scale, eps: norm(x, scale, eps))


class TestNormThatSeesItsCompany(Norm):
    """In the last bits only."""

    kernel_under_test = staticmethod(lambda x, weight, eps: norm(x, weight, eps) * np.float32(1 + len(x) * 1e-7))


class TestNormThatSeesItsPlace(Norm):
    kernel_under_test = staticmethod(
        lambda x, weight, eps: norm(x, weight, eps) + np.arange(len(x), dtype=np.float32)[:, None] * np.float32(1e-7)
    )


def norm_in_place(x: Any, weight: Any, eps: float) -> Any:
    x[...] = norm(x, weight, eps)
    return x.copy()


class TestNormInPlace(Norm):
    kernel_under_test = staticmethod(norm_in_place)


def unsteady() -> Any:
    calls = iter(range(10**6))
    return lambda x, weight, eps: norm(x, weight, eps) + np.float32(next(calls) * 1e-8)


class TestNormThatDrifts(Norm):
    kernel_under_test = staticmethod(unsteady())


class TestNormOfTwoResults(Norm):
    kernel_under_test = staticmethod(lambda x, weight, eps: (norm(x, weight, eps), x))
