"""Runs requests through an engine on toy executors, and through a plain loop that has no engine at all."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.contracts import Drafter
from headrace.engine import Engine
from headrace.kvspace import PagedSpace, SlotSpace
from headrace.sampling import new_table, sample_step, set_row
from headrace.testing.toy import ToyConstraint, ToyModel, ToyOracle, ToyPaged, ToySlots
from headrace.types import WANT_TOKEN, EngineOptions, MaskBatch, Request, SamplingParams, Sequence, StepPlan
from headrace_plugins.ngram import NGram, NGramOptions

MODEL = ToyModel(vocab=270, seed=3, repeat=0.6, eos_rate=0.02)
MAX_STEPS = 4000


def request(id: str, prompt: str | Seq[int], params: SamplingParams | None = None, **more: Any) -> Request:
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    return Request(id=id, prompt_ids=ids, params=(params or SamplingParams(max_tokens=16)).resolved(), **more)


def plain(req: Request, model: ToyModel = MODEL, sample_index: int = 0) -> list[int]:
    """The definition: one token after the other from the whole prefix, sampled by a plan of one row."""
    params, tokens = req.params, list(req.prompt_ids)
    table = new_table(1)
    set_row(table, 0, params, sample_index)
    engine = ToyConstraint(ToyPaged(model).tokenizer)
    matcher = engine.compile(params.constraint).start() if params.constraint else None
    eos = model.spec().eos_ids if not params.ignore_eos else frozenset()
    limit = len(tokens) + (params.max_tokens if params.max_tokens is not None else 64)
    while len(tokens) < limit:
        n = len(tokens)
        one = np.ones(1, np.int32)
        plan = StepPlan(
            step=0, seq=np.zeros(1, np.int32), slot=np.zeros(1, np.int32), start=np.array([n - 1], np.int32),
            length=one, n_draft=np.zeros(1, np.int32), offset=np.array([0, 1], np.int32),
            tokens=np.array(tokens[-1:], np.int32), sample=np.ones(1, np.bool_),
            wants=np.array([WANT_TOKEN], np.uint8), sampling=table,
        )  # fmt: skip
        masks = None
        if matcher is not None:
            bits = np.zeros((1, -(-model.vocab // 32)), np.int32)
            matcher.fill(bits[0])
            masks = MaskBatch(starts=np.array([0, 1], np.int32), bits=bits)
        tokens.append(int(sample_step(plan, [model.logits(tokens)], masks).tokens[0]))
        if tokens[-1] in eos:
            break
        if matcher is not None:
            assert matcher.accept(tokens[-1])
            if matcher.done():
                break
    return tokens[len(req.prompt_ids) :]


def ngram() -> Drafter:
    return NGram(NGramOptions(max_draft=4), MODEL.spec())


def oracle(reference: dict[str, list[int]], requests: Seq[Request], p: float = 0.7) -> Drafter:
    """Knows the reference outputs and lies now and then."""

    def continuation(tokens: Seq[int], n: int) -> list[int]:
        for req in requests:
            whole = list(req.prompt_ids) + reference[req.id]
            if len(tokens) >= len(req.prompt_ids) and whole[: len(tokens)] == list(tokens):
                return whole[len(tokens) : len(tokens) + n]
        return [97] * n

    return ToyOracle(continuation, p=p, max_draft=4)


@dataclass
class Setup:
    kv: str = "paged"
    drafter: Drafter | None = None
    chunk: int = 64
    n_blocks: int = 256
    block_tokens: int = 4
    n_slots: int = 8
    preempt_every: int = 0
    """Preempt the last running sequence each so many steps."""
    prefix_cache: bool = True
    partial_trim: bool = True
    rings: dict[str, int] = field(default_factory=dict)
    """Arguments of ToyPaged that give it a window."""
    model: ToyModel = field(default_factory=lambda: MODEL)
    options: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    space: Callable[..., Any] | None = None
    jumps: bool = True
    """Append forced tokens without a model step."""

    def engine(self) -> Engine:
        options = EngineOptions(
            **{"prefill_chunk_tokens": self.chunk, "max_sequences": 16, "block_tokens": self.block_tokens}
            | self.options
        )
        if self.kv == "paged":
            executor: Any = ToyPaged(
                self.model, n_blocks=self.n_blocks, block_tokens=self.block_tokens, **self.rings, **self.faults
            )
            kv: Any = (self.space or PagedSpace)(executor.layout, options.max_sequences, prefix_cache=self.prefix_cache)
        else:
            executor = ToySlots(
                self.model, n_slots=self.n_slots, slot_tokens=512, partial_trim=self.partial_trim, **self.faults
            )
            kv = (self.space or SlotSpace)(
                executor.layout, partial_trim=self.partial_trim, fork=executor.caps.fork, prefix_cache=self.prefix_cache
            )
        executor.open()
        constraints = ToyConstraint(executor.tokenizer)
        engine = Engine(executor, kv, options, drafter=self.drafter, constraints=constraints)
        engine.jumps = self.jumps
        return engine


MAX_PREEMPTIONS = 40
"""Then a run is left alone: what must start over each time would never end."""


def run(engine: Engine, requests: Seq[Request], preempt_every: int = 0) -> dict[str, list[Sequence]]:
    """Add all requests and step until nothing is left, checking the KV's invariants after each step."""
    found = {req.id: engine.add(req) for req in requests}
    drain(engine, preempt_every)
    return found


def drain(engine: Engine, preempt_every: int = 0) -> None:
    n = 0
    while engine.has_work():
        engine.step()
        engine.kv.check(engine.scheduler.running)
        n += 1
        assert n < MAX_STEPS, "the engine makes no progress"
        due = preempt_every and n % preempt_every == 0 and engine.scheduler.n_preemptions < MAX_PREEMPTIONS
        if due and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running.pop(), engine._ops)


def output(seqs: Seq[Sequence], i: int = 0) -> list[int]:
    return seqs[i].tokens[seqs[i].n_prompt :]
