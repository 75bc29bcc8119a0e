"""Compiled grammars, kept by their text within a bound of memory; one that is asked for twice at once compiles once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from headrace.contracts import Compiled
from headrace.errors import RequestError

POLL_S = 0.05
"""How often somebody who waits for another's work asks whether its own request was cancelled."""

K = TypeVar("K", bound=Hashable)
Cancelled = Callable[[], bool]


def cancelled_error() -> RequestError:
    return RequestError("HR-CONSTRAINT-06", "compiling the grammar was cancelled")


class _Flight:
    """A compile in progress. It is cancelled when nobody waits for it any more."""

    def __init__(self) -> None:
        self.result: Future[Compiled] = Future()
        self.waiting: list[Cancelled] = []

    def cancelled(self) -> bool:
        return all(cancelled() for cancelled in self.waiting)


class CompileCache(Generic[K]):
    """A byte-bounded LRU of compiled grammars. Any thread; never locked while something compiles.

    Errors are not kept: a limit may be raised, a machine may be less busy.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[Compiled, int]] = OrderedDict()
        self._flights: dict[K, _Flight] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K, cost_bytes: int, make: Callable[[Cancelled], Compiled], cancelled: Cancelled) -> Compiled:
        """The compiled grammar of `key`, made by make(cancelled) if it is not there.

        cost_bytes: what keeping the key itself takes. Raises what make raises, HR-CONSTRAINT-06 when cancelled.
        """
        while True:
            with self._lock:
                if (kept := self._kept.get(key)) is not None:
                    self._kept.move_to_end(key)
                    return kept[0]
                flight = self._flights.get(key)
                mine = flight is None
                if flight is None:
                    flight = self._flights[key] = _Flight()
                flight.waiting.append(cancelled)
            if mine:
                return self._fly(key, cost_bytes, flight, make)
            try:
                return _wait(flight, cancelled)
            except RequestError as error:
                if error.code != "HR-CONSTRAINT-06" or cancelled():
                    raise
                # it was given up just before this request joined: make it anew

    def _fly(self, key: K, cost_bytes: int, flight: _Flight, make: Callable[[Cancelled], Compiled]) -> Compiled:
        try:
            compiled = make(flight.cancelled)
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.result.set_exception(error)
            raise
        with self._lock:
            del self._flights[key]
            self._keep(key, compiled, compiled.size_bytes() + cost_bytes)
        flight.result.set_result(compiled)
        return compiled

    def _keep(self, key: K, compiled: Compiled, size: int) -> None:
        if size > self.capacity_bytes:
            return  # it would drive out all others and then be the next to go
        self._kept[key] = (compiled, size)
        self.used_bytes += size
        while self.used_bytes > self.capacity_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.used_bytes -= freed

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.used_bytes = 0


def _wait(flight: _Flight, cancelled: Cancelled) -> Compiled:
    while True:
        try:
            return flight.result.result(timeout=POLL_S)
        except TimeoutError:
            if flight.result.done():
                raise  # a TimeoutError of the compile itself
        if cancelled():
            raise cancelled_error()
