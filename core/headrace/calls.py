"""Runs the calls of an answer: at once, each with a timeout. Whatever goes wrong is a result that the model reads."""

from __future__ import annotations

import contextvars
import inspect
import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from headrace.dialogue import Message
from headrace.errors import FAULTS, RequestError, why
from headrace.tools import Tool

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""An async tool may keep its loop from running for so long beyond every timeout; then nobody waits for it any more."""

ERROR_CHARS = 2000

CATCHABLE = (*FAULTS, KeyboardInterrupt)
"""What a tool may raise and a coroutine may catch; GeneratorExit is how a coroutine itself is closed."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of one call."""

    id: str
    name: str
    content: str
    """What the model reads: text as the tool returned it, anything else as JSON; {"error": "..."} when it failed."""
    error: BaseException | None = None
    """Why it failed: the tool's own exception, or RequestError HR-TOOL-03 (arguments), -07 (no such tool),
    -08 (timeout)."""

    @property
    def message(self) -> Message:
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": self.content}


def text_of(value: Any) -> str:
    """A tool's value as the model reads it. Raises ValueError for what JSON can't say."""
    from pydantic_core import to_json

    text = value if isinstance(value, str) else to_json(value, fallback=str, inf_nan_mode="strings").decode()
    return text.encode("utf-8", "replace").decode()


class Caller:
    """Runs the tools of one chat. Sync tools run in threads of their own; async ones in the caller's event loop, or for
    blocking callers in one loop that lives as long as this. A sync tool that is given up on runs on to its end."""

    def __init__(self, tools: Mapping[str, Tool], timeout_s: float | None) -> None:
        self._tools = tools
        self._timeout_s = timeout_s
        self._loop: _Loop | None = None
        self._stop: Callable[[], object] | None = None
        """Gives up on what is running."""

    def run(self, calls: Seq[Mapping[str, Any]]) -> list[ToolResult] | None:
        """Results in the order of the calls; None: `cancel` was called."""
        import asyncio

        if self._loop is None:
            self._loop = _Loop()
            weakref.finalize(self, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(self._all(calls), self._loop.loop)
        news: SimpleQueue[Any] = SimpleQueue()  # ^C leaves it whole, unlike a lock
        future.add_done_callback(news.put)
        self._stop = future.cancel
        try:
            news.get(timeout=self._longest(calls))
        except Empty:
            future.cancel()
            self._loop = None
            late = RequestError("HR-TOOL-08", "an async tool blocks its event loop", "make it a plain def")
            return [_failed(call, late) for call in calls]
        except BaseException:
            future.cancel()
            raise
        finally:
            self._stop = None
        return None if future.cancelled() else future.result()

    async def arun(self, calls: Seq[Mapping[str, Any]]) -> list[ToolResult] | None:
        import asyncio

        loop = asyncio.get_running_loop()
        task = loop.create_task(self._all(calls))
        self._stop = partial(loop.call_soon_threadsafe, task.cancel)
        try:
            await asyncio.wait({task})
        except BaseException:
            task.cancel()
            raise
        finally:
            self._stop = None
        return None if task.cancelled() else task.result()

    def cancel(self) -> None:
        """Any thread, and a handler of signals."""
        if (stop := self._stop) is not None:
            stop()

    def _longest(self, calls: Seq[Mapping[str, Any]]) -> float | None:
        seconds = [self._seconds(call["function"]["name"]) for call in calls]
        known = [each for each in seconds if each is not None]
        return max(known) + GRACE_S if len(known) == len(seconds) else None

    def _seconds(self, name: str) -> float | None:
        tool = self._tools.get(name)
        return tool.timeout_s if tool is not None and tool.timeout_s is not None else self._timeout_s

    async def _all(self, calls: Seq[Mapping[str, Any]]) -> list[ToolResult]:
        import asyncio

        return await asyncio.gather(*map(self._one, calls))

    async def _one(self, call: Mapping[str, Any]) -> ToolResult:
        import asyncio

        name, arguments = call["function"]["name"], call["function"]["arguments"]
        seconds = self._seconds(name)
        try:
            bound, is_async = self._bound(name, arguments)
            value: Any = _awaited(bound) if is_async else _in_thread(partial(contextvars.copy_context().run, bound))
            while inspect.isawaitable(value):
                task: asyncio.Future[Any] = asyncio.ensure_future(value)
                try:
                    done, _ = await asyncio.wait({task}, timeout=seconds)
                finally:
                    task.cancel()  # not waited for: it may not listen
                if not done:
                    raise RequestError("HR-TOOL-08", f"the tool {name} gave no answer within {seconds:g} s")
                if task.cancelled():
                    raise RuntimeError("it was cancelled")
                value, error = task.result()
                if isinstance(error, asyncio.CancelledError):
                    raise RuntimeError("it was cancelled")
                if error is not None and not isinstance(error, CATCHABLE):
                    raise RuntimeError(f"it raised {type(error).__name__}")
                if error is not None:
                    raise error
            return ToolResult(call["id"], name, text_of(value))
        except CATCHABLE as error:
            log.info("a call of the tool %r failed", name, exc_info=True)
            return _failed(call, error)

    def _bound(self, name: str, arguments: str) -> tuple[Callable[[], Any], bool]:
        tool = self._tools.get(name)
        if tool is None or tool.function is None:
            known = ", ".join(each.name for each in self._tools.values() if each.function is not None)
            raise RequestError("HR-TOOL-07", f"there is no tool named {name}; there are {known}")
        return tool.bind(arguments), tool.is_async


def _failed(call: Mapping[str, Any], error: BaseException) -> ToolResult:
    text = json.dumps({"error": why(error)[:ERROR_CHARS]}, ensure_ascii=False)
    return ToolResult(call["id"], call["function"]["name"], text_of(text), error)


async def _awaited(bound: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(value, None) or (None, error): SystemExit in a task would end its loop."""
    try:
        return await bound(), None
    except CATCHABLE as error:
        return None, error


def _in_thread(bound: Callable[[], Any]) -> asyncio.Future[Any]:
    """The same of a plain function, in a daemon thread: it can't be stopped, and nothing may wait for it at exit."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        found: tuple[Any, BaseException | None]
        try:
            value = bound()
            found = (_awaited(lambda: value) if inspect.isawaitable(value) else value, None)
        except BaseException as error:
            found = None, error
        try:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(found))
        except RuntimeError:  # acceptable: the loop is gone, and with it whoever asked
            log.debug("a tool ended after its loop")

    threading.Thread(target=work, name="headrace-tool", daemon=True).start()
    return future


class _Loop:
    """An event loop with a thread."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="headrace-tools", daemon=True).start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def stop(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:  # acceptable: it is closed already
            log.debug("the loop of tools was closed before")
