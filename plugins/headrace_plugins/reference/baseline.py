"""The loop that the engine is measured against: `model.forward` on hand-made batches and an argmax, nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from headrace.modeling import Batch
from headrace_plugins.reference.caches import Pools
from headrace_plugins.reference.executor import ReferenceExecutor

ROOM_TOKENS = 1024
"""Tokens that a prompt may grow by."""


class StraightLoop:
    """Greedy decoding of a fixed set of prompts on an open executor's model, with caches of its own. No scheduler, no
    block manager, no sampler: sequence i has the blocks [i n, (i + 1) n) and slot i. Also times the executor's forward.
    """

    def __init__(self, executor: ReferenceExecutor) -> None:
        self._model = executor._model
        self._arrangement = executor._arrangement
        self._block_tokens = executor.layout.block_tokens
        self._pools: Pools | None = None
        self.decode_s = 0.0
        """Seconds that the executor spent inside `model.forward`."""
        real = executor._forward

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return real(*args)
            finally:
                self.decode_s += time.perf_counter() - started

        executor._forward = timed
        self._executor, self._forward = executor, real

    def start(self, prompts: Seq[Seq[int]]) -> list[int]:
        """Forget everything, prefill each prompt on its own and take the first token of each."""
        self.reset(len(prompts), max(map(len, prompts)))
        self._tokens = torch.cat([self.feed(i, prompt)[-1:].argmax(-1) for i, prompt in enumerate(prompts)])
        return self._tokens.tolist()

    def reset(self, n: int, prompt_tokens: int) -> None:
        """n empty sequences, for prompts of at most so many tokens."""
        per = -(-(prompt_tokens + ROOM_TOKENS) // self._block_tokens)
        self._pools = Pools(self._arrangement, n * per, n, 0)
        self._table = torch.arange(n * per).view(n, per)
        self._positions = torch.zeros(n, dtype=torch.int64)
        self._recent = torch.full((n, self._model.history_tokens), -1, dtype=torch.int64)
        self._rows = torch.arange(n)

    def feed(self, i: int, tokens: Seq[int]) -> Tensor:
        """Append tokens to sequence i. Returns float32 logits [n, vocab] of all of them."""
        n, start = len(tokens), int(self._positions[i])
        ids, row = torch.tensor(tokens), torch.full((n,), i)
        known = torch.cat([self._recent[i].flip(0), ids])
        h = self._recent.shape[1]
        # entry j of the token at t is the one at t - 1 - j
        history = torch.stack([known[h - 1 - j : h - 1 - j + n] for j in range(h)], 1) if h else None
        logits = self._run(ids, start + torch.arange(n), row, history)
        self._positions[i] += n
        self._recent[i] = known[len(known) - h :].flip(0)
        return logits

    def step(self) -> list[int]:
        """One token for every prompt."""
        tokens = self._tokens
        logits = self._run(tokens, self._positions.clone(), self._rows, self._recent if self._recent.shape[1] else None)
        self._positions += 1
        self._recent = torch.cat([tokens[:, None], self._recent], 1)[:, : self._recent.shape[1]]
        self._tokens = logits.argmax(-1)
        return self._tokens.tolist()

    def close(self) -> None:
        self._pools = None
        self._executor._forward = self._forward

    def _run(self, tokens: Tensor, positions: Tensor, row: Tensor, history: Tensor | None) -> Tensor:
        assert self._pools is not None, "start() comes first"
        n_blocks = int(positions.max()) // self._block_tokens + 1
        batch = Batch(
            tokens=tokens,
            positions=positions,
            row=row,
            slot=row,
            first=torch.zeros_like(row),
            table=self._table[:, :n_blocks],
            block_tokens=self._block_tokens,
            history=history,
            wanted=torch.arange(len(tokens)),
        )
        with torch.inference_mode():
            logits: Tensor = self._forward(batch, self._pools.caches)
        return logits
