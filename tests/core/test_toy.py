"""The toys notice wrong KV bookkeeping: that is what they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from headrace.errors import Fatal, ModelError, StepFailed
from headrace.testing.rig import Rig, RigRow, emitted
from headrace.testing.toy import KVCorrupt, ToyModel, ToyPaged, ToySlots
from headrace.testing.toy_backend import open_executor, probe, resolve
from headrace.testing.toy_options import ToyOptions
from headrace.types import (
    WANT_LOGITS,
    WANT_TOKEN,
    Begin,
    BuildContext,
    EngineOptions,
    Fit,
    Fork,
    KVOp,
    MachineInfo,
    ModelSource,
    Reject,
    Restore,
    Snapshot,
    StepPlan,
    Trim,
)

PROMPT = list(b"a river runs")
GOLDEN_TEXT = b"mojkid\ngkmohfbj "
GOLDEN_LOGITS = [2.9882445335388184, 1.8014588356018066, 1.136329174041748]
MACHINE = MachineInfo(devices=(), host_memory_bytes=2**30, available_memory_bytes=2**30, physical_cores=1)


def paged(**options: object) -> tuple[ToyPaged, Rig]:
    toy = ToyPaged(ToyModel(), n_blocks=32, block_tokens=4, **options)  # type: ignore[arg-type]
    toy.open()
    return toy, Rig(toy)


def slots(**options: object) -> tuple[ToySlots, Rig]:
    toy = ToySlots(ToyModel(), n_slots=4, slot_tokens=64, **options)  # type: ignore[arg-type]
    toy.open()
    return toy, Rig(toy)


def forward(toy: ToyPaged | ToySlots, plan: StepPlan) -> np.ndarray:
    handle = toy.forward(plan)
    toy.sample(handle, None)
    return toy.collect(handle).tokens


# --- wrong bookkeeping


def test_overwritten_block_changes_the_output() -> None:
    """Another sequence wrote a block that this one still reads, at the same positions: only the tokens tell."""
    _, rig = paged()
    want = rig.generate(PROMPT, 12)
    rig.lengths[0] = 0
    rig.prefill(PROMPT)
    assert rig.tables is not None
    rig.tables[1] = rig.tables[0]
    rig.prefill(list(b"b river runs"), seq=1)
    rig.lengths[0] = len(PROMPT)
    tokens = want[:1]
    while len(tokens) < 12:
        tokens += emitted(rig.step(RigRow(seq=0, tokens=tokens[-1:])))[0]
    assert tokens != want


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda table: table[:, ::-1].copy(), "holds the KV of position"),
        (lambda table: np.where(table == table[0, 1], -1, table), "does not cover"),
        (lambda table: np.where(table == table[0, 1], 32, table), "does not cover"),
        (lambda table: table[:, :2], "does not cover"),
        (lambda table: np.where(table == table[0, 1], table[0, 0], table), "names a block twice"),
    ],
    ids=["shuffled", "missing", "outside", "short", "twice"],
)
def test_wrong_block_table(spoil: Callable[[np.ndarray], np.ndarray], says: str) -> None:
    toy, rig = paged()
    first = rig.prefill(PROMPT)
    plan = rig.plan([RigRow(seq=0, tokens=first)])
    assert plan.blocks is not None
    with pytest.raises(KVCorrupt, match=says):
        toy.forward(replace(plan, blocks=spoil(plan.blocks[:, :4])))


def test_reading_what_nobody_wrote() -> None:
    toy, rig = paged()
    with pytest.raises(KVCorrupt, match="position 0 holds"):
        toy.forward(rig.plan([RigRow(seq=0, tokens=[1], start=3)]))


def test_two_rows_write_one_block() -> None:
    toy, rig = paged()
    assert rig.tables is not None
    rig.tables[1] = rig.tables[0]
    with pytest.raises(KVCorrupt, match="two rows write"):
        toy.forward(rig.plan([RigRow(seq=0, tokens=PROMPT), RigRow(seq=1, tokens=PROMPT)]))


def test_block_is_read_and_written_in_one_step() -> None:
    toy, rig = paged()
    first = rig.prefill(PROMPT)
    assert rig.tables is not None
    rig.tables[1] = rig.tables[0]
    with pytest.raises(KVCorrupt, match="another row writes"):
        toy.forward(rig.plan([RigRow(seq=0, tokens=first), RigRow(seq=1, tokens=[9, 9])]))


def test_replay_below_write_from_must_agree() -> None:
    toy, rig = paged()
    rig.prefill(PROMPT)
    row = RigRow(seq=0, tokens=PROMPT[4:], start=4)
    want = forward(toy, replace(rig.plan([row]), write_from=np.array([8], np.int32)))
    assert want.tolist() == ToyModel().generate(PROMPT, 1)
    row.tokens = [1, *PROMPT[5:]]
    with pytest.raises(KVCorrupt, match="below write_from"):
        toy.forward(replace(rig.plan([row]), write_from=np.array([8], np.int32)))


@pytest.mark.parametrize("start", [0, 5, 13])
def test_slot_row_must_start_where_the_slot_ends(start: int) -> None:
    toy, rig = slots()
    rig.prefill(PROMPT)
    with pytest.raises(KVCorrupt, match="the slot holds 12 positions"):
        toy.forward(rig.plan([RigRow(seq=0, tokens=[1], start=start)]))


def test_two_rows_in_one_slot() -> None:
    toy, rig = slots()
    plan = rig.plan([RigRow(seq=0, tokens=[1]), RigRow(seq=1, tokens=[2])])
    with pytest.raises(KVCorrupt, match="share a slot"):
        toy.forward(replace(plan, slot=np.array([2, 2], np.int32)))


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (Trim(0, 3), {"partial_trim": False}),
        (Trim(9, 0), {}),
        (Fork(0, 1, 13), {}),
        (Fork(0, 0, 2), {}),
        (Fork(0, 1, 12), {"fork": False}),
        (Fork(0, 1, 5), {"partial_trim": False}),
        (Snapshot(0, 0, 0), {}),
    ],
)
def test_operations_that_the_executor_refuses(op: KVOp, options: dict[str, bool]) -> None:
    toy, rig = slots(**options)
    rig.prefill(PROMPT)
    rig.ops.append(op)
    with pytest.raises(KVCorrupt):
        toy.forward(rig.plan([]))


def test_trim_may_be_repeated() -> None:
    _, rig = slots()
    rig.prefill(PROMPT)
    rig.trim(0, 5)
    rig.ops *= 2
    rig.ops.append(Trim(0, 9))
    assert rig.prefill(PROMPT[5:]) == ToyModel().generate(PROMPT, 1)


# --- faults on demand


@pytest.mark.parametrize("fail_at", ["forward", "sample", "collect"])
def test_failed_step_leaves_garbage_behind(fail_at: str) -> None:
    """Whoever goes on without writing the failed positions again gets another text, or an error."""
    toy, rig = paged(fail_at=fail_at)
    first = rig.prefill(PROMPT)
    toy.fail = lambda _: StepFailed("on demand", rows=[0])
    with pytest.raises(StepFailed) as caught:
        rig.step(RigRow(seq=0, tokens=first))
    assert caught.value.rows == (0,)
    toy.fail = None
    want = ToyModel().generate(PROMPT, 3)
    careless = rig.step(RigRow(seq=0, tokens=want[1:2], start=13, wants=WANT_TOKEN | WANT_LOGITS))
    assert not np.array_equal(careless.arrays["logits"][1][0], ToyModel().logits([*PROMPT, *want[:2]]))
    rig.lengths[0] = 12
    assert emitted(rig.step(RigRow(seq=0, tokens=want[:2]))) == [want[2:3]]


def test_fatal_then_reopened() -> None:
    toy, rig = slots()
    toy.fail = lambda _: Fatal("gone")
    with pytest.raises(Fatal):
        rig.prefill(PROMPT)
    toy.fail = None
    toy.close()
    toy.open()
    assert Rig(toy).generate(PROMPT, 3) == ToyModel().generate(PROMPT, 3)


def test_interrupt_ends_the_running_forward_only() -> None:
    toy, rig = paged()
    toy.interrupt()
    first = rig.prefill(PROMPT)
    toy.on_forward = lambda _: toy.interrupt()
    with pytest.raises(StepFailed, match="interrupted"):
        rig.step(RigRow(seq=0, tokens=first))
    toy.on_forward = None
    assert emitted(rig.step(RigRow(seq=0, tokens=first))) == [ToyModel().generate(PROMPT, 2)[1:]]


def test_steps_are_used_in_order() -> None:
    toy, rig = paged()
    plan = rig.plan([RigRow(seq=0, tokens=PROMPT)])
    handle = toy.forward(plan)
    with pytest.raises(AssertionError, match="before the last step"):
        toy.forward(plan)
    with pytest.raises(AssertionError, match="collect before sample"):
        toy.collect(handle)
    toy.sample(handle, None)
    with pytest.raises(AssertionError, match="twice"):
        toy.sample(handle, None)
    toy.collect(handle)
    with pytest.raises(AssertionError, match="not open"):
        toy.collect(handle)


# --- the model


def test_logits_depend_on_every_token_and_its_place() -> None:
    model = ToyModel()
    base = model.logits(PROMPT)
    for i in range(len(PROMPT)):
        other = [*PROMPT[:i], PROMPT[i] ^ 1, *PROMPT[i + 1 :]]
        assert not np.array_equal(model.logits(other), base)
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:]]
    assert not np.array_equal(model.logits(swapped), base)
    assert not np.array_equal(ToyModel(seed=1).logits(PROMPT), base)


def test_model_is_the_same_everywhere() -> None:
    """Golden: integer hashing only, so these hold on every machine and numpy."""
    model = ToyModel(vocab=258, seed=3)
    assert bytes(model.generate(list(b"golden"), 16)) == GOLDEN_TEXT
    assert model.logits(list(b"golden"))[:3].tolist() == GOLDEN_LOGITS


def test_repeat_makes_text_predictable() -> None:
    def share(repeat: float) -> float:
        text = ToyModel(repeat=repeat).generate([1], 400)
        pairs = list(pairwise(text))
        return 1 - len(set(pairs)) / len(pairs)

    assert share(0.95) > share(0.5) > share(0.0)


def test_eos_rate() -> None:
    assert 256 not in ToyModel().generate([1], 200)
    assert 256 in ToyModel(eos_rate=0.1).generate([1], 200)


def test_fast_mode_neither_reads_kv_nor_hashes() -> None:
    toy = ToyPaged(ToyModel(fast=True), max_rows=4)
    toy.open()
    rig = Rig(toy)
    assert emitted(rig.step(RigRow(seq=0, tokens=[1, 2]), RigRow(seq=1, tokens=[5], start=9, sample=False))) == [
        [99],
        [],
    ]
    assert not toy.caps.drafts
    assert not toy.caps.logprobs


# --- rings


def ringed(**options: int) -> tuple[ToyPaged, Rig]:
    return paged(**{"window": 6, "slack": 2, "n_snapshots": 2} | options)


def test_rings_change_nothing_while_they_are_right() -> None:
    for chunk in (1, 5, 12):
        _, rig = ringed()
        assert rig.generate(PROMPT, 12, chunk=chunk) == ToyModel().generate(PROMPT, 12)


def test_what_a_ring_holds_decides_the_output() -> None:
    """Only within the window: what left it is read from the blocks."""
    toy, rig = ringed()
    want = ToyModel().logits([*PROMPT, 97])
    rig.prefill(PROMPT)
    cells = toy._rings._cells[0]
    cells[np.flatnonzero(cells >> 32 == 7)] ^= 1
    row = RigRow(seq=0, tokens=[97], wants=WANT_TOKEN | WANT_LOGITS)
    assert not np.array_equal(rig.step(row).arrays["logits"][1][0], want)
    rig.lengths[0] = len(PROMPT)
    cells[np.flatnonzero(cells >> 32 == 7)] ^= 1
    cells[np.flatnonzero(cells >> 32 == 6)] ^= 1
    assert np.array_equal(rig.step(row).arrays["logits"][1][0], want)


def test_a_ring_that_starts_late_lacks_what_came_before() -> None:
    toy, rig = ringed(replay_tokens=4)
    assert toy.caps.approximations == ()
    assert ringed(replay_tokens=4, n_snapshots=0)[0].caps.approximations
    want = ToyModel().logits([*PROMPT, 97])
    rig.prefill(PROMPT)
    row = RigRow(seq=0, tokens=[97], wants=WANT_TOKEN | WANT_LOGITS)
    for n, same in ((4, False), (5, True)):
        rig.ops.append(Begin(0))
        rig.lengths[0] = len(PROMPT) - n
        rig.prefill(PROMPT[-n:])
        assert np.array_equal(rig.step(row).arrays["logits"][1][0], want) == same


@pytest.mark.parametrize(
    ("ops", "start", "says"),
    [
        ([], 9, "its ring ends at 12"),
        ([], 13, "its ring ends at 12"),
        ([Snapshot(1, 0, 0)], 12, "holds nothing"),
        ([Restore(0, 0, 1)], 12, "holds nothing"),
        ([Snapshot(0, 0, 2)], 12, "snapshot 2 of 2"),
        ([Begin(0), Snapshot(0, 0, 0)], 12, "holds nothing"),
    ],
)
def test_wrong_use_of_rings_is_noticed(ops: list[KVOp], start: int, says: str) -> None:
    _, rig = ringed()
    rig.prefill(PROMPT)
    rig.ops += ops
    rig.lengths[0] = start
    with pytest.raises(KVCorrupt, match=says):
        rig.step(RigRow(seq=0, tokens=[97]))


def test_a_slot_is_begun_before_it_is_used() -> None:
    toy, rig = ringed()
    with pytest.raises(KVCorrupt, match="before Begin"):
        forward(toy, rig.plan([RigRow(seq=0, tokens=PROMPT)]))


def test_history_is_checked() -> None:
    toy, rig = paged(history_tokens=2)
    rig.prefill(PROMPT)
    plan = rig.plan([RigRow(seq=0, tokens=[97])])
    assert plan.history is not None
    plan.history[0, 1] ^= 1
    with pytest.raises(KVCorrupt, match="history"):
        forward(toy, plan)


def test_rings_need_a_window() -> None:
    for wrong in ({"window": 1}, {"n_snapshots": 2}, {"replay_tokens": 2}):
        with pytest.raises(ValueError, match="window"):
            ToyPaged(ToyModel(), **wrong)  # type: ignore[arg-type]


# --- toy:// models


def build(uri: str) -> ToyPaged | ToySlots:
    source = resolve(uri)
    assert source is not None
    context = BuildContext(engine=EngineOptions(max_sequences=3), machine=MACHINE)
    executor = open_executor(source, ToyOptions(), context)
    assert isinstance(executor, (ToyPaged, ToySlots))
    return executor


def test_uri_sets_everything() -> None:
    toy = build("toy://vocab=300,seed=7,context=99,repeat=0.25,kv=slots,slots=2,slot_tokens=50")
    assert isinstance(toy, ToySlots)
    assert (toy.toy.vocab, toy.toy.seed, toy.toy.context, toy.toy.repeat) == (300, 7, 99, 0.25)
    assert (toy.layout.n_slots, toy.layout.slot_tokens) == (2, 50)
    paged = build("toy://blocks=9,block_tokens=5")
    assert (paged.layout.n_blocks, paged.layout.block_tokens) == (9, 5)
    assert paged.caps.max_rows == 3
    assert paged.model.uri == "toy://blocks=9,block_tokens=5"


def test_uri_sets_rings() -> None:
    kept = build("toy://window=6,slack=3,snapshots=5").layout
    assert (kept.has_rings, kept.slack_tokens, kept.n_snapshots, kept.replay_tokens) == (True, 3, 5, 0)
    rebuilt = build("toy://window=6,replay=9").layout
    assert (rebuilt.slack_tokens, rebuilt.n_snapshots, rebuilt.replay_tokens) == (8, 0, 9)
    assert build("toy://window=6").layout.n_snapshots == 32
    plain = build("toy://blocks=9").layout
    assert (plain.has_rings, plain.slack_tokens) == (False, 0)
    for uri, says in (("toy://snapshots=3", "no window"), ("toy://window=6,kv=slots", "kv=slots has no rings")):
        with pytest.raises(ModelError, match="HR-TOY-02") as caught:
            build(uri)
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("toy://vocabb=300", "did you mean 'vocab'"),
        ("toy://vocab=many", "is no int"),
        ("toy://vocab=2", "out of range"),
        ("toy://kv=both", "write kv=paged or kv=slots"),
        ("toy://repeat=nan", "out of range"),
        ("toy://vocab", "is no int"),
    ],
)
def test_bad_uri(uri: str, says: str) -> None:
    with pytest.raises(ModelError, match="HR-TOY-01") as caught:
        resolve(uri)
    assert says in str(caught.value)


def test_other_schemes_and_formats() -> None:
    assert resolve("file:///x") is None
    assert isinstance(probe(MACHINE, ModelSource(uri="x", path="x", format="gguf")), Reject)
    assert isinstance(probe(MACHINE, ModelSource(uri="toy://", path="", format="toy")), Fit)
