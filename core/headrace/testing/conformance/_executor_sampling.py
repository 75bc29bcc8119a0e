"""Executor checks: drafts, masks, sampling, logprobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headrace import sampling
from headrace.testing.conformance._executor_fixture import WARM, ExecutorFixture, need
from headrace.testing.rig import GREEDY, Rig, RigRow, emitted, logprob_rows
from headrace.types import (
    WANT_LOGITS,
    WANT_LOGPROBS,
    WANT_PROMPT_LOGITS,
    WANT_PROMPT_LOGPROBS,
    WANT_TOKEN,
    SamplingParams,
    StepResult,
)


class SamplingChecks(ExecutorFixture):
    """Drafts, masks, sampling and logprobs."""

    # --- drafts

    @pytest.mark.parametrize("wrong", [None, 0, 1, 2])
    def test_drafts_are_verified(self, rig: Rig, wrong: int | None) -> None:
        """Right drafts are all accepted, nothing after the first wrong one is, and the text goes on as without."""
        self._need_drafts(rig)
        self._check_drafts(rig, GREEDY, wrong)

    @pytest.mark.parametrize("wrong", [None, 1])
    def test_drafts_are_verified_when_sampling(self, rig: Rig, wrong: int | None) -> None:
        self._need_drafts(rig)
        self._check_drafts(rig, WARM, wrong)

    def _check_drafts(self, rig: Rig, params: SamplingParams, wrong: int | None) -> None:
        prompt = self.prompts(rig.executor)[0]
        plain = rig.generate(prompt, 6, params=params)
        rig.free(0)
        first = rig.prefill(prompt, params=params)
        drafts = plain[1:4]
        if wrong is not None:
            drafts[wrong] = (drafts[wrong] + 1) % rig.executor.model.vocab_size
        n_right = 3 if wrong is None else wrong
        result = rig.step(RigRow(seq=0, tokens=[*first, *drafts], n_draft=3, params=params))
        assert result.accepted.tolist() == [n_right]
        tokens = first + emitted(result)[0]
        assert tokens == plain[: n_right + 2]
        while len(tokens) < 6:
            tokens += emitted(rig.step(RigRow(seq=0, tokens=tokens[-1:], params=params)))[0]
        assert tokens == plain

    def test_drafts_in_a_mixed_batch(self, rig: Rig) -> None:
        self._need_drafts(rig)
        need(rig.n_sequences > 1, "one row per step")
        a, b, *_ = self.prompts(rig.executor)
        want_a, want_b = rig.generate(a, 4, seq=0), rig.generate(b, 1, seq=1)
        rig.free(0)
        rig.free(1)
        first = rig.prefill(a, seq=0)
        rows = RigRow(seq=1, tokens=b), RigRow(seq=0, tokens=[*first, *want_a[1:3]], n_draft=2)
        result = rig.step(*rows)
        assert emitted(result) == [want_b, want_a[1:4]]
        assert result.accepted.tolist() == [0, 2]

    def test_drafts_after_several_tokens(self, rig: Rig) -> None:
        """A row of tokens that are new and certain (a grammar forced them, say), and then drafts."""
        self._need_drafts(rig)
        prompt = self.prompts(rig.executor)[0]
        plain = rig.generate(prompt, 6)
        rig.free(0)
        rig.prefill(prompt)
        wrong = (plain[4] + 1) % rig.executor.model.vocab_size
        result = rig.step(RigRow(seq=0, tokens=[*plain[:4], wrong], n_draft=2))
        assert emitted(result) == [plain[3:5]]
        tokens = plain[:5] + emitted(rig.step(RigRow(seq=0, tokens=plain[4:5])))[0]
        assert tokens == plain

    # --- masks

    def test_mask_leaves_only_what_it_allows(self, rig: Rig) -> None:
        need(rig.executor.caps.masks, "caps.masks is False")
        prompt = self.prompts(rig.executor)[0]
        last = rig.executor.model.vocab_size - 1
        for allowed in ([5], [last], [3, 31, 32, 33]):
            for params in (GREEDY, WARM):
                result = rig.step(RigRow(seq=0, tokens=prompt, masks=[allowed], params=params))
                assert emitted(result)[0][0] in allowed
                rig.free(0)

    def test_mask_is_for_its_row_only(self, rig: Rig) -> None:
        need(rig.executor.caps.masks and rig.n_sequences > 1, "no masks, or one row per step")
        a, b, *_ = self.prompts(rig.executor)
        want = rig.generate(b, 1, seq=1)
        rig.free(1)
        result = rig.step(RigRow(seq=0, tokens=a, masks=[[9]]), RigRow(seq=1, tokens=b))
        assert emitted(result) == [[9], want]

    def test_masks_of_drafts(self, rig: Rig) -> None:
        self._need_drafts(rig)
        need(rig.executor.caps.masks, "caps.masks is False")
        prompt = self.prompts(rig.executor)[0]
        first = rig.prefill(prompt)
        row = RigRow(seq=0, tokens=[*first, 11, 12], n_draft=2, masks=[[11], [12], [13]])
        assert emitted(rig.step(row)) == [[11, 12, 13]]
        row = RigRow(seq=0, tokens=[13, 11, 12], n_draft=2, masks=[[11], [15], [13]])
        assert emitted(rig.step(row)) == [[11, 15]]

    # --- sampling

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=1.0, top_p=1.0, seed=1),
            SamplingParams(temperature=0.7, top_k=5, seed=2),
            SamplingParams(temperature=1.3, top_p=0.6, seed=3),
            SamplingParams(temperature=1.0, top_p=1.0, min_p=0.05, seed=4),
            SamplingParams(temperature=1.0, top_p=1.0, typical_p=0.5, seed=5),
        ],
        ids=["plain", "top_k", "top_p", "min_p", "typical_p"],
    )
    def test_samples_as_headrace_defines(self, rig: Rig, params: SamplingParams) -> None:
        need(self.core_sampler, "samples by its own rules")
        prompt = self.prompts(rig.executor)[0]
        row = RigRow(seq=0, tokens=prompt, params=params, wants=WANT_TOKEN | WANT_LOGITS)
        result = rig.step(row)
        logits = np.array(result.arrays["logits"][1][0])
        rig.lengths[0] = 0
        plan = rig.plan([row])
        assert emitted(result) == emitted(sampling.sample_step(plan, [logits], None))

    def test_seed_position_and_sample_index_decide_the_noise(self, rig: Rig) -> None:
        prompt = self.prompts(rig.executor)[0]

        def run(params: SamplingParams, sample_index: int = 0, chunk: int | None = None, seq: int = 0) -> list[int]:
            tokens = rig.generate(prompt, 8, params=params, sample_index=sample_index, chunk=chunk, seq=seq)
            rig.free(seq)
            return tokens

        hot = SamplingParams(temperature=1.5, top_p=1.0, seed=11)
        first = run(hot)
        assert run(hot) == first
        if self._compares_tokens(rig):
            assert run(hot, chunk=2) == first, "noise must not depend on chunking"
            assert run(hot, seq=rig.n_sequences - 1) == first, "noise must not depend on the row or slot"
        assert run(SamplingParams(temperature=1.5, top_p=1.0, seed=12)) != first
        if self.core_sampler:
            assert run(hot, sample_index=1) != first

    def test_bias_ban_and_penalties(self, rig: Rig) -> None:
        need(self.core_sampler, "samples by its own rules")
        prompt = self.prompts(rig.executor)[0]

        def token(**row: Any) -> int:
            result = emitted(rig.step(RigRow(seq=0, tokens=prompt, **row)))[0][0]
            rig.free(0)
            return result

        best = token()
        assert token(bias={17: 1000.0}) == 17
        assert token(bias={best: -math.inf}) != best
        assert token(banned=[best]) == token(bias={best: -math.inf})
        strong = SamplingParams(temperature=0.0, frequency_penalty=100.0)
        assert token(params=strong, counts={best: 50}) != best

    # --- logprobs

    def test_logprobs_of_sampled_tokens(self, rig: Rig) -> None:
        need(rig.executor.caps.logprobs, "caps.logprobs is False")
        prompt = self.prompts(rig.executor)[0]
        wants = WANT_TOKEN | WANT_LOGPROBS | WANT_LOGITS
        params = SamplingParams(temperature=0.0, logprobs=4)
        result = rig.step(RigRow(seq=0, tokens=prompt, wants=wants, params=params))
        ((position, ids, values),) = logprob_rows(result.logprobs, 0)
        logits = result.arrays["logits"][1][0].astype(np.float64)
        exact = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
        assert position == len(prompt)
        assert ids[0] == emitted(result)[0][0]
        assert ids[1:] == np.argsort(-logits, kind="stable")[:4].tolist()
        assert values == pytest.approx([exact[token] for token in ids], abs=1e-3)

    def test_logprobs_of_a_verified_row(self, rig: Rig) -> None:
        self._need_drafts(rig)
        need(rig.executor.caps.logprobs, "caps.logprobs is False")
        prompt = self.prompts(rig.executor)[0]
        plain = rig.generate(prompt, 4)
        rig.free(0)
        first = rig.prefill(prompt)
        params = SamplingParams(temperature=0.0, logprobs=1)
        row = RigRow(seq=0, tokens=[*first, *plain[1:3]], n_draft=2, params=params, wants=WANT_TOKEN | WANT_LOGPROBS)
        entries = logprob_rows(rig.step(row).logprobs, 0)
        assert [ids[0] for _, ids, _ in entries] == plain[1:4]
        assert [position for position, _, _ in entries] == [len(prompt) + 1 + j for j in range(3)]

    def test_prompt_logprobs_do_not_depend_on_chunking(self, rig: Rig) -> None:
        need(rig.executor.caps.logprobs, "caps.logprobs is False")
        prompt = self.prompts(rig.executor)[0]
        params = SamplingParams(temperature=0.0, prompt_logprobs=2)
        wants = WANT_TOKEN | WANT_PROMPT_LOGPROBS

        def run(chunk: int) -> list[tuple[int, list[int], list[float]]]:
            entries = []
            for low in range(0, len(prompt), chunk):
                part = prompt[low : low + chunk]
                row = RigRow(
                    seq=0, tokens=part, params=params, wants=wants, targets=prompt[low + 1 : low + 1 + len(part)]
                )
                row.sample = low + chunk >= len(prompt)
                entries += logprob_rows(rig.step(row).prompt_logprobs, 0)
            rig.free(0)
            return entries

        whole, parts = run(len(prompt)), run(2)
        assert [position for position, _, _ in whole] == list(range(1, len(prompt)))
        assert [ids[0] for _, ids, _ in whole] == prompt[1:]
        assert all(len(ids) == 3 for _, ids, _ in whole)
        assert all(value <= 1e-6 for _, _, values in whole for value in values)
        assert [entry[0] for entry in parts] == [entry[0] for entry in whole]
        for (_, _, got), (_, _, want) in zip(parts, whole, strict=True):
            assert got == pytest.approx(want, abs=0 if rig.executor.caps.row_invariant else self.tolerance)

    # --- logits of prompts

    def test_prompt_logits_do_not_depend_on_chunking(self, rig: Rig) -> None:
        """One row of logits for each token, equal to those of a prompt that ends there."""
        need(rig.executor.caps.prompt_logits, "caps.prompt_logits is False")
        prompt = self.prompts(rig.executor)[0]

        def run(chunk: int) -> np.ndarray:
            found = []
            for low in range(0, len(prompt), chunk):
                part = prompt[low : low + chunk]
                row = RigRow(seq=0, tokens=part, sample=False, wants=WANT_PROMPT_LOGITS)
                found.append(prompt_logit_rows(rig.step(row), 0))
                assert len(found[-1]) == len(part)
            rig.free(0)
            return np.concatenate(found)

        whole = run(len(prompt))
        assert whole.shape == (len(prompt), rig.executor.model.vocab_size)
        assert whole.dtype == np.float32
        for chunk in (1, 3):
            self._same(rig, run(chunk), whole)
        for i in (0, len(prompt) - 1):
            self._same(rig, whole[i], self._logits(rig, prompt[: i + 1]))
            rig.free(0)

    def test_prompt_logits_beside_other_rows(self, rig: Rig) -> None:
        need(rig.executor.caps.prompt_logits, "caps.prompt_logits is False")
        need(rig.n_sequences > 2, "fewer than three rows per step")
        a, b, c, *_ = self.prompts(rig.executor)
        wanted = WANT_PROMPT_LOGITS
        alone = [prompt_logit_rows(rig.step(RigRow(seq=0, tokens=a, sample=False, wants=wanted)), 0)]
        rig.free(0)
        alone.append(prompt_logit_rows(rig.step(RigRow(seq=0, tokens=c, sample=False, wants=wanted)), 0))
        rig.free(0)
        token = rig.prefill(b)
        rig.free(0)
        strong = {7: 1000.0}  # biases change what is sampled, not what the model said
        result = rig.step(
            RigRow(seq=0, tokens=a, wants=WANT_TOKEN | wanted, bias=strong),
            RigRow(seq=1, tokens=b),
            RigRow(seq=2, tokens=c, sample=False, wants=wanted),
        )
        assert result.arrays["prompt_logits"][0].tolist() == [0] * len(a) + [2] * len(c)
        self._same(rig, prompt_logit_rows(result, 0), alone[0])
        self._same(rig, prompt_logit_rows(result, 2), alone[1])
        first, second, third = emitted(result)
        assert (first, third) == ([7], [])
        if self._compares_tokens(rig):
            assert second == token

    def test_logits_come_only_when_wanted(self, rig: Rig) -> None:
        prompt = self.prompts(rig.executor)[0]
        result = rig.step(RigRow(seq=0, tokens=prompt))
        assert not {"logits", "prompt_logits"} & set(result.arrays)
        assert result.logprobs is None
        assert result.prompt_logprobs is None


def prompt_logit_rows(result: StepResult, row: int) -> np.ndarray:
    """[n, vocab] logits of the positions of one plan row, copied: a result is valid until the next one."""
    rows, values = result.arrays["prompt_logits"]
    return np.array(values[rows == row])
