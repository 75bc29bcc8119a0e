"""What every observer must do: take any statistics that the engine reports, quickly and without raising."""

from __future__ import annotations

import pytest

from headrace.contracts import Observer
from headrace.testing.fakes import fake_request_stats, fake_step_stats


class ObserverConformance:
    """Subclass and return a new observer from `make()`."""

    def make(self) -> Observer:
        raise NotImplementedError("return your observer from make()")

    @pytest.fixture
    def observer(self) -> Observer:
        return self.make()

    def test_takes_steps(self, observer: Observer) -> None:
        for step in range(50):
            observer.on_step(fake_step_stats(step))

    def test_takes_an_empty_step(self, observer: Observer) -> None:
        observer.on_step(fake_step_stats(0, n_rows=0, n_tokens=0, seconds={}))

    @pytest.mark.parametrize("reason", ["stop", "length", "abort", "error", "deadline"])
    def test_takes_every_way_to_finish(self, observer: Observer, reason: str) -> None:
        observer.on_finish(fake_request_stats(finish_reason=reason))

    def test_takes_a_request_that_never_ran(self, observer: Observer) -> None:
        observer.on_finish(fake_request_stats(finish_reason="abort", completion_tokens=0, rate=0.0))

    def test_finish_before_any_step(self, observer: Observer) -> None:
        observer.on_finish(fake_request_stats())
        observer.on_step(fake_step_stats(1))

    def test_close_twice_and_without_use(self, observer: Observer) -> None:
        observer.close()
        observer.close()

    def test_close_after_use(self, observer: Observer) -> None:
        observer.on_step(fake_step_stats(1))
        observer.on_finish(fake_request_stats())
        observer.close()
