"""Threads of the engine that nobody waits for."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from operator import floordiv

import pytest

from headrace.workers import Workers


def test_results_and_failures() -> None:
    workers = Workers(2, "w")
    futures = [workers.submit(partial(floordiv, 6, i)) for i in range(4)]
    with pytest.raises(ZeroDivisionError):
        futures[0].result()
    assert [future.result() for future in futures[1:]] == [6, 3, 2]
    assert isinstance(workers.submit(lambda: sys.exit(3)).exception(), SystemExit)
    assert isinstance(workers.submit(_interrupt).exception(), RuntimeError), "nobody pressed Ctrl-C"
    assert workers.submit(lambda: threading.current_thread().name).result() == "w"
    workers.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_close_drops_what_waits_and_ends_the_threads() -> None:
    workers = Workers(1, "only-here")
    gate, inside = threading.Event(), threading.Event()
    running = workers.submit(lambda: [event() for event in (inside.set, gate.wait)])
    waiting = workers.submit(lambda: None)
    inside.wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "only-here"]
    workers.close()
    workers.close()
    assert waiting.cancelled()
    gate.set()
    thread.join(30)
    assert running.done()
    assert not thread.is_alive()


def test_dropped_workers_end() -> None:
    workers = Workers(1, "dropped")
    workers.submit(lambda: None).result()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dropped"]
    del workers
    thread.join(30)
    assert not thread.is_alive()


def test_a_leaving_interpreter_waits_for_none() -> None:
    script = (
        "import threading; from headrace.workers import Workers; inside = threading.Event()\n"
        "workers = Workers(1, 'w'); workers.submit(lambda: (inside.set(), threading.Event().wait())); inside.wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
