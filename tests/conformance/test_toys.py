"""The toys are held to the conformance classes: each part of the kit checks the other."""

from __future__ import annotations

from headrace.contracts import ConstraintEngine, Drafter, Executor, KVSpace, Observer, Store, Strategy, Tokenizer
from headrace.errors import StepFailed
from headrace.kvspace import PagedSpace, SlotSpace
from headrace.testing.conformance import (
    ConstraintConformance,
    DrafterConformance,
    ExecutorConformance,
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
from headrace.types import Capabilities, Grammar, KVLayout, ModelSpec, StepPlan


class FaultyToys(ExecutorConformance):
    n_tokens = 20

    def break_next(self, executor: Executor) -> bool:
        assert isinstance(executor, (ToyPaged, ToySlots))

        def fail(plan: StepPlan) -> Exception:
            executor.fail = None
            return StepFailed("injected")

        executor.fail = fail
        return True

    def poison_row(self, executor: Executor, row: int) -> bool:
        assert isinstance(executor, (ToyPaged, ToySlots))
        executor.nan = lambda plan, r: r == row
        return True


class TestToyPaged(FaultyToys):
    def make(self) -> Executor:
        return ToyPaged(ToyModel(), n_blocks=64, block_tokens=4)


class TestToyPagedFailsLate(TestToyPaged):
    def make(self) -> Executor:
        return ToyPaged(ToyModel(), n_blocks=64, block_tokens=4, fail_at="collect")


class TestToySlots(FaultyToys):
    def make(self) -> Executor:
        return ToySlots(ToyModel(), n_slots=4, slot_tokens=256)


class TestToySlotsRecurrent(FaultyToys):
    """As memory that refuses partial trims."""

    def make(self) -> Executor:
        return ToySlots(ToyModel(), n_slots=4, slot_tokens=256, partial_trim=False)


class TestPagedSpace(KVSpaceConformance):
    kv = "paged"

    def make(self, layout: KVLayout, caps: Capabilities) -> KVSpace:
        return PagedSpace(layout, self.max_sequences)


class TestPagedSpaceWithoutCache(TestPagedSpace):
    expect_hits = False

    def make(self, layout: KVLayout, caps: Capabilities) -> KVSpace:
        return PagedSpace(layout, self.max_sequences, prefix_cache=False)


class TestSlotSpace(KVSpaceConformance):
    kv = "slots"

    def make(self, layout: KVLayout, caps: Capabilities) -> KVSpace:
        return SlotSpace(layout, partial_trim=caps.partial_trim, fork=caps.fork)


class TestSlotSpaceWithoutFork(TestSlotSpace):
    fork = False


class TestSlotSpaceRecurrent(TestSlotSpace):
    partial_trim = False


class TestToyTokenizer(TokenizerConformance):
    def make(self) -> Tokenizer:
        return ToyTokenizer(320)


class TestToyTokenizerWithBos(TokenizerConformance):
    def make(self) -> Tokenizer:
        return ToyTokenizer(258, wants_bos=True)


class TestToyOracle(DrafterConformance):
    def make(self, model: ModelSpec) -> Drafter:
        return ToyOracle(ToyModel().generate, p=0.5)


class TestToyConstraint(ConstraintConformance):
    def make(self, tokenizer: Tokenizer) -> ConstraintEngine:
        return ToyConstraint(tokenizer)

    def cases(self) -> list[tuple[Grammar, list[str], list[str]]]:
        return [
            (Grammar("choice", '["yes", "yesterday", "no", "né"]'), ["yes", "no", "yesterday", "né"], ["ye", "maybe"]),
            (Grammar("charset", "abc{2,5}"), ["ab", "ccccc"], ["a", "abcabc", "xx", ""]),
        ]

    def bad_grammars(self) -> list[Grammar]:
        return [Grammar("choice", "[]"), Grammar("choice", "{"), Grammar("charset", "abc"), Grammar("lark", "x")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestToyStore(StoreConformance):
    def make(self) -> Store:
        self.clock = Clock()
        return ToyStore(self.clock)

    def expire(self, store: Store) -> bool:
        self.clock.now += 61.0
        return True


class TestToyStrategy(StrategyConformance):
    def make(self) -> Strategy:
        return ToyStrategy(2)


class TestToyObserver(ObserverConformance):
    def make(self) -> Observer:
        return ToyObserver()
