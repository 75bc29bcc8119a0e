"""Writes tiny random checkpoints of dense decoders, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def write_dense(folder: Path, *, seed: int = 0, scale: float = 0.25, **config: Any) -> str:
    """A folder with config.json and one shard of float32 tensors. Returns its path."""
    import torch
    from safetensors.torch import save_file

    from headrace.modeling import ModelContext
    from headrace.ops import Ops
    from headrace_plugins.models.dense import Dense

    folder.mkdir(parents=True, exist_ok=True)
    merged = CONFIG | config
    (folder / "config.json").write_text(json.dumps(merged))
    model = Dense(merged, Ops({}), ModelContext(block_tokens=16, slack_tokens=1, compute="float32"))
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in model.tensors():
        values = scale * torch.randn(spec.shape, generator=noise)
        tensors["model." + spec.name] = values if len(spec.shape) > 1 else values + 1
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
