"""Makes executors of the reference backend without a config, and runs requests through an engine of theirs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import headrace_plugins
from headrace.contracts import Drafter
from headrace.engine import Engine
from headrace.kvspace import PagedSpace
from headrace.machine import probe_machine
from headrace.ops import Candidate
from headrace.types import BuildContext, EngineOptions, ModelSource, Request, SamplingParams, Sequence
from headrace_plugins.reference import specs
from headrace_plugins.reference.backend import open_executor
from headrace_plugins.reference.executor import ReferenceExecutor
from headrace_plugins.reference.options import ReferenceOptions

Determinism = Literal["off", "seeded", "batch-invariant"]


def load(name: str) -> Any:
    """ "module:attribute" """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def candidates(device: str) -> Seq[Candidate]:
    return [Candidate(spec, "headrace_plugins", load) for spec in specs.kernels()] if device == "cpu" else []


def architecture(name: str) -> Any:
    return next(load(spec.factory) for spec in headrace_plugins.headrace_models() if name in spec.architectures)


def new_executor(
    path: str, *, determinism: Determinism = "batch-invariant", engine: EngineOptions | None = None, **options: Any
) -> ReferenceExecutor:
    """Not opened."""
    context = BuildContext(
        engine=engine or EngineOptions(max_sequences=8),
        machine=probe_machine(),
        determinism=determinism,
        kernels=candidates,
        architecture=architecture,
    )
    source = ModelSource(uri=path, path=path, format="safetensors")
    return open_executor(source, ReferenceOptions(**options), context)


def opened(path: str, **kwargs: Any) -> ReferenceExecutor:
    executor = new_executor(path, **kwargs)
    executor.open()
    return executor


def request(id: str, prompt: Iterable[int], *, logits: bool = False, **given: Any) -> Request:
    merged: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | given
    params = SamplingParams(**merged).resolved()
    return Request(id=id, prompt_ids=tuple(prompt), params=params, want_text=False, want_logits=logits)


class Run:
    """An engine over an executor. What finishes is in `done`, by request id."""

    def __init__(
        self, executor: ReferenceExecutor, engine: EngineOptions | None = None, drafter: Drafter | None = None
    ) -> None:
        self.options = engine or executor._build.engine
        self.kv = PagedSpace(executor.layout, self.options.max_sequences, prefix_cache=self.options.prefix_cache)
        self.engine = Engine(executor, self.kv, self.options, drafter=drafter)
        self.done: dict[str, Sequence] = {}

    def add(self, *requests: Request) -> Run:
        for each in requests:
            self.engine.add(each)
        return self

    def finish(self, after_step: Callable[[Run], object] = lambda run: None) -> dict[str, Sequence]:
        """Step until nothing is left; KV bookkeeping is checked after each."""
        while self.engine.has_work():
            for seq in self.engine.step():
                if seq.finish_reason is not None:
                    assert seq.error is None, seq.error
                    self.done[seq.request.id] = seq
            self.kv.check(self.engine.scheduler.running)
            after_step(self)
        return self.done


def tokens_of(seq: Sequence) -> list[int]:
    return seq.tokens[seq.n_prompt :]


def logits_of(seq: Sequence) -> NDArray[np.float32]:
    """[n_prompt, vocab]"""
    assert seq.prompt_logits is not None
    return seq.prompt_logits.values
