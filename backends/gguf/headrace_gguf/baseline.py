"""The loop that Headrace is measured against: `llama_decode` on the same batches and a numpy argmax, nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np

from headrace_gguf.executor import GGUFExecutor
from headrace_gguf.llama import Context


class RawLoop:
    """A second context over an open executor's weights. Also times the executor's own `llama_decode` calls."""

    def __init__(self, executor: GGUFExecutor) -> None:
        assert executor._library_model is not None, "open the executor first"
        assert executor._context is not None
        self._context = Context(executor._library_model, executor._context_params())
        self._tokens: list[int] = []
        self.decode_s = 0.0
        """Seconds that the executor spent inside llama_decode."""
        real = executor._context._decode

        def timed(*args: object) -> int:
            started = time.perf_counter()
            code = real(*args)
            self.decode_s += time.perf_counter() - started
            return int(code)

        executor._context._decode = timed

    def start(self, prompts: Seq[Seq[int]]) -> None:
        """Forget everything, prefill each prompt in its own slot and take the first token of each."""
        context = self._context
        context.clear()
        self._tokens = []
        for slot, prompt in enumerate(prompts):
            n = len(prompt)
            context.token[:n], context.pos[:n], context.slot[:n] = prompt, range(n), slot
            context.output[:n] = 0
            context.output[n - 1] = 1
            self._decode(n)
            self._tokens.append(int(np.argmax(context.logits(1)[0])))
        n = len(prompts)
        context.slot[:n], context.output[:n] = range(n), 1
        context.pos[:n] = [len(prompt) for prompt in prompts]

    def step(self) -> list[int]:
        """One token for every prompt."""
        context, n = self._context, len(self._tokens)
        context.token[:n] = self._tokens
        self._decode(n)
        context.pos[:n] += 1
        self._tokens = [int(np.argmax(row)) for row in context.logits(n)]
        return self._tokens

    def close(self) -> None:
        self._context.close()

    def _decode(self, n: int) -> None:
        code = self._context.decode(n)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
