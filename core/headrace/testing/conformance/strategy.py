"""What every parallel strategy must do: split every plan so that each row runs exactly once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.contracts import Strategy
from headrace.testing.fakes import fake_plan, fake_step_stats
from headrace.types import DeviceInfo, StepPlan


class StrategyConformance:
    """Subclass and return a new strategy from `make()`; `n_devices` is a number of devices that it accepts."""

    n_devices = 4

    def make(self) -> Strategy:
        raise NotImplementedError("return your strategy from make()")

    @pytest.fixture
    def strategy(self) -> Strategy:
        return self.make()

    @pytest.fixture
    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(kind="cpu", arch="x86_64", index=i, memory_bytes=2**30) for i in range(self.n_devices)]

    def test_mesh_uses_each_device_at_most_once(self, strategy: Strategy, devices: list[DeviceInfo]) -> None:
        groups = strategy.mesh(devices)
        flat = [index for group in groups for index in group]
        assert flat
        assert len(set(flat)) == len(flat)
        assert set(flat) <= {device.index for device in devices}

    def test_mesh_groups_are_of_one_size(self, strategy: Strategy, devices: list[DeviceInfo]) -> None:
        assert len({len(group) for group in strategy.mesh(devices)}) == 1

    def test_mesh_is_a_pure_function(self, strategy: Strategy, devices: list[DeviceInfo]) -> None:
        assert [list(group) for group in strategy.mesh(devices)] == [list(group) for group in strategy.mesh(devices)]

    def test_number_of_ranks_does_not_depend_on_the_plan(self, strategy: Strategy) -> None:
        assert len({len(strategy.split(fake_plan([4] * n))) for n in (0, 1, 3, 8)}) == 1

    def test_plan_without_rows(self, strategy: Strategy) -> None:
        assert all(len(rows) == 0 for rows in strategy.split(fake_plan([])))

    @pytest.mark.parametrize("seed", range(10))
    def test_each_row_runs_exactly_once(self, strategy: Strategy, seed: int) -> None:
        rng = random.Random(seed)
        plan = fake_plan([rng.choice([1, 1, 1, 5, 64]) for _ in range(rng.randint(1, 20))])
        self._check_split(strategy, plan)

    def test_split_is_a_pure_function(self, strategy: Strategy) -> None:
        plan = fake_plan([1, 5, 9, 1, 1])
        tokens = plan.tokens.copy()
        first, second = strategy.split(plan), strategy.split(plan)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        assert np.array_equal(plan.tokens, tokens)

    def test_after_step_answers_with_an_order_or_none(self, strategy: Strategy) -> None:
        for step in range(20):
            order = strategy.after_step(fake_step_stats(step))
            assert order is None or all(isinstance(name, str) for name in order)

    def _check_split(self, strategy: Strategy, plan: StepPlan) -> None:
        ranks = strategy.split(plan)
        assert all(rows.dtype == np.int32 for rows in ranks)
        assert sorted(row for rows in ranks for row in rows.tolist()) == list(range(len(plan.seq)))
