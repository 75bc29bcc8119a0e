"""Records as the engine would make them, for checks that need no engine."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from headrace.sampling import new_table
from headrace.types import RequestStats, StepPlan, StepStats, Timings, Usage


def fake_plan(lengths: Seq[int], slots: Seq[int] | None = None) -> StepPlan:
    """A plan with one row per length, at positions [0, length), all sampling greedily."""
    n_rows, offset = len(lengths), np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offset[1:])
    index = np.arange(n_rows, dtype=np.int32)
    return StepPlan(
        step=1,
        seq=index,
        slot=index if slots is None else np.array(slots, np.int32),
        start=np.zeros(n_rows, np.int32),
        length=np.array(lengths, np.int32),
        n_draft=np.zeros(n_rows, np.int32),
        offset=offset,
        tokens=np.arange(int(offset[-1]), dtype=np.int32) % 256,
        sample=np.ones(n_rows, np.bool_),
        wants=np.ones(n_rows, np.uint8),
        sampling=new_table(max(1, n_rows)),
    )


def fake_step_stats(
    step: int, *, n_rows: int = 4, n_tokens: int = 40, seconds: Mapping[str, float] | None = None
) -> StepStats:
    phases = ("schedule", "forward", "mask", "sample", "update")
    return StepStats(
        step=step,
        n_rows=n_rows,
        n_tokens=n_tokens,
        n_running=n_rows,
        n_waiting=2,
        kv_used_ratio=0.25,
        preemptions=step // 10,
        drafted=8,
        accepted=5,
        seconds=dict.fromkeys(phases, 0.001) if seconds is None else seconds,
    )


def fake_request_stats(
    *, finish_reason: Any = "stop", prompt_tokens: int = 12, completion_tokens: int = 20, rate: float = 50.0
) -> RequestStats:
    return RequestStats(
        request_id="r1",
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=4),
        timings=Timings(0.001, 0.02, 0.4, rate, rate),
    )
