"""What `PagedSpace` remembers of sequences that found no room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_harness import Setup, request

from headrace import kvspace
from headrace.kvspace import PagedSpace
from headrace.types import KVOp, SamplingParams, Sequence

PREFIXES = ("", "a long preface that many requests share: ", "a long preface that ")


class Forgetful(PagedSpace):
    """Tries every time."""

    def admit(self, seq: Sequence, ops: list[KVOp], use_prefix: bool = True) -> bool:
        self._misfits.clear()
        return super().admit(seq, ops, use_prefix)


def schedule(space: type[PagedSpace], seed: int) -> list[Any]:
    """Who ran in each step of a random run in a tight pool."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    engine = Setup(space=space, block_tokens=size, n_blocks=rng.choice([70, 90, 140]) // size, chunk=9).engine()
    seen: list[Any] = []
    executor: Any = engine.executor
    executor.on_forward = lambda plan: seen.append((plan.seq.tolist(), plan.start.tolist(), plan.length.tolist()))
    for i in range(14):
        prompt = rng.choice(PREFIXES) + "xyz"[: rng.randrange(3)] + "tail" * rng.randrange(1, 3)
        params = SamplingParams(max_tokens=rng.randrange(1, 16), n=rng.choice([1, 1, 3]), ignore_eos=True)
        engine.add(request(str(i), prompt, params, priority=rng.choice([0, 0, 1])))
        if rng.random() < 0.2:
            engine.cancel(str(rng.randrange(i + 1)))
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.kv.check(engine.scheduler.running)
    while engine.has_work():
        engine.step()
    return seen


@pytest.mark.parametrize("seed", range(24))
def test_remembered_misfits_delay_nobody(seed: int) -> None:
    assert schedule(PagedSpace, seed) == schedule(Forgetful, seed)


def test_a_full_pool_does_not_hash_waiting_prompts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Setup(n_blocks=130, block_tokens=4, chunk=512).engine()
    prompt = "the same long preface for all " * 13
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    for i in range(12):
        engine.add(request(str(i), prompt + f"and then {i} " * 4, params))
    for _ in range(20):
        engine.step()
    n_hashed = 0
    chained = kvspace._chained

    def counted(*args: Any) -> bytes:
        nonlocal n_hashed
        n_hashed += 1
        return chained(*args)

    monkeypatch.setattr(kvspace, "_chained", counted)
    for _ in range(40):
        engine.step()
    assert engine.scheduler.waiting
    assert n_hashed < 40 * 250, "9 prompts of 100 blocks are in line in each of 40 steps"
