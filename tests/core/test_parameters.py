"""Every sampling parameter reaches the tokens: through admission, engine, plan and sampler, not through one alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_harness import MODEL, Setup, ngram, oracle, output, plain, request, run

from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.testing.toy import EOS
from headrace.types import Grammar, SamplingParams, StepPlan, field_names

PROMPT = "once upon a time there was"
BASE: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "top_p": 1.0, "ignore_eos": False}
IM_START = 258
FREE = plain(request("free", PROMPT, SamplingParams(**BASE)))
LETTER = chr(next(token for token in FREE[2:] if 97 <= token < 123))

# field -> (a value that must change what comes out, what else the request says)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (3, {}),
    "temperature": (0.0, {}),
    "top_k": (1, {}),
    "top_p": (0.01, {}),
    "min_p": (1.0, {}),
    "typical_p": (0.05, {}),
    "repetition_penalty": (30.0, {}),
    "presence_penalty": (50.0, {}),
    "frequency_penalty": (50.0, {}),
    "logit_bias": ({97: 100.0}, {}),
    "min_tokens": (5, {"logit_bias": {EOS: 50.0}}),
    "ignore_eos": (True, {"logit_bias": {EOS: 50.0}}),
    "stop": ((LETTER,), {}),
    "stop_token_ids": ((ord(LETTER),), {}),
    "bad_words": ((LETTER,), {}),
    "n": (2, {}),
    "seed": (5, {}),
    "logprobs": (2, {}),
    "logprobs_mode": ("filtered", {"logprobs": 1, "top_k": 2}),
    "prompt_logprobs": (1, {}),
    "constraint": (Grammar("charset", "abcdefg{3,14}"), {}),
    "skip_special_tokens": (False, {"logit_bias": {IM_START: 50.0}}),
    "deadline_s": (0.0, {}),
}


def outcome(**params: Any) -> list[Any]:
    seqs = run(Setup().engine(), [request("r", PROMPT, SamplingParams(**{**BASE, **params}))])["r"]
    return [(seq.tokens, seq.stream.text, seq.finish_reason, seq.logprobs, seq.prompt_logprobs) for seq in seqs]


def test_no_parameter_is_forgotten_here() -> None:
    assert set(CASES) == set(field_names(SamplingParams))


@pytest.mark.parametrize("name", CASES)
def test_it_changes_what_comes_out(name: str) -> None:
    value, rest = CASES[name]
    assert outcome(**rest, **{name: value}) != outcome(**rest)
    assert outcome(**rest) == outcome(**rest)


def penalised(repetition: float, presence: float, frequency: float, n: int) -> list[int]:
    """Greedy decoding with the penalties' definition: prompt and output count, every occurrence of them."""
    tokens = list(PROMPT.encode())
    for _ in range(n):
        logits = np.array(MODEL.logits(tokens), np.float32)
        for token in set(tokens):
            value = logits[token]
            value = value / np.float32(repetition) if value > 0 else value * np.float32(repetition)
            logits[token] = value - (np.float32(presence) + np.float32(frequency) * np.float32(tokens.count(token)))
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("penalties", [(4.0, 0.0, 0.0), (1.0, 9.0, 0.0), (1.0, 0.0, 4.0), (1.5, 3.0, 2.0)])
def test_penalties_count_prompt_and_output(penalties: tuple[float, float, float]) -> None:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, **dict(zip(names, penalties, strict=True)))
    req = request("r", PROMPT, params)
    expected = penalised(*penalties, n=24)
    assert expected != penalised(1.0, 0.0, 0.0, n=24)
    for setup, preempt in ((Setup(chunk=5), 0), (Setup(kv="slots"), 4), (Setup(drafter=ngram()), 5)):
        assert output(run(setup.engine(), [req], preempt)["r"]) == expected


@pytest.mark.parametrize("word", [LETTER, "".join(map(chr, FREE[:2]))])
def test_bad_words_of_one_token_and_of_several_never_come(word: str) -> None:
    params = SamplingParams(**{**BASE, "max_tokens": 60, "ignore_eos": True})
    free = run(Setup().engine(), [request("r", PROMPT, params)])["r"][0].stream.text
    assert word in free
    params = SamplingParams(**{**BASE, "max_tokens": 60, "ignore_eos": True, "bad_words": (word,)})
    assert word not in run(Setup(drafter=ngram()).engine(), [request("r", PROMPT, params)])["r"][0].stream.text


def test_a_bad_word_is_also_the_token_that_joins_the_space_to_it() -> None:
    encode = Setup().engine().executor.tokenizer.encode
    (joined,) = encode(" the", add_bos=False)
    assert len(encode("the", add_bos=False)) == 3
    base = {**BASE, "ignore_eos": True, "logit_bias": {joined: 100.0}}
    for word, comes in (("the", False), (" the", False), ("and", True)):
        seqs = run(Setup().engine(), [request("r", PROMPT, SamplingParams(**base, bad_words=(word,)))])["r"]
        assert (joined in output(seqs)) == comes, word


def test_media_are_refused_by_models_that_take_none() -> None:
    with pytest.raises(RequestError, match="takes no images or audio"):
        Setup().engine().add(request("r", "x", media=("image",)))


@pytest.mark.parametrize(
    ("option", "most"), [("prefill_chunk_tokens", 4), ("max_batch_tokens", 7), ("max_sequences", 2)]
)
def test_limits_of_the_engine_hold_in_every_step(option: str, most: int) -> None:
    engine = Setup(kv="slots", options={"prefill_chunk_tokens": 64, option: most}).engine()
    seen: list[int] = []

    def measure(plan: StepPlan) -> None:
        found = {"prefill_chunk_tokens": plan.length, "max_batch_tokens": [plan.offset[-1]]}
        seen.append(int(max(found.get(option, [len(plan.seq)]))))

    engine.executor.on_forward = measure  # type: ignore[attr-defined]
    run(engine, [request(f"r{i}", PROMPT, SamplingParams(max_tokens=3, temperature=0)) for i in range(3)])
    assert max(seen) == most


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_the_prefix_cache_can_be_off(kv: str) -> None:
    for on in (True, False):
        with LLM("toy://vocab=300", backend={"use": "toy", "kv": kv}, engine={"prefix_cache": on}) as llm:
            cached = [llm.generate("a prompt " * 9, {"max_tokens": 2}).usage.cached_tokens for _ in range(2)]
        assert cached[0] == 0
        assert (cached[1] > 0) == on


@pytest.mark.parametrize(
    "params", [{"min_tokens": 5, "logit_bias": {EOS: 50.0}}, {"bad_words": ("".join(map(chr, FREE[3:5])),)}]
)
@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_bans_of_one_position_are_not_those_of_a_whole_draft(kv: str, params: dict[str, Any]) -> None:
    req = request("r", PROMPT, SamplingParams(**{**BASE, **params}))
    alone = output(run(Setup(kv=kv).engine(), [req])["r"])
    for told in (alone, FREE, [*alone[:4], EOS, EOS]):
        drafter = oracle({"r": told}, [req], p=1.0)
        assert output(run(Setup(kv=kv, drafter=drafter).engine(), [req])["r"]) == alone
