"""What a checkpoint folder says of its model, without loading a weight. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import ModelError, RequestError
from headrace.textfile import read_text
from headrace.types import ModelSource, SamplingParams
from headrace_plugins.checkpoint import CheckpointFacts, inspect, read_config
from headrace_plugins.checkpoint.folder import MAX_JSON_BYTES

_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_MOST_TOKENS = 1 << 24
"""Of a vocabulary: tokenizers hold a table as long before any weight is looked at. The largest known has 262144."""
_MOST_POSITIONS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A folder with a config.json that names an architecture."""

    folder: str
    config: Mapping[str, Any]
    """config.json, as it stands."""
    architecture: str
    vocab_size: int
    context_tokens: int | None
    """Positions the model was made for; None: config.json does not say."""
    dtype: str
    quantisation: str
    """Of the checkpoint; empty: none."""
    checkpoint: CheckpointFacts | None
    """None: the folder holds no weights."""
    sampling_defaults: Mapping[str, Any]
    """`SamplingParams` fields that generation_config.json recommends."""
    chat_template: str | None

    @property
    def fingerprint(self) -> str:
        """Hex digest that names config, weights and tokenizer."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        if self.checkpoint is not None:
            digest.update(self.checkpoint.digest.encode())
        path = os.path.join(self.folder, "tokenizer.json")
        if os.path.isfile(path):
            with open(path, "rb") as file:
                digest.update(file.read())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """For `config explain`."""
        weights = "none"
        if self.checkpoint is not None:
            kinds = ", ".join(sorted(self.checkpoint.bytes_by_dtype))
            n_files, size = len(self.checkpoint.files), self.checkpoint.tensor_bytes / 2**30
            weights = f"{self.checkpoint.n_tensors} tensors ({kinds}) in {n_files} files, {size:.2f} GiB"
        return {
            "architecture": self.architecture,
            "context": self.context_tokens or "not said",
            "vocabulary": f"{self.vocab_size} tokens",
            "dtype": self.dtype or "not said",
            "quantisation": self.quantisation or "none",
            "weights": weights,
            "chat template": "yes" if self.chat_template else "no",
            "chat_template": self.chat_template,
            "sampling_defaults": dict(self.sampling_defaults),
        }


def folder_of(source: ModelSource) -> str:
    """The checkpoint's folder: the source itself, or where the file that it names lies."""
    return source.path if os.path.isdir(source.path) else os.path.dirname(source.path)


def read_facts(folder: str, *, weights: bool = True) -> ModelFacts:
    """Read config.json and what lies beside it. weights: False lets a folder without weights pass. ModelError: of the
    checkpoint package for damaged files, HR-REFERENCE-01 and -02 for a config that lacks what every model has."""
    path = os.path.join(folder, "config.json")
    config = read_config(folder)
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            "HR-REFERENCE-01", f"architectures = {names!r:.100} in {path} names no architecture",
            'it must be a list such as ["LlamaForCausalLM"]',
        )  # fmt: skip
    quantisation = config.get("quantization_config")
    unsaid = text.get("max_position_embeddings") is None
    return ModelFacts(
        folder=folder,
        config=config,
        architecture=names[0],
        vocab_size=_count(path, text, "vocab_size", _MOST_TOKENS),
        context_tokens=None if unsaid else _count(path, text, "max_position_embeddings", _MOST_POSITIONS),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or ""),
        quantisation=str(quantisation.get("quant_method", "yes")) if isinstance(quantisation, dict) else "",
        checkpoint=_checkpoint(folder, weights),
        sampling_defaults=_sampling_defaults(os.path.join(folder, "generation_config.json")),
        chat_template=_chat_template(folder),
    )


def _checkpoint(folder: str, needed: bool) -> CheckpointFacts | None:
    try:
        return inspect(folder)
    except ModelError as error:
        if needed or error.code != "HR-CKPT-02":
            raise
        return None


def _count(path: str, config: Mapping[str, Any], key: str, most: int) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelError(
            "HR-REFERENCE-02", f"{key} = {value!r:.100} in {path}", f"it must be a whole number from 1 to {most}"
        )
    return value


def _beside(path: str) -> Mapping[str, Any]:
    """A JSON object that may be missing. Raises ModelError HR-REFERENCE-03."""
    if not os.path.lexists(path):
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise ModelError("HR-REFERENCE-03", f"{path} holds no JSON object", "download the file again")
    return found


def _text(path: str) -> str:
    """A file that is there, if only as a link that leads nowhere. Raises ModelError HR-REFERENCE-03."""
    try:
        return read_text(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: BaseException) -> ModelError:
    why = getattr(error, "strerror", None) or error
    return ModelError("HR-REFERENCE-03", f"can't read {path}: {why}", "download the file again")


def _sampling_defaults(path: str) -> dict[str, Any]:
    """What generation_config.json recommends; do_sample = false is greedy. Values that we would refuse are left out:
    they are advice, and not the user's own."""
    config = _beside(path)
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, Any] = {name: config[name] for name in _GENERATION_KEYS if config.get(name) is not None}
    return {name: value for name, value in found.items() if _is_allowed(name, value)}


def _is_allowed(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except RequestError:
        return False
    return True


def _chat_template(folder: str) -> str | None:
    """chat_template.jinja, else what tokenizer_config.json holds: a text, or several of which we take "default"."""
    path, beside = (os.path.join(folder, name) for name in ("chat_template.jinja", "tokenizer_config.json"))
    found = _beside(beside).get("chat_template")
    if os.path.lexists(path):
        return _text(path)
    if isinstance(found, list):
        named = (each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default")
        found = next(named, None)
    if found is not None and not isinstance(found, str):
        raise ModelError(
            "HR-REFERENCE-03", f"chat_template = {found!r:.60} in {beside} is no text", "download the file again"
        )
    return found
