"""`bench scheduler`: what the engine itself costs per step and sequence, on an executor that does nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

from headrace.engine import Engine
from headrace.kvspace import PagedSpace
from headrace.testing.toy import ToyModel, ToyPaged
from headrace.types import EngineOptions, MaskBatch, Request, SamplingParams, StepPlan, StepResult
from headrace_plugins.bench.report import Result, compared, measured

SIZES = (1, 16, 64, 256, 512)
PROMPT_TOKENS = 512


class _Timedian(ToyPaged):
    """Knows how long it was busy itself, which is no part of the figure."""

    busy_s = 0.0

    def forward(self, plan: StepPlan) -> Any:
        started = time.perf_counter()
        step = super().forward(plan)
        self.busy_s += time.perf_counter() - started
        return step

    def sample(self, step: Any, masks: MaskBatch | None) -> None:
        started = time.perf_counter()
        super().sample(step, masks)
        self.busy_s += time.perf_counter() - started

    def collect(self, step: Any) -> StepResult:
        started = time.perf_counter()
        result = super().collect(step)
        self.busy_s += time.perf_counter() - started
        return result


def run(n_steps: int = 200, sizes: Iterable[int] = SIZES) -> list[Result]:
    """Prefix cache and stop ids on, 512-token prompts, decoding. `text` adds detokenising and two stop strings.

    The baseline appends a token to each of n lists and looks it up in a set: the least that any Python engine does.
    """
    results = []
    for text in (False, True):
        label = "schedule + update + text" if text else "schedule + update"
        medians = {}
        for n in sizes:
            ours, floor = _measure(n, n_steps, text)
            medians[n] = median(ours)
            results.append(compared(f"{label}, {n} sequences", medians[n], median(floor), "us/step/sequence"))
        wide = [value for n, value in medians.items() if n >= 64]
        if wide:
            results.append(measured(f"{label}, max / min over n >= 64", max(wide) / min(wide), "ratio"))
    return results


def _measure(n: int, n_steps: int, text: bool) -> tuple[list[float], list[float]]:
    model = ToyModel(vocab=512, context=PROMPT_TOKENS + n_steps + 16, fast=True)
    n_blocks = n * (-(-model.context // 16) + 1)
    executor = _Timedian(model, n_blocks=n_blocks, block_tokens=16, max_rows=n, max_tokens=1 << 24)
    executor.open()
    options = EngineOptions(max_sequences=n, max_batch_tokens=1 << 24, prefill_chunk_tokens=4096)
    engine = Engine(executor, PagedSpace(executor.layout, n), options)
    params = SamplingParams(
        max_tokens=n_steps + 8, temperature=0, stop_token_ids=(300, 301), stop=("zzz", "\n\n") if text else ()
    ).resolved()
    for i in range(n):
        prompt = (i % 256, i // 256, *(j % 251 for j in range(PROMPT_TOKENS - 2)))
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params, want_text=text))
    engine.step()
    ours, floor = [], []
    lists: list[list[int]] = [[] for _ in range(n)]
    stops = frozenset((300, 301))
    gc.disable()
    try:
        for step in range(n_steps):
            executor.busy_s = 0.0
            started = time.perf_counter()
            engine.step()
            ours.append(1e6 * (time.perf_counter() - started - executor.busy_s) / n)
            started = time.perf_counter()
            for tokens in lists:
                tokens.append(step)
                if step in stops:
                    break
            floor.append(1e6 * (time.perf_counter() - started) / n)
    finally:
        gc.enable()
    engine.close()
    return ours, floor
