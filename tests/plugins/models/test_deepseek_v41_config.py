"""What DeepSeek-V4.1 reads from a config, what it refuses, and what it asks a backend for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from golden import model, op_case, op_cases  # noqa: E402
from safetensors import safe_open  # noqa: E402
from v41_rig import make_rig  # noqa: E402

from headrace.catalog import Catalog  # noqa: E402
from headrace.errors import ModelError  # noqa: E402
from headrace.hooks import ArchSpec  # noqa: E402
from headrace.modeling import CacheFormat, ModelContext, build_model  # noqa: E402
from headrace.ops import OPS, Ops  # noqa: E402
from headrace_plugins.hf_tokenizer import load_tokenizer  # noqa: E402
from headrace_plugins.models.deepseek_v41.config import EngramConfig, Yarn, read_config  # noqa: E402
from headrace_plugins.models.deepseek_v41.engram import compress_vocabulary, multipliers, primes  # noqa: E402
from headrace_plugins.models.deepseek_v41.model import DeepseekV41  # noqa: E402
from headrace_plugins.models.deepseek_v41.rotary import inverse_frequencies  # noqa: E402

RELEASED: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "image_token_id": 129264,
    "text_config": {
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [37, 38, 39],
        "rope_scaling": {
            "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
        },
    },
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    },
}  # fmt: skip


def released(top: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """The released config with other values; None removes a key."""
    config = RELEASED | {"text_config": RELEASED["text_config"] | text} | (top or {})
    config["text_config"] = {key: value for key, value in config["text_config"].items() if value is not None}
    return {key: value for key, value in config.items() if value is not None}


def made(config: dict[str, Any], **settings: Any) -> DeepseekV41:
    """With a tokenizer that nothing is read of before the load."""
    context = ModelContext(**({"block_tokens": 128, "slack_tokens": 6, "tokenizer": object()} | settings))
    built = build_model(DeepseekV41, config, Ops({}), context)
    assert isinstance(built, DeepseekV41)
    return built


# --- what is read ----------------------------------------------------------------------------------------------------


def test_the_released_config_gives_the_released_layers() -> None:
    config = read_config(RELEASED)
    assert (config.hidden, config.heads, config.head_dim, config.n_experts, config.eps) == (5120, 64, 512, 384, 1e-20)
    assert config.yarn == Yarn(factor=16, beta_fast=32, beta_slow=1, original=65536)
    assert config.boundary == 20
    table = {plan.index: (plan.ratio, plan.kv_source, plan.index_source) for plan in config.layers}
    assert table[0] == table[1] == (0, -1, -1)
    assert table[2] == table[7] == (2, 2, 2)
    assert table[13] == (2, 8, 8)
    assert table[19] == (2, 14, 14)
    assert table[20] == table[23] == (1, 20, 20)
    assert table[24] == table[27] == (1, 20, 24)
    assert table[39] == (1, 20, 36)
    limited = [plan.index for plan in config.layers if plan.candidate_source == 20]
    assert limited == [24, 28, 32, 36]
    assert [plan.index for plan in config.layers if plan.publishes_candidates] == [20]
    assert [plan.index for plan in config.layers if plan.engram >= 0] == [1, 14]
    assert config.draft is not None
    assert (config.draft.stages, config.draft.gamma, config.draft.noise_token) == (3, 5, 128799)


def test_states_of_the_released_model_take_890_bytes_a_token() -> None:
    states = list(made(RELEASED, draft=True).states())
    paged = sum(state.format.entry_bytes / state.ratio for state in states if state.kind == "paged")
    assert paged == 890
    formats = {state.name: (state.format, state.entries) for state in states}
    assert formats["layers.39.window"] == (CacheFormat("q8", 512), 128 + 6)
    assert formats["layers.2.compressor"] == (CacheFormat("float32", 1024), 1 + 6)
    assert formats["layers.20.compressed"][0] == CacheFormat("q4", 512)
    assert formats["layers.20.index_keys"][0] == CacheFormat("qm", 128)
    assert formats["mtp.2.window"][1] >= 128 + 6
    assert "layers.20.compressor" not in formats
    assert "layers.3.compressed" not in formats


def test_formats_follow_config_and_context() -> None:
    states = {state.name: state.format for state in made(released(use_fp4_sparse_kv=False)).states()}
    assert states["layers.2.compressed"] == CacheFormat("q8", 512)
    assert states["layers.2.index_keys"] == CacheFormat("qm", 128)
    plain = made(RELEASED, cache="plain", compute="bfloat16")
    names = {state.format.name for state in plain.states() if not state.name.endswith("compressor")}
    assert names == {"bfloat16"}


def test_shapes_of_the_released_checkpoint() -> None:
    tensors = {spec.name: spec for spec in made(RELEASED, draft=True).tensors()}
    shapes = {name: spec.shape for name, spec in tensors.items()}
    assert shapes["layers.0.attn.wq_a.weight"] == (1280, 5120)
    assert shapes["layers.0.attn.wq_b.weight"] == (32768, 1280)
    assert shapes["layers.0.attn.wo_a.weight"] == (8192, 4096)
    assert shapes["layers.0.attn.wo_b.weight"] == (5120, 8192)
    assert shapes["layers.0.hc_ffn_fn"] == (24, 20480)
    assert shapes["layers.2.attn.indexer.wq_b.weight"] == (4096, 1280)
    assert shapes["layers.1.engram.wkv.weight"] == (25600, 6144)
    assert shapes["layers.14.engram.embed.weight"] == (384016682, 256)
    assert shapes["mtp.0.main_proj.weight"] == (5120, 15360)
    assert tensors["layers.0.ffn.experts.383.w2.weight"].packing == "fp4_row"
    assert tensors["layers.1.engram.embed.weight"].packing == "fp8_row"
    assert tensors["layers.0.attn.attn_sink"].dtype == "float32"
    assert "mtp.1.main_proj.weight" not in shapes
    assert "layers.24.attn.indexer.wk.weight" not in shapes


@pytest.mark.parametrize("name", ["t1", "t2", "t3", "f1", "q1"])
def test_tensors_are_those_of_the_checkpoint(name: str) -> None:
    golden = model(name)
    drafts = bool(golden.config["text_config"].get("num_nextn_predict_layers"))
    with safe_open(golden.folder / "model.safetensors", "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    wanted = {spec.name: spec for spec in made(golden.config, draft=drafts).tensors()}
    assert set(wanted) == {key for key in found if not key.endswith(".scale")}
    for key, spec in wanted.items():
        packed = key.removesuffix("weight") + "scale" in found and spec.packing == "fp4_row"
        assert found[key] == ((spec.shape[0], spec.shape[1] // 2) if packed else spec.shape), key


def test_tensors_of_parts_that_were_not_asked_for_are_ignored() -> None:
    plain, drafting = made(RELEASED), made(RELEASED, draft=True)
    assert plain.ignored("mtp.0.main_norm.weight")
    assert not drafting.ignored("mtp.0.main_norm.weight")
    assert plain.ignored("vision.blocks.0.norm1.weight")
    assert plain.ignored("image_start")
    assert not plain.ignored("layers.0.hc_head_fn")
    assert not any(name.name.startswith("mtp.") for name in plain.tensors())


def test_it_needs_known_ops_and_uses_no_others() -> None:
    assert set(DeepseekV41.needs) <= set(OPS)
    assert len(set(DeepseekV41.needs)) == len(DeepseekV41.needs)
    golden = model("f1")
    rig = make_rig(golden, draft=True, quantise_activations=True)  # Ops holds what `needs` names, nothing else
    rig.logits(golden.expected["seq0.input_ids"].tolist())


def test_the_architecture_is_registered() -> None:
    catalog = Catalog.load()
    entry = catalog.find(ArchSpec, "deepseek_v41")
    assert entry.spec.architectures == ("DeepseekV41ForCausalLM",)
    assert catalog.load_object(entry.spec.factory, entry) is DeepseekV41


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"model_type": "deepseek_v4", "compress_ratios": [128, 4]}, "HR-MODEL-20", "'deepseek_v4'"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "HR-MODEL-20", "'deepseek_v3'"),
        ({"model_type": "deepseek_v41"}, "HR-MODEL-20", "no text_config"),
        ({}, "HR-MODEL-20", "None"),
        (released(hc_shifted=False), "HR-MODEL-21", "hc_shifted = False"),
        (released(scoring_func="sigmoid"), "HR-MODEL-21", "'sigmoid'"),
        (released(topk_method="greedy"), "HR-MODEL-21", "'greedy'"),
        (released(norm_topk_prob=False), "HR-MODEL-21", "norm_topk_prob = False"),
        (released(tie_word_embeddings=True), "HR-MODEL-21", "tie_word_embeddings"),
        (released(num_key_value_heads=8), "HR-MODEL-21", "num_key_value_heads = 8"),
        (released(hidden_act="gelu"), "HR-MODEL-21", "'gelu'"),
        (released(n_shared_experts=2), "HR-MODEL-21", "n_shared_experts = 2"),
        (released(hidden_size="5120"), "HR-MODEL-21", "hidden_size = '5120'"),
        (released(hidden_size=0), "HR-MODEL-21", "at least 1"),
        (released(hidden_size=1 << 31), "HR-MODEL-21", "at most 2147483647"),
        (released(n_routed_experts=10**9), "HR-MODEL-21", "n_routed_experts = 1000000000"),
        (released(dspark_n_routed_experts=10**9), "HR-MODEL-21", "dspark_n_routed_experts = 1000000000"),
        (released(hc_sinkhorn_iters=10**9), "HR-MODEL-21", "hc_sinkhorn_iters = 1000000000"),
        (released(num_nextn_predict_layers=10**9), "HR-MODEL-21", "num_nextn_predict_layers = 1000000000"),
        (released(hidden_size=float("inf")), "HR-MODEL-21", "hidden_size = inf"),
        (released(rope_theta=float("inf")), "HR-MODEL-21", "rope_theta = inf"),
        (released(use_fp4_sparse_kv="false"), "HR-MODEL-21", "use_fp4_sparse_kv = 'false'"),
        (released({"image_token_id": "<image>"}), "HR-MODEL-21", "image_token_id = '<image>'"),
        (released(head_dim=500), "HR-MODEL-21", "head_dim = 500"),
        (released(o_groups=7), "HR-MODEL-21", "divisor of the 64 heads"),
        (released(num_experts_per_tok=400), "HR-MODEL-21", "num_experts_per_tok = 400"),
        (released(compress_ratios=None), "HR-MODEL-21", "compress_ratios = None"),
        (released(compress_ratios=[0, 0] + [4] * 18 + [128] * 20), "HR-MODEL-21", "DeepSeek-V4"),
        (released(compress_ratios=[0] * 39), "HR-MODEL-21", "one ratio per layer"),
        (released(compress_ratios=[0, 0] + [1] * 19 + [2] * 19), "HR-MODEL-21", "before the first one of ratio 1"),
        (released(kv_source_layer_ids=[2, 8, 14]), "HR-MODEL-21", "layer 20"),
        (released(kv_source_layer_ids=[1, 2, 20]), "HR-MODEL-21", "compress ratio of 1 or 2"),
        (released(index_source_layer_ids=[2, 8, 20]), "HR-MODEL-21", "every kv source"),
        (released(index_k_source_layer_ids=[2, 20]), "HR-MODEL-21", "index_k_source_layer_ids"),
        (released(candidate_source_layer_id=24), "HR-MODEL-21", "candidate_source_layer_id = 24"),
        (released(engram_layer_ids=[1, 40]), "HR-MODEL-21", "engram_layer_ids"),
        (released(engram_num_embeddings=[5]), "HR-MODEL-21", "one number per Engram layer"),
        (released(dspark_target_layer_ids=[40]), "HR-MODEL-21", "dspark_target_layer_ids"),
        (released(dspark_target_attn_input=False), "HR-MODEL-21", "dspark_target_attn_input"),
        (released(rope_scaling={"type": "linear", "factor": 2}), "HR-MODEL-21", "'yarn'"),
        (released(rope_scaling={"type": "yarn"}), "HR-MODEL-21", "factor"),
        (released({"quantization_config": {"quant_method": "awq"}}), "HR-MODEL-21", "'awq'"),
        (released({"quantization_config": "fp8"}), "HR-MODEL-21", "quant_method"),
        (
            released({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
            "HR-MODEL-21",
            r"\[128, 128\]",
        ),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        made(config)
    assert caught.value.code == code
    assert "config.json" in caught.value.message
    assert caught.value.help


def test_a_selection_is_no_longer_than_the_context() -> None:
    config = released(max_position_embeddings=4096, index_topk=10**8, candidate_topk_blocks=10**8)["text_config"]
    read = read_config(RELEASED | {"text_config": config | {"candidate_block_size": 10**8}})
    assert (read.index_top, read.candidate_blocks, read.candidate_block) == (4096, 4096, 4096)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (RELEASED, {"block_tokens": 33}, "blocks of 33 tokens"),
        (released(q_lora_rank=1300), {"quantise_activations": True}, "q_lora_rank = 1300"),
        (released(engram_head_dim=30, engram_n_heads=1), {"quantise_activations": True}, "engram_head_dim = 90"),
        (
            released(num_nextn_predict_layers=None, compress_ratios=[0, 0] + [2] * 18 + [1] * 20),
            {"draft": True},
            "no d",
        ),
        (released(engram_layer_ids=[1, 21]), {"replay": "compact"}, "engram_layer_ids"),
        (released(kv_source_layer_ids=[2, 8, 14, 20, 28]), {"replay": "compact"}, r"kv_source_layer_ids has \[28\]"),
        (released(dspark_target_layer_ids=[19, 20]), {"replay": "mask", "draft": True}, "both sides of layer 20"),
    ],
)
def test_contexts_that_a_config_does_not_allow(config: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        made(config, **settings)
    assert caught.value.code == "HR-MODEL-23"


def test_a_model_without_a_second_half_has_no_replay() -> None:
    config = model("t1").config
    config["text_config"].update(
        compress_ratios=[0, 2, 2, 2, 2], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3]
    )
    assert made(config).rerun_tokens == 0
    with pytest.raises(ModelError, match="compress_ratios has none"):
        made(config, replay="mask")


def test_replay_says_how_much_must_run_again() -> None:
    assert made(RELEASED).rerun_tokens == 0
    assert made(RELEASED, replay="compact").rerun_tokens == 128 + 6
    assert made(RELEASED).replay_tokens == 128
    assert made(RELEASED).history_tokens == 3
    assert made(model("t1").config).history_tokens == 0


# --- rotary, Engram --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", op_cases("rope"), ids=lambda case: case.name)
def test_frequencies(case: Any) -> None:
    given = case.params
    yarn = Yarn(**{key: given[key] for key in ("factor", "beta_fast", "beta_slow", "original")})
    scaled = case.name.endswith("_yarn")
    theta = given["compress_rope_theta" if scaled else "rope_theta"]
    assert torch.equal(inverse_frequencies(given["dim"], theta, yarn if scaled else None), case.outputs["inv_freq"])


def engram_config(**changes: Any) -> EngramConfig:
    values: dict[str, Any] = {
        "table_rows": (384006168, 384016682), "layers": (1, 14), "max_ngram": 4, "heads": 8, "head_dim": 256,
        "vocab_size": 16000000, "compressed_vocab_size": 99092, "pad_token": 2,
    }  # fmt: skip
    return EngramConfig(**values | changes)


@pytest.mark.parametrize("name", ["hash_released", "hash_small"])
def test_hash_functions(name: str) -> None:
    case = op_case("engram", name)
    given = case.params
    config = engram_config(
        layers=tuple(given["layer_ids"]), heads=given["n_heads"], vocab_size=given["engram_vocab_size"],
        compressed_vocab_size=given["compressed_vocab_size"],
    )  # fmt: skip
    assert primes(config) == case.outputs["primes"].flatten(1).tolist()
    assert [sum(row) for row in primes(config)] == given["table_rows"]
    for layer, expected in zip(config.layers, case.outputs["multipliers_i64"], strict=True):
        assert torch.equal(multipliers(config, layer), expected)


@pytest.mark.parametrize("name", ["f1", "q1"])
def test_the_compressed_vocabulary(name: str) -> None:
    golden = model(name)
    size = golden.config["text_config"]["vocab_size"]
    numbers = compress_vocabulary(load_tokenizer(str(golden.folder), size))
    known = golden.meta["token_map"]
    assert numbers[: len(known)] == known
    assert set(numbers[len(known) :]) == {-1}


def test_texts_share_a_number_when_they_differ_in_case_accents_or_blanks() -> None:
    class Words:
        texts = (
            "a",
            " A",
            "\u00e1",
            "\uff21",
            "a\n",
            "\u03a3",
            "\u03c3",
            " ",
            "\n",
            "\u0301",
            "\x1c",
            "\t\x1c ",
            "<s>",
            "\u0915",
            "\u0915\u093f",
            "\u0915\u0488",
        )
        n_vocab = len(texts) + 2

        def token_bytes(self, token: int) -> bytes:
            return [*(text.encode() for text in self.texts), b"\xff", b""][token]

    a, sigma, blank = 0, 1, 2
    assert compress_vocabulary(Words()) == [a] * 5 + [sigma] * 2 + [blank] * 2 + [3, 4, 4, 5] + [6] * 3 + [7, -1]  # type: ignore[arg-type]


def test_another_tokenizer_or_none_is_refused() -> None:
    golden = model("f1")
    with pytest.raises(ModelError, match=r"259 distinct .* = 258") as caught:
        make_rig(golden, text={"engram_compressed_vocab_size": 258})
    assert caught.value.code == "HR-MODEL-22"
    with pytest.raises(ModelError, match="address 630"):
        make_rig(golden, text={"engram_num_embeddings": [629, 834]})
    with pytest.raises(ModelError, match="no tokenizer"):
        made(golden.config, tokenizer=None)
