"""Checkpoints in Hugging Face layout: config.json and safetensors, one file or shards with an index.

`read_config` and `inspect` read headers only and need no tensor library; the others import torch when they are first
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_plugins.checkpoint.folder import CheckpointFacts, inspect, read_config

if TYPE_CHECKING:
    from headrace_plugins.checkpoint.loading import load_weights
    from headrace_plugins.checkpoint.random_weights import dummy_weights, random_checkpoint
    from headrace_plugins.checkpoint.writing import write_checkpoint

__all__ = [
    "CheckpointFacts",
    "dummy_weights",
    "inspect",
    "load_weights",
    "random_checkpoint",
    "read_config",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "load_weights":
        from headrace_plugins.checkpoint.loading import load_weights

        return load_weights
    if name == "write_checkpoint":
        from headrace_plugins.checkpoint.writing import write_checkpoint

        return write_checkpoint
    if name in ("dummy_weights", "random_checkpoint"):
        from headrace_plugins.checkpoint import random_weights

        return getattr(random_weights, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
