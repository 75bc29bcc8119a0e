"""What every KV store must do. Losing items is allowed; wrong bytes, raising or blocking for ever are not."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.contracts import Store

HOUR_S = 3600.0


class StoreConformance:
    """Subclass and return a new, empty store with room for a few kilobytes from `make()`."""

    reliable = True
    """A small item that was just put is there. False for stores that drop at will: those checks are skipped."""

    def make(self) -> Store:
        raise NotImplementedError("return your store from make()")

    def expire(self, store: Store) -> bool:
        """Make more than 60 s pass for the store; False if its clock can't be moved."""
        return False

    @pytest.fixture
    def store(self) -> Store:
        return self.make()

    def _need_reliable(self) -> None:
        if not self.reliable:
            pytest.skip("reliable is False")

    def test_empty_store_has_nothing(self, store: Store) -> None:
        assert store.probe([key(1)]) == 0
        assert list(store.get([key(1), key(2)])) == [None, None]

    def test_empty_calls(self, store: Store) -> None:
        assert store.probe([]) == 0
        assert list(store.get([])) == []
        assert store.put([], HOUR_S) == 0

    def test_put_then_get(self, store: Store) -> None:
        self._need_reliable()
        items = [(key(i), bytes([i]) * (10 + i)) for i in range(5)]
        assert store.put(items, HOUR_S) == 5
        assert list(store.get([k for k, _ in items])) == [value for _, value in items]

    def test_get_keeps_the_order_and_marks_what_is_missing(self, store: Store) -> None:
        self._need_reliable()
        store.put([(key(1), b"one"), (key(3), b"three")], HOUR_S)
        assert list(store.get([key(3), key(2), key(1)])) == [b"three", None, b"one"]

    def test_probe_counts_the_leading_run(self, store: Store) -> None:
        self._need_reliable()
        store.put([(key(i), b"x") for i in (0, 1, 3)], HOUR_S)
        assert store.probe([key(0), key(1), key(2), key(3)]) == 2
        assert store.probe([key(2), key(0)]) == 0
        assert store.probe([key(0), key(1)]) == 2

    def test_put_again_replaces(self, store: Store) -> None:
        self._need_reliable()
        store.put([(key(1), b"old")], HOUR_S)
        store.put([(key(1), b"new")], HOUR_S)
        assert list(store.get([key(1)])) == [b"new"]

    @pytest.mark.parametrize(
        "value", [b"", b"\x00", bytes(range(256)), b"\r\n" * 40], ids=["empty", "nul", "all", "crlf"]
    )
    def test_any_bytes_survive(self, store: Store, value: bytes) -> None:
        self._need_reliable()
        store.put([(key(1), value)], HOUR_S)
        assert list(store.get([key(1)])) == [value]

    def test_keys_are_bytes_of_any_kind(self, store: Store) -> None:
        self._need_reliable()
        keys = [b"a", b"a/b", b"../a", b"\x00a", b"a" * 200, b"A"]
        store.put([(one, one[::-1]) for one in keys], HOUR_S)
        assert list(store.get(keys)) == [one[::-1] for one in keys]

    def test_caller_may_reuse_its_buffer(self, store: Store) -> None:
        self._need_reliable()
        buffer = bytearray(b"before")
        store.put([(key(1), buffer)], HOUR_S)  # type: ignore[list-item]
        buffer[:] = b"after!"
        assert list(store.get([key(1)])) == [b"before"]

    def test_expired_items_are_gone(self, store: Store) -> None:
        self._need_reliable()
        store.put([(key(1), b"short")], 30.0)
        store.put([(key(2), b"long")], HOUR_S)
        if not self.expire(store):
            pytest.skip("expire is not implemented")
        assert list(store.get([key(1), key(2)])) == [None, b"long"]
        assert store.probe([key(1)]) == 0

    def test_no_time_to_live_keeps_nothing(self, store: Store) -> None:
        assert store.put([(key(1), b"x")], 0.0) == 0
        assert list(store.get([key(1)])) == [None]

    def test_put_returns_at_most_what_it_got(self, store: Store) -> None:
        assert 0 <= store.put([(key(i), b"x" * 100) for i in range(20)], HOUR_S) <= 20

    def test_huge_item_does_no_harm(self, store: Store) -> None:
        store.put([(key(1), b"small")], HOUR_S)
        store.put([(key(2), b"y" * 4_000_000)], HOUR_S)
        (value,) = store.get([key(2)])
        assert value in (None, b"y" * 4_000_000)

    def test_several_threads(self, store: Store) -> None:
        def work(worker: int) -> bool:
            items = [(key(100 * worker + i), key(i)) for i in range(30)]
            for item in items:
                store.put([item], HOUR_S)
            return all(
                got in (None, want) for got, (_, want) in zip(store.get([k for k, _ in items]), items, strict=True)
            )

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))

    def test_close_twice(self, store: Store) -> None:
        store.put([(key(1), b"x")], HOUR_S)
        store.close()
        store.close()


def key(i: int) -> bytes:
    """A key as the engine makes them: a digest."""
    return hashlib.sha256(str(i).encode()).digest()
