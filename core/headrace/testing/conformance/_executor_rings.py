"""Executor checks: rings beside blocks, which are kept, taken back, or rebuilt."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.testing.conformance._executor_fixture import ExecutorFixture, need
from headrace.testing.rig import Rig, RigRow
from headrace.types import WANT_LOGITS, WANT_TOKEN, Begin, Restore, Snapshot


class RingChecks(ExecutorFixture):
    """Begin, Snapshot, Restore, replay with suppressed writes; for layouts with rings."""

    @pytest.mark.parametrize("at", ["the end of a block", "slack tokens later"])
    def test_snapshot_holds_what_a_boundary_needs(self, rig: Rig, at: str) -> None:
        """Another slot goes on from it as the first did, whatever the first became in between."""
        self._need_rings(rig)
        layout = rig.executor.layout
        need(layout.n_snapshots, "layout.n_snapshots is 0")
        boundary, text = self._text(rig)
        taken = boundary if at == "the end of a block" else min(boundary + layout.slack_tokens, len(text))
        rig.step(RigRow(seq=0, tokens=text[:boundary], sample=False))
        want = self._logits(rig, text[boundary:])
        rig.free(0)
        rig.step(RigRow(seq=0, tokens=text[:boundary], sample=False))
        if taken > boundary:
            rig.step(RigRow(seq=0, tokens=text[boundary:taken], sample=False))
        rig.fork(0, 1, boundary)
        last = layout.n_snapshots - 1
        rig.ops[-3:] = [Snapshot(0, 0, last)]
        for _ in range(2):
            rig.step(RigRow(seq=0, tokens=text[-layout.block_tokens :], sample=False))
            rig.ops += [Begin(1), Restore(1, 0, last)]
            rig.lengths[1] = boundary
            self._same(rig, self._logits(rig, text[boundary:], seq=1), want)

    def test_slack_can_be_taken_back(self, rig: Rig) -> None:
        self._need_rings(rig)
        slack = rig.executor.layout.slack_tokens
        need(slack, "layout.slack_tokens is 0")
        boundary, text = self._text(rig)
        rig.step(RigRow(seq=0, tokens=text[:boundary], sample=False))
        want = self._logits(rig, text[boundary:])
        rig.free(0)
        rig.step(RigRow(seq=0, tokens=text[:boundary], sample=False))
        rig.step(RigRow(seq=0, tokens=[text[0]] * slack, sample=False))
        rig.trim(0, boundary)
        self._same(rig, self._logits(rig, text[boundary:]), want)

    @pytest.mark.parametrize("how", ["all again", "the last tokens again"])
    def test_rows_that_run_again_leave_shared_blocks_alone(self, rig: Rig, how: str) -> None:
        self._need_rings(rig)
        layout = rig.executor.layout
        need(how == "all again" or layout.replay_tokens, "layout.replay_tokens is 0")
        boundary, text = self._text(rig)
        first, rest = text[:boundary], text[boundary:]
        rig.step(RigRow(seq=0, tokens=first, sample=False))
        want = self._logits(rig, rest)
        rig.free(0)
        rig.step(RigRow(seq=0, tokens=first, sample=False))
        self._share(rig, boundary)
        start = 0 if how == "all again" else max(0, boundary - layout.replay_tokens)
        rig.ops.append(Begin(1))
        if start < boundary - 1:
            again = text[start : boundary - 1]
            rig.step(RigRow(seq=1, tokens=again, start=start, write_from=boundary, sample=False))
        wants = WANT_TOKEN | WANT_LOGITS
        row = RigRow(seq=1, tokens=text[boundary - 1 :], start=boundary - 1, write_from=boundary, wants=wants)
        got = np.array(rig.step(row).arrays["logits"][1][0])
        if start == 0 or not rig.executor.caps.approximations:
            self._same(rig, got, want)
        self._same(rig, self._logits(rig, rest), want)

    # --- helpers

    def _need_rings(self, rig: Rig) -> None:
        need(rig.executor.layout.has_rings, "the layout has no rings")
        need(rig.n_sequences > 1, "one sequence at a time")

    def _text(self, rig: Rig) -> tuple[int, list[int]]:
        """(the end of a whole block, at least as many tokens as that and a few more)."""
        size = rig.executor.layout.block_tokens
        prompts = self.prompts(rig.executor)
        room = min(rig.capacity, rig.executor.caps.max_tokens) - 3 * size
        need(room >= size, f"no room for four blocks of {size} tokens")
        boundary = min(room, max(size, 48)) // size * size
        text = [token for prompt in prompts for token in prompt] * (1 + boundary // 8)
        return boundary, text[: boundary + 5]

    def _share(self, rig: Rig, boundary: int) -> None:
        """Sequence 1 gets the blocks of sequence 0 up to `boundary`, and no rings."""
        rig.fork(0, 1, boundary)
        rig.ops = [op for op in rig.ops if not isinstance(op, (Snapshot, Begin, Restore))]
