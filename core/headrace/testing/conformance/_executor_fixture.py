"""What all executor checks share: the fixtures that a backend's test class fills in, and their knobs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.contracts import Executor
from headrace.testing.rig import Rig, RigRow
from headrace.types import WANT_LOGITS, WANT_TOKEN, SamplingParams

N_DRAFTS = 3
"""Most drafts in one row of these checks."""
WARM = SamplingParams(temperature=0.8, top_p=0.95, seed=7)


def need(condition: object, why: str) -> None:
    if not condition:
        pytest.skip(why)


class ExecutorFixture:
    """Set `make`. Override the knobs where your device needs it; checks that your capabilities exclude are skipped."""

    n_tokens = 6
    """Tokens generated per check: raise it on fast executors."""
    tolerance = 1e-3
    """Largest difference of logits between batchings where caps.row_invariant is False."""
    core_sampler = True
    """False: the executor samples by other rules (a library's own chain); checks against headrace.sampling are off."""

    compare_tokens: bool | None = None
    """Compare token by token across batchings; None: where caps.row_invariant. True is right for an executor that is
    not row invariant if your prompts leave no near ties."""

    def make(self) -> Executor:
        """A new executor, not opened. Called for each check."""
        raise NotImplementedError("return your executor from make()")

    def prompts(self, executor: Executor) -> list[list[int]]:
        """Token ids of four different prompts of 4 or more tokens; the first two share no prefix."""
        texts = ("The river runs", "Once upon a time", "The river bends twice", "0 1 2 3 4 5 6")
        return [executor.tokenizer.encode(text) for text in texts]

    def break_next(self, executor: Executor) -> bool:
        """Make the next forward fail with StepFailed; False if you have no way to."""
        return False

    def poison_row(self, executor: Executor, row: int) -> bool:
        """Make this row's logits NaN in the next step; False if you have no way to."""
        return False

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        executor = self.make()
        executor.open()
        yield executor
        executor.close()

    @pytest.fixture
    def rig(self, executor: Executor) -> Rig:
        return Rig(executor)

    # --- helpers of the checks

    def _compares_tokens(self, rig: Rig) -> bool:
        return rig.executor.caps.row_invariant if self.compare_tokens is None else self.compare_tokens

    def _need_drafts(self, rig: Rig) -> None:
        need(rig.executor.caps.drafts, "caps.drafts is False")
        layout = rig.executor.layout
        need(
            not layout.has_rings or layout.slack_tokens >= N_DRAFTS, f"rings with slack for less than {N_DRAFTS} drafts"
        )
        need(self._compares_tokens(rig), "equal only up to near ties")

    def _logits(self, rig: Rig, tokens: list[int], *, seq: int = 0, chunk: int | None = None) -> np.ndarray:
        """Logits after the last token, copied."""
        while chunk and len(tokens) > chunk:
            rig.step(RigRow(seq=seq, tokens=tokens[:chunk], sample=False))
            tokens = tokens[chunk:]
        result = rig.step(RigRow(seq=seq, tokens=tokens, wants=WANT_TOKEN | WANT_LOGITS))
        return np.array(result.arrays["logits"][1][0])

    def _same(self, rig: Rig, got: np.ndarray, want: np.ndarray) -> None:
        if rig.executor.caps.row_invariant:
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=self.tolerance)
