"""Options of the reference backend: the `[backend]` table when `use = "reference"`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.options import ByteSize, Options

Count = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]


class ReferenceOptions(Options):
    """Run a model on plain PyTorch, on the CPU."""

    compute: Literal["float32", "bfloat16"] = "float32"
    """Number format of activations and of weights that are not kept packed."""
    weights: Literal["dequant", "quantised"] = "dequant"
    """dequant: packed matrices are unpacked once, at the load. quantised: they stay packed in memory and are unpacked
    whenever they are used."""
    cache: Literal["quantised", "plain"] = "quantised"
    """quantised: caches in the formats of the model. plain: in the number format of `compute`, nothing is rounded on
    its way through a cache."""
    quantise_activations: bool = False
    """Round the inputs of packed matrices to 8 bits, as the kernels of the released model do."""
    prefix: Literal["snapshot", "replay"] = "snapshot"
    """How a prefix hit gets the sliding windows of a model that has them. snapshot: from a copy made at a block
    boundary, exact. replay: by running the tokens before the hit again, approximate."""
    replay: Literal["off", "mask", "compact"] = "off"
    """For models that split: which prompt tokens the second half computes. off: all. compact: the last
    `replay_keep_tokens` only. mask: all, with the visibility of compact; for comparison."""
    replay_keep_tokens: Count | None = None
    """Tokens at the end of a prompt that the second half computes. Unset: as few as the model allows."""
    block_tokens: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Tokens per KV block. Unset: 128 for models with sliding windows, else `engine.block_tokens`."""
    kv_tokens: Count | None = None
    """Tokens that the KV holds, all sequences together. Unset: `engine.max_sequences` times the model's context, within
    `kv_memory`."""
    kv_memory: ByteSize | None = None
    """Most memory for KV blocks, e.g. "4GiB". Unset: a quarter of what is free after the weights."""
    snapshots: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    """Copies of sliding windows that are kept for prefix hits. Unset: four per sequence, within a sixteenth of the free
    memory."""
    draft: bool = False
    """Load the model's own drafter too."""
    dummy_weights: bool = False
    """Random weights in place of the checkpoint's: for planning memory and time."""
    compile: bool = False
    """Pass element-wise ops through torch.compile; needs a C++ compiler. Not batch-invariant."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads that PyTorch computes with; holds for the whole process. Unset: PyTorch's own choice."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """Which kernel serves an op, in place of the one of highest priority: op name to kernel name."""

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceOptions:
        if self.replay_keep_tokens is not None and self.replay == "off":
            raise ValueError('replay_keep_tokens has no effect with replay = "off": set "compact" or "mask"')
        if self.snapshots is not None and self.prefix == "replay":
            raise ValueError('snapshots has no effect with prefix = "replay": set prefix = "snapshot"')
        return self
