"""A real model: what it writes does not depend on slots, chunks or mates, up to near ties."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_driver import MACHINE, Driver, Row, new_executor, prompt_logprobs_row

from headrace.types import Fit, Fork, Free, ModelSource, Trim
from headrace_gguf.backend import checks, probe

pytestmark = pytest.mark.gguf

NEAR = 0.6  # logits; flash attention and the one-row path move them by up to that, which flips near ties only

PROMPTS = [
    "The capital of France is", "Water boils at a temperature of", "Once upon a time", "def add(a, b):",
    "The sun rises in the", "One, two, three,", "A triangle has", "My favourite colour is",
]  # fmt: skip


@pytest.fixture(scope="module")
def driver(smollm2):
    executor = new_executor(smollm2, slots=8, context_tokens=256, kv_type="f16")
    executor.open()
    yield Driver(executor)
    executor.close()


def reset(driver: Driver) -> list[Free]:
    return [Free(slot) for slot in range(8)]


def encode(driver: Driver, text: str) -> list[int]:
    return driver.executor.tokenizer.encode(text)


def test_it_knows_paris(driver):
    ids = driver.generate(0, 0, encode(driver, PROMPTS[0]), 2, reset(driver))
    assert driver.executor.tokenizer.token_bytes(ids[0]) == b" Paris"


def test_eight_rows_write_what_each_would_alone(driver):
    texts = [encode(driver, prompt) for prompt in PROMPTS]
    result = driver.step([Row(i, 0, text) for i, text in enumerate(texts)], reset(driver))
    out = [[token] for token in result.tokens.tolist()]
    for _ in range(5):
        rows = [Row(i, len(texts[i]) + len(out[i]) - 1, out[i][-1:]) for i in range(8)]
        for i, token in enumerate(driver.step(rows).tokens.tolist()):
            out[i].append(token)
    ops = reset(driver)
    for i in (0, 3, 7):
        logits = driver.logits(0, 0, texts[i] + out[i][:-1], ops)
        assert logits[out[i][-1]] >= logits.max() - NEAR
        ops = [Free(0)]


def test_chunks_trims_and_forks_change_nothing(driver):
    text = encode(driver, " ".join(PROMPTS))
    whole = driver.logits(0, 0, text, reset(driver))
    driver.step([Row(1, 0, text[:10], sample=False), Row(2, 0, [*text[:20], 5, 6, 7], sample=False)])
    chunked = driver.logits(1, 10, text[10:])
    trimmed = driver.logits(2, 20, text[20:], [Trim(2, 20)])
    forked = driver.logits(3, 15, text[15:], [Fork(0, 3, 15)])
    for other in (chunked, trimmed, forked):
        assert np.corrcoef(whole, other)[0, 1] > 0.999
        assert other[whole.argmax()] >= other.max() - NEAR


def test_prompt_logprobs(driver):
    text = encode(driver, PROMPTS[5])
    rows = driver.step([prompt_logprobs_row(0, text)], reset(driver)).prompt_logprobs
    assert rows is not None
    assert rows.position.tolist() == list(range(1, len(text)))
    assert [ids[0] for ids in rows.ids] == text[1:]
    assert all(value[0] < 0 for value in rows.values)
    assert rows.values[-2][0] > -2  # "three" after "One, two,"


def test_probe_reads_the_facts_without_loading(smollm2):
    fit = probe(MACHINE, ModelSource(uri="x", path=smollm2, format="gguf"))
    assert isinstance(fit, Fit)
    assert fit.facts["context"] == 8192
    assert fit.facts["quantisation"] == "Q4_1"
    assert fit.facts["eos ids"] == [2]
    assert not isinstance(probe(MACHINE, ModelSource(uri="x", path="x", format="safetensors")), Fit)


def test_doctor(driver):
    results = {result.name: result for result in checks()}
    assert results["llama.cpp"].status in ("ok", "warn")
    assert "built with" in results["CPU features"].detail
    assert "OMP_WAIT_POLICY=" in results["OpenMP"].detail


def test_imports_are_light_and_the_omp_policy_is_set_in_time():
    code = """
import os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
import headrace_gguf, headrace_gguf.backend, headrace_gguf.facts
assert not {"llama_cpp", "numpy", "torch"} & set(sys.modules), "headrace_gguf"
assert "OMP_WAIT_POLICY" not in os.environ, "set at import"
from headrace_gguf.llama import library
library()
assert os.environ["OMP_WAIT_POLICY"] == "passive"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_value_of_the_user_is_kept(monkeypatch):
    code = "import os; from headrace_gguf.llama import library; library(); print(os.environ['OMP_WAIT_POLICY'])"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "active\n"
