"""config.json of DeepSeek-V4.1, read, completed and checked.

`read_config` gives a frozen `TextConfig` with one `LayerPlan` per layer, or raises ModelError: a model is served as its
config says, or not at all. Source: DeepSeek-V4.1 model description, "Config" (DeepInfer `hugging_face/config.py`) and
"Topology checks" (DeepInfer `v4_modules/cross_layer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.errors import ModelError
from headrace_plugins.checkpoint.matching import QUANTISATION


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What one layer owns and what it reads of others."""

    index: int
    ratio: int
    """Tokens per compressed entry: 0 = window only."""
    kv_source: int = -1
    """Layer whose compressed keys it reads; -1 = none."""
    index_source: int = -1
    """Layer whose selection of entries it uses; -1 = none."""
    candidate_source: int = -1
    """Layer whose candidate blocks limit its own selection; -1 = all visible entries."""
    publishes_candidates: bool = False
    engram: int = -1
    """Number of its n-gram table; -1 = none."""
    consumer: bool = False
    """Belongs to the second half of the split: reads the compressed keys of the boundary layer."""
    boundary: bool = False
    """First consumer: publishes the keys of every token before the halves part."""

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index

    @property
    def selects(self) -> bool:
        return self.index_source == self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    factor: float
    beta_fast: float
    beta_slow: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    table_rows: tuple[int, ...]
    """Rows of each table, in the order of `LayerPlan.engram`."""
    layers: tuple[int, ...]
    max_ngram: int
    heads: int
    head_dim: int
    vocab_size: int
    compressed_vocab_size: int
    pad_token: int

    @property
    def width(self) -> int:
        """Channels that one token looks up in one table."""
        return (self.max_ngram - 1) * self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    stages: int
    gamma: int
    """Tokens proposed per round."""
    noise_token: int
    targets: tuple[int, ...]
    """Layers whose input is the drafter's feature."""
    markov_rank: int
    n_experts: int
    top_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    eps: float
    context: int
    rope_theta: float
    compress_theta: float
    yarn: Yarn | None
    swiglu_limit: float
    expert_width: int
    n_experts: int
    n_shared: int
    top_experts: int
    route_scale: float
    streams: int
    sinkhorn_iters: int
    hc_eps: float
    index_heads: int
    index_dim: int
    index_top: int
    candidate_blocks: int
    candidate_block: int
    fp4_cache: bool
    layers: tuple[LayerPlan, ...]
    engram: EngramConfig | None
    draft: DraftConfig | None
    image_token: int | None

    @property
    def boundary(self) -> int | None:
        """First consumer layer; None = the model has no second half."""
        return next((layer.index for layer in self.layers if layer.boundary), None)


LARGEST = (1 << 31) - 1
"""Of any size or count. Those that nothing else bounds before work grows with them have bounds of their own."""
MOST_EXPERTS = 4096
MOST_ITERATIONS = 1000
MOST_STAGES = 64


class _Reader:
    """Reads keys of one table; every problem names the key, its value and where it is."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.table = table
        self.where = where

    def refuse(self, key: str, supported: str) -> NoReturn:
        raise ModelError(
            "HR-MODEL-21",
            f"{key} = {self.table.get(key)!r} (config.json, {self.where}): the architecture deepseek_v41 does not have"
            " that",
            f"supported is {supported}",
        )

    def number(
        self, key: str, default: Any = None, kind: type = int, least: float = 1, most: float | None = None
    ) -> Any:
        """most: None = LARGEST for a whole number, 2^63 for others."""
        value = self.table.get(key, default)
        if value is None:
            raise ModelError(
                "HR-MODEL-21",
                f"'{key}' is missing (config.json, {self.where})",
                "is this the config.json of a DeepSeek-V4.1 checkpoint, complete?",
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if most is None:
            most = LARGEST if kind is int else 1 << 63
        if not is_number or not least <= value <= most or (kind is int and value != int(value)):
            name = "a number" if kind is float else "a whole number"
            self.refuse(key, f"{name} of at least {least}" + (f" and at most {most}" if is_number else ""))
        return kind(value)

    def ints(self, key: str, default: Any = None) -> tuple[int, ...]:
        value = self.table.get(key, default)
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            self.refuse(key, "a list of whole numbers")
        return tuple(value)

    def only(self, key: str, *allowed: Any) -> None:
        """An absent key means the first of `allowed`."""
        if self.table.get(key, allowed[0]) not in allowed:
            self.refuse(key, " or ".join(repr(value) for value in allowed))


def read_config(config: Mapping[str, Any]) -> TextConfig:
    """config: the parsed config.json. Raises ModelError."""
    kind = config.get("model_type")
    text = config.get("text_config")
    if kind != "deepseek_v41" or not isinstance(text, Mapping):
        what = "has no text_config" if kind == "deepseek_v41" else "is another model's"
        raise ModelError(
            "HR-MODEL-20",
            f"model_type = {kind!r} (config.json): {what}; DeepSeek-V4.1 is served from model_type 'deepseek_v41' with"
            " a text_config",
            "deepseek_v3, deepseek_v32 and deepseek_v4 are other architectures (no shared compressed keys, other mHC)",
        )
    reader = _Reader(text, "text_config")
    _check_constants(reader)
    _check_quantisation(config.get("quantization_config"))
    layers = _plan_layers(reader)
    engram = _read_engram(reader, layers)
    context = reader.number("max_position_embeddings", 1048576)
    result = TextConfig(
        vocab_size=reader.number("vocab_size", 129280),
        hidden=reader.number("hidden_size", 5120),
        heads=reader.number("num_attention_heads", 64),
        head_dim=reader.number("head_dim", 512),
        rope_dim=reader.number("qk_rope_head_dim", 64),
        q_rank=reader.number("q_lora_rank", 1280),
        o_groups=reader.number("o_groups", 8),
        o_rank=reader.number("o_lora_rank", 1024),
        window=reader.number("sliding_window", 128, least=2),
        eps=reader.number("rms_norm_eps", 1e-20, float, 0),
        context=context,
        rope_theta=reader.number("rope_theta", 10000.0, float),
        compress_theta=reader.number("compress_rope_theta", 160000.0, float),
        yarn=_read_yarn(reader),
        swiglu_limit=reader.number("swiglu_limit", 10.0, float, 1e-9),
        expert_width=reader.number("moe_intermediate_size", 2304),
        n_experts=reader.number("n_routed_experts", 384, most=MOST_EXPERTS),
        n_shared=reader.number("n_shared_experts", 1),
        top_experts=reader.number("num_experts_per_tok", 6),
        route_scale=reader.number("routed_scaling_factor", 1.5, float, 0),
        streams=reader.number("hc_mult", 4),
        sinkhorn_iters=reader.number("hc_sinkhorn_iters", 20, most=MOST_ITERATIONS),
        hc_eps=reader.number("hc_eps", 1e-6, float, 0),
        index_heads=reader.number("index_n_heads", 32),
        index_dim=reader.number("index_head_dim", 128),
        # a sequence has no more entries than tokens: larger numbers choose the same and cost memory
        index_top=min(context, reader.number("index_topk", 512)),
        candidate_blocks=min(context, reader.number("candidate_topk_blocks", 2048)),
        candidate_block=min(context, reader.number("candidate_block_size", 8)),
        fp4_cache=bool(text.get("use_fp4_sparse_kv", True)),
        layers=layers,
        engram=engram,
        draft=_read_draft(reader, len(layers)),
        image_token=_read_image_token(config),
    )
    _check_sizes(reader, result)
    return result


def _check_constants(reader: _Reader) -> None:
    reader.only("num_key_value_heads", 1)
    reader.only("hidden_act", "silu")
    reader.only("scoring_func", "sqrtsoftplus")
    reader.only("topk_method", "noaux_tc")
    reader.only("norm_topk_prob", True)
    reader.only("hc_shifted", True)
    reader.only("dspark_target_attn_input", True)
    reader.only("tie_word_embeddings", False)
    reader.only("attention_bias", False)
    reader.only("n_group", 1, None)
    reader.only("topk_group", 1, None)
    reader.only("num_hash_layers", 0, None)
    reader.only("gate_temp", 1.0)
    reader.only("use_fp4_sparse_kv", True, False)


def _check_quantisation(table: Any) -> None:
    if table is None:
        return
    reader = _Reader(table if isinstance(table, Mapping) else {"quant_method": table}, "quantization_config")
    if not isinstance(table, Mapping) or table.get("quant_method") != "fp8":
        reader.refuse("quant_method", "'fp8', or no quantization_config for a plain checkpoint")
    for key, value in QUANTISATION.items():
        if key in table and table[key] != value:
            reader.refuse(key, repr(value))


def _read_yarn(reader: _Reader) -> Yarn | None:
    table = reader.table.get("rope_scaling")
    if table is None:
        return None
    inner = _Reader(table if isinstance(table, Mapping) else {}, "text_config.rope_scaling")
    kind = inner.table.get("rope_type", inner.table.get("type"))
    if kind == "default":
        return None
    if kind != "yarn":
        reader.refuse("rope_scaling", "a table of type 'yarn', or null")
    inner.only("mscale", 1.0, inner.table.get("mscale_all_dim", 1.0))
    return Yarn(
        factor=inner.number("factor", None, float),
        beta_fast=inner.number("beta_fast", 32, float),
        beta_slow=inner.number("beta_slow", 1, float),
        original=inner.number("original_max_position_embeddings"),
    )


def _plan_layers(reader: _Reader) -> tuple[LayerPlan, ...]:
    """Who reads whose keys and whose selection. Source: "Derived layer table", "Topology checks"."""
    count = reader.number("num_hidden_layers", 40)
    stages = reader.number("num_nextn_predict_layers", 0, least=0, most=MOST_STAGES)
    ratios = reader.ints("compress_ratios")
    if len(ratios) not in (count, count + stages):
        reader.refuse("compress_ratios", f"one ratio per layer ({count}), or also one per draft stage ({stages})")
    if any(ratio not in (0, 1, 2) for ratio in ratios) or any(ratios[count:]):
        reader.refuse("compress_ratios", "0, 1 or 2 per layer and 0 for draft stages (4 and 128 are DeepSeek-V4)")
    ratios = ratios[:count]
    if 1 in ratios and 2 in ratios[ratios.index(1) :]:
        reader.refuse("compress_ratios", "every layer of ratio 2 before the first one of ratio 1")
    sources = _check_sources(reader, ratios)
    candidate = reader.number("candidate_source_layer_id", -1, least=-1)
    if candidate >= 0 and candidate not in sources[0]:
        reader.refuse("candidate_source_layer_id", f"-1 or one of kv_source_layer_ids {list(sources[0])}")
    tables = reader.ints("engram_layer_ids", ())
    boundary = ratios.index(1) if 1 in ratios else count
    plans = []
    for index, ratio in enumerate(ratios):
        kv = max((source for source in sources[0] if source <= index), default=-1) if ratio else -1
        chosen = max((source for source in sources[1] if source <= index), default=-1) if ratio else -1
        limited = 0 <= candidate < index and kv == candidate and chosen == index
        plans.append(
            LayerPlan(
                index=index,
                ratio=ratio,
                kv_source=kv,
                index_source=chosen,
                candidate_source=candidate if limited else -1,
                publishes_candidates=index == candidate,
                engram=tables.index(index) if index in tables else -1,
                consumer=index >= boundary,
                boundary=index == boundary,
            )
        )
    return tuple(plans)


def _check_sources(reader: _Reader, ratios: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> (kv sources, index sources), ascending."""
    kv = reader.ints("kv_source_layer_ids", ())
    index = reader.ints("index_source_layer_ids", ())
    for key, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < len(ratios) or not ratios[i] for i in ids):
            reader.refuse(key, "ascending numbers of layers with a compress ratio of 1 or 2")
    if not set(kv) <= set(index):
        reader.refuse("index_source_layer_ids", f"a list that holds every kv source {list(kv)}")
    if reader.ints("index_k_source_layer_ids", kv) != kv:
        reader.refuse("index_k_source_layer_ids", f"absent, or the kv sources {list(kv)}")
    for ratio in (2, 1):
        if ratio in ratios and ratios.index(ratio) not in kv:
            first = ratios.index(ratio)
            reader.refuse("kv_source_layer_ids", f"a list that holds layer {first}, the first one of ratio {ratio}")
    return kv, index


def _read_engram(reader: _Reader, layers: tuple[LayerPlan, ...]) -> EngramConfig | None:
    ids = reader.ints("engram_layer_ids", ())
    if not ids:
        return None
    if list(ids) != sorted(set(ids)) or any(not 0 <= i < len(layers) for i in ids):
        reader.refuse("engram_layer_ids", f"ascending layer numbers below {len(layers)}")
    rows = reader.ints("engram_num_embeddings")
    if len(rows) != len(ids):
        reader.refuse("engram_num_embeddings", f"one number per Engram layer ({len(ids)})")
    return EngramConfig(
        table_rows=rows,
        layers=ids,
        max_ngram=reader.number("engram_max_ngram_size", 4, least=2),
        heads=reader.number("engram_n_heads", 8),
        head_dim=reader.number("engram_head_dim", 256),
        vocab_size=reader.number("engram_vocab_size", 16000000),
        compressed_vocab_size=reader.number("engram_compressed_vocab_size", 99092),
        pad_token=reader.number("engram_pad_token_id", 2, least=0),
    )


def _read_image_token(config: Mapping[str, Any]) -> int | None:
    if config.get("image_token_id") is None:
        return None
    return int(_Reader(config, "top level").number("image_token_id", least=0))


def _read_draft(reader: _Reader, count: int) -> DraftConfig | None:
    stages = reader.number("num_nextn_predict_layers", 0, least=0, most=MOST_STAGES)
    if not stages:
        return None
    targets = reader.ints("dspark_target_layer_ids")
    if not targets or list(targets) != sorted(set(targets)) or any(not 0 <= i < count for i in targets):
        reader.refuse("dspark_target_layer_ids", f"ascending layer numbers below {count}")
    return DraftConfig(
        stages=stages,
        gamma=reader.number("dspark_block_size", 5),
        noise_token=reader.number("dspark_noise_token_id", 128799, least=0),
        targets=targets,
        markov_rank=reader.number("dspark_markov_rank", 256),
        n_experts=reader.number("dspark_n_routed_experts", 128, most=MOST_EXPERTS),
        top_experts=reader.number("dspark_num_experts_per_tok", 3),
    )


def _check_sizes(reader: _Reader, config: TextConfig) -> None:
    if config.heads % config.o_groups:
        reader.refuse("o_groups", f"a divisor of the {config.heads} heads")
    if config.head_dim % 32:
        reader.refuse("head_dim", "a multiple of 32 (cache entries have one scale per 32 channels)")
    if config.index_dim % 32:
        reader.refuse("index_head_dim", "a multiple of 32 (index keys have one scale per 32 channels)")
    if config.rope_dim % 2 or config.rope_dim > min(config.head_dim, config.index_dim):
        reader.refuse("qk_rope_head_dim", "an even number, at most head_dim and index_head_dim")
    if config.top_experts > config.n_experts:
        reader.refuse("num_experts_per_tok", f"at most n_routed_experts, {config.n_experts}")
    if config.n_shared != 1:
        reader.refuse("n_shared_experts", "1")
    if config.draft and config.draft.top_experts > config.draft.n_experts:
        reader.refuse("dspark_num_experts_per_tok", f"at most dspark_n_routed_experts, {config.draft.n_experts}")
    if config.draft and config.draft.noise_token >= config.vocab_size:
        reader.refuse("dspark_noise_token_id", f"a token below vocab_size, {config.vocab_size}")
