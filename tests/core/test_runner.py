"""The engine's thread: submission, streams, cancellation, death, close; on toy executors, without a clock."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.engine import Engine
from headrace.errors import Busy, DeviceError, HeadraceError, RequestError, StepFailed
from headrace.kvspace import PagedSpace
from headrace.outputs import TextStream
from headrace.runner import Runner
from headrace.testing.toy import ToyModel, ToyPaged
from headrace.types import Chunk, EngineOptions, Request, SamplingParams, StepPlan

MODEL = ToyModel(vocab=270, seed=3, repeat=0.6, eos_rate=0.0)


class Gate(ToyPaged):
    """A toy executor that stands still before each step while it is held; `interrupt` fails the step it stands in."""

    def __init__(self, **more: Any) -> None:
        super().__init__(MODEL, n_blocks=512, block_tokens=4, **more)
        self._held = self._aborted = False
        self._standing = threading.Event()
        self._permits = threading.Semaphore(0)
        self._n_interrupts = 0

    def forward(self, plan: StepPlan) -> Any:
        if self._held:
            self._standing.set()
            self._permits.acquire()
        aborted, self._aborted = self._aborted, False
        if aborted:
            raise StepFailed("interrupted")
        return super().forward(plan)

    def interrupt(self) -> None:
        self._n_interrupts += 1
        self._aborted = True
        release(self)


def hold(executor: Gate) -> None:
    executor._held = True


def stands(executor: Gate) -> None:
    assert executor._standing.wait(30)


def advance(executor: Gate) -> None:
    """One step further."""
    executor._standing.clear()
    executor._permits.release()
    stands(executor)


def release(executor: Gate) -> None:
    executor._held = False
    if executor._standing.is_set():
        executor._standing.clear()
        executor._permits.release()


def make(executor: Gate | None = None, **options: Any) -> tuple[Runner, Gate]:
    executor = executor or Gate()
    executor.open()
    settings = EngineOptions(**{"max_sequences": 4, "max_waiting": 4, "prefill_chunk_tokens": 16, **options})
    kv = PagedSpace(executor.layout, settings.max_sequences, prefix_cache=settings.prefix_cache)
    return Runner(Engine(executor, kv, settings), on_close=executor.close), executor


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[Runner, Gate]]]:
    runners = []

    def start(*args: Any, **options: Any) -> tuple[Runner, Gate]:
        runners.append(make(*args, **options))
        return runners[-1]

    yield start
    for runner, executor in runners:
        release(executor)
        runner.close()


def request(id: str, prompt: str = "hello", **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 8, **params}).resolved()
    return Request(id=id, prompt_ids=tuple(prompt.encode()), params=sampling)


def joined(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_stream_equals_result(started: Any) -> None:
    runner, _ = started()
    handle = runner.submit(request("a", n=2, max_tokens=20))
    chunks = list(handle)
    output = handle.result()
    assert len(output.completions) == 2
    for completion in output.completions:
        own = [chunk for chunk in chunks if chunk.index == completion.index]
        assert joined(own) == completion.text
        assert sum((chunk.token_ids for chunk in own), ()) == completion.token_ids
        assert [bool(chunk.text) for chunk in own[:-1]] == [True] * (len(own) - 1)
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
    assert output.completions[0].token_ids != output.completions[1].token_ids
    assert output.usage.completion_tokens == 40
    assert list(handle) == []


def test_output_facts(started: Any) -> None:
    runner, _ = started()
    first = runner.submit(request("a", "x" * 40, logprobs=2, temperature=0.0)).result()
    again = runner.submit(request("b", "x" * 40, logprobs=2, temperature=0.0)).result()
    assert again.token_ids == first.token_ids
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens > 0
    assert first.logprobs is not None
    assert [entry.id for entry in first.logprobs] == list(first.token_ids)
    assert all(len(entry.top) == 2 and entry.top[0][2] >= entry.top[1][2] for entry in first.logprobs)
    assert first.timings.total_s >= first.timings.first_token_s >= first.timings.queue_s >= 0


def test_async_stream(started: Any) -> None:
    runner, _ = started()

    async def one(name: str) -> str:
        handle = await runner.asubmit(request(name))
        chunks = [chunk async for chunk in handle]
        assert joined(chunks) == (await handle.aresult()).text
        return joined(chunks)

    async def main() -> list[str]:
        return await asyncio.gather(*(one(f"r{i}") for i in range(4)))

    texts = asyncio.run(main())
    assert len(set(texts)) == 1


def test_many_threads(started: Any) -> None:
    runner, _ = started(max_waiting=64)
    texts: dict[int, str] = {}

    def work(i: int) -> None:
        texts[i] = runner.submit(request(f"r{i}", f"prompt {i % 4}")).result().text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 16
    assert all(texts[i] == texts[i % 4] for i in range(16))
    assert not runner._live


def test_refusals_come_in_the_callers_thread(started: Any) -> None:
    runner, _ = started()
    with pytest.raises(RequestError, match="HR-REQUEST-02"):
        runner.submit(Request(id="empty", prompt_ids=(), params=SamplingParams().resolved()))
    with pytest.raises(RequestError, match="HR-REQUEST-05"):
        runner.submit(Request(id="big", prompt_ids=(10**6,), params=SamplingParams().resolved()))
    assert runner.submit(request("fine")).result().finish_reason == "length"


def test_full_queue_is_busy(started: Any) -> None:
    runner, executor = started(max_sequences=1, max_waiting=1)
    hold(executor)
    running = runner.submit(request("running"))
    stands(executor)
    handles = runner.enqueue([(request("queued"), None), (request("over"), None)])
    release(executor)
    with pytest.raises(Busy, match="1 requests are waiting"):
        handles[1].result()
    assert handles[0].result().finish_reason == "length"
    assert running.result().finish_reason == "length"


def test_cancel_interrupts_a_step_when_nobody_else_runs(started: Any) -> None:
    runner, executor = started()
    hold(executor)
    handle = runner.submit(request("a"))
    stands(executor)
    handle.cancel()
    assert executor._n_interrupts == 1
    assert handle.result().finish_reason == "abort"
    assert runner.submit(request("b")).result().finish_reason == "length"


def test_cancel_between_steps_leaves_others_alone(started: Any) -> None:
    runner, executor = started()
    expected = runner.submit(request("x")).result().token_ids
    hold(executor)
    first, second = runner.enqueue([(request("a"), None), (request("b"), None)])
    stands(executor)
    first.cancel()
    assert executor._n_interrupts == 0
    release(executor)
    assert first.result().finish_reason == "abort"
    assert second.result().token_ids == expected


def test_long_prefill_is_interrupted_beside_others(started: Any) -> None:
    runner, executor = started()
    expected = runner.submit(request("x", max_tokens=30)).result().token_ids
    hold(executor)
    other = runner.enqueue([(request("a", max_tokens=30), None)])[0]
    stands(executor)
    long = runner.enqueue([(request("long", "y" * 200), None)])[0]
    while not long.n_prefilled:
        advance(executor)
    long.cancel()
    assert executor._n_interrupts == 1
    assert other.result().token_ids == expected
    assert long.result().finish_reason == "abort"


def test_dropped_handle_cancels(started: Any) -> None:
    runner, executor = started()
    hold(executor)
    handle = runner.submit(request("a", max_tokens=1000))
    stands(executor)
    (seq,) = handle._seqs
    del handle
    gc.collect()
    release(executor)
    assert runner.submit(request("b")).result().finish_reason == "length"
    assert seq.finish_reason == "abort"
    assert not runner._live


def test_slow_consumer_holds_nothing(started: Any) -> None:
    runner, _ = started()
    handle = runner.submit(request("a", max_tokens=200))
    other = runner.submit(request("b", max_tokens=200))
    other.result()
    assert handle._waiters == []  # nobody asked, so nothing was queued
    assert len(joined(list(handle))) > 0


def test_a_waiter_that_fails_loses_only_its_news(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner, executor = started()
    hold(executor)
    handle = runner.submit(request("a"))
    handle.watch(lambda: 1 // 0)
    release(executor)
    assert handle.result().finish_reason == "length"
    assert runner.submit(request("b")).result().finish_reason == "length"
    assert "a waiter of request 'a' failed" in caplog.text


class Interrupted:
    """A queue in whose `get` ^C comes."""

    def put(self, item: object) -> None:
        pass

    def get(self) -> None:
        raise KeyboardInterrupt


def test_waits_that_are_given_up_leave_nothing(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, executor = started()
    hold(executor)
    handle = runner.submit(request("a"))
    with monkeypatch.context() as patch:
        patch.setattr("headrace.runner.SimpleQueue", Interrupted)
        for wait in (handle.result, handle.__next__):
            with pytest.raises(KeyboardInterrupt):
                wait()
    assert handle._waiters == []

    async def poll() -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle.aresult(), 1e-4)

    asyncio.run(poll())
    assert handle._waiters == []
    release(executor)
    assert handle.result().finish_reason == "length"


def test_readers_of_one_stream_share_it(started: Any) -> None:
    runner, _ = started()
    handle = runner.submit(request("a", max_tokens=1500))
    ids: list[int] = []

    def read() -> None:
        for chunk in handle:
            ids.extend(chunk.token_ids)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        readers = [threading.Thread(target=read) for _ in range(6)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        sys.setswitchinterval(before)
    assert len(ids) == 1500


def test_a_reader_that_sees_the_end_sees_all(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever polls in another thread finds text that was held back once the request counts as ended."""
    runner, executor = started()
    hold(executor)
    seen = []
    finish = TextStream.finish

    def slow(stream: TextStream) -> None:
        seen.append(handle.done)
        finish(stream)

    monkeypatch.setattr(TextStream, "finish", slow)
    handle = runner.submit(request("a"))
    release(executor)
    handle.result()
    assert seen == [False]


def test_logprobs_may_be_read_after_close(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, executor = started()
    handle = runner.submit(request("a", logprobs=2, prompt_logprobs=1, temperature=0.0))
    expected = handle.result()
    alive = executor.tokenizer.token_bytes
    monkeypatch.setattr(executor.tokenizer, "token_bytes", lambda token: alive(token) if executor._opened else 1 // 0)
    runner.close()
    assert handle.result() == expected


def test_errors_raised_again_keep_no_frames(started: Any) -> None:
    runner, _ = started()
    runner.close()
    depths = []
    for _ in range(3):
        with pytest.raises(RequestError) as caught:
            runner.submit(request("a"))
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_deadline(started: Any) -> None:
    runner, _ = started()
    params = SamplingParams(max_tokens=8, deadline_s=0.0).resolved()
    late = Request(id="late", prompt_ids=(1, 2), params=params, arrival_s=runner.engine.clock() - 1)
    assert runner.submit(late).result().finish_reason == "deadline"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_engine_ends_everything(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, executor = started()
    hold(executor)
    running = runner.submit(request("a"))
    stands(executor)
    waiting = runner.enqueue([(request("b"), None)])[0]

    def explode() -> Any:
        raise ZeroDivisionError("a bug")

    step = runner.engine.step
    monkeypatch.setattr(runner.engine, "step", lambda: (step(), explode()))
    release(executor)
    for handle in (running, waiting):
        with pytest.raises(HeadraceError) as caught:
            [*handle, handle.result()]
        assert caught.value.code in ("HR-ENGINE-01",)
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        runner.submit(request("c"))
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        asyncio.run(runner.asubmit(request("d")))
    runner.close()


def test_failed_row_raises_in_its_stream_only(started: Any) -> None:
    def fail(plan: StepPlan) -> Exception | None:
        firsts = plan.tokens[plan.offset[:-1]].tolist()
        return StepFailed("no exclamations", [firsts.index(ord("!"))]) if ord("!") in firsts else None

    runner, _ = started(Gate(fail=fail))
    bad, good = runner.enqueue([(request("bad", "!bad"), None), (request("good"), None)])
    assert good.result().finish_reason == "length"
    assert bad.result().error is not None
    with pytest.raises(RequestError, match="HR-STEP"):
        list(bad)


def test_close_aborts_joins_and_repeats(started: Any) -> None:
    runner, executor = started()
    hold(executor)
    handle = runner.submit(request("a", max_tokens=1000))
    stands(executor)
    closers = [threading.Thread(target=runner.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert not runner._thread.is_alive()
    assert handle.result().finish_reason == "abort"
    assert [chunk.finish_reason for chunk in handle][-1] == "abort"
    with pytest.raises(RequestError, match="HR-CLOSED-01"):
        runner.submit(request("b"))
    runner.close()


def test_close_without_waiting_frees_in_the_engines_thread(started: Any) -> None:
    runner, _ = started()
    runner.close(wait=False)
    runner._thread.join()
    assert not runner._thread.is_alive()


def test_runner_is_collected_after_close() -> None:
    runner, _ = make()
    runner.close()
    ref = weakref.ref(runner)
    del runner, _
    gc.collect()
    assert ref() is None


def test_two_runners_at_once(started: Any) -> None:
    one, _ = started()
    two, _ = started()
    handles = [one.submit(request("a")), two.submit(request("a"))]
    assert handles[0].result().token_ids == handles[1].result().token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_is_refused(started: Any) -> None:
    runner, _ = started()
    handle = runner.submit(request("a"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            codes = []
            for use in (lambda: runner.submit(request("b")), handle.result, handle.cancel):
                try:
                    use()
                    codes.append("no error")
                except HeadraceError as error:
                    codes.append(error.code)
            runner.close()  # the parent's; does nothing
            os.write(writer, ",".join(codes).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000) == b"HR-FORK-01,HR-FORK-01,HR-FORK-01"
    assert handle.result().finish_reason == "length"


def test_interpreter_leaves_with_work_under_way() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests/core'); from test_runner import make, request\n"
        "runner, executor = make()\n"
        "handle = runner.submit(request('a', max_tokens=1500)); next(handle); print('left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=os.path.join(os.path.dirname(__file__), "..", ".."),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr
