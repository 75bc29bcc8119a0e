"""The dense decoder against transformers, on random checkpoints that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import HeadraceError, ModelError
from headrace.modeling import ModelContext
from headrace.types import EngineOptions

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from reference_driver import Run, logits_of, opened, request, tokens_of  # noqa: E402

from headrace.ops import Ops  # noqa: E402
from headrace_plugins.models.dense import Dense  # noqa: E402

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, rope llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, rope linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}
SIZES = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def hf_model(case: str, folder: Path) -> Any:
    """A random model of transformers, saved in shards. Returns it, in eval mode."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    family, config = CASES[case]
    torch.manual_seed(len(case))
    made = getattr(transformers, f"{family}Config")(**SIZES | config)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(made, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (parameter.dim() == 1)
    model.save_pretrained(folder, safe_serialization=True, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1, "the test wants shards"
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = hf_model(case, tmp_path)
    executor = opened(str(tmp_path), engine=EngineOptions(max_sequences=4, block_tokens=8))
    prompt = torch.randint(3, 300, (1, 37), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = model(prompt).logits[0].numpy()
        text = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 37:].tolist()
    for chunk in (512, 5, 1):
        run = Run(executor, EngineOptions(max_sequences=4, prefill_chunk_tokens=chunk))
        got = run.add(request("r", prompt[0].tolist(), logits=True, max_tokens=12)).finish()["r"]
        assert np.abs(logits_of(got) - want).max() < 1e-5 * np.abs(want).max()
        assert tokens_of(got) == text


def dense(**config: Any) -> Dense:
    base = {"architectures": ["LlamaForCausalLM"], **SIZES}
    return Dense(base | config, Ops({}), ModelContext(block_tokens=16, slack_tokens=1, compute="float32"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"vocab_size": 10**400}, "vocab_size = 1000"),
        ({"rope_theta": 10**400}, "rope_theta = 1000"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ({"attention_bias": 0}, "attention_bias = 0"),
        ({"mlp_bias": "no"}, "mlp_bias = 'no'"),
        ({"sliding_window": 64, "use_sliding_window": "false"}, "use_sliding_window = 'false'"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor = 1.0"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window = 4096"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"rope_theta": "10000"}, "rope_theta = '10000'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_it_can_not_serve_exactly_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as found:
        dense(**config)
    assert found.value.code == "HR-DENSE-01"
    assert found.value.help


def test_it_has_no_drafter_to_load_and_nothing_packed() -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES}
    with pytest.raises(ModelError, match=r"^HR-DENSE-02: draft = true, and a LlamaForCausalLM"):
        Dense(config, Ops({}), ModelContext(block_tokens=16, slack_tokens=1, draft=True))
    with pytest.raises(ModelError, match=r"^HR-DENSE-02: quantise_activations = true, and a LlamaForCausalLM"):
        Dense(config, Ops({}), ModelContext(block_tokens=16, slack_tokens=1, quantise_activations=True))


def test_a_window_that_is_switched_off_is_none() -> None:
    dense(architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False)


def test_heads_and_frequencies_that_may_be_left_unread() -> None:
    assert dense(tie_word_embeddings=True).ignored("lm_head.weight")
    assert not dense().ignored("lm_head.weight")
    assert dense().ignored("layers.0.self_attn.rotary_emb.inv_freq")
    assert not dense().ignored("layers.0.self_attn.q_proj.weight")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from dense_checkpoint import write_dense

    folder = Path(write_dense(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(HeadraceError, match=r"layers\.2\."):
        opened(str(folder))
