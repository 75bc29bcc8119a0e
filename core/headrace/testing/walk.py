"""Random walks over a KVSpace: what an engine would ask of it, with a toy executor as the judge.

The walk keeps the same rules as the engine: operations collected since the last step go with the next plan; `computed`
moves before `commit`; a failed step's operations count as applied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.contracts import KVSpace
from headrace.errors import StepFailed
from headrace.planning import tokens_before
from headrace.testing.rig import Rig, RigRow
from headrace.testing.toy import ToyPaged, ToySlots
from headrace.types import WANT_LOGITS, WANT_TOKEN, KVOp, Request, SamplingParams, Sequence

Part = tuple[Sequence, int, Seq[int]]
"""(sequence, how many of its tokens to feed, drafts after them)."""


def sequence(tokens: Seq[int], **request: Any) -> Sequence:
    """A sequence as the engine would make it, without an end. request: fields of `Request`."""
    params = SamplingParams(temperature=0.0).resolved()
    return Sequence(Request(id="walk", prompt_ids=tuple(tokens), params=params, **request), 0, 1 << 30)


class Walk:
    def __init__(self, space: KVSpace, toy: ToyPaged | ToySlots, rng: random.Random | None = None) -> None:
        self.space, self.toy = space, toy
        self.rng = rng or random.Random(0)
        self.running: list[Sequence] = []
        self.ops: list[KVOp] = []
        self._rig = Rig(toy, 64)
        self._rig.n_sequences = 64
        self._tails = [[self.rng.randrange(250) for _ in range(12)] for _ in range(3)]

    def reset(self) -> None:
        self.running, self.ops = [], []

    # --- moves

    def admit(self, tokens: Seq[int], *, use_prefix: bool = True, **request: Any) -> Sequence | None:
        seq = sequence(tokens, **request)
        return seq if self.readmit(seq, use_prefix=use_prefix) else None

    def readmit(self, seq: Sequence, *, use_prefix: bool = True) -> bool:
        restorable = self.space.restorable(seq) if use_prefix else 0
        admitted = self.space.admit(seq, self.ops, use_prefix)
        if admitted:
            assert not restorable or seq.computed == restorable, "it starts elsewhere than restorable() said"
            assert 0 <= seq.computed < len(seq.tokens), "admit leaves at least one token to compute"
            self.running.append(seq)
        self.space.check(self.running)
        return admitted

    def step(self, parts: Seq[Part]) -> None:
        """Run the parts; drafts are verified against the model, and the sampled token is appended."""
        parts = self._reserved(parts)
        if not parts:
            return
        plan, rows = self._plan(parts)
        handle = self.toy.forward(plan)
        self.toy.sample(handle, None)
        result = self.toy.collect(handle)
        where, values = result.arrays.get("logits", (np.zeros(0, np.int32), np.zeros((0, 0), np.float32)))
        logits = dict(zip(where.tolist(), values, strict=True))
        for r, (seq, n, drafts) in enumerate(parts):
            base = seq.computed
            if rows[r].sample:
                n_accepted = int(result.accepted[r])
                if not drafts:
                    want = self.toy.toy.logits(seq.tokens)
                    assert np.array_equal(logits[r], want), f"wrong logits for {plan.row(r)}"
                new = result.tokens[result.starts[r] : result.starts[r + 1]].tolist()
                assert new == self.toy.toy.generate(seq.tokens, len(new)), f"wrong tokens for {plan.row(r)}"
                seq.tokens += new
                seq.computed = base + n + n_accepted
            else:
                seq.computed = base + n
            self.space.commit(seq, seq.computed, self.ops)
        self.space.check(self.running)

    def fail(self, parts: Seq[Part]) -> None:
        """The same, but the executor fails and leaves garbage behind."""
        parts = self._reserved(parts)
        if not parts:
            return
        plan, _ = self._plan(parts)
        self.toy.fail = lambda _: StepFailed("walk")
        with pytest.raises(StepFailed):
            self.toy.forward(plan)
        self.toy.fail = None
        for seq, _, _ in parts:
            self.space.rollback(seq, self.ops)
        self.space.check(self.running)

    def release(self, seq: Sequence, *, reuse: bool = True) -> None:
        self._leave(seq, reuse)
        self.space.check(self.running)

    def _leave(self, seq: Sequence, reuse: bool = True) -> None:
        self.running.remove(seq)
        self.space.release(seq, self.ops, reuse)
        assert seq.slot == -1

    def finish(self, seq: Sequence) -> None:
        """Compute all of its tokens and one more, then release it."""
        n = len(seq.tokens)
        while len(seq.tokens) == n:
            self.step([(seq, len(seq.tokens) - seq.computed, [])])
        self.release(seq)

    # --- random moves

    def move(self) -> None:
        kind = self.rng.choices(
            ["admit", "step", "fail", "release", "preempt"], [3 if len(self.running) < 4 else 0, 8, 1, 1, 1]
        )[0]
        if kind == "admit" or not self.running:
            prompt = self.rng.choice(self._tails)[: self.rng.randint(1, 12)]
            prompt = prompt + [self.rng.randrange(250) for _ in range(self.rng.randint(0, 3))]
            self.admit(prompt, cache_salt=self.rng.choice(["", "", "", "b"]))
        elif kind in ("step", "fail"):
            parts = [self._part(seq) for seq in self.rng.sample(self.running, self.rng.randint(1, len(self.running)))]
            self.fail(parts) if kind == "fail" else self.step(parts)
        elif kind == "release":
            self.release(self.rng.choice(self.running), reuse=self.rng.random() < 0.8)
        else:
            seq = self.rng.choice(self.running)
            self.release(seq)
            self.readmit(seq)

    def drain(self) -> None:
        for seq in list(self.running):
            self.release(seq)
        assert self.space.used_ratio() == 0.0

    # --- helpers

    def _part(self, seq: Sequence) -> Part:
        pending = len(seq.tokens) - seq.computed
        n = self.rng.randint(1, pending)
        if self.rng.random() < 0.7:
            n = self.space.chunk_end(seq, seq.computed + n) - seq.computed
        if n < pending or not self.toy.caps.drafts:
            return seq, n, []
        drafts = self.toy.toy.generate(seq.tokens, self.rng.randint(0, 3))
        return seq, n, [token if self.rng.random() < 0.6 else (token + 1) % 250 for token in drafts]

    def _reserved(self, parts: Seq[Part]) -> list[Part]:
        """The parts for which there is room; a sequence without any is ended, as the engine would preempt it."""
        kept = []
        for seq, n, drafts in parts:
            if seq.computed + n + len(drafts) > self.toy.toy.context:
                self._leave(seq)
            elif self.space.reserve(seq, seq.computed + n + len(drafts), self.ops):
                kept.append((seq, n, drafts))
            elif self.space.reserve(seq, seq.computed + n, self.ops):
                kept.append((seq, n, []))
            else:
                self._leave(seq)
        return kept

    def _plan(self, parts: Seq[Part]) -> tuple[Any, list[RigRow]]:
        rows = []
        for i, (seq, n, drafts) in enumerate(parts):
            base = seq.computed
            last = base + n == len(seq.tokens)
            rows.append(
                RigRow(
                    seq=i,
                    tokens=[*seq.tokens[base : base + n], *drafts],
                    start=base,
                    n_draft=len(drafts),
                    sample=last,
                    wants=WANT_TOKEN | (WANT_LOGITS if last and not drafts else 0),
                )
            )
        self._rig.ops, self.ops = self.ops, []
        tables, self._rig.tables = self._rig.tables, None
        plan = self._rig.plan(rows)
        self._rig.tables = tables
        slots = np.array([seq.slot for seq, _, _ in parts], np.int32)
        seqs, layout = [seq for seq, _, _ in parts], self.toy.layout
        n_history = self.toy.caps.history_tokens
        plan = replace(
            plan,
            slot=slots,
            blocks=self.space.table(slots),
            write_from=self.space.write_from(slots),
            history=tokens_before(seqs, n_history) if n_history else None,
            n_prompt=np.array([seq.n_prompt for seq in seqs], np.int32) if layout.rerun_tokens else None,
        )
        return plan, rows
