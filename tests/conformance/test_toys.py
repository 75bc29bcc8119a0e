"""The toys are held to the conformance classes: each part of the kit checks the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from headrace.contracts import ConstraintEngine, Drafter, Executor, KVSpace, Observer, Store, Strategy, Tokenizer
from headrace.errors import StepFailed
from headrace.kvspace import PagedSpace, SlotSpace
from headrace.modeling import Cache, CacheFormat
from headrace.ops import KernelContext
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


class TestToyPagedWithRings(FaultyToys):
    rings: ClassVar[dict[str, int]] = {"n_snapshots": 2, "history_tokens": 2}

    def make(self) -> Executor:
        return ToyPaged(ToyModel(), n_blocks=64, block_tokens=8, window=6, slack=5, **self.rings)


class TestToyPagedWithReplay(TestToyPagedWithRings):
    rings: ClassVar[dict[str, int]] = {"replay_tokens": 5}


class TestToyPagedWithRoughReplay(TestToyPagedWithRings):
    rings: ClassVar[dict[str, int]] = {"replay_tokens": 2}


class TestToyPagedWithLostRings(TestToyPagedWithRings):
    rings: ClassVar[dict[str, int]] = {"history_tokens": 1}


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


class TestPagedSpaceWithSnapshots(TestPagedSpace):
    rings: ClassVar[dict[str, int]] = {"window": 5, "slack": 3, "n_snapshots": 6, "history_tokens": 2}


class TestPagedSpaceWithFewSnapshots(TestPagedSpace):
    rings: ClassVar[dict[str, int]] = {"window": 3, "slack": 4, "n_snapshots": 1, "rerun_tokens": 2}


class TestPagedSpaceWithReplay(TestPagedSpace):
    rings: ClassVar[dict[str, int]] = {"window": 6, "slack": 3, "replay_tokens": 5}


class TestPagedSpaceWithReplayAndRerun(TestPagedSpace):
    rings: ClassVar[dict[str, int]] = {"window": 4, "slack": 3, "replay_tokens": 7, "rerun_tokens": 2}


class TestPagedSpaceWithLostRings(TestPagedSpace):
    expect_hits = False
    rings: ClassVar[dict[str, int]] = {"window": 6, "slack": 3}


class TestPagedSpaceWithRingsButNoCache(TestPagedSpaceWithoutCache):
    rings: ClassVar[dict[str, int]] = {"window": 5, "slack": 3, "n_snapshots": 6}


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


class TestNormKernel(KernelConformance):
    """numpy sums each row by itself."""

    op = "norm.rms"
    exact = True

    def make(self, context: KernelContext) -> Callable[..., Any]:
        return lambda x, weight, eps: x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight

    def inputs(self, n: int) -> dict[str, Any]:
        x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
        return {"x": x, "weight": np.linspace(0.5, 2, 24, dtype=np.float32), "eps": 0.25}

    def reference(self, x: Any, weight: Any, eps: float) -> Any:
        wide = x.astype(np.float64)
        return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight


class TestHashKernel(KernelConformance):
    """Integers, and an op with rows that others share."""

    op = "engram.hash"
    exact = True

    def make(self, context: KernelContext) -> Callable[..., Any]:
        def rows(ngrams: Any, multipliers: Any, primes: Any, offsets: Any) -> Any:
            products = ngrams * multipliers
            mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
            heads = len(primes) // mixed.shape[1]
            return np.repeat(mixed, heads, axis=1) % primes + offsets

        return rows

    def inputs(self, n: int) -> dict[str, Any]:
        ngrams = np.random.default_rng(n).integers(0, 2**40, (n, 3))
        multipliers = np.array([3, 2**40 + 1, 7])
        return {"ngrams": ngrams, "multipliers": multipliers, "primes": np.array([97, 101, 103, 107]),
                "offsets": np.array([0, 97, 198, 301])}  # fmt: skip

    def reference(self, ngrams: Any, multipliers: Any, primes: Any, offsets: Any) -> Any:
        rows = []
        for row in ngrams.tolist():
            products = [(c * m + 2**63) % 2**64 - 2**63 for c, m in zip(row, multipliers.tolist(), strict=True)]
            two, three = products[0] ^ products[1], products[0] ^ products[1] ^ products[2]
            pairs = zip((two, two, three, three), primes.tolist(), offsets.tolist(), strict=True)
            rows.append([value % prime + offset for value, prime, offset in pairs])
        return np.array(rows)


class TestStoreKernel(KernelConformance):
    """A kernel that writes to a cache and returns nothing."""

    op = "kv.store"
    exact = True

    def make(self, context: KernelContext) -> Callable[..., Any]:
        def store(cache: Cache, slots: Any, values: Any) -> None:
            entries = cache.pool.view(np.float32).reshape(-1, cache.format.width)
            for slot, value in zip(slots, values, strict=True):
                if slot >= 0:
                    entries[slot] = value

        return store

    def inputs(self, n: int) -> dict[str, Any]:
        rng = np.random.default_rng(n)
        cache = Cache(np.zeros((4, 16 * 8 * 4), np.uint8), CacheFormat("float32", 8), 16)
        return {"cache": cache, "slots": rng.integers(-1, 64, n), "values": rng.random((n, 8), np.float32)}

    def reference(self, cache: Cache, slots: Any, values: Any) -> None:
        last = {int(slot): value for slot, value in zip(slots, values, strict=True) if slot >= 0}
        for slot, value in last.items():
            cache.pool[slot // 16, slot % 16 * 32 : slot % 16 * 32 + 32] = value.view(np.uint8)

    def outcome(self, result: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
        return (arguments["cache"].pool,)
