"""The oracle of engine tests: one prompt after the other, token by token, on a model's ops and nothing else."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from headrace_plugins.reference.baseline import StraightLoop
from headrace_plugins.reference.executor import ReferenceExecutor


def straight_greedy(executor: ReferenceExecutor, prompts: Seq[Seq[int]], n: int) -> list[list[int]]:
    """n greedy tokens after each prompt; all prompts decode in one batch."""
    loop = StraightLoop(executor)
    steps = [loop.start(prompts), *(loop.step() for _ in range(n - 1))]
    loop.close()
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def straight_logits(executor: ReferenceExecutor, tokens: Seq[int], chunk: int) -> NDArray[np.float32]:
    """[n, vocab] logits of every position, fed `chunk` tokens at a time."""
    loop = StraightLoop(executor)
    loop.reset(1, len(tokens))
    parts = [loop.feed(0, tokens[i : i + chunk]).numpy() for i in range(0, len(tokens), chunk)]
    loop.close()
    return np.concatenate(parts)
