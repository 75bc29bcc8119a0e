"""The batch of a plan, against loops over its rows."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.sampling import new_table
from headrace.types import WANT_PROMPT_LOGITS, WANT_PROMPT_LOGPROBS, WANT_TOKEN, StepPlan

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from headrace_plugins.reference.batch import make_batch, wanted_positions  # noqa: E402


def random_plan(rng: np.random.Generator, n_rows: int, *, history: int = 0) -> StepPlan:
    length = rng.integers(1, 7, n_rows).astype(np.int32)
    sample = rng.random(n_rows) < 0.7
    drafts = np.where(sample, rng.integers(0, 6, n_rows) % length, 0).astype(np.int32)
    wants = rng.choice([WANT_TOKEN, WANT_PROMPT_LOGPROBS, WANT_TOKEN | WANT_PROMPT_LOGITS], n_rows, p=[0.6, 0.2, 0.2])
    start = rng.integers(0, 40, n_rows).astype(np.int32)
    offset = np.zeros(n_rows + 1, np.int32)
    np.cumsum(length, out=offset[1:])
    return StepPlan(
        step=0, seq=np.arange(n_rows, dtype=np.int32), slot=rng.permutation(n_rows).astype(np.int32), start=start,
        length=length, n_draft=drafts, offset=offset, tokens=rng.integers(0, 99, offset[-1]).astype(np.int32),
        sample=sample, wants=wants.astype(np.uint8), sampling=new_table(n_rows),
        blocks=rng.integers(-1, 9, (n_rows, 4)).astype(np.int32),
        write_from=rng.integers(0, 45, n_rows).astype(np.int32), n_prompt=rng.integers(1, 60, n_rows).astype(np.int32),
        history=rng.integers(-1, 99, (n_rows, history)).astype(np.int32) if history else None,
        targets=np.arange(offset[-1], dtype=np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("n_rows", [1, 2, 7])
@pytest.mark.parametrize("seed", range(6))
def test_columns_are_those_of_a_loop_over_the_rows(n_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, n_rows, history=3)
    first = rng.integers(0, 9, n_rows)
    batch = make_batch(plan, wanted_positions(plan), first, 16, history=3, keep=5)
    t = 0
    assert plan.write_from is not None
    assert plan.n_prompt is not None
    assert plan.history is not None
    for r in range(n_rows):
        before = plan.history[r].tolist()
        for i in range(int(plan.length[r])):
            position = int(plan.start[r]) + i
            assert batch.tokens[t] == plan.tokens[plan.offset[r] + i]
            assert batch.positions[t] == position
            assert (batch.row[t], batch.slot[t], batch.first[t]) == (r, plan.slot[r], first[r])
            assert batch.store[t] == (position >= plan.write_from[r])
            assert batch.tail[t] == max(0, plan.n_prompt[r] - 5)
            assert batch.history[t].tolist() == before
            before = [int(plan.tokens[t]), *before][:3]
            t += 1
    assert len(batch.tokens) == t
    assert batch.table.tolist() == plan.blocks.tolist()
    columns = ("tokens", "positions", "row", "slot", "first", "tail", "history", "table", "wanted")
    assert {name for name in columns if getattr(batch, name).dtype != torch.int64} == set()


def test_columns_that_a_plan_lacks_are_none() -> None:
    plan = random_plan(np.random.default_rng(0), 3)
    plan.write_from = plan.n_prompt = None
    batch = make_batch(plan, wanted_positions(plan), np.zeros(3, np.int64), 16)
    assert batch.store is None
    assert batch.tail is None
    assert batch.history is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("plain", [True, False])
def test_wanted_positions(seed: int, plain: bool) -> None:
    plan = random_plan(np.random.default_rng(seed), 6)
    if plain:
        plan.wants[:] = WANT_TOKEN
    if plain and seed % 2:
        plan.n_draft[:] = 0
    index, sampled, spans = [], [], []
    for r in range(6):
        whole = bool(plan.wants[r] & (WANT_PROMPT_LOGPROBS | WANT_PROMPT_LOGITS))
        a, b = int(plan.offset[r]), int(plan.offset[r + 1])
        n_sampled = 1 + int(plan.n_draft[r]) if plan.sample[r] else 0
        if whole:
            spans.append((r, len(index), len(index) + b - a))
        for t in range(a if whole else b - n_sampled, b):
            if t >= b - n_sampled:
                sampled.append(len(index))
            index.append(t)
    wanted = wanted_positions(plan)
    assert wanted.index.tolist() == index
    assert wanted.spans == tuple(spans)
    assert (list(range(len(index))) if wanted.sampled is None else wanted.sampled.tolist()) == sampled
