"""Golden DeepSeek-V4.1 models through the front door: checkpoint, engine, scheduler, caches and sampler in the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.types import SamplingParams

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")
pytest.importorskip("safetensors", reason="the reference backend needs safetensors")

import golden  # noqa: E402

TEXT = ("t1", "t2", "t3", "f1")


def open_llm(name: str, **backend: Any) -> LLM:
    folder = str(golden.model(name).folder)
    return LLM(folder, backend={"use": "reference", **backend}, determinism="batch-invariant")


@pytest.mark.parametrize("name", TEXT)
def test_logits(name: str) -> None:
    """In one chunk and in chunks: the same bits, and those of other implementations up to rounding."""
    expected = golden.model(name).expected
    for cache, field in (("quantised", "logits_fp32_qon"), ("plain", "logits_fp32_qoff")):
        with open_llm(name, cache=cache) as llm:
            for number in (0, 1):
                ids, want = expected[f"seq{number}.input_ids"].tolist(), expected[f"seq{number}.{field}"]
                whole = llm.logits(ids)
                np.testing.assert_array_equal(llm.logits(ids, chunk=7), whole)
                if cache == "plain":
                    assert golden.rel(torch.from_numpy(whole), want) <= 1e-4
                else:
                    golden.assert_rows(torch.from_numpy(whole), want)


@pytest.mark.parametrize("name", TEXT)
def test_generated_text_is_what_its_logits_say(name: str) -> None:
    """Greedy decode, one token a step, against the logits of the whole text read as a prompt."""
    prompt = golden.model(name).expected["seq0.input_ids"].tolist()[:20]
    with open_llm(name) as llm:
        found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        text = [*prompt, *found.token_ids]
        assert llm.logits(text).argmax(1).tolist()[19:-1] == list(found.token_ids)


@pytest.mark.parametrize("weights", ["dequant", "quantised"])
def test_packed_checkpoint(weights: str) -> None:
    expected = golden.model("q1").expected
    with open_llm("q1", weights=weights) as llm:
        logits = torch.from_numpy(llm.logits(expected["input_ids"].tolist()))
    golden.assert_rows(logits, expected["logits_fp32_qon"])


def test_prompts_are_not_scored_where_half_of_the_model_skips_them() -> None:
    with open_llm("t1", replay="compact") as llm:
        with pytest.raises(RequestError, match=r"replay = 'compact'"):
            llm.generate([5, 6, 7], SamplingParams(prompt_logprobs=1))
        with pytest.raises(RequestError):
            llm.logits([5, 6, 7])
