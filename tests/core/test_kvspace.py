"""What `PagedSpace` remembers of sequences that found no room, and how it keeps rings."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from engine_harness import Setup, request

from headrace import kvspace
from headrace.kvspace import PagedSpace
from headrace.testing.walk import sequence
from headrace.types import Begin, KVGroup, KVLayout, KVOp, Restore, SamplingParams, Sequence, Snapshot

PREFIXES = ("", "a long preface that many requests share: ", "a long preface that ")


class Forgetful(PagedSpace):
    """Tries every time."""

    def admit(self, seq: Sequence, ops: list[KVOp], use_prefix: bool = True) -> bool:
        self._misfits.clear()
        return super().admit(seq, ops, use_prefix)


def schedule(space: type[PagedSpace], seed: int, rings: dict[str, int]) -> list[Any]:
    """Who ran in each step of a random run in a tight pool."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    n_blocks = rng.choice([70, 90, 140]) // size
    engine = Setup(space=space, block_tokens=size, n_blocks=n_blocks, chunk=9, rings=rings).engine()
    seen: list[Any] = []
    executor: Any = engine.executor
    executor.on_forward = lambda plan: seen.append((plan.seq.tolist(), plan.start.tolist(), plan.length.tolist()))
    for i in range(14):
        prompt = rng.choice(PREFIXES) + "xyz"[: rng.randrange(3)] + "tail" * rng.randrange(1, 3)
        params = SamplingParams(max_tokens=rng.randrange(1, 16), n=rng.choice([1, 1, 3]), ignore_eos=True)
        engine.add(request(str(i), prompt, params, priority=rng.choice([0, 0, 1])))
        if rng.random() < 0.2:
            engine.cancel(str(rng.randrange(i + 1)))
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.kv.check(engine.scheduler.running)
    while engine.has_work():
        engine.step()
    return seen


@pytest.mark.parametrize("rings", [{}, {"window": 4, "slack": 2, "n_snapshots": 3}, {"window": 4, "replay_tokens": 3}])
@pytest.mark.parametrize("seed", range(16))
def test_remembered_misfits_delay_nobody(seed: int, rings: dict[str, int]) -> None:
    assert schedule(PagedSpace, seed, rings) == schedule(Forgetful, seed, rings)


def test_a_full_pool_does_not_hash_waiting_prompts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Setup(n_blocks=130, block_tokens=4, chunk=512).engine()
    prompt = "the same long preface for all " * 13
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    for i in range(12):
        engine.add(request(str(i), prompt + f"and then {i} " * 4, params))
    for _ in range(20):
        engine.step()
    n_hashed = 0
    chained = kvspace._chained

    def counted(*args: Any) -> bytes:
        nonlocal n_hashed
        n_hashed += 1
        return chained(*args)

    monkeypatch.setattr(kvspace, "_chained", counted)
    for _ in range(40):
        engine.step()
    assert engine.scheduler.waiting
    assert n_hashed < 40 * 250, "9 prompts of 100 blocks are in line in each of 40 steps"


# --- rings: blocks of 4 tokens, slack for 2 drafts --------------------------------------------------------------------


def space(**layout: int) -> PagedSpace:
    groups = (KVGroup(name="kv", grain_bytes=1), KVGroup(name="window", grain_bytes=1, kind="ring"))
    given = {"n_blocks": 32, "block_tokens": 4, "slack_tokens": 2} | layout
    return PagedSpace(KVLayout(fingerprint="x", groups=groups, **given), 4)


def held(kv: PagedSpace, tokens: Iterable[int], n_prompt: int | None = None) -> tuple[Sequence, list[KVOp]]:
    """An admitted sequence, and what that asked of the executor."""
    tokens, ops = list(tokens), list[KVOp]()
    seq = sequence(tokens[:n_prompt])
    seq.tokens = tokens
    assert kv.admit(seq, ops)
    return seq, ops


def feed(kv: PagedSpace, seq: Sequence, upto: int, keep: int | None = None) -> list[KVOp]:
    """A step that writes up to `upto` and keeps up to `keep`."""
    ops: list[KVOp] = []
    assert kv.reserve(seq, upto, ops)
    seq.computed = upto if keep is None else keep
    kv.commit(seq, seq.computed, ops)
    return ops


def from_now(kv: PagedSpace, seq: Sequence) -> list[int] | None:
    found = kv.write_from(np.array([seq.slot], np.int32))
    return None if found is None else found.tolist()


@pytest.mark.parametrize(("upto", "keep", "taken"), [(4, 4, 1), (6, 6, 1), (6, 4, 1), (7, 7, 0), (7, 5, 0), (3, 3, 0)])
def test_a_snapshot_is_taken_while_the_ring_holds_its_boundary(upto: int, keep: int, taken: int) -> None:
    """Rejected drafts overwrite the ring as well as those that stay."""
    kv = space(n_snapshots=3)
    seq, _ = held(kv, range(20))
    assert [type(op) for op in feed(kv, seq, upto, keep)] == [Snapshot] * taken


def test_a_boundary_has_one_snapshot_however_it_is_passed() -> None:
    kv = space(n_snapshots=3)
    seq, ops = held(kv, range(20))
    assert ops == [Begin(seq.slot)]
    assert feed(kv, seq, 4) == [Snapshot(seq.slot, 0, 0)]
    assert feed(kv, seq, 5) == []
    other, _ = held(kv, range(4))  # its last token must run: no hit
    assert other.computed == 0
    assert feed(kv, other, 4) == []
    assert feed(kv, seq, 8) == [Snapshot(seq.slot, 0, 1)]


def test_a_hit_ends_where_a_snapshot_is() -> None:
    kv = space(n_snapshots=2)
    seq, _ = held(kv, range(20))
    for upto in (4, 11, 12, 15):  # 8 is passed with too much behind it
        feed(kv, seq, upto)
    kv.release(seq, [])
    assert [kv.restorable(sequence(range(n))) for n in (4, 5, 9, 12, 13, 20)] == [0, 4, 4, 4, 12, 12]
    again, ops = held(kv, range(11))
    assert again.computed == 4
    assert ops == [Begin(again.slot), Restore(again.slot, 0, 0)]
    assert from_now(kv, again) is None
    kv.check([again])


def test_the_snapshot_that_nobody_used_goes_first() -> None:
    kv = space(n_snapshots=2)
    seq, _ = held(kv, range(20))
    feed(kv, seq, 4)
    feed(kv, seq, 8)
    user, _ = held(kv, range(6))
    assert user.computed == 4
    assert feed(kv, seq, 12) == [Snapshot(seq.slot, 0, 1)], "8 was used less recently than 4"
    assert kv.restorable(sequence(range(10))) == 4
    assert kv.restorable(sequence(range(14))) == 12


def test_a_boundary_counts_as_used_when_it_is_passed_and_only_then() -> None:
    kv = space(n_snapshots=2)
    first, _ = held(kv, range(20))
    feed(kv, first, 4)
    other, _ = held(kv, range(50, 70))
    feed(kv, other, 4)
    again, _ = held(kv, range(4))
    feed(kv, again, 4)  # 4 was used now
    assert feed(kv, other, 8) == [Snapshot(other.slot, 0, 1)], "other's own 4 goes"
    assert feed(kv, other, 9) == feed(kv, first, 5) == []
    late, _ = held(kv, range(10))
    assert late.computed == 4
    feed(kv, other, 12)
    feed(kv, other, 16)  # nobody has 4 any more
    assert feed(kv, late, 5) == feed(kv, first, 6) == [], "they are past it, though their rings still hold it"
    assert kv.restorable(sequence(range(10))) == 0


def test_a_forgotten_block_takes_its_snapshot_along() -> None:
    kv = space(n_snapshots=8, n_blocks=3)
    seq, _ = held(kv, range(8))
    feed(kv, seq, 8)
    kv.release(seq, [])
    other, _ = held(kv, range(50, 62))
    kv.release(other, [], False)
    assert kv.restorable(sequence(range(9))) == 0
    kv.check([])


def test_nothing_of_a_row_that_went_wrong_is_kept() -> None:
    kv = space(n_snapshots=8)
    good, _ = held(kv, range(8))
    bad, _ = held(kv, range(8))
    assert feed(kv, good, 7) == [], "the first block can be found, the ring is past its end"
    assert feed(kv, bad, 4) == [Snapshot(bad.slot, 0, 0)]
    kv.check([good, bad])
    assert kv.restorable(sequence(range(6))) == 4
    kv.release(bad, [], False)
    assert kv.restorable(sequence(range(6))) == 0, "the block is the other one's, its snapshot was not"


def test_chunks_end_where_a_snapshot_can_be_taken() -> None:
    kv = space(n_snapshots=2)
    seq, _ = held(kv, range(30))
    assert [kv.chunk_end(seq, end) for end in (3, 4, 6, 7, 8, 11, 30)] == [3, 4, 6, 4, 8, 8, 30]
    feed(kv, seq, 5)
    assert [kv.chunk_end(seq, end) for end in (6, 7, 11)] == [6, 7, 8]
    assert space().chunk_end(seq, 11) == 11, "no snapshots, no cuts"
    kv = space(n_snapshots=2, rerun_tokens=9)
    seq, _ = held(kv, range(30))
    assert kv.chunk_end(seq, 30) == 20, "the same prompt may start at 21 at the latest"
    assert kv.chunk_end(seq, 11) == 8
    feed(kv, seq, 20)
    assert kv.chunk_end(seq, 31) == 28


@pytest.mark.parametrize(("layout", "prompt", "chunks", "start"), [
    ({}, 30, 30, 28),
    ({}, 28, 28, 24),
    ({"slack_tokens": 6}, 28, 28, 24),
    ({"rerun_tokens": 9}, 30, 30, 20),
    ({"rerun_tokens": 9, "slack_tokens": 6}, 30, 25, 20),
    ({"rerun_tokens": 9, "slack_tokens": 6}, 30, 13, 20),
    ({"rerun_tokens": 40}, 30, 30, 0),
])  # fmt: skip
def test_the_same_prompt_starts_as_late_as_it_may(layout: dict[str, int], prompt: int, chunks: int, start: int) -> None:
    """A prompt of whole blocks too, whose last token must run: its last block but one is then the last to start at."""
    kv = space(n_snapshots=8, **layout)
    seq, _ = held(kv, range(prompt))
    while seq.computed < prompt:
        feed(kv, seq, kv.chunk_end(seq, min(prompt, seq.computed + chunks)))
    again, _ = held(kv, range(prompt))
    assert again.computed == start
    longer, _ = held(kv, range(prompt + 40))
    assert longer.computed == prompt - prompt % 4, "who goes on from there starts at the end"
    kv.check([seq, again, longer])


def test_the_end_of_a_prompt_runs_but_not_of_what_came_after_it() -> None:
    kv = space(n_snapshots=8, rerun_tokens=3)
    seq, _ = held(kv, range(20), n_prompt=12)
    for upto in (4, 8, 12, 16):
        feed(kv, seq, upto)
    kv.release(seq, [])
    again, _ = held(kv, range(20), n_prompt=12)
    assert again.computed == 8
    kv.release(again, [])
    later, _ = held(kv, range(20))
    assert later.computed == 16


def test_replay_runs_the_last_tokens_again_and_writes_none_of_them() -> None:
    kv = space(replay_tokens=6)
    seq, _ = held(kv, range(20))
    assert feed(kv, seq, 18) == []
    kv.release(seq, [])
    again, ops = held(kv, range(20))
    assert (again.computed, ops, from_now(kv, again)) == (10, [Begin(again.slot)], [16])
    assert kv.restorable(sequence(range(20))) == 0, "it is not exact"
    other, _ = held(kv, [99])
    assert kv.write_from(np.array([other.slot, again.slot], np.int32)).tolist() == [0, 16]
    kv.release(other, [])
    feed(kv, again, 15)
    assert from_now(kv, again) == [16]
    feed(kv, again, 16)
    assert from_now(kv, again) is None
    kv.release(again, [])
    short, _ = held(kv, range(6))
    assert (short.computed, from_now(kv, short)) == (0, [4])
    kv.release(short, [])
    kv.check([])


def test_rings_that_are_not_kept_have_no_hits() -> None:
    kv = space()
    seq, _ = held(kv, range(20))
    feed(kv, seq, 16)
    kv.release(seq, [])
    again, ops = held(kv, range(20))
    assert (again.computed, ops, from_now(kv, again)) == (0, [Begin(again.slot)], None)


def test_a_replay_that_fails_still_writes_no_shared_block() -> None:
    kv = space(replay_tokens=6)
    seq, _ = held(kv, range(20))
    feed(kv, seq, 18)
    again, _ = held(kv, range(20))
    for _ in range(2):
        ops: list[KVOp] = []
        kv.reserve(again, 15, ops)
        kv.rollback(again, ops)
        assert (again.computed, ops, from_now(kv, again)) == (10, [Begin(again.slot)], [16])
    kv.check([seq, again])


@pytest.mark.parametrize(("layout", "start"), [({"n_snapshots": 4}, 8), ({"replay_tokens": 3}, 8), ({}, 0)])
def test_a_failed_step_that_overran_the_ring(layout: dict[str, int], start: int) -> None:
    kv = space(**layout)
    seq, _ = held(kv, range(40))
    feed(kv, seq, 8)
    feed(kv, seq, 11)
    ops: list[KVOp] = []
    kv.reserve(seq, 13, ops)
    kv.rollback(seq, ops)
    assert (seq.computed, ops) == (11, []), "within the slack"
    kv.reserve(seq, 14, ops)
    kv.rollback(seq, ops)
    assert seq.computed == start
    assert ops == [Begin(seq.slot), *([Restore(seq.slot, 0, 0)] if "n_snapshots" in layout else [])]
    assert from_now(kv, seq) == [11]
    kv.check([seq])
    feed(kv, seq, 12)
    assert from_now(kv, seq) is None


def test_the_table_is_as_wide_as_one_sequence_can_be() -> None:
    """A row for each of 10,000 sequences with a column for each of 100,000 blocks would take 4 GB."""
    kv = PagedSpace(KVLayout(fingerprint="", n_blocks=100_000, block_tokens=4), 10_000, context_tokens=10)
    assert kv.capacity_tokens() == 12
    seq = sequence(range(10))
    assert kv.admit(seq, [])
    assert kv.reserve(seq, 12, [])
    assert not kv.reserve(seq, 13, [])
    assert not kv.admit(sequence(range(13)), [])
    table = kv.table(np.array([seq.slot]))
    assert table is not None
    assert table.shape == (1, 3)
    kv.check([seq])
    narrow = PagedSpace(KVLayout(fingerprint="", n_blocks=2, block_tokens=4), 4, context_tokens=100)
    assert narrow.capacity_tokens() == 8
