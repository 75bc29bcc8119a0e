"""Threads that work for the engine: grammars compile there, and masks are filled while the device runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from headrace.errors import FAULTS

Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Workers:
    """Up to n_threads daemon threads, started as calls come.

    Unlike those of a ThreadPoolExecutor, they take calls until the very end and a leaving interpreter does not wait for
    them: a grammar that compiles for minutes must not hold up the end of the process.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        self.n_threads = n_threads
        self.name = name
        self._n_started = 0
        self._calls: Calls = SimpleQueue()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run call() on one of the threads. One caller at a time."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        if self._n_started < self.n_threads:
            self._n_started += 1
            threading.Thread(target=_serve, args=(self._calls,), name=self.name, daemon=True).start()
        return future

    def close(self) -> None:
        """Drop calls that did not start, and let the threads end. Idempotent."""
        n_started, self._n_started = self._n_started, 0
        while n_started and not self._calls.empty():
            waiting = self._calls.get()
            if waiting is not None:
                waiting[0].cancel()
        for _ in range(n_started):
            self._calls.put(None)

    __del__ = close


def _serve(calls: Calls) -> None:
    while (waiting := calls.get()) is not None:
        future, call = waiting
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except FAULTS as error:  # whoever asks for the result gets it
                future.set_exception(error)
            except BaseException as error:  # nobody pressed Ctrl-C here: whoever asks must not take it for that
                future.set_exception(RuntimeError(f"{type(error).__name__} was raised"))
        del waiting, future, call  # what they refer to must not live until the next call comes
