"""The executor against itself: whatever the KV went through, logits are those of a fresh run."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_driver import Driver, Row, new_executor, prompt_logprobs_row

from headrace.errors import StepFailed
from headrace.types import (
    WANT_LOGITS,
    WANT_LOGPROBS,
    WANT_PROMPT_LOGITS,
    WANT_TOKEN,
    Fork,
    Free,
    MaskBatch,
    SamplingParams,
    Trim,
)

pytestmark = pytest.mark.gguf

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 250, 40)]
OTHER = [int(t) for t in np.random.default_rng(2).integers(0, 250, 40)]

# flash attention sums in another order per chunk size; without it only the one-token path differs, in the last bits
CLOSE = {"rtol": 0, "atol": 2e-3}


@pytest.fixture
def driver(tiny, opened):
    return Driver(opened(tiny(), flash_attention="off", kv_type="f32"))


@pytest.fixture
def fresh(tiny, opened):
    """fresh(tokens) -> logits after tokens, in a slot that never held anything."""
    other = Driver(opened(tiny(), flash_attention="off", kv_type="f32"))

    def run(tokens):
        return other.logits(0, 0, list(tokens), [Free(0)])

    return run


def test_capabilities_of_an_attention_model(driver):
    caps = driver.executor.caps
    assert (caps.kv, caps.max_rows, caps.max_tokens) == ("slots", 4, 256)
    assert caps.partial_trim
    assert caps.fork
    assert caps.drafts
    assert caps.blocking_forward
    assert not caps.row_invariant
    assert driver.executor.layout.n_slots == 4
    assert driver.executor.layout.slot_tokens == 256


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_recurrent_models_refuse_trims_and_say_so(tiny, opened, arch):
    driver = Driver(opened(tiny(arch)))
    caps = driver.executor.caps
    assert not caps.partial_trim
    assert not caps.fork
    assert not caps.drafts
    first = driver.generate(0, 0, PROMPT, 4)
    with pytest.raises(StepFailed) as failed:
        driver.step([Row(1, 0, PROMPT), Row(0, 10, PROMPT[10:])], [Trim(0, 10)])
    assert failed.value.rows == (1,)
    assert driver.generate(0, 0, PROMPT, 4, [Free(0), Free(1)]) == first


@pytest.mark.parametrize("arch", ["llama", "mamba", "lfm2", "gemma3"])
def test_capabilities_are_foreseen_before_the_load(tiny, arch):
    executor = new_executor(tiny(arch))
    foreseen = executor.caps
    executor.open()
    assert executor.caps == foreseen
    executor.close()


def test_chunked_prefill_equals_one_chunk(driver, fresh):
    for start in range(0, 32, 8):
        result = driver.step([Row(2, start, PROMPT[start : start + 8], sample=False)])
        assert result.tokens.tolist() == []
    np.testing.assert_allclose(driver.logits(2, 32, PROMPT[32:]), fresh(PROMPT), **CLOSE)


def test_rows_of_one_step_do_not_mix(driver, fresh):
    want = WANT_TOKEN | WANT_LOGITS
    driver.step([Row(0, 0, PROMPT[:20], sample=False), Row(3, 0, OTHER[:7], sample=False)])
    result = driver.step(
        [Row(3, 7, OTHER[7:9], wants=want), Row(1, 0, OTHER, wants=want), Row(0, 20, PROMPT[20:21], wants=want)]
    )
    index, logits = result.arrays["logits"]
    assert index.tolist() == [0, 1, 2]
    for got, tokens in zip(logits, (OTHER[:9], OTHER, PROMPT[:21]), strict=True):
        np.testing.assert_allclose(got, fresh(tokens), **CLOSE)


def test_four_decoding_rows_write_what_each_writes_alone(driver, fresh):
    texts = [PROMPT[:9], OTHER[:5], PROMPT[5:30], OTHER[3:20]]
    result = driver.step([Row(i, 0, text) for i, text in enumerate(texts)])
    out = [[token] for token in result.tokens.tolist()]
    for _ in range(5):
        rows = [Row(i, len(text) + len(out[i]) - 1, out[i][-1:]) for i, text in enumerate(texts)]
        for i, token in enumerate(driver.step(rows).tokens.tolist()):
            out[i].append(token)
    for text, tokens in zip(texts, out, strict=True):
        for i, token in enumerate(tokens):
            logits = fresh(text + tokens[:i])
            assert logits[token] >= logits.max() - 1e-2


def test_trim_forgets_what_came_after(driver, fresh):
    driver.logits(0, 0, PROMPT)
    got = driver.logits(0, 10, OTHER[:6], [Trim(0, 10)])
    np.testing.assert_allclose(got, fresh(PROMPT[:10] + OTHER[:6]), **CLOSE)


def test_trim_to_nothing_and_free_empty_a_slot(driver, fresh):
    for op in (Trim(0, 0), Free(0)):
        driver.logits(0, 0, PROMPT, [Free(0)])
        np.testing.assert_allclose(driver.logits(0, 0, OTHER, [op]), fresh(OTHER), **CLOSE)


def test_fork_copies_a_prefix_and_leaves_the_source(driver, fresh):
    driver.logits(0, 0, PROMPT)
    driver.logits(1, 0, OTHER)  # what the fork overwrites
    want = WANT_TOKEN | WANT_LOGITS
    result = driver.step([Row(1, 15, OTHER[:3], wants=want), Row(0, 40, OTHER[:2], wants=want)], [Fork(0, 1, 15)])
    forked, source = result.arrays["logits"][1]
    np.testing.assert_allclose(forked, fresh(PROMPT[:15] + OTHER[:3]), **CLOSE)
    np.testing.assert_allclose(source, fresh(PROMPT + OTHER[:2]), **CLOSE)


def test_forks_in_a_row_and_a_trimmed_source(driver, fresh):
    driver.logits(0, 0, PROMPT)
    got = driver.logits(2, 9, OTHER[:4], [Fork(0, 1, 12), Trim(0, 3), Fork(1, 2, 9)])
    np.testing.assert_allclose(got, fresh(PROMPT[:9] + OTHER[:4]), **CLOSE)
    np.testing.assert_allclose(driver.logits(0, 3, OTHER[:4]), fresh(PROMPT[:3] + OTHER[:4]), **CLOSE)


def test_right_and_wrong_drafts(driver):
    truth = driver.generate(0, 0, PROMPT, 6)
    drafts = [truth[1], truth[2], (truth[3] + 1) % 250]
    driver.step([Row(1, 0, PROMPT)])
    result = driver.step([Row(1, 40, [truth[0], *drafts], n_draft=3)])
    assert result.accepted.tolist() == [2]
    assert result.tokens.tolist() == truth[1:4]
    assert driver.generate(1, 43, [truth[3]], 2, [Trim(1, 43)]) == truth[4:6]


def test_mixed_prefill_draft_and_plain_rows(driver):
    truth = [driver.generate(i, 0, text, 4, [Free(i)]) for i, text in enumerate((PROMPT, OTHER))]
    ops = [Trim(0, 40), Trim(1, 40)]
    rows = [Row(0, 40, truth[0][:3], n_draft=2), Row(2, 0, OTHER[:8], sample=False), Row(1, 40, truth[1][:1])]
    result = driver.step(rows, ops)
    assert result.starts.tolist() == [0, 3, 3, 4]
    assert result.tokens.tolist() == [*truth[0][1:4], truth[1][1]]


def test_prompt_logprobs_beside_another_row(driver, fresh):
    second = prompt_logprobs_row(3, PROMPT, sample=False)
    result = driver.step([Row(1, 0, OTHER[:5]), prompt_logprobs_row(0, PROMPT), second])
    alone = driver.generate(2, 0, PROMPT, 1)
    assert result.tokens.tolist()[1] == alone[0]
    rows = result.prompt_logprobs
    assert rows is not None
    assert rows.row.tolist() == [1] * 39 + [2] * 39
    assert np.allclose(rows.values[:39], rows.values[39:], atol=1e-3)
    for position, ids, values in list(zip(rows.position.tolist(), rows.ids, rows.values, strict=True))[::9]:
        logits = fresh(PROMPT[:position]).astype(np.float64)
        assert ids[0] == PROMPT[position]
        assert values[0] == pytest.approx(logits[ids[0]] - np.log(np.exp(logits).sum()), abs=1e-2)


def test_logits_of_a_whole_prompt_beside_other_rows(driver, fresh):
    """Of rows that sample too, and are biased: what comes back is what the model said."""
    driver.params[0] = SamplingParams(temperature=0, logprobs=1)
    wants = WANT_TOKEN | WANT_PROMPT_LOGITS
    kept = Row(0, 0, PROMPT, wants=wants, targets=[-1] * len(PROMPT))
    only = Row(3, 0, OTHER, sample=False, wants=WANT_PROMPT_LOGITS)
    result = driver.step([Row(1, 0, OTHER[:5]), kept, prompt_logprobs_row(2, PROMPT), only])
    rows, logits = result.arrays["prompt_logits"]
    assert rows.tolist() == [1] * len(PROMPT) + [3] * len(OTHER)
    assert result.prompt_logprobs is not None
    assert set(result.prompt_logprobs.row.tolist()) == {2}
    for ids, found in ((PROMPT, logits[: len(PROMPT)]), (OTHER, logits[len(PROMPT) :])):
        for i in range(0, len(ids), 9):
            assert np.allclose(found[i], fresh(ids[: i + 1]), atol=1e-2)


def test_logprobs_of_chosen_tokens(driver, fresh):
    driver.params[0] = SamplingParams(temperature=0, logprobs=2)
    result = driver.step([Row(0, 0, PROMPT, wants=WANT_TOKEN | WANT_LOGPROBS)])
    logits = fresh(PROMPT).astype(np.float64)
    assert result.logprobs is not None
    assert result.logprobs.values[0][0] == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=1e-2)


@pytest.mark.parametrize("sampler", ["core", "native"])
def test_masks_decide(tiny, opened, sampler):
    driver = Driver(opened(tiny(), sampler=sampler))
    bits = np.zeros((1, (driver.executor.model.vocab_size + 31) // 32), np.int32)
    bits[0, 77 // 32] = 1 << (77 % 32)
    masks = MaskBatch(starts=np.array([0, 0, 1], np.int32), bits=bits)
    result = driver.step([Row(0, 0, PROMPT), Row(1, 0, OTHER)], masks=masks)
    assert result.tokens.tolist()[1] == 77


def test_an_interrupted_step_fails_and_the_next_one_runs(driver, fresh, monkeypatch):
    context = driver.executor._context
    decode = context.decode

    def interrupted(n):
        thread = threading.Thread(target=driver.executor.interrupt)
        thread.start()
        thread.join()
        return decode(n)

    monkeypatch.setattr(context, "decode", interrupted)
    with pytest.raises(StepFailed, match="interrupted"):
        driver.step([Row(0, 0, PROMPT)])
    monkeypatch.undo()
    np.testing.assert_allclose(driver.logits(0, 0, PROMPT, [Trim(0, 0)]), fresh(PROMPT), **CLOSE)


@pytest.mark.parametrize("bad", ["token", "position", "negative"])
def test_a_bad_row_is_named_and_its_mates_go_on(driver, fresh, bad):
    row = {
        "token": Row(1, 0, [10**6]),
        "position": Row(1, 7, [5]),
        "negative": Row(1, 0, [-1]),
    }[bad]
    with pytest.raises(StepFailed) as failed:
        driver.step([Row(0, 0, PROMPT), row])
    assert failed.value.rows == (1,)
    # llama.cpp took nothing of it, so that the mates can go on as they are
    np.testing.assert_allclose(driver.logits(0, 0, PROMPT), fresh(PROMPT), **CLOSE)


def test_a_full_slot_fails_the_step(driver):
    driver.step([Row(0, 0, [1] * 256, sample=False)])
    with pytest.raises(StepFailed, match="no KV slot"):
        driver.step([Row(0, 256, [1])])


def test_sliding_windows_survive_a_trim(tiny, opened):
    """A cache of just the window would have dropped what a trimmed text needs again."""
    small = {"context_tokens": 512, "batch_tokens": 32, "ubatch_tokens": 32, "flash_attention": "off", "kv_type": "f32"}
    driver = Driver(opened(tiny("gemma3"), **small))
    text = (PROMPT + OTHER) * 5
    assert driver.executor.caps.partial_trim
    for slot, end in ((0, len(text)), (1, 40)):
        for start in range(0, end, 20):
            driver.step([Row(slot, start, text[start : start + 20], sample=False)])
    trimmed = driver.logits(0, 40, text[40:50], [Trim(0, 40)])
    np.testing.assert_allclose(trimmed, driver.logits(1, 40, text[40:50]), **CLOSE)


def test_two_models_at_once_and_twice(tiny, opened):
    path = tiny()
    first, second = Driver(opened(path)), Driver(opened(tiny("mamba")))
    expected = first.generate(0, 0, PROMPT, 3)
    second.generate(0, 0, PROMPT, 3)
    second.executor.close()
    second.executor.close()
    assert first.generate(1, 0, PROMPT, 3) == expected
    tokenizer = first.executor.tokenizer
    first.executor.close()
    first.executor.open()
    assert first.executor.tokenizer is tokenizer
    assert tokenizer.encode("ab") != []
    assert first.generate(0, 0, PROMPT, 3) == expected


def test_more_tokens_than_a_batch_holds(tiny, opened):
    driver = Driver(opened(tiny(), slots=1, batch_tokens=1024))
    assert driver.executor.caps.max_tokens == 256  # no more than the KV
    with pytest.raises(StepFailed, match="257 tokens in one step, at most 256"):
        driver.step([Row(0, 0, [1] * 257)])
    driver.step([Row(0, 0, [1] * 256)])


def test_an_empty_plan_is_legal(driver):
    result = driver.step([])
    assert result.tokens.tolist() == []


def test_a_closed_executor_fails_the_step(driver):
    driver.executor.close()
    driver.executor.interrupt()
    with pytest.raises(StepFailed, match="closed"):
        driver.step([Row(0, 0, PROMPT)])


def test_temperature_repeats_with_the_seed(driver):
    driver.params[0] = SamplingParams(temperature=1.0, seed=7)
    first = driver.generate(0, 0, PROMPT, 8)
    assert driver.generate(0, 0, PROMPT, 8, [Free(0)]) == first
    driver.params[0] = SamplingParams(temperature=1.0, seed=8)
    assert driver.generate(0, 0, PROMPT, 8, [Free(0)]) != first
