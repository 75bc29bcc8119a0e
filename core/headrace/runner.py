"""Gives an engine its thread, and every request a handle.

    callers (any thread or event loop)            engine thread
    submit, cancel, close  --- SimpleQueue --->   between two steps: add, cancel
    Handle: wait, read     <--- wake-up -------   after a step: only handles that somebody waits for

The engine is touched by its own thread alone. A consumer reads the sequences' own lists by cursor, so nothing is queued
for it: a slow or absent one costs no memory. The inbox is a SimpleQueue because its `put` may run inside a finalizer,
at any point of any thread; nothing on that path takes a lock.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from headrace.errors import DeviceError, HeadraceError, RequestError
from headrace.types import Chunk, Completion, Output, Request, Sequence, TokenLogprob

if TYPE_CHECKING:
    from headrace.contracts import Tokenizer
    from headrace.engine import Engine

log = logging.getLogger(__name__)

LONG_PREFILL_TOKENS = 64
"""A cancelled request with more prompt than this to compute interrupts the step, although others repeat it."""

EXIT_WAIT_S = 10.0
"""How long a leaving interpreter waits for the step in progress."""


class Handle:
    """One request under way: an iterator of chunks, sync and async, and its result.

    Made by `Runner`. Dropping the last reference cancels the request. Usable from any thread; chunks go to whoever asks
    first, `result()` is independent of them.
    """

    def __init__(self, runner: Runner, request: Request, prompt: str | None, owner: object) -> None:
        self.request = request
        self.prompt = prompt
        self.cancelled = False
        self._runner = runner
        self._owner = owner  # keeps an LLM alive that only its stream refers to
        self._seqs: list[Sequence] | None = None
        self._error: BaseException | None = None
        self._kept: Output | None = None
        self._cursors: list[list[int]] = []
        """[pieces, tokens, ended] read so far, by sequence."""
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._waiters: list[tuple[Callable[[], object], bool]] = []

    # --- state -----------------------------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """The engine took the request or refused it."""
        return self._seqs is not None or self._error is not None

    @property
    def done(self) -> bool:
        if self._error is not None:
            return True
        return self._seqs is not None and all(seq.finish_reason is not None for seq in self._seqs)

    @property
    def n_prefilled(self) -> int:
        """Prompt tokens computed so far."""
        return min(self._seqs[0].computed, self._seqs[0].n_prompt) if self._seqs else 0

    @property
    def n_generated(self) -> int:
        return sum(seq.n_generated for seq in self._seqs or ())

    def cancel(self) -> None:
        """End the request soon with finish_reason "abort". Any thread; again or too late is fine."""
        self._runner._check_process()
        if not self.done:
            self.cancelled = True
            self._runner._cancel(self)

    close = cancel

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a half-built handle
            if not self.done and not self.cancelled:
                self._runner._abandon(self)

    # --- results ---------------------------------------------------------------------------------------------------

    def result(self) -> Output:
        """Wait for the end. A sample that failed has its error in the output; raises when the engine stopped."""
        self.wait()
        return self._output()

    async def aresult(self) -> Output:
        await self.await_()
        return self._output()

    def _output(self) -> Output:
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._kept is not None:
            return self._kept
        assert self._seqs is not None
        try:
            return build_output(self._seqs, self._runner.tokenizer, self.prompt)
        except Exception as error:
            if isinstance(error, HeadraceError):
                raise
            raise RequestError("HR-STEP-03", f"the tokenizer failed: {error!r}", "report it to its author") from error

    def _keep(self) -> None:
        """Build the output while the tokenizer still works; `result()` may be asked for after close."""
        if self.done and self._error is None:
            with contextlib.suppress(HeadraceError):  # it comes again when somebody asks
                self._kept = self._output()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while True:
            chunk = self._poll()
            if chunk is not None:
                return chunk
            if self._exhausted():
                raise StopIteration
            self._block(self._has_news, each=True)

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            chunk = self._poll()
            if chunk is not None:
                return chunk
            if self._exhausted():
                raise StopAsyncIteration
            await self._ablock(self._has_news, each=True)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Handle:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def _poll(self) -> Chunk | None:
        """The next chunk, or None when nothing new came. A sample's last chunk carries its finish_reason."""
        self._runner._check_process()
        seqs = self._seqs or ()
        with self._reading:
            if len(self._cursors) != len(seqs):
                self._cursors = [[0, 0, 0] for _ in seqs]
            for seq, cursor in zip(seqs, self._cursors, strict=True):
                chunk = None if cursor[2] else _advance(seq, cursor)
                if chunk is not None:
                    return chunk
        return None

    def _has_news(self) -> bool:
        if self.done:
            return True
        for seq, (n_read, _, ended) in zip(self._seqs or (), self._cursors, strict=False):
            n_pieces = len(seq.stream.pieces) if seq.stream is not None else seq.n_generated
            if not ended and (n_pieces > n_read or seq.finish_reason is not None):
                return True
        return bool(self._seqs) and not self._cursors

    def _exhausted(self) -> bool:
        """True after the last chunk; raises what ended the request if that was an error."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        seqs = self._seqs or ()
        if not seqs or not all(cursor[2] for cursor in self._cursors):
            return False
        failed = next((seq.error for seq in seqs if seq.error is not None), None)
        if failed is not None:
            raise failed.with_traceback(None)
        return True

    # --- waiting ---------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until the request has ended."""
        self._block(lambda: self.done)

    async def await_(self) -> None:
        await self._ablock(lambda: self.done)

    def watch(self, wake: Callable[[], object], each: bool = False) -> None:
        """Call `wake` once: when the request is answered or ends, and with `each` also when tokens came. It is called
        from the engine's thread, maybe before this returns; check the state after registering."""
        with self._lock:
            self._waiters.append((wake, each))

    def unwatch(self, wake: Callable[[], object]) -> None:
        """Give up waiting: forget a `wake` that was not called yet."""
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if waiter[0] is not wake]

    def _block(self, ready: Callable[[], bool], each: bool = False) -> None:
        self._runner._check_process()
        # no Event: ^C inside Event.wait breaks its lock, and then Event.set raises or hangs in the engine's thread
        news: SimpleQueue[None] = SimpleQueue()
        wake = partial(news.put, None)
        while not ready():
            try:
                self.watch(wake, each)
                if not ready():
                    news.get()
            finally:
                self.unwatch(wake)

    async def _ablock(self, ready: Callable[[], bool], each: bool = False) -> None:
        import asyncio

        self._runner._check_process()
        loop = asyncio.get_running_loop()
        while not ready():
            event = asyncio.Event()
            wake = partial(wake_loop, loop, event)
            try:
                self.watch(wake, each)
                if not ready():
                    await event.wait()
            finally:  # a cancelled task waits no more, and one that asks with a timeout asks often
                self.unwatch(wake)

    def _notify(self, final: bool) -> None:
        if not self._waiters:
            return
        with self._lock:
            due = [wake for wake, each in self._waiters if final or each]
            self._waiters = [] if final else [waiter for waiter in self._waiters if not waiter[1]]
        for wake in due:
            try:
                wake()
            except Exception:  # acceptable: only whoever gave it misses the news
                log.warning("a waiter of request %r failed", self.request.id, exc_info=True)

    def _accept(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs
        self._notify(final=True)

    def _fail(self, error: BaseException) -> None:
        """The request was refused, or the engine is gone. What had ended before stays as it is."""
        if not self.done:
            self._error = error
        self._notify(final=True)


def _advance(seq: Sequence, cursor: list[int]) -> Chunk | None:
    """What came since the cursor, which moves; None when nothing did."""
    reason = seq.finish_reason  # read first: what is set before the end is then seen below
    n_tokens = len(seq.tokens)
    pieces = seq.stream.pieces if seq.stream is not None else None
    n_pieces = n_tokens - seq.n_prompt if pieces is None else len(pieces)
    if n_pieces == cursor[0] and reason is None:
        return None
    text = "".join(pieces[cursor[0] : n_pieces]) if pieces is not None else ""
    ids = tuple(seq.tokens[seq.n_prompt + cursor[1] : n_tokens])
    cursor[:] = n_pieces, n_tokens - seq.n_prompt, int(reason is not None)
    return Chunk(seq.sample_index, text, ids, reason)


def wake_loop(loop: Any, event: Any) -> None:
    """Set an asyncio event from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
        loop.call_soon_threadsafe(event.set)


class Runner:
    """Owns the thread that owns an engine. Every method may be called from any thread.

    on_close runs in the engine's thread after the engine was closed: it frees the executor.
    """

    def __init__(self, engine: Engine, *, on_close: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.tokenizer: Tokenizer = engine.executor.tokenizer
        self._on_close = on_close
        self._pid = os.getpid()
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._live: dict[str, weakref.ref[Handle]] = {}
        self._worded: weakref.WeakSet[Handle] = weakref.WeakSet()
        """Handles whose output needs the tokenizer: log-probabilities name tokens."""
        self._stepping = False
        self._ended: BaseException | None = None
        """Why nothing is accepted any more."""
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._at_exit = partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)
        self._thread.start()

    # --- for callers -----------------------------------------------------------------------------------------------

    def enqueue(self, jobs: Iterable[tuple[Request, str | None]], owner: object = None) -> list[Handle]:
        """Hand over (request, prompt text) pairs without waiting; `Handle.answered` tells when the engine replied."""
        self.check()
        handles = [Handle(self, request, prompt, owner) for request, prompt in jobs]
        self._inbox.put(("add", [weakref.ref(handle) for handle in handles]))
        if self._ended is not None:  # it ended in between and may not have seen them
            for handle in handles:
                handle._fail(self._ended)
        return handles

    def submit(self, request: Request, prompt: str | None = None, owner: object = None) -> Handle:
        """Queue a request. Raises RequestError or Busy here. Waits at most for the step in progress."""
        (handle,) = self.enqueue([(request, prompt)], owner)
        handle._block(lambda: handle.answered)
        if handle._seqs is None and handle._error is not None:
            raise handle._error.with_traceback(None)
        return handle

    async def asubmit(self, request: Request, prompt: str | None = None, owner: object = None) -> Handle:
        (handle,) = self.enqueue([(request, prompt)], owner)
        await handle._ablock(lambda: handle.answered)
        if handle._seqs is None and handle._error is not None:
            raise handle._error.with_traceback(None)
        return handle

    def close(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """Abort everything and stop. Idempotent. wait: return when the engine is freed (never in its own thread)."""
        if os.getpid() != self._pid:
            return  # the thread and the model belong to the parent
        if self._ended is None:
            self._ended = RequestError("HR-CLOSED-01", "this LLM is closed", "create a new one")
        self._inbox.put(("close", None))
        if self._stepping:
            self.engine.interrupt()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Raise what stands against any use: a fork, or the end of the engine."""
        self._check_process()
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # raised again and again, it would keep every caller's frames

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RequestError(
                "HR-FORK-01",
                f"this LLM was created in process {self._pid}; after fork, process {os.getpid()} can't use it",
                "create the LLM in the child, or start the child with multiprocessing's 'spawn' method",
            )

    def _cancel(self, handle: Handle) -> None:
        self._inbox.put(("cancel", handle.request.id))
        if not self._stepping:
            return
        seqs = handle._seqs or ()
        prefilling = any(seq.status == "running" and seq.n_prompt - seq.computed > LONG_PREFILL_TOKENS for seq in seqs)
        live = [ref() for ref in list(self._live.values())]
        if prefilling or all(other is None or other.cancelled for other in live):
            self.engine.interrupt()

    def _abandon(self, handle: Handle) -> None:
        """From a finalizer: no errors, no locks."""
        if os.getpid() == self._pid and self._ended is None:
            self._cancel(handle)

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            log.critical("the engine's thread died", exc_info=True)
            self._ended = DeviceError(
                "HR-ENGINE-01",
                f"the engine stopped unexpectedly: {error!r}",
                "create a new LLM; the traceback is in the log, please report it",
            )
            self._ended.__cause__ = error
            self._fail_all(self._ended)  # before closing the engine, which would call it an abort
        finally:
            self._leave()

    def _serve(self) -> None:
        engine, inbox, live = self.engine, self._inbox, self._live
        while True:
            while not inbox.empty() or not engine.has_work():
                if not self._read(*inbox.get()):
                    return
            self._stepping = True
            touched = engine.step()
            self._stepping = False
            for seq in touched:
                ref = live.get(seq.request.id)
                handle = ref() if ref is not None else None
                if handle is None:
                    live.pop(seq.request.id, None)
                    continue
                final = seq.finish_reason is not None and handle.done
                if final:
                    del live[seq.request.id]
                handle._notify(final)
            del touched
            handle = None  # the last reference may be ours; its finalizer must not wait for the next step

    def _read(self, what: str, about: Any) -> bool:
        """One message; False ends the thread."""
        if what == "close":
            return False
        if what == "cancel":
            self.engine.cancel(about)
            return True
        for ref in about:
            handle = ref()
            if handle is None or handle.cancelled:
                if handle is not None:
                    handle._fail(RequestError("HR-REQUEST-08", f"request {handle.request.id!r} was cancelled"))
                continue
            self._add(handle)
        return True

    def _add(self, handle: Handle) -> None:
        request = handle.request
        try:
            seqs = self.engine.add(request)
        except HeadraceError as error:
            handle._fail(error)
        except Exception as error:  # acceptable: only this request is lost, and it says so
            log.warning("request %r was not accepted", request.id, exc_info=True)
            failure = RequestError("HR-REQUEST-10", f"request {request.id!r} could not be accepted: {error!r}")
            failure.__cause__ = error
            handle._fail(failure)
        else:
            self._live[request.id] = weakref.ref(handle)
            if request.params.logprobs is not None or request.params.prompt_logprobs is not None:
                self._worded.add(handle)
            handle._accept(seqs)

    def _leave(self) -> None:
        """Close engine and executor, end every handle; nothing may be left waiting."""
        assert self._ended is not None
        for close in (self.engine.close, self._keep_outputs, self._on_close):
            try:
                close()
            except Exception:
                log.warning("closing the engine failed", exc_info=True)
        self._fail_all(self._ended)
        self._live.clear()
        atexit.unregister(self._at_exit)

    def _keep_outputs(self) -> None:
        for handle in list(self._worded):
            handle._keep()

    def _fail_all(self, error: BaseException) -> None:
        waiting: list[weakref.ref[Handle]] = []
        while not self._inbox.empty():
            what, about = self._inbox.get()
            waiting += about if what == "add" else ()
        for ref in [*self._live.values(), *waiting]:
            handle = ref()
            if handle is not None:
                handle._fail(error)


def _leave(ref: weakref.ref[Runner]) -> None:
    runner = ref()
    if runner is not None:
        runner.close(timeout_s=EXIT_WAIT_S)


# --- results ---------------------------------------------------------------------------------------------------------


def build_output(seqs: list[Sequence], tokenizer: Tokenizer, prompt: str | None) -> Output:
    """The result of ended sequences: the n samples of one request."""
    from headrace.reports import timings_of, usage_of

    first = seqs[0]
    prompt_logprobs, logits = first.prompt_logprobs, first.prompt_logits
    return Output(
        request_id=first.request.id,
        prompt=prompt,
        prompt_token_ids=tuple(first.tokens[: first.n_prompt]),
        completions=tuple(_completion(seq, tokenizer) for seq in seqs),
        usage=usage_of(seqs),
        timings=timings_of(seqs),
        prompt_logprobs=None
        if prompt_logprobs is None
        else tuple(entry and _logprob(entry, tokenizer) for entry in prompt_logprobs),
        prompt_logits=logits.values if logits is not None and logits.complete else None,
    )


def _completion(seq: Sequence, tokenizer: Tokenizer) -> Completion:
    assert seq.finish_reason is not None
    return Completion(
        index=seq.sample_index,
        text=seq.stream.text if seq.stream is not None else "",
        token_ids=tuple(seq.tokens[seq.n_prompt :]),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=None if seq.logprobs is None else tuple(_logprob(entry, tokenizer) for entry in seq.logprobs),
        error=seq.error,
    )


def _logprob(entry: tuple[list[int], list[float]], tokenizer: Tokenizer) -> TokenLogprob:
    """Column 0 is the token itself, the rest are alternatives."""
    ids, values = entry
    texts = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
    return TokenLogprob(ids[0], texts[0], values[0], tuple(zip(ids[1:], texts[1:], values[1:], strict=True)))
