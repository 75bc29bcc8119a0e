"""`LLM`: the front door for Python. Text or token ids in, `Output` out; from any thread or event loop."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, overload

from headrace.admission import admit_request
from headrace.errors import Busy, ConfigError, HeadraceError, RequestError, did_you_mean
from headrace.runner import Handle, Runner, wake_loop
from headrace.types import Completion, Output, Request, SamplingParams, Timings, Usage, field_names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.catalog import Catalog
    from headrace.config import Config
    from headrace.contracts import Tokenizer
    from headrace.pipeline import Pipeline
    from headrace.schemas import Expected

T = TypeVar("T")
Prompt = str | Seq[int]
Params = SamplingParams | Mapping[str, Any]

BUSY_RETRY_S = 0.02
"""How often a batch looks for room in a queue that others fill."""
REFRESH_S = 0.1


Job = tuple[Request, str | None]
"""A checked request and the text of its prompt, if it has one."""


@dataclass(slots=True)
class Tally:
    """What a batch has finished so far."""

    n_done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, output: Output) -> None:
        self.n_done += 1
        self.prompt_tokens += output.usage.prompt_tokens
        self.completion_tokens += output.usage.completion_tokens


Show = Callable[[Seq[Handle], Tally], None]


@dataclass(frozen=True, slots=True)
class _Wait:
    """A batch can't go on before one of `handles` changes, or `timeout_s` has passed."""

    handles: Seq[Handle]
    timeout_s: float | None = None


class LLM:
    """A loaded model.

    model: a path or URI of a model, a pipeline file (`.toml`), or a `Config`. backend: its name, or a table with its
    options; every other keyword is a config table or key: `LLM("m.gguf", engine={"max_sequences": 4})`.

    Thread-safe. Several may live in one process; none survives a fork (HR-FORK-01). Close it, use it as a context
    manager, or drop it: streams that are still referenced keep it alive.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Config,
        *,
        backend: str | Mapping[str, Any] | None = None,
        catalog: Catalog | None = None,
        report: Callable[[str, float], None] | None = None,
        **overrides: Any,
    ) -> None:
        from headrace.pipeline import build

        self.pipeline: Pipeline = build(_config_of(model, backend, overrides), catalog=catalog, report=report)
        self.catalog = self.pipeline.catalog
        try:
            engine = self.pipeline.engine()
        except BaseException:
            self.pipeline.close()
            raise
        self._runner = Runner(engine, on_close=self.pipeline.close)
        self._numbers = count()
        # from a finalizer nothing may be waited for: the engine's thread frees the model on its own
        self._finalizer = weakref.finalize(self, self._runner.close, False)
        self._finalizer.atexit = False  # the runner leaves in order by itself

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self._runner.tokenizer

    @property
    def context_tokens(self) -> int:
        return self.pipeline.model.context_tokens

    def tokenize(self, text: str, *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def detokenize(self, ids: Seq[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        tokenizer = self.tokenizer
        kept = [token for token in ids if not (skip_special and tokenizer.is_special(token))]
        return b"".join(tokenizer.token_bytes(token) for token in kept).decode("utf-8", "replace")

    # --- generate --------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str | Seq[int],
        params: Params | None = ...,
        *,
        echo: bool = ...,
        progress: bool | None = ...,
        schema: None = ...,
    ) -> Output: ...
    @overload
    def generate(
        self,
        prompts: Seq[str] | Seq[Seq[int]] | Seq[Prompt],
        params: Params | Seq[Params] | None = ...,
        *,
        echo: bool = ...,
        progress: bool | None = ...,
        schema: None = ...,
    ) -> list[Output]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str | Seq[int], params: Params | None = ..., *, progress: bool | None = ..., schema: type[T]
    ) -> T: ...
    @overload
    def generate(
        self,
        prompts: Seq[str] | Seq[Seq[int]] | Seq[Prompt],
        params: Params | Seq[Params] | None = ...,
        *,
        progress: bool | None = ...,
        schema: type[T],
    ) -> list[T]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params | Seq[Params] | None = ...,
        *,
        progress: bool | None = ...,
        schema: Any,
    ) -> Any: ...

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params | Seq[Params] | None = None,
        *,
        echo: bool = False,
        progress: bool | None = None,
        schema: Any = None,
    ) -> Any:
        """Complete prompts: text, or lists of token ids. One prompt gives an Output, a list gives a list in its order.

        Text is raw: no chat template, but names of special tokens are honoured. params: one for all, or one per prompt.
        echo puts the prompt in front of text and token_ids. progress: None shows a bar for a list on a terminal.

        Every prompt is checked before any work starts: RequestError names the index. A failure later is in that
        Output's `error` and touches no other. More prompts than the queue holds are fed as room comes.

        schema: the text is JSON that it allows, and values come back instead of Outputs: for a pydantic model, a
        dataclass, a TypedDict or any type that pydantic takes, validated objects of it; for a JSON schema (a dict, or
        text), plain values. An answer that was cut raises AnswerError HR-CONSTRAINT-10 once all are done; its `output`
        and `outputs` are what came.
        """
        wanted = self._wanted(schema, echo)
        single, jobs = self._jobs(prompts, params, wanted)
        outputs: dict[int, Output] = {}
        self.run(
            jobs, outputs.__setitem__, progress=not single and sys.stderr.isatty() if progress is None else progress
        )
        return self._ordered(outputs, single, echo, wanted)

    async def agenerate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params | Seq[Params] | None = None,
        *,
        echo: bool = False,
        schema: Any = None,
    ) -> Any:
        """`generate` without blocking the event loop; cancelling the task cancels its requests."""
        wanted = self._wanted(schema, echo)
        single, jobs = self._jobs(prompts, params, wanted)
        outputs: dict[int, Output] = {}
        await _adrive(self._feed(iter(jobs), outputs.__setitem__, None))
        return self._ordered(outputs, single, echo, wanted)

    def run(self, jobs: Iterable[Job], done: Callable[[int, Output], object], *, progress: bool = False) -> None:
        """Run jobs (made by `request`) taken from an iterable as room comes; done(i, output) is called as each ends, in
        this thread. For work that is too large to hold. An exception, ^C too, cancels what is under way."""
        n_total = len(jobs) if isinstance(jobs, Sized) else None
        with _display(progress, n_total) as show:
            _drive(self._feed(iter(jobs), done, show), REFRESH_S if show is not None else None)

    def stream(self, prompt: Prompt, params: Params | None = None) -> Handle:
        """Start one request and return its chunks as they come: `for chunk in llm.stream("Hi"): ...`.

        Also `async for`, `with`, `.result()` and `.cancel()`. Dropping it cancels the request. Raises RequestError or
        Busy here, not at the first chunk.
        """
        _, (job,) = self._jobs(_one(prompt), params)
        return self.start(job)

    async def astream(self, prompt: Prompt, params: Params | None = None) -> Handle:
        """`async for chunk in await llm.astream("Hi")`."""
        _, (job,) = self._jobs(_one(prompt), params)
        return await self.astart(job)

    def logits(self, prompt: Prompt, chunk: int | None = None) -> NDArray[np.float32]:
        """The model's logits after every position of one prompt: [n, vocab] float32, yours to keep.

        A request like any other, which waits for room beside those that run; no prefix hit serves it, since a hit has
        no logits. prompt: token ids, or text (with BOS, as for `generate`). chunk: most tokens per step; None: the
        engine's own. Raises RequestError, for a backend without this too.
        """
        if not _is_one(prompt) and len(prompt):
            raise RequestError("HR-REQUEST-13", "logits takes one prompt, not a list of them", "call it for each")
        params = SamplingParams(max_tokens=0, temperature=0.0, top_p=1.0).resolved()
        job = self.request(prompt, params, want_text=False, want_logits=True, prefill_chunk_tokens=_plain_int(chunk))
        self._check_memory(len(job[0].prompt_ids))
        outputs: dict[int, Output] = {}
        self.run([job], outputs.__setitem__)
        if outputs[0].error is not None:
            raise outputs[0].error
        found = outputs[0].prompt_logits
        assert found is not None, f"ended with {outputs[0].finish_reason!r}"
        return found

    def _check_memory(self, n_tokens: int) -> None:
        from headrace.machine import probe_machine

        wanted, available = 4 * n_tokens * self.pipeline.model.vocab_size, probe_machine().available_memory_bytes
        if wanted > available:
            raise RequestError(
                "HR-REQUEST-17",
                f"the logits of {n_tokens} tokens take {wanted / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free",
                "ask for fewer tokens",
            )

    # --- lifetime --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs, stop the engine and free the model. Idempotent, from any thread."""
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> LLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    # --- requests --------------------------------------------------------------------------------------------------

    def resolve(self, params: Params | None) -> SamplingParams:
        """Fill what params leaves open: the config's [sampling], then the model's own defaults, then ours."""
        if params is None:
            params = SamplingParams()
        elif isinstance(params, Mapping):
            params = params_from(params)
        elif not isinstance(params, SamplingParams):
            raise _wrong_kind("params", params, "SamplingParams or a dict, or a list of these for a list of prompts")
        return params.resolved(self.pipeline.sampling_defaults)

    def _wanted(self, schema: Any, echo: bool) -> Expected | None:
        from headrace.schemas import expected

        if schema is not None and echo:
            raise RequestError("HR-REQUEST-18", "echo and schema were both asked for", "a value has no prompt in front")
        return None if schema is None else expected(schema)

    def _jobs(
        self, prompts: Prompt | Seq[Prompt], params: Params | Seq[Params] | None, wanted: Expected | None = None
    ) -> tuple[bool, list[Job]]:
        """(one prompt only, its or their checked jobs)."""
        single = _is_one(prompts)
        several: Seq[Any] = [prompts] if single else prompts
        if not _is_list(params):
            resolved = [self.resolve(params)] * len(several)  # type: ignore[arg-type]
        elif len(params) != len(several):
            raise RequestError(
                "HR-REQUEST-11",
                f"{len(several)} prompts, but {len(params)} params",
                "give one SamplingParams for all prompts, or a list with one for each",
            )
        else:
            resolved = [self.resolve(each) for each in params]
        if wanted is not None:
            resolved = [_held(each, wanted) for each in resolved]
        jobs = []
        for i, (prompt, each) in enumerate(zip(several, resolved, strict=True)):
            try:
                jobs.append(self.request(prompt, each))
            except HeadraceError as error:
                if single:
                    raise
                raise type(error)(error.code, f"prompt {i}: {error.message}", error.help) from error
        return single, jobs

    def request(self, prompt: Prompt, params: SamplingParams, text: str | None = None, **fields: Any) -> Job:
        """A checked request and its prompt text. params must be resolved; fields are those of `Request`."""
        self._runner.check()
        if isinstance(prompt, str):
            text = prompt
            ids = encode_text(self.tokenizer, prompt) if prompt else []
        elif not _is_list(prompt):
            raise _wrong_kind("a prompt", prompt, "text or a list of token ids")
        else:
            ids = [_plain_int(token) for token in prompt]
        engine = self._runner.engine
        if params.n > engine.options.max_waiting:
            raise RequestError(
                "HR-REQUEST-14",
                f"n = {params.n}, but the queue holds {engine.options.max_waiting} sequences",
                "ask for fewer samples, or raise engine.max_waiting",
            )
        request = Request(
            id=f"req-{next(self._numbers)}",
            prompt_ids=tuple(ids),
            params=params,
            arrival_s=engine.clock(),
            **fields,
        )
        admit_request(request, engine.executor, engine.kv, engine.constraints)
        return request, text

    def start(self, job: Job) -> Handle:
        """Run a job made by `request`."""
        return self._runner.submit(*job, owner=self)

    async def astart(self, job: Job) -> Handle:
        return await self._runner.asubmit(*job, owner=self)

    def echoed(self, output: Output) -> Output:
        """The output with its prompt in front."""
        prompt = output.prompt if output.prompt is not None else self.detokenize(output.prompt_token_ids)
        return prefixed(output, prompt, output.prompt_token_ids)

    def _ordered(self, outputs: Mapping[int, Output], single: bool, echo: bool, wanted: Expected | None = None) -> Any:
        ordered: list[Any] = [self.echoed(outputs[i]) if echo else outputs[i] for i in range(len(outputs))]
        if wanted is not None:
            from headrace.schemas import values_of

            ordered = values_of(wanted, ordered, single)
        return ordered[0] if single else ordered

    # --- batches ---------------------------------------------------------------------------------------------------

    def _feed(
        self, jobs: Iterator[Job], done: Callable[[int, Output], object], show: Show | None
    ) -> Generator[_Wait, None, None]:
        """Keep the engine supplied with jobs; yields when it must wait."""
        engine = self.pipeline.config.engine
        window = max(1, min(engine.max_waiting, 4 * engine.max_sequences))
        numbered = enumerate(jobs)
        refused: list[tuple[int, Job]] = []
        live: dict[int, tuple[Job, Handle]] = {}
        tally = Tally()
        try:
            while True:
                batch, refused = refused, []
                batch += islice(numbered, max(0, window - len(live) - len(batch)))
                handles = self._runner.enqueue([job for _, job in batch], owner=self)
                live |= {i: (job, handle) for (i, job), handle in zip(batch, handles, strict=True)}
                if not live:
                    return
                under_way = [handle for _, handle in live.values()]
                if not any(handle.done for handle in under_way):
                    yield _Wait(under_way)
                for i, (job, handle) in [item for item in live.items() if item[1][1].done]:
                    del live[i]
                    if isinstance(handle._error, Busy):
                        refused.append((i, job))
                    else:
                        output = self._outcome(handle)
                        tally.add(output)
                        done(i, output)
                under_way = [handle for _, handle in live.values()]
                if show is not None:
                    show(under_way, tally)
                if refused:
                    yield _Wait(under_way, BUSY_RETRY_S)
        finally:
            for _, handle in live.values():
                handle.cancel()

    def _outcome(self, handle: Handle) -> Output:
        try:
            return handle._output()
        except RequestError as error:
            if error.code.startswith(("HR-CLOSED", "HR-FORK")):
                raise
            failed = Completion(index=0, text="", token_ids=(), finish_reason="error", error=error)
            request = handle.request
            return Output(
                request_id=request.id,
                prompt=handle.prompt,
                prompt_token_ids=request.prompt_ids,
                completions=(failed,),
                usage=Usage(len(request.prompt_ids), 0, 0),
                timings=Timings(0.0, 0.0, 0.0, 0.0, 0.0),
            )


def _held(params: SamplingParams, wanted: Expected) -> SamplingParams:
    if params.constraint is not None:
        raise RequestError(
            "HR-CONSTRAINT-11", "a schema and params.constraint were both asked for", "leave one of them out"
        )
    if params.n != 1:
        raise RequestError("HR-REQUEST-18", f"n = {params.n} with a schema: a prompt has one value", "leave n out")
    return replace(params, constraint=wanted.grammar)


def params_from(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a mapping; RequestError for a key that is none of its fields."""
    known = field_names(SamplingParams)
    for name in values:
        if name not in known:
            raise RequestError(
                "HR-REQUEST-12",
                f"unknown sampling parameter {name!r}",
                f"{did_you_mean(name, known)}known: {', '.join(known)}",
            )
    return SamplingParams(**values)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a whole prompt: special tokens by their names, BOS first where the model wants one, never twice."""
    ids = tokenizer.encode(text, add_bos=True, parse_special=True)
    bos = tokenizer.bos_id
    while bos is not None and ids[:2] == [bos, bos]:  # the text names it, and the tokenizer adds it
        del ids[0]
    return ids


def prefixed(output: Output, text: str, ids: tuple[int, ...] = ()) -> Output:
    """The output with text (and ids) in front of every completion."""
    return replace(
        output,
        completions=tuple(replace(c, text=text + c.text, token_ids=ids + c.token_ids) for c in output.completions),
    )


def _config_of(
    model: str | os.PathLike[str] | Config, backend: str | Mapping[str, Any] | None, overrides: dict[str, Any]
) -> Config:
    from headrace.config import Config, file_or_model, load_config

    if backend is not None:
        overrides["backend"] = {"use": backend} if isinstance(backend, str) else dict(backend)
    if isinstance(model, Config):
        if overrides:
            raise ConfigError(
                "HR-CONFIG-20",
                f"a Config object can't be combined with {', '.join(sorted(overrides))}",
                "put these into the config, or pass a path",
            )
        return model
    path, uri = file_or_model(os.fspath(model))
    return load_config(path, model=uri, overrides=overrides)


def _one(prompt: Prompt) -> Prompt:
    if not _is_one(prompt):
        raise RequestError("HR-REQUEST-13", "a stream takes one prompt, not a list", "use generate() for several")
    return prompt


def _is_one(prompts: Any) -> bool:
    """One prompt, right or wrong, rather than a list of prompts."""
    return not _is_list(prompts) or (len(prompts) > 0 and not isinstance(prompts[0], str) and not _is_list(prompts[0]))


def _is_list(value: Any) -> TypeGuard[Seq[Any]]:
    """A list, a tuple, an array of numpy, ...: what is counted and indexed from 0, and isn't text or bytes."""
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()
    return listed and not isinstance(value, (str, bytes, bytearray, Mapping))


def _wrong_kind(what: str, given: Any, wanted: str) -> RequestError:
    return RequestError("HR-REQUEST-15", f"{what} can't be {given!r:.60} ({type(given).__name__})", f"give {wanted}")


def _plain_int(token: Any) -> Any:
    """numpy integers become Python's; anything else is left for admission to refuse."""
    return token if type(token) is int else getattr(token, "item", lambda: token)()


# --- drivers: the same batch, blocking and async ---------------------------------------------------------------------


def _drive(feed: Generator[_Wait, None, None], refresh_s: float | None) -> None:
    news: SimpleQueue[None] = SimpleQueue()  # ^C leaves it whole, unlike an Event (see Handle._block)
    armed: set[str] = set()

    def fire(name: str) -> None:
        armed.discard(name)
        news.put(None)

    try:
        for pause in feed:
            while not news.empty():
                news.get()
            _arm(pause.handles, armed, fire)
            if pause.timeout_s is not None or not any(handle.done for handle in pause.handles):
                with contextlib.suppress(Empty):
                    news.get(timeout=pause.timeout_s if pause.timeout_s is not None else refresh_s)
    finally:
        feed.close()


async def _adrive(feed: Generator[_Wait, None, None]) -> None:
    import asyncio

    event, loop = asyncio.Event(), asyncio.get_running_loop()
    armed: set[str] = set()

    def fire(name: str) -> None:
        armed.discard(name)
        wake_loop(loop, event)

    try:
        for pause in feed:
            event.clear()
            _arm(pause.handles, armed, fire)
            if pause.timeout_s is not None or not any(handle.done for handle in pause.handles):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), pause.timeout_s)
    finally:
        feed.close()


def _arm(handles: Seq[Handle], armed: set[str], fire: Callable[[str], None]) -> None:
    """Ask each handle once for a wake-up; asking again before it came would only pile up."""
    for handle in handles:
        name = handle.request.id
        if name not in armed:
            armed.add(name)
            handle.watch(partial(fire, name))
            if handle.done:  # maybe too late for a call, and a retry of the request has the same name
                armed.discard(name)


# --- progress --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _display(progress: bool, n_total: int | None) -> Iterator[Show | None]:
    """A bar on stderr: prompts done, prefill and decode tokens per second."""
    if not progress:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=n_total)
        started = time.perf_counter()

        def show(live: Seq[Handle], tally: Tally) -> None:
            seconds = max(time.perf_counter() - started, 1e-6)
            prefill = (tally.prompt_tokens + sum(handle.n_prefilled for handle in live)) / seconds
            decode = (tally.completion_tokens + sum(handle.n_generated for handle in live)) / seconds
            rates = f"prefill {prefill:,.0f} tok/s · decode {decode:,.1f} tok/s"
            bar.update(task, completed=tally.n_done, description=rates)

        yield show
