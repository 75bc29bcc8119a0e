"""`bench determinism`: what batch invariance costs, two engines on one backend, step by step in one process."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

from headrace.catalog import Catalog
from headrace.config import Config
from headrace.engine import Engine
from headrace.pipeline import Pipeline, build
from headrace.types import SamplingParams
from headrace_plugins.bench.engine import prefill, prompts_for
from headrace_plugins.bench.report import Result, compared

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def run(config: Config, catalog: Catalog, n_requests: tuple[int, ...], n_tokens: int, n_rounds: int) -> list[Result]:
    """Decode speed for every number of requests, and of one prefill of all of them: batch-invariant is ours, off the
    baseline. ConfigError where the backend can't be batch-invariant."""
    with (
        build(replace(config, determinism="batch-invariant"), catalog=catalog) as ours,
        build(replace(config, determinism="off"), catalog=catalog) as plain,
    ):
        results: list[Result] = []
        for n in n_requests:
            rounds = [_round(ours, plain, n, n_tokens) for _ in range(n_rounds)]
            name = f"{n} request{'s' if n > 1 else ''}"
            for i, what in enumerate(("prefill", "decode")):
                exact, off = (median(each[i][side] for each in rounds) for side in range(2))
                results.append(compared(f"{name}: {what}", exact, off, "tokens/s"))
    return results


def _round(ours: Pipeline, plain: Pipeline, n: int, n_tokens: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Tokens per second of (ours, plain): prefill, decode."""
    prompts = prompts_for(ours, n)
    params = replace(GREEDY, max_tokens=n_tokens + 8).resolved()
    engines: list[Engine] = [ours.engine(), plain.engine()]
    prefills: list[float] = []
    for engine in engines:
        started = time.perf_counter()
        prefill(engine, prompts, params)
        prefills.append(sum(map(len, prompts)) / (time.perf_counter() - started))
    seconds = [0.0, 0.0]
    for i in range(n_tokens):
        for side in (0, 1) if i % 2 else (1, 0):
            started = time.perf_counter()
            engines[side].step()
            seconds[side] += time.perf_counter() - started
    for engine in engines:
        engine.close()
    decodes = [n * n_tokens / each for each in seconds]
    return (prefills[0], prefills[1]), (decodes[0], decodes[1])
