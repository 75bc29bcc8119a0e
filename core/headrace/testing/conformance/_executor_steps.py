"""Executor checks: life cycle, steps, KV operations, failures."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contracts import Executor
from headrace.errors import StepFailed
from headrace.testing.conformance._executor_fixture import ExecutorFixture, need
from headrace.testing.rig import Rig, RigRow, emitted
from headrace.types import WANT_LOGITS, WANT_TOKEN


class StepChecks(ExecutorFixture):
    """Life cycle, steps, chunking, batch mates, KV operations and failures."""

    # --- what it says about itself

    def test_capabilities_are_consistent(self, executor: Executor) -> None:
        caps, layout = executor.caps, executor.layout
        assert caps.max_rows >= 1
        assert caps.max_tokens >= 1
        assert layout.fingerprint, "KVLayout.fingerprint is empty: stored KV could be loaded into another model"
        if caps.kv == "paged":
            assert layout.n_blocks >= 1
            assert layout.block_tokens >= 1
            assert layout.groups, "a paged layout names at least one KV group"
            assert all(group.grain_bytes > 0 for group in layout.groups)
            assert layout.has_rings or not (layout.n_snapshots or layout.replay_tokens), "they are for rings"
            assert not (layout.has_rings and caps.drafts and layout.slack_tokens < 1), "rejected drafts need slack"
        else:
            assert layout.n_slots >= 1
            assert layout.slot_tokens >= 1
        assert not (caps.kv == "slots" and caps.drafts and not caps.partial_trim), "rejected drafts need partial trims"

    def test_model_is_described(self, executor: Executor) -> None:
        model = executor.model
        assert model.vocab_size == executor.tokenizer.n_vocab
        assert model.eos_ids == executor.tokenizer.eos_ids
        assert all(0 <= token < model.vocab_size for token in model.eos_ids)
        assert model.context_tokens >= 1
        assert model.fingerprint
        assert model.architecture

    def test_describe_and_step_cost_have_the_right_form(self, executor: Executor) -> None:
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in executor.describe().items())
        curve = list(executor.step_cost())
        assert [size for size, _ in curve] == sorted({size for size, _ in curve})
        assert all(ms > 0 for _, ms in curve)

    # --- life cycle

    def test_close_twice_and_before_open(self) -> None:
        executor = self.make()
        executor.close()
        executor.open()
        executor.close()
        executor.close()

    def test_reopened_executor_starts_empty_and_repeats(self, executor: Executor) -> None:
        prompt = self.prompts(executor)[0]
        fingerprint = executor.model.fingerprint
        first = Rig(executor).generate(prompt, self.n_tokens)
        executor.close()
        executor.open()
        assert executor.model.fingerprint == fingerprint
        assert Rig(executor).generate(prompt, self.n_tokens) == first

    # --- steps

    def test_plan_without_rows(self, rig: Rig) -> None:
        result = rig.step()
        assert len(result.tokens) == 0
        assert result.starts.tolist() == [0]
        assert len(result.accepted) == 0

    def test_row_that_does_not_sample_emits_nothing(self, rig: Rig) -> None:
        a, b, *_ = self.prompts(rig.executor)
        if rig.n_sequences > 1:
            result = rig.step(RigRow(seq=0, tokens=a, sample=False), RigRow(seq=1, tokens=b))
            assert [len(tokens) for tokens in emitted(result)] == [0, 1]
        assert emitted(rig.step(RigRow(seq=0, tokens=b, sample=False))) == [[]]

    def test_greedy_is_the_argmax_of_its_logits(self, rig: Rig) -> None:
        need(self.core_sampler, "samples by its own rules")
        prompt = self.prompts(rig.executor)[0]
        result = rig.step(RigRow(seq=0, tokens=prompt, wants=WANT_TOKEN | WANT_LOGITS))
        rows, logits = result.arrays["logits"]
        assert rows.tolist() == [0]
        assert logits.shape == (1, rig.executor.model.vocab_size)
        assert logits.dtype == np.float32
        assert emitted(result) == [[int(np.argmax(logits[0]))]]

    def test_same_prompt_twice_gives_the_same_tokens(self, rig: Rig) -> None:
        prompt = self.prompts(rig.executor)[0]
        first = rig.generate(prompt, self.n_tokens)
        rig.free(0)
        assert rig.generate(prompt, self.n_tokens) == first

    def test_every_token_of_the_prefix_counts(self, rig: Rig) -> None:
        prompt = self.prompts(rig.executor)[0]
        other = [*prompt[:1], (prompt[1] + 1) % 250, *prompt[2:]]
        first = self._logits(rig, prompt)
        rig.free(0)
        assert not np.array_equal(first, self._logits(rig, other))

    @pytest.mark.parametrize("chunk", [1, 2, 3])
    def test_chunked_prefill(self, rig: Rig, chunk: int) -> None:
        prompt = self.prompts(rig.executor)[0]
        whole = self._logits(rig, prompt)
        rig.free(0)
        self._same(rig, self._logits(rig, prompt, chunk=chunk), whole)

    def test_batch_mates_do_not_change_a_row(self, rig: Rig) -> None:
        need(rig.n_sequences > 1, "one row per step")
        prompts = self.prompts(rig.executor)[: rig.n_sequences]
        alone = [self._logits(rig, prompt, seq=i) for i, prompt in enumerate(prompts)]
        for i in range(len(prompts)):
            rig.free(i)
        want = WANT_TOKEN | WANT_LOGITS
        rows = [RigRow(seq=i, tokens=prompt, wants=want) for i, prompt in enumerate(prompts)]
        order, logits = rig.step(*reversed(rows)).arrays["logits"]
        for r, values in zip(order.tolist(), logits, strict=True):
            self._same(rig, values, alone[len(prompts) - 1 - r])

    def test_prefill_and_decode_share_a_step(self, rig: Rig) -> None:
        need(rig.n_sequences > 1, "one row per step")
        need(self._compares_tokens(rig), "equal only up to near ties")
        a, b, *_ = self.prompts(rig.executor)
        want_a, want_b = rig.generate(a, 3, seq=0), rig.generate(b, 2, seq=1)
        rig.free(0)
        rig.free(1)
        got_a = rig.prefill(a, seq=0)
        mixed = emitted(rig.step(RigRow(seq=0, tokens=got_a[-1:]), RigRow(seq=1, tokens=b)))
        last = emitted(rig.step(RigRow(seq=1, tokens=mixed[1]), RigRow(seq=0, tokens=mixed[0])))
        assert got_a + mixed[0] + last[1] == want_a
        assert mixed[1] + last[0] == want_b

    # --- KV operations

    def test_trim_forgets_what_came_after(self, rig: Rig) -> None:
        need(rig.executor.caps.kv == "paged" or rig.executor.caps.partial_trim, "caps.partial_trim is False")
        a, b, *_ = self.prompts(rig.executor)
        layout = rig.executor.layout
        keep = max(2, len(a) + 2 - layout.slack_tokens) if layout.has_rings else 2
        need(keep <= len(a), "rings without slack")
        want = self._logits(rig, a[:keep] + b)
        rig.free(0)
        rig.generate(a, 3)
        rig.trim(0, keep)
        self._same(rig, self._logits(rig, b), want)

    def test_free_forgets_everything(self, rig: Rig) -> None:
        a, b, *_ = self.prompts(rig.executor)
        want = self._logits(rig, b)
        rig.free(0)
        rig.generate(a, 2)
        rig.free(0)
        self._same(rig, self._logits(rig, b), want)

    @pytest.mark.parametrize("drop", [0, 1])
    def test_fork_then_diverge(self, rig: Rig, drop: int) -> None:
        """drop = 1 forks a part of the source."""
        caps = rig.executor.caps
        need(rig.n_sequences > 1, "one sequence at a time")
        need(caps.kv == "paged" or caps.fork, "caps.fork is False")
        need(not drop or caps.kv == "paged" or caps.partial_trim, "caps.partial_trim is False")
        layout = rig.executor.layout
        need(not layout.has_rings or (layout.n_snapshots and drop <= layout.slack_tokens), "rings can't be copied")
        a, b, *_ = self.prompts(rig.executor)
        want_branch = self._logits(rig, a[: len(a) - drop] + b)
        rig.free(0)
        want_trunk = self._logits(rig, a + b[:2])
        rig.free(0)
        rig.step(RigRow(seq=0, tokens=a, sample=False))
        rig.fork(0, 1, len(a) - drop)
        self._same(rig, self._logits(rig, b, seq=1), want_branch)
        self._same(rig, self._logits(rig, b[:2], seq=0), want_trunk)

    # --- failures

    def test_step_failure_leaves_the_executor_usable(self, rig: Rig) -> None:
        prompts = self.prompts(rig.executor)[: max(1, rig.n_sequences)]
        want = [rig.generate(prompt, 3, seq=i) for i, prompt in enumerate(prompts)]
        for i in range(len(prompts)):
            rig.free(i)
        firsts = [rig.prefill(prompt, seq=i) for i, prompt in enumerate(prompts)]
        need(self.break_next(rig.executor), "break_next is not implemented")
        rows = [RigRow(seq=i, tokens=first) for i, first in enumerate(firsts)]
        bases = list(rig.lengths)
        with pytest.raises(StepFailed):
            rig.step(*rows)
        trims = rig.executor.caps.kv == "paged" or rig.executor.caps.partial_trim
        for i, base in enumerate(bases):
            if trims:
                rig.trim(i, base)
            else:
                rig.free(i)
                rig.prefill(prompts[i], seq=i)
        tokens = [first + second for first, second in zip(firsts, emitted(rig.step(*rows)), strict=True)]
        last = emitted(rig.step(*[RigRow(seq=i, tokens=text[-1:]) for i, text in enumerate(tokens)]))
        if self._compares_tokens(rig):
            assert [text + more for text, more in zip(tokens, last, strict=True)] == want

    def test_interrupt_between_steps_harms_nobody(self, rig: Rig) -> None:
        prompt = self.prompts(rig.executor)[0]
        want = rig.generate(prompt, 2)
        rig.free(0)
        rig.executor.interrupt()
        try:
            got = rig.generate(prompt, 2)
        except StepFailed:  # allowed: the interrupt met the forward; the next one must work
            rig.free(0)
            got = rig.generate(prompt, 2)
        assert got == want

    def test_nan_ends_its_own_row_only(self, rig: Rig) -> None:
        need(rig.n_sequences > 1, "one row per step")
        a, b, *_ = self.prompts(rig.executor)
        want = rig.generate(b, 1, seq=1)
        rig.free(1)
        need(self.poison_row(rig.executor, 0), "poison_row is not implemented")
        result = rig.step(RigRow(seq=0, tokens=a), RigRow(seq=1, tokens=b))
        assert list(result.status) == [0]
        assert result.status[0]
        assert emitted(result)[1] == want
