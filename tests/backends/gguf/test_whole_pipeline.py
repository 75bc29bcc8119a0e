"""From a config file to text: catalog, config, pipeline, engine and front door over llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from headrace.cli import main
from headrace.llm import LLM

pytestmark = pytest.mark.gguf

GREEDY = {"temperature": 0, "max_tokens": 6}


def write(folder: Path, model: str, more: str = "") -> str:
    path = folder / "pipeline.toml"
    path.write_text(
        f'model = "{model}"\n[backend]\nuse = "gguf"\ncontext_tokens = 256\nslots = 4\ntrial_load = false\n{more}'
    )
    return str(path)


def test_a_real_model_answers_from_a_file(smollm2: str, tmp_path: Path) -> None:
    prompts = ["The capital of France is", "Water boils at a temperature of", "One, two, three,"] * 3
    found = {}
    for name, more in (("plain", ""), ("drafting", '[drafter]\nuse = "ngram"\n')):
        with LLM(write(tmp_path, smollm2, more)) as llm:
            outputs = llm.generate(prompts, GREEDY)
            again = llm.generate(prompts[0], GREEDY)
        found[name] = [output.text for output in outputs]
        assert all(output.finish_reason == "length" for output in outputs)
        assert found[name][0].startswith(" Paris")
        assert "four, five" in found[name][2]
        assert again.text.startswith(" Paris")
        assert again.usage.cached_tokens > 0
    assert [text[:6] for text in found["plain"]] == [text[:6] for text in found["drafting"]]


def test_the_models_own_sampling_defaults_hold_and_are_shown(
    tiny: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(general__sampling__temp=0.25, general__sampling__top_k=7)
    with LLM(write(tmp_path, model, "[sampling]\ntop_k = 9\n")) as llm:
        resolved = llm.resolve({"min_p": 0.125})
    assert (resolved.temperature, resolved.top_k, resolved.min_p, resolved.top_p) == (0.25, 9, 0.125, 0.95)
    assert main(["config", "explain", "--json", write(tmp_path, model)]) == 0
    shown = {each["key"]: each for each in json.loads(capsys.readouterr().out)}
    for key, value in (("temperature", "0.25"), ("top_k", "7")):
        assert (shown[f"sampling.{key}"]["value"], shown[f"sampling.{key}"]["why"]) == (value, "the model's metadata")
    assert shown["sampling.top_p"]["why"] == "Headrace's default"


def test_check_refuses_a_promise_that_llama_cpp_can_not_keep(
    tiny: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(write(tmp_path, tiny()))
    assert main(["config", "check", str(path)]) == 0
    path.write_text('determinism = "batch-invariant"\n' + path.read_text())
    for verb in ("check", "explain"):
        assert main(["config", verb, str(path)]) == 3
        assert "determinism = 'batch-invariant'" in capsys.readouterr().err
