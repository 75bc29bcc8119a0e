"""llama.cpp's own sampler chain: repeatable, restarted for each sequence, and nothing ignored."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_driver import Driver, Row

from headrace import sampling
from headrace.types import Fork, Free, SamplingParams, SparseRows

pytestmark = pytest.mark.gguf

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 250, 20)]
OTHER = [int(t) for t in np.random.default_rng(2).integers(0, 250, 20)]


@pytest.fixture
def make(tiny, opened):
    def build(temperature: float = 1.0, seed: int = 5, **native) -> Driver:
        driver = Driver(opened(tiny(), sampler="native", native_sampler=native))
        driver.params = dict.fromkeys(range(4), SamplingParams(temperature=temperature, seed=seed, top_p=1.0))
        return driver

    return build


def test_capabilities_say_what_it_can_not(make):
    caps = make().executor.caps
    assert not caps.drafts
    assert not caps.logprobs
    assert "logprobs" in caps.refuses
    assert caps.masks


@pytest.mark.parametrize(
    "native",
    [{}, {"mirostat": 1}, {"mirostat": 2, "mirostat_tau": 2.0}, {"xtc_probability": 1.0, "xtc_threshold": 0.01},
     {"top_n_sigma": 1.0}, {"dry_multiplier": 2.0, "dry_sequence_breakers": ["é"]}],
)  # fmt: skip
def test_each_sampler_repeats_with_its_seed(make, native):
    driver = make(**native)
    first = driver.generate(0, 0, PROMPT, 12)
    assert driver.generate(0, 0, PROMPT, 12, [Free(0)]) == first
    assert make(seed=6, **native).generate(0, 0, PROMPT, 12) != first


def test_greedy_is_the_core_sampler_s_greedy(make, tiny, opened):
    core = Driver(opened(tiny()))
    assert make(temperature=0).generate(0, 0, PROMPT, 8) == core.generate(0, 0, PROMPT, 8)


def test_mirostat_and_xtc_change_the_text(make):
    plain = make().generate(0, 0, PROMPT, 12)
    assert make(mirostat=2, mirostat_tau=1.0).generate(0, 0, PROMPT, 12) != plain
    greedy = make(temperature=0.01).generate(0, 0, PROMPT, 1)
    cut = make(temperature=0.01, xtc_probability=1.0, xtc_threshold=0.0).generate(0, 0, PROMPT, 1)
    assert cut != greedy  # the top choice is the one that XTC removes


def test_dry_forbids_a_repeat(make):
    loop = list(b"abcdefghi") * 3

    def next_token(**native) -> int:
        """What follows the loop, with a bias for the token that continues it."""
        driver = make(temperature=0, **native)
        plan = driver.plan([Row(0, 0, loop)])
        plan.sampling.bias = SparseRows(
            rows=np.array([0], np.int32),
            starts=np.array([0, 1], np.int32),
            ids=np.array([loop[0]], np.int32),
            values=np.array([100.0], np.float32),
        )
        handle = driver.executor.forward(plan)
        driver.executor.sample(handle, None)
        return int(driver.executor.collect(handle).tokens[0])

    assert next_token() == loop[0]
    assert next_token(dry_multiplier=10.0) != loop[0]
    assert next_token(dry_multiplier=10.0, dry_sequence_breakers=["e"], dry_allowed_length=9) == loop[0]


def test_penalties_count_the_prompt_even_where_it_was_cached(make):
    """The chain's history is the slot's content, not only what this request computed."""

    def run(cached: bool) -> list[int]:
        driver = make(temperature=0)
        driver.params[0] = SamplingParams(temperature=0, repetition_penalty=2.0)
        if cached:
            driver.step([Row(0, 0, PROMPT[:-1], sample=False)])
            return driver.generate(0, len(PROMPT) - 1, PROMPT[-1:], 8)
        return driver.generate(0, 0, PROMPT, 8)

    assert run(True) == run(False)


def test_a_forked_slot_has_its_source_s_history(make):
    driver = make(temperature=0)
    # a text that holds what greedy decoding would say next, so that the penalty matters
    text = PROMPT + driver.generate(0, 0, PROMPT, 20)
    text += driver.generate(0, 0, text, 1, [Free(0)])
    driver.params = dict.fromkeys(range(4), SamplingParams(temperature=0, presence_penalty=50.0))
    expected = driver.generate(0, 0, text, 6, [Free(0)])
    last = len(text) - 1
    assert driver.generate(1, last, text[-1:], 6, [Fork(0, 1, last)]) == expected


def test_a_cached_prompt_at_a_reused_index_starts_a_chain_anew(make):
    driver = make()
    expected = driver.generate(0, 0, PROMPT, 8)
    driver.step([Row(1, 0, PROMPT[:-1], sample=False)])
    # one token at a time, like a sequence that goes on, but at another position
    assert driver.generate(1, 19, PROMPT[-1:], 8, seq=0) == expected


def test_mates_and_a_reused_index_do_not_change_a_text(make):
    driver = make()
    alone = driver.generate(0, 0, PROMPT, 6)
    driver.step([Row(1, 0, OTHER)])  # the chain of index 1 now belongs to another text
    driver.step([Row(1, 0, PROMPT[:5])], [Free(1)])
    result = driver.step([Row(1, 0, PROMPT), Row(2, 0, OTHER)], [Free(1)])
    mine = [result.tokens[0]]
    tokens = result.tokens.tolist()
    for i in range(5):
        tokens = driver.step([Row(1, 20 + i, tokens[:1]), Row(2, 20 + i, tokens[1:])]).tokens.tolist()
        mine.append(tokens[0])
    assert mine == alone


def test_samples_of_one_request_differ(make):
    driver = make()
    plan = driver.plan([Row(0, 0, PROMPT), Row(1, 0, PROMPT), Row(2, 0, PROMPT)])
    plan.sampling.sample_index[:3] = [0, 1, 2]
    handle = driver.executor.forward(plan)
    driver.executor.sample(handle, None)
    assert len(set(driver.executor.collect(handle).tokens.tolist())) > 1


def test_banned_tokens_never_come(make):
    driver = make(temperature=0)
    top = driver.generate(0, 0, PROMPT, 1)[0]
    plan = driver.plan([Row(1, 0, OTHER, sample=False), Row(0, 0, PROMPT)], [Free(0)])
    one = np.array([top], np.int32)
    plan.sampling.banned = SparseRows(
        rows=np.array([1], np.int32), starts=np.array([0, 1], np.int32), ids=one, values=np.zeros(1, np.float32)
    )
    handle = driver.executor.forward(plan)
    driver.executor.sample(handle, None)
    result = driver.executor.collect(handle)
    assert result.starts.tolist() == [0, 0, 1]
    assert result.tokens[0] != top


def test_a_row_with_nothing_allowed_fails_alone(make):
    from headrace.types import MaskBatch

    driver = make()
    width = (driver.executor.model.vocab_size + 31) // 32
    masks = MaskBatch(starts=np.array([0, 1, 1], np.int32), bits=np.zeros((1, width), np.int32))
    result = driver.step([Row(0, 0, PROMPT), Row(1, 0, OTHER)], masks=masks)
    assert list(result.status) == [0]
    assert result.starts.tolist() == [0, 0, 1]


@pytest.mark.parametrize(("bias", "why"), [(np.inf, sampling.INFINITE), (np.nan, sampling.NAN)])
def test_a_row_that_can_not_be_sampled_says_why(make, bias, why):
    driver = make()
    plan = driver.plan([Row(0, 0, PROMPT), Row(1, 0, OTHER)])
    plan.sampling.bias = SparseRows(
        rows=np.array([0], np.int32),
        starts=np.array([0, 1], np.int32),
        ids=np.array([5], np.int32),
        values=np.array([bias], np.float32),
    )
    handle = driver.executor.forward(plan)
    driver.executor.sample(handle, None)
    result = driver.executor.collect(handle)
    assert result.status == {0: why}
    assert result.starts.tolist() == [0, 0, 1]
