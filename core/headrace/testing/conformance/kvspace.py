"""What every KVSpace must do. The space's bookkeeping is believed only as far as a toy executor can compute with it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from headrace.contracts import KVSpace
from headrace.testing.toy import ToyModel, ToyPaged, ToySlots
from headrace.testing.walk import Walk, sequence
from headrace.types import Begin, Capabilities, KVLayout, KVOp


class KVSpaceConformance:
    """Set `kv` and `make`. A walk is a random run of admissions, chunked steps, drafts, failures, preemptions and
    releases over a toy executor; after each move the space's own `check()` must hold and the logits be right."""

    kv: Literal["paged", "slots"] = "paged"
    partial_trim = True
    fork = True
    max_sequences = 4
    n_moves = 60
    """Moves per walk."""
    expect_hits = True
    """False for a space that never reuses a prefix."""
    rings: ClassVar[Mapping[str, Any]] = {}
    """paged: arguments of ToyPaged for a layout with rings. Replay must be exact (window - 1 tokens or more)."""

    def make(self, layout: KVLayout, caps: Capabilities) -> KVSpace:
        """A new space for an executor with this layout and these capabilities; at most `max_sequences` at once."""
        raise NotImplementedError("return your space from make()")

    @pytest.fixture
    def toy(self) -> ToyPaged | ToySlots:
        model = ToyModel(vocab=260, context=64)
        if self.kv == "paged":
            toy: ToyPaged | ToySlots = ToyPaged(model, n_blocks=14, block_tokens=4, **self.rings)
        else:
            toy = ToySlots(
                model, n_slots=self.max_sequences, slot_tokens=40, partial_trim=self.partial_trim, fork=self.fork
            )
        toy.open()
        return toy

    @pytest.fixture
    def space(self, toy: ToyPaged | ToySlots) -> KVSpace:
        return self.make(toy.layout, toy.caps)

    # --- answers

    def test_capacity_is_the_longest_that_runs_alone(self, space: KVSpace) -> None:
        n, ops = space.capacity_tokens(), list[KVOp]()
        assert n > 0
        for n_tokens in (1, n):
            seq = sequence([7] * n_tokens)
            assert space.admit(seq, ops)
            assert space.reserve(seq, n_tokens, ops)
            space.release(seq, ops, False)
        assert not space.admit(sequence([7] * (n + 1)), ops)

    def test_table_has_one_row_per_slot_or_is_none(self, space: KVSpace) -> None:
        seq, ops = sequence([1, 2, 3, 4, 5, 6]), list[KVOp]()
        assert space.admit(seq, ops)
        table = space.table(np.array([seq.slot], np.int32))
        if self.kv == "slots":
            assert table is None
        else:
            assert table is not None
            assert table.shape[0] == 1
            assert table.dtype == np.int32
            assert (table[0, :2] >= 0).all()

    def test_used_ratio_follows_what_runs(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        assert space.used_ratio() == 0.0
        walk = Walk(space, toy)
        seq = walk.admit([1, 2, 3, 4, 5, 6, 7, 8])
        assert seq is not None
        walk.step([(seq, 8, [])])
        assert 0.0 < space.used_ratio() <= 1.0
        walk.release(seq)
        assert space.used_ratio() == 0.0

    # --- admission

    def test_admission_gives_a_slot_and_leaves_a_token_to_compute(self, space: KVSpace) -> None:
        seq, ops = sequence([1, 2, 3, 4]), list[KVOp]()
        assert space.admit(seq, ops)
        assert seq.slot >= 0
        assert seq.computed == 0
        space.check([seq])

    def test_refused_admission_changes_nothing(self, space: KVSpace) -> None:
        held = []
        for i in range(self.max_sequences + 20):
            seq, ops = sequence([i, 7, 7, 7, 7, 7, 7, 7, 7]), list[KVOp]()
            before = space.used_ratio()
            if space.admit(seq, ops):
                held.append(seq)
                continue
            assert (seq.slot, seq.computed, ops) == (-1, 0, [])
            assert space.used_ratio() == before
            break
        else:
            pytest.fail("the space admitted more than it has")
        space.check(held)

    def test_reserve_beyond_the_room_changes_nothing(self, space: KVSpace) -> None:
        seq, ops = sequence([1, 2, 3, 4]), list[KVOp]()
        assert space.admit(seq, ops)
        ops.clear()
        assert not space.reserve(seq, space.capacity_tokens() + 1, ops)
        assert ops == []
        space.check([seq])
        assert space.reserve(seq, 4, ops)

    # --- prefixes

    def test_finished_prefix_is_found_again(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        if not self.expect_hits:
            pytest.skip("expect_hits is False")
        walk = Walk(space, toy)
        tokens = list(range(10, 23))
        self._run(walk, tokens)
        again = walk.admit([*tokens, 99])
        assert again is not None
        assert 0 < again.computed <= len(tokens)
        walk.finish(again)

    def test_whole_prompt_cached_still_leaves_a_token(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 22))
        self._run(walk, tokens)
        again = walk.admit(tokens)
        assert again is not None
        assert again.computed < len(tokens)
        walk.finish(again)

    def test_no_prefix_without_use_prefix(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 23))
        self._run(walk, tokens)
        again = walk.admit(tokens, use_prefix=False)
        assert again is not None
        assert again.computed == 0
        walk.finish(again)

    def test_nothing_is_reused_when_told_so(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 23))
        self._run(walk, tokens, reuse=False)
        again = walk.admit(tokens)
        assert again is not None
        assert again.computed == 0
        walk.finish(again)

    @pytest.mark.parametrize("field", ["cache_salt", "adapter", "media", "extra_keys"])
    def test_what_changes_kv_keeps_prefixes_apart(self, space: KVSpace, toy: ToyPaged | ToySlots, field: str) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 23))
        self._run(walk, tokens)
        value: Any = {"cache_salt": "b", "adapter": ("lora", 0.5), "media": ("hash",), "extra_keys": ("x",)}[field]
        other = walk.admit(tokens, **{field: value})
        assert other is not None
        assert other.computed == 0
        walk.finish(other)

    def test_same_block_after_another_prefix_is_not_shared(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        self._run(walk, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        other = walk.admit([9, 9, 9, 9, 5, 6, 7, 8, 9])
        assert other is not None
        assert other.computed == 0
        walk.finish(other)

    def test_running_sequences_share_a_prefix_and_diverge(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 22))
        first = walk.admit(tokens)
        assert first is not None
        walk.step([(first, len(tokens), [])])
        second = walk.admit([*tokens[:9], 77, 78])
        assert second is not None
        walk.step([(second, len(second.tokens) - second.computed, []), (first, 1, [])])
        walk.finish(second)
        walk.finish(first)

    def test_what_is_restorable_is_where_it_starts(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 24))
        assert space.restorable(sequence(tokens)) == 0
        self._run(walk, tokens)
        for n in (6, 9, 13, 14):
            other = [*tokens[:n], 99, 98, 97]
            found = space.restorable(sequence(other))
            assert found <= n
            seq = walk.admit(other)  # compares
            assert seq is not None
            walk.release(seq)
        assert space.restorable(sequence(tokens, cache_salt="b")) == 0

    # --- rings

    def test_rings_come_back_where_chunks_end(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        """In whatever chunks a prompt was computed: once they end where the space wants, a longer one starts there."""
        if not toy.layout.n_snapshots or not self.expect_hits:
            pytest.skip("no snapshots")
        for n in range(9, 21):
            walk = Walk(space, toy)
            tokens = [n] * n
            first = walk.admit(tokens)
            assert first is not None
            while len(first.tokens) == n:
                walk.step([(first, space.chunk_end(first, min(n, first.computed + 9)) - first.computed, [])])
            walk.release(first)
            again = walk.admit([*tokens, 1, 2, 3])
            assert again is not None
            assert again.computed == n - n % 4
            walk.finish(again)

    def test_a_layout_with_rings_begins_each_sequence(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        if not toy.layout.has_rings:
            pytest.skip("no rings")
        ops: list[KVOp] = []
        seq = sequence([1, 2, 3, 4])
        assert space.admit(seq, ops)
        assert ops == [Begin(seq.slot)]

    def test_rings_that_a_failed_step_overran_are_had_again(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        if not toy.layout.has_rings:
            pytest.skip("no rings")
        walk = Walk(space, toy)
        tokens = list(range(10, 34))
        seq = walk.admit(tokens)
        assert seq is not None
        for n in (8, 2):
            walk.step([(seq, n, [])])
        walk.fail([(seq, 14, [])])
        replayed = 10 - toy.layout.replay_tokens if toy.layout.replay_tokens else 0
        assert seq.computed == (8 if toy.layout.n_snapshots and self.expect_hits else replayed)
        other = walk.admit([*tokens[:9], 5])
        assert other is not None
        walk.step([(seq, 1, []), (other, 1, [])])
        walk.fail([(seq, 1, []), (other, 1, [])])
        walk.finish(other)
        walk.finish(seq)

    # --- progress and failure

    def test_rejected_drafts_are_dropped(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        if not self.partial_trim:
            pytest.skip("partial_trim is False: no drafts")
        walk = Walk(space, toy)
        seq = walk.admit([1, 2, 3, 4, 5])
        assert seq is not None
        walk.step([(seq, 5, [])])
        walk.step([(seq, 1, [200, 201, 202])])
        walk.step([(seq, 1, [])])
        walk.finish(seq)

    def test_rollback_restores_the_base(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        seq = walk.admit([1, 2, 3, 4, 5, 6, 7])
        assert seq is not None
        walk.step([(seq, 3, [])])
        walk.fail([(seq, 4, [])])
        if self.rings:
            assert seq.computed <= 3
        else:
            assert seq.computed == (3 if self.partial_trim or self.kv == "paged" else 0)
        walk.finish(seq)

    def test_reset_forgets_everything(self, space: KVSpace, toy: ToyPaged | ToySlots) -> None:
        walk = Walk(space, toy)
        tokens = list(range(10, 23))
        self._run(walk, tokens)
        held = walk.admit([5, 5, 5])
        assert held is not None
        walk.reset()
        space.reset(walk.ops)  # the executor still holds everything: the operations must empty it
        space.check([])
        again = walk.admit(tokens)
        assert again is not None
        assert again.computed == 0
        walk.finish(again)

    @pytest.mark.parametrize("seed", range(12))
    def test_random_walk(self, toy: ToyPaged | ToySlots, seed: int) -> None:
        walk = Walk(self.make(toy.layout, toy.caps), toy, rng=random.Random(seed))
        for _ in range(self.n_moves):
            walk.move()
        walk.drain()

    # --- helpers

    def _run(self, walk: Walk, tokens: list[int], *, reuse: bool = True) -> None:
        seq = walk.admit(tokens)
        assert seq is not None
        walk.step([(seq, len(tokens), [])])
        walk.release(seq, reuse=reuse)
