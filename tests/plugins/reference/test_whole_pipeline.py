"""From a folder to text: LLM, config and command line on the reference backend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import main
from headrace.errors import HeadraceError, ModelError
from headrace.llm import LLM
from headrace.types import SamplingParams

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")
pytest.importorskip("tokenizers", reason="the reference backend needs tokenizers")

TOKENIZER = Path(__file__).parents[2] / "data" / "golden" / "model_full" / "f1" / "tokenizer.json"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(dense: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with a byte-level BPE tokenizer."""
    path = tmp_path_factory.mktemp("model") / "dense"
    shutil.copytree(dense(vocab_size=312), path)
    shutil.copy(TOKENIZER, path / "tokenizer.json")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, backend="reference", determinism="batch-invariant") as llm:
        yield llm


def test_text_comes_out(llm: LLM) -> None:
    one = llm.generate("The river runs", GREEDY)
    many = llm.generate(["The river runs", "Once upon a time"], GREEDY)
    assert one.text
    assert many[0].text == one.text
    assert many[0].text != many[1].text
    assert len(one.token_ids) == 12


def test_logits_have_the_same_bits_in_any_chunks(llm: LLM) -> None:
    prompt = np.random.default_rng(1).integers(3, 300, 70).tolist()
    whole = llm.logits(prompt)
    assert whole.shape == (70, 312)
    assert whole.dtype == np.float32
    for chunk in (1, 13):
        np.testing.assert_array_equal(llm.logits(prompt, chunk=chunk), whole)


def test_prompt_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    prompt = [5, 60, 200, 7, 90]
    found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)).prompt_logprobs
    assert found is not None
    logits = llm.logits(prompt).astype(np.float64)
    exact = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    assert found[0] is None
    for i, entry in enumerate(found[1:], 1):
        assert entry is not None
        assert entry.id == prompt[i]
        assert entry.logprob == pytest.approx(exact[i - 1, prompt[i]], abs=1e-5)


def test_explain_shows_which_kernel_serves_which_op(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", folder, "--set", 'determinism="batch-invariant"', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    text = json.dumps(found)
    assert "torch-tiled" in text
    assert "linear.dense" in text
    assert "Qwen3ForCausalLM" in text


def test_an_unknown_architecture_lists_those_known(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | {"architectures": ["MadeUpForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="MadeUpForCausalLM") as found:
        LLM(str(copy))
    assert "Qwen3ForCausalLM" in found.value.help + found.value.message


def test_a_folder_without_weights(folder: str, tmp_path: Path) -> None:
    shutil.copy(Path(folder) / "config.json", tmp_path)
    with pytest.raises(HeadraceError, match=r"no model\.safetensors"):
        LLM(str(tmp_path))
    with LLM(str(tmp_path), backend={"use": "reference", "dummy_weights": True}) as llm:
        assert len(llm.generate([5, 6, 7], GREEDY).token_ids) == 12


def test_numbers_in_the_weights_are_checked(folder: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "nan"
    shutil.copytree(folder, copy)
    tensors: dict[str, Any] = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        LLM(str(copy))


@pytest.mark.parametrize("kind", ["engine", "determinism"])
def test_bench(folder: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["bench", kind, folder, "--requests", "1,2", "--tokens", "3", "--rounds", "1", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    speeds = [result for result in found["results"] if result["unit"] == "tokens/s"]
    assert len(speeds) == {"engine": 6, "determinism": 4}[kind]
    assert all(result["ours"] > 0 and result["baseline"] > 0 for result in speeds)
