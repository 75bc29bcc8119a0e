"""Drives an executor without the engine: plans written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headrace import sampling
from headrace.contracts import Executor
from headrace.types import (
    WANT_LOGITS,
    WANT_PROMPT_LOGPROBS,
    WANT_TOKEN,
    BuildContext,
    EngineOptions,
    KVOp,
    MachineInfo,
    MaskBatch,
    ModelSource,
    SamplingParams,
    StepPlan,
    StepResult,
)
from headrace_gguf.backend import open_executor
from headrace_gguf.executor import GGUFExecutor
from headrace_gguf.options import GGUFOptions

MACHINE = MachineInfo(devices=(), host_memory_bytes=8 << 30, available_memory_bytes=8 << 30, physical_cores=1)


def new_executor(path: str, machine: MachineInfo = MACHINE, **options: object) -> GGUFExecutor:
    source = ModelSource(uri=path, path=path, format="gguf")
    small = {"slots": 4, "context_tokens": 256, "batch_tokens": 256, "trial_load": False}
    chosen = GGUFOptions.model_validate(small | options)
    return open_executor(source, chosen, BuildContext(engine=EngineOptions(), machine=machine))


@dataclass
class Row:
    """`tokens` at positions from `start` in `slot`; the last `n_draft` are drafts."""

    slot: int
    start: int
    tokens: list[int]
    sample: bool = True
    n_draft: int = 0
    seq: int = -1
    wants: int = WANT_TOKEN
    targets: list[int] | None = None


@dataclass
class Driver:
    executor: Executor
    params: dict[int, SamplingParams] = field(default_factory=dict)
    """Sampling of each seq; greedy where there is none."""
    step_no: int = 0

    def plan(self, rows: list[Row], ops: Iterable[KVOp] = ()) -> StepPlan:
        table = sampling.new_table(16)
        for row in rows:
            row.seq = row.slot if row.seq < 0 else row.seq
            sampling.set_row(table, row.seq, self.params.get(row.seq, SamplingParams(temperature=0)).resolved(), 0)
        lengths = [len(row.tokens) for row in rows]
        if any(row.targets is not None for row in rows):
            listed = [t for row in rows for t in (row.targets or [-1] * len(row.tokens))]
            targets = np.array(listed, np.int32)
        else:
            targets = None
        self.step_no += 1
        return StepPlan(
            step=self.step_no,
            seq=np.array([row.seq for row in rows], np.int32),
            slot=np.array([row.slot for row in rows], np.int32),
            start=np.array([row.start for row in rows], np.int32),
            length=np.array(lengths, np.int32),
            n_draft=np.array([row.n_draft for row in rows], np.int32),
            offset=np.array([0, *np.cumsum(lengths)], np.int32),
            tokens=np.array([t for row in rows for t in row.tokens], np.int32),
            sample=np.array([row.sample for row in rows], np.bool_),
            wants=np.array([row.wants for row in rows], np.uint8),
            sampling=table,
            kv_ops=tuple(ops),
            targets=targets,
        )

    def step(self, rows: list[Row], ops: Iterable[KVOp] = (), masks: MaskBatch | None = None) -> StepResult:
        handle = self.executor.forward(self.plan(rows, ops))
        self.executor.sample(handle, masks)
        return self.executor.collect(handle)

    def logits(self, slot: int, start: int, tokens: list[int], ops: Iterable[KVOp] = ()) -> np.ndarray:
        """Logits after the last of `tokens`."""
        result = self.step([Row(slot, start, tokens, wants=WANT_TOKEN | WANT_LOGITS)], ops)
        return np.array(result.arrays["logits"][1][0])

    def generate(
        self, slot: int, start: int, tokens: list[int], n: int, ops: Iterable[KVOp] = (), seq: int = -1
    ) -> list[int]:
        """n tokens after `tokens`, one step each."""
        out: list[int] = []
        for _ in range(n):
            result = self.step([Row(slot, start, tokens, seq=seq)], ops)
            assert not result.status
            start, tokens, ops = start + len(tokens), result.tokens.tolist(), ()
            out += tokens
        return out


def prompt_logprobs_row(slot: int, tokens: list[int], sample: bool = True) -> Row:
    return Row(slot, 0, tokens, sample=sample, wants=WANT_TOKEN | WANT_PROMPT_LOGPROBS, targets=[*tokens[1:], -1])
