"""How states share a block and a slot, and what the KV operations do to the bytes."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.modeling import CacheFormat, StateSpec
from headrace.types import Begin, CopyBlock, Fork, Free, Restore, Snapshot, Trim

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from headrace_plugins.reference.caches import ALIGN, Pools, arrange  # noqa: E402

STATES = [
    StateSpec(name="key", kind="paged", format=CacheFormat("q4", 64), ratio=2),
    StateSpec(name="window", kind="ring", format=CacheFormat("q8", 64), entries=11),
    StateSpec(name="index", kind="paged", format=CacheFormat("qm", 32)),
    StateSpec(name="pair", kind="ring", format=CacheFormat("float32", 6), entries=3),
]


@pytest.fixture
def pools() -> Pools:
    return Pools(arrange(STATES, 8), 4, 3, 2)


def test_states_lie_apart_and_aligned() -> None:
    found = arrange(STATES, 8)
    assert [place.grain for place in (*found.paged, *found.rings)] == [4, 8, 11, 3]
    for places, size in ((found.paged, found.block_bytes), (found.rings, found.ring_bytes)):
        ends = 0
        for place in places:
            assert place.start >= ends, "two states overlap"
            assert place.start % ALIGN == 0
            assert place.end - place.start == place.grain * place.state.format.entry_bytes
            ends = place.end
        assert ends <= size < ends + ALIGN


def test_caches_are_views_of_their_pool(pools: Pools) -> None:
    assert pools.caches["key"].pool.shape == (4, 4 * CacheFormat("q4", 64).entry_bytes)
    assert pools.caches["window"].pool.shape == (3, 11 * CacheFormat("q8", 64).entry_bytes)
    assert {name: cache.grain for name, cache in pools.caches.items()} == {
        "key": 4, "index": 8, "window": 11, "pair": 3,
    }  # fmt: skip
    pools.caches["index"].pool.fill_(7)
    assert pools.caches["key"].pool.sum() == 0
    assert pools.caches["pair"].pool.view(torch.float32).shape == (3, 18)


def test_a_block_must_hold_whole_entries() -> None:
    with pytest.raises(ConfigError, match=r"block_tokens = 5.*'key'.*per 2 tokens") as found:
        arrange(STATES, 5)
    assert found.value.code == "HR-REFERENCE-10"
    assert "4" in found.value.help


def test_copy_block_copies_every_paged_state(pools: Pools) -> None:
    for name in ("key", "index"):
        pools.caches[name].pool[1] = 9
    pools.apply(CopyBlock(0, 1, 3))
    for name in ("key", "index"):
        assert (pools.caches[name].pool[3] == 9).all()
        assert (pools.caches[name].pool[2] == 0).all()


def test_snapshot_and_restore_carry_rings_and_where_they_start(pools: Pools) -> None:
    slots = np.array([1], np.int32)
    pools.apply(Begin(1))
    assert pools.enter(slots, np.array([40], np.int32)).tolist() == [40], "the first row says where rings start"
    pools.caches["window"].pool[1] = 5
    pools.apply(Snapshot(1, 0, 0))
    pools.caches["window"].pool[1] = 6
    pools.apply(Begin(2))
    pools.apply(Restore(2, 0, 0))
    assert (pools.caches["window"].pool[2] == 5).all(), "the snapshot is a copy"
    assert pools.enter(np.array([2], np.int32), np.array([64], np.int32)).tolist() == [40]


def test_a_slot_that_begins_again_has_no_past(pools: Pools) -> None:
    slots = np.array([0, 2], np.int32)
    for slot in (0, 2):
        pools.apply(Begin(slot))
    assert pools.enter(slots, np.array([0, 16], np.int32)).tolist() == [0, 16]
    assert pools.enter(slots, np.array([5, 20], np.int32)).tolist() == [0, 16]
    pools.apply(Begin(2))
    assert pools.enter(slots, np.array([6, 0], np.int32)).tolist() == [0, 0]
    assert pools.enter(slots, np.array([0, 1], np.int32)).tolist() == [0, 0], "a sequence that starts over"


def test_what_says_nothing_new_is_allowed_and_slot_operations_are_not(pools: Pools) -> None:
    pools.apply(Trim(0, 3))
    pools.apply(Free(0))
    with pytest.raises(ValueError, match="Fork"):
        pools.apply(Fork(0, 1, 3))
    with pytest.raises(IndexError):
        pools.apply(CopyBlock(0, 1, 99))
