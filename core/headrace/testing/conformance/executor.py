"""What every executor must do."""

from __future__ import annotations

from headrace.testing.conformance._executor_rings import RingChecks
from headrace.testing.conformance._executor_sampling import SamplingChecks
from headrace.testing.conformance._executor_steps import StepChecks


class ExecutorConformance(StepChecks, RingChecks, SamplingChecks):
    """Subclass as `class TestMine(ExecutorConformance)` and return a new executor from `make()`.

    Where your capabilities exclude a check it is skipped with the reason; see `ExecutorFixture` for the knobs.
    """
