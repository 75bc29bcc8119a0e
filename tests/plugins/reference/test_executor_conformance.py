"""The reference executor under the same conformance class as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from headrace.contracts import Executor
from headrace.errors import StepFailed
from headrace.testing.conformance import ExecutorConformance

pytest.importorskip("torch", reason="the reference backend needs PyTorch")

PROMPTS = [[7, 31, 250, 4, 9], [5, 8, 100, 101, 102, 103], [7, 31, 11, 200], [299, 3, 3, 3, 17, 18, 19]]


class OnReference(ExecutorConformance):
    determinism = "batch-invariant"
    compare_tokens = True  # random weights leave no near ties between these prompts
    path: str

    def make(self) -> Executor:
        from reference_driver import new_executor

        return new_executor(self.path, determinism=self.determinism)  # type: ignore[arg-type]

    def prompts(self, executor: Executor) -> list[list[int]]:
        return PROMPTS

    def break_next(self, executor: Executor) -> bool:
        """The next forward fails after it wrote its KV."""
        forward: Any = executor._forward  # type: ignore[attr-defined]

        def failing(*args: Any) -> Any:
            executor._forward = forward  # type: ignore[attr-defined]
            forward(*args)
            raise StepFailed("as the test asked")

        executor._forward = failing  # type: ignore[attr-defined]
        return True

    def poison_row(self, executor: Executor, row: int) -> bool:
        forward: Any = executor._forward  # type: ignore[attr-defined]

        def poisoned(batch: Any, caches: Any) -> Any:
            executor._forward = forward  # type: ignore[attr-defined]
            logits = forward(batch, caches)
            logits[batch.row[batch.wanted] == row] = float("nan")
            return logits

        executor._forward = poisoned  # type: ignore[attr-defined]
        return True


class TestDenseExact(OnReference):
    @pytest.fixture(autouse=True)
    def _model(self, dense: Callable[..., str]) -> None:
        self.path = dense()


class TestDensePlain(TestDenseExact):
    determinism = "seeded"


class TestDenseBfloat16(TestDenseExact):
    def make(self) -> Executor:
        from reference_driver import new_executor

        return new_executor(self.path, compute="bfloat16")


class OnDeepseekV41(OnReference):
    """The golden model: windows in rings, compressed caches, experts, Engram."""

    options: ClassVar[dict[str, Any]] = {"block_tokens": 8}

    def make(self) -> Executor:
        from golden import GOLDEN
        from reference_driver import new_executor

        return new_executor(str(GOLDEN / "model_full" / "f1"), **self.options)


class TestDeepseekV41(OnDeepseekV41):
    pass


class TestDeepseekV41Drafter(OnDeepseekV41):
    options: ClassVar[dict[str, Any]] = {"block_tokens": 128, "draft": True, "cache": "plain"}


class TestDeepseekV41Replay(OnDeepseekV41):
    options: ClassVar[dict[str, Any]] = {"block_tokens": 8, "prefix": "replay"}
