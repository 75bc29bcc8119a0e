"""What a GGUF model is, from its metadata: checked for sense, without loading a weight. Standard library only."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.errors import ModelError, RequestError
from headrace.types import SamplingParams
from headrace_gguf.ggufcheck import Array, GGUFFile, read_gguf

MAX_CONTEXT = 1 << 28
MAX_SHARDS = 1024
MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS."""
_SHARD = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")

SAMPLING_KEYS: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""general.sampling.<key> -> SamplingParams field."""
NATIVE_KEYS: Mapping[str, str] = {
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "penalty_last_n",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""general.sampling.<key> -> `native_sampler` option: honoured by sampler = "native" alone."""

KV_TYPE_BYTES: Mapping[str, float] = {
    "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes per KV element."""

_ENCODERS = (
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "gemma-embedding", "llama-embed", "t5encoder", "clip", "wavtokenizer-dec",
)  # fmt: skip
"""Architectures that don't generate text."""
_RECURRENT = ("ssm", "shortconv", "wkv", "kda")
"""Groups of hyper-parameters that only models with a running state have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFacts:
    """A model that passed every check."""

    path: str
    shards: tuple[str, ...]
    """Every file of the model, the first one first."""
    architecture: str
    name: str
    metadata: Mapping[str, Any]
    """Scalars only."""
    fingerprint: str
    size_bytes: int
    tensor_bytes: int
    n_tensors: int
    quantisation: str
    """Tensor type that holds most bytes."""
    n_vocab: int
    n_embd: int
    n_heads: int
    context_length: int
    """Positions the model was trained for."""
    kv_elements: tuple[int, int]
    """Elements per token of K and of V, all layers together."""
    state_bytes: int
    """Recurrent state per sequence (mamba and its like), bytes."""
    recurrent: bool
    """Some layer keeps a running state, as far as the metadata tells."""
    tokenizer: str
    bos_id: int | None
    eos_ids: frozenset[int]
    """Declared in the metadata; llama.cpp adds those that it knows by name."""
    add_bos: bool
    chat_template: str | None
    sampling_defaults: Mapping[str, Any]
    native_defaults: Mapping[str, Any]

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> float:
        """KV bytes that one position of one sequence takes."""
        return self.kv_elements[0] * KV_TYPE_BYTES[type_k] + self.kv_elements[1] * KV_TYPE_BYTES[type_v]


def read_facts(path: str) -> GGUFFacts:
    """Check a model (all of its shards) and say what it is. Raises ModelError HR-GGUF-01..14."""
    first = read_gguf(path)
    files = [first, *_other_shards(first)]
    return _Facts(first, files).build()


def _other_shards(first: GGUFFile) -> list[GGUFFile]:
    """The shards after the first; a model that isn't split has none."""
    count, no = (first.metadata.get(key, 0) for key in ("split.count", "split.no"))
    if not (isinstance(count, int) and isinstance(no, int) and 0 <= count <= MAX_SHARDS and 0 <= no < max(count, 1)):
        raise ModelError(
            "HR-GGUF-13", f"{first.path}: split.no = {no!r} of split.count = {count!r} is not possible",
            f"a model has at most {MAX_SHARDS} shards; download it again",
        )  # fmt: skip
    if count <= 1:
        return []
    match = _SHARD.match(os.path.basename(first.path))
    if match is None or int(match["count"]) != count or int(match["no"]) != no + 1:
        raise ModelError(
            "HR-GGUF-13", f"{first.path} says it is shard {no + 1} of {count}, its name does not",
            f"name the shards NAME-00001-of-{count:05d}.gguf and so on, in one folder",
        )  # fmt: skip
    names = [f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    paths = [os.path.join(os.path.dirname(first.path), name) for name in names]
    if no != 0:
        raise ModelError("HR-GGUF-13", f"{first.path} is shard {no + 1} of {count}", f"name the first one: {paths[0]}")
    for path in paths:
        if not os.path.exists(path):
            raise ModelError("HR-GGUF-13", f"shard {path} of {count} is missing", "download all shards into one folder")
    others = [read_gguf(path) for path in paths[1:]]
    for i, shard in enumerate(others, 1):
        if (shard.metadata.get("split.no"), shard.metadata.get("split.count")) != (i, count):
            raise ModelError(
                "HR-GGUF-13", f"{shard.path} does not say that it is shard {i + 1} of {count}", "download it again"
            )
    total = first.metadata.get("split.tensors.count")
    found = len(first.tensors) + sum(len(shard.tensors) for shard in others)
    if total is not None and total != found:
        raise ModelError(
            "HR-GGUF-13", f"{first.path}: {total} tensors are announced, the shards hold {found}", "download them again"
        )
    return others


class _Facts:
    """Reads the metadata of one model. Lives for one `build`."""

    def __init__(self, first: GGUFFile, files: list[GGUFFile]) -> None:
        self.path = first.path
        self.metadata = first.metadata
        self.files = files
        self.tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
        self.arch = ""

    def _fail(self, code: int, what: str, help: str = "") -> NoReturn:
        raise ModelError(f"HR-GGUF-{code:02d}", f"{self.path}: {what}", help or "download or convert the model again")

    def _integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; of a per-layer array the largest."""
        value = self.metadata.get(key, default)
        if value is None:
            self._fail(12, f"'{key}' is missing")
        values = value.values if isinstance(value, Array) else (value,)
        if not values or not all(isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in values):
            shown = list(values[:8]) if isinstance(value, Array) else value
            self._fail(12, f"'{key}' = {shown!r}, whole numbers from {low} to {high} are allowed")
        return max(values)

    def _layered(self, key: str, n_layers: int, default: int) -> list[int]:
        """A hyper-parameter per layer, given as one number or as an array."""
        value = self.metadata.get(key, default)
        self._integer(key, 0, 1 << 20, default)
        if not isinstance(value, Array):
            return [value] * n_layers
        if value.length < n_layers:
            self._fail(12, f"'{key}' has {value.length} entries for {n_layers} layers")
        return list(value.values[:n_layers])

    def _string(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            self._fail(12, f"'{key}' = {value!r} is not a string")
        return value

    def build(self) -> GGUFFacts:
        self._architecture()
        a = self.arch
        tokenizer, n_vocab = self._tokenizer()
        context = self._integer(f"{a}.context_length", 1, MAX_CONTEXT)
        n_layers = self._integer(f"{a}.block_count", 1, MAX_LAYERS)
        n_embd = self._integer(f"{a}.embedding_length", 1, 1 << 20)
        n_heads = self._integer(f"{a}.attention.head_count", 0, 1 << 16, 0)
        self._embeddings(n_vocab)
        self._floats()
        if n_heads and self.metadata.get(f"{a}.rope.dimension_count") == 0:
            self._fail(12, f"'{a}.rope.dimension_count' = 0 in a model with attention")  # llama.cpp loops forever
        bos_id, eos_ids = self._special_ids(n_vocab)
        sampling, native = self._sampling()
        by_type: dict[str, int] = {}
        for tensor in self.tensors.values():
            by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.n_bytes
        digests = [file.digest for file in self.files]
        return GGUFFacts(
            path=self.path,
            shards=tuple(file.path for file in self.files),
            architecture=a,
            name=self._string("general.name"),
            metadata={k: v for k, v in self.metadata.items() if not isinstance(v, Array)},
            fingerprint=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
            size_bytes=sum(file.size_bytes for file in self.files),
            tensor_bytes=sum(by_type.values()),
            n_tensors=len(self.tensors),
            quantisation=max(by_type, key=lambda name: by_type[name]),
            n_vocab=n_vocab,
            n_embd=n_embd,
            n_heads=n_heads,
            context_length=context,
            kv_elements=self._kv_elements(n_layers, n_embd, n_heads),
            state_bytes=self._state_bytes(n_layers),
            recurrent=any(key.startswith(tuple(f"{a}.{name}." for name in _RECURRENT)) for key in self.metadata),
            tokenizer=tokenizer,
            bos_id=bos_id,
            eos_ids=eos_ids,
            add_bos=self._flag("tokenizer.ggml.add_bos_token", tokenizer == "llama"),
            chat_template=self._string("tokenizer.chat_template") or None,
            sampling_defaults=sampling,
            native_defaults=native,
        )

    def _architecture(self) -> None:
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            self._fail(10, f"'general.architecture' is {'missing' if arch is None else repr(arch)}")
        if self.metadata.get("general.type", "model") not in ("model", ""):
            self._fail(
                10, f"'general.type' is {self.metadata['general.type']!r}, not 'model'", "name the model's main file"
            )
        if arch in _ENCODERS or self.metadata.get(f"{arch}.attention.causal") is False:
            self._fail(10, f"architecture '{arch}' does not generate text", "use a text-generation model")
        self.arch = arch

    def _flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self._fail(12, f"'{key}' = {value!r} is not a bool")
        return value

    def _tokenizer(self) -> tuple[str, int]:
        """Model name and vocabulary size; the arrays agree with each other."""
        prefix = "tokenizer.ggml."
        model = self._string(prefix + "model")
        if not model:
            self._fail(11, f"'{prefix}model' is missing", "use a model file that holds its tokenizer")
        if model in ("no_vocab", "none"):
            self._fail(11, "the model has no tokenizer", "use a model file that holds its tokenizer")
        tokens = self._array(prefix + "tokens", ("string",))
        if tokens is None or not 1 <= tokens.length <= 1 << 20:
            self._fail(11, f"'{prefix}tokens' is missing, empty or larger than {1 << 20}")
        if tokens.repeated:
            self._fail(11, f"'{prefix}tokens' holds a token twice")
        for key, kinds in (("token_type", ("i32", "u32")), ("scores", ("f32",))):
            array = self._array(prefix + key, kinds)
            if array is not None and array.length != tokens.length:
                self._fail(11, f"'{prefix}{key}' has {array.length} entries for {tokens.length} tokens")
        if (
            self._array(prefix + "merges", ("string",)) is None
            and model == "gpt2"
            and self._string(prefix + "pre") != "kimi-k2"
        ):
            self._fail(11, f"'{prefix}merges' is missing")
        self._array(prefix + "precompiled_charsmap", ("u8", "i8"))
        return model, tokens.length

    def _embeddings(self, n_vocab: int) -> None:
        """The embeddings are there, one row per token."""
        tensor = self.tensors.get("token_embd.weight")
        if tensor is None:
            self._fail(10, f"no 'token_embd.weight' among {len(self.tensors)} tensors", "use a complete model file")
        if len(tensor.shape) != 2 or tensor.shape[1] != n_vocab:
            self._fail(11, f"'token_embd.weight' has shape {list(tensor.shape)} for {n_vocab} tokens")

    def _floats(self) -> None:
        """Hyper-parameters are finite, epsilons not negative."""
        for key, value in self.metadata.items():
            if not isinstance(value, float) or not key.startswith(f"{self.arch}."):
                continue
            if not math.isfinite(value) or (value < 0 and key.endswith("epsilon")):
                self._fail(12, f"'{key}' = {value} is not allowed")

    def _array(self, key: str, kinds: tuple[str, ...]) -> Array | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, Array) or value.kind not in kinds:
            self._fail(11, f"'{key}' is not an array of {' or '.join(kinds)}")
        return value

    def _special_ids(self, n_vocab: int) -> tuple[int | None, frozenset[int]]:
        """BOS and the ids that end a text. Every `tokenizer.ggml.*_token_id` must be in the vocabulary."""
        ids: dict[str, int] = {}
        for key, value in self.metadata.items():
            if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
                # -1 and 2**32 - 1 are how converters write "none"
                if value in (-1, 2**32 - 1):
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n_vocab:
                    self._fail(11, f"'{key}' = {value!r} is outside the vocabulary of {n_vocab} tokens")
                ids[key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")] = value
        return ids.get("bos"), frozenset(ids[name] for name in ("eos", "eot", "eom") if name in ids)

    def _sampling(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`general.sampling.*` as SamplingParams fields, and what only llama.cpp's own samplers know."""
        prefix = "general.sampling."
        found = {k.removeprefix(prefix): v for k, v in self.metadata.items() if k.startswith(prefix)}
        core: dict[str, Any] = {}
        for key, name in SAMPLING_KEYS.items():
            if key in found:
                value = found[key]
                # llama.cpp writes "off" as a top_k of 0 or less and as a greedy temperature of 0 or less
                core[name] = max(value, 0) if key in ("top_k", "temp") and isinstance(value, int | float) else value
        try:
            SamplingParams(**core)
        except RequestError as error:
            self._fail(14, f"'{prefix}*' recommends a value that can't be used: {error.message}")
        native = {name: found[key] for key, name in NATIVE_KEYS.items() if key in found}
        for name, value in native.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                self._fail(14, f"'{prefix}{name}' = {value!r} is not a number")
        return core, native

    def _kv_elements(self, n_layers: int, n_embd: int, n_heads: int) -> tuple[int, int]:
        a = self.arch
        head_dim = n_embd // n_heads if n_heads else 0
        heads_kv = self._layered(f"{a}.attention.head_count_kv", n_layers, n_heads)
        key = self._integer(f"{a}.attention.key_length", 0, 1 << 16, head_dim)
        value = self._integer(f"{a}.attention.value_length", 0, 1 << 16, head_dim)
        return sum(heads_kv) * key, sum(heads_kv) * value

    def _state_bytes(self, n_layers: int) -> int:
        """Recurrent state of one sequence, from above: as if every layer were recurrent. float32."""
        a = self.arch
        inner, state, conv, groups = (
            self._integer(f"{a}.ssm.{name}", 0, 1 << 24, 0)
            for name in ("inner_size", "state_size", "conv_kernel", "group_count")
        )
        short = self._integer(f"{a}.shortconv.l_cache", 0, 1 << 16, 0) * self._integer(
            f"{a}.embedding_length", 1, 1 << 20
        )
        return 4 * n_layers * (inner * state + max(conv - 1, 0) * (inner + 2 * groups * state) + short)
