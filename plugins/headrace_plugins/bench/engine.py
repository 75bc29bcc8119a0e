"""`bench engine`: our engine against a raw loop over the same library, step by step in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from headrace.catalog import Catalog
from headrace.config import Config
from headrace.engine import Engine
from headrace.errors import PluginError, RequestError
from headrace.hooks import BackendSpec
from headrace.pipeline import Pipeline, build
from headrace.types import Request, SamplingParams
from headrace_plugins.bench.report import Result, compared, measured

PROMPT = "Write a long story about a dragon who learns to read."

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, top_k=0, min_p=0),
    "temperature 0.8, unfiltered": SamplingParams(temperature=0.8, top_p=1, top_k=0, min_p=0),
}


class Baseline(Protocol):
    """What `BackendSpec.baseline` names: a raw loop over the library of an open executor."""

    decode_s: float
    """Seconds that the executor, not the loop, spent inside the library so far."""

    def start(self, prompts: Seq[Seq[int]]) -> None:
        """Forget everything and take the first token of each prompt."""

    def step(self) -> object:
        """One token for every prompt."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Round:
    """Seconds per step of one round: ours, the raw loop's, and ours outside the library."""

    ours: list[float]
    raw: list[float]
    host: list[float]


def run(config: Config, catalog: Catalog, n_requests: tuple[int, ...], n_tokens: int, n_rounds: int) -> list[Result]:
    """Every case for every number of requests. Both sides decode batches of the same shape at the same positions."""
    with build(config, catalog=catalog) as pipeline:
        return _run(pipeline, n_requests, n_tokens, n_rounds)


def _run(pipeline: Pipeline, n_requests: tuple[int, ...], n_tokens: int, n_rounds: int) -> list[Result]:
    catalog = pipeline.catalog
    entry = catalog.find(BackendSpec, _backend_of(pipeline))
    if not entry.spec.baseline:
        raise PluginError(
            "HR-BENCH-01", f"backend '{entry.spec.name}' has no raw loop to compare with", _with_a_loop(catalog)
        )
    raw: Baseline = catalog.load_object(entry.spec.baseline, entry)(pipeline.executor)
    results: list[Result] = []
    try:
        for n in n_requests:
            for name, params in CASES.items():
                rounds = [_round(pipeline, raw, n, n_tokens, params, r) for r in range(n_rounds)]
                results += _summary(f"{n} request{'s' if n > 1 else ''}, {name}", n, rounds)
    finally:
        raw.close()
    return results


def _with_a_loop(catalog: Catalog) -> str:
    names = [entry.spec.name for entry in catalog.specs(BackendSpec) if entry.spec.baseline]
    return f"these have one: {', '.join(names)}" if names else "install a backend that has one"


def _backend_of(pipeline: Pipeline) -> str:
    return next(decision.value for decision in pipeline.decisions if decision.key == "backend")


def _summary(name: str, n: int, rounds: list[_Round]) -> list[Result]:
    ours = median([n * len(r.ours) / sum(r.ours) for r in rounds])
    raw = median([n * len(r.raw) / sum(r.raw) for r in rounds])
    # the ratio of each round's neighbours, since a shared machine drifts between rounds
    ratio = median([sum(r.raw) / sum(r.ours) for r in rounds])
    host = median([1e6 * median(r.host) for r in rounds])
    speed = compared(f"{name}: speed", ours, raw, "tokens/s")
    unit = "us/token" if n == 1 else "us/step"
    return [
        Result(speed.name, speed.ours, speed.baseline, round(ratio, 4), speed.unit),
        measured(f"{name}: host time outside the library", host, unit),
    ]


def _round(pipeline: Pipeline, raw: Baseline, n: int, n_tokens: int, params: SamplingParams, number: int) -> _Round:
    """Prefill both sides, then alternate single steps; who goes first alternates too."""
    engine = pipeline.engine()
    params = replace(params, max_tokens=n_tokens + 8, ignore_eos=True, seed=1 + number).resolved()
    prompts = prompts_for(pipeline, n)
    prefill(engine, prompts, params)
    raw.start(prompts)
    found = _Round([], [], [])
    for i in range(n_tokens):
        if i % 2:
            found.raw.append(_timed_raw(raw))
            _timed_ours(engine, raw, found)
        else:
            _timed_ours(engine, raw, found)
            found.raw.append(_timed_raw(raw))
    engine.close()
    return found


def prompts_for(pipeline: Pipeline, n: int) -> list[list[int]]:
    """n prompts that differ at their end."""
    tokenizer = pipeline.tokenizer
    try:
        ids = tokenizer.encode(PROMPT)
        return [[*ids, *tokenizer.encode(f" Part {i}.", add_bos=False)] for i in range(n)]
    except RequestError:  # a model without tokenizer takes any ids
        most = pipeline.model.vocab_size
        return [[*(j % most for j in range(20)), i % most] for i in range(n)]


def prefill(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams) -> None:
    """Start a request per prompt and step until each has its first token."""
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=f"bench-{i}", prompt_ids=tuple(prompt), params=params))
    while engine.scheduler.waiting or any(seq.n_generated == 0 for seq in engine.scheduler.running):
        engine.step()


def _timed_raw(raw: Baseline) -> float:
    started = time.perf_counter()
    raw.step()
    return time.perf_counter() - started


def _timed_ours(engine: Engine, raw: Baseline, found: _Round) -> None:
    before = raw.decode_s
    started = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - started
    found.ours.append(seconds)
    found.host.append(seconds - (raw.decode_s - before))
