"""Weights that were never trained: for plans, tests and benches. The same seed gives the same numbers everywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.modeling import Quantised, TensorSpec
from headrace_plugins.checkpoint.loading import CHUNK, held_dtype
from headrace_plugins.checkpoint.matching import BLOCK, codes_shape, scale_shape
from headrace_plugins.checkpoint.writing import SHARD_BYTES, quantise, write_checkpoint
from headrace_plugins.reference.kernels.formats import unpack

_AROUND_ONE = ("norm", "q_weight", "k_weight")
"""Words in names of factors that a trained model keeps near 1."""


def dummy_weights(
    specs: Iterable[TensorSpec], *, compute: torch.dtype, keep: Literal["dequant", "quantised"], seed: int = 0
) -> dict[str, Tensor | Quantised]:
    """What `load_weights` gives for a quantised `random_checkpoint` of this seed, without files."""
    weights: dict[str, Tensor | Quantised] = {}
    for spec in specs:
        dtype = held_dtype(spec, compute)
        if spec.packing == "none":
            weights[spec.name] = _plain(spec, seed).to(dtype)
        elif keep == "quantised":
            weights[spec.name] = _packed(spec, seed)
        else:
            weights[spec.name] = unpack(_packed(spec, seed), dtype)
    return weights


def random_checkpoint(
    folder: str | PathLike[str],
    specs: Iterable[TensorSpec],
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    quantised: bool = True,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | PathLike[str] | None = None,
) -> None:
    """Write a checkpoint of random numbers, one tensor in memory at a time. See `write_checkpoint`."""
    tensors: Iterator[tuple[TensorSpec, Tensor | Quantised]] = (
        (spec, _packed(spec, seed) if quantised and spec.packing != "none" else _plain(spec, seed)) for spec in specs
    )
    write_checkpoint(folder, config, tensors, quantised=quantised, shard_bytes=shard_bytes, tokenizer=tokenizer)


def _plain(spec: TensorSpec, seed: int) -> Tensor:
    """bfloat16, or float32 where the spec wants that."""
    out = torch.empty(spec.shape, dtype=torch.float32 if spec.dtype == "float32" else torch.bfloat16)
    flat, start = out.view(-1), 0
    for piece in _pieces(spec, seed):
        flat[start : start + piece.numel()] = piece.view(-1)
        start += piece.numel()
    return out


def _packed(spec: TensorSpec, seed: int) -> Quantised:
    codes = torch.empty(codes_shape(spec), dtype=torch.uint8)
    scales = torch.empty(scale_shape(spec), dtype=torch.uint8)
    rows_per_scale = BLOCK if spec.packing == "fp8_block" else 1
    start = 0
    for piece in _pieces(spec, seed):
        end = start + len(piece)
        codes[start:end], scales[start // rows_per_scale : -(-end // rows_per_scale)] = quantise(spec, piece)
        start = end
    return Quantised(codes, scales, spec.packing, spec.shape)


def _pieces(spec: TensorSpec, seed: int) -> Iterator[Tensor]:
    """Rows of a tensor in pieces, float32, rounded to bfloat16 where that is what a checkpoint holds.

    Activations stay finite: factors of norms near 1, embeddings of size 1, matrices about 1/sqrt(fan in).
    """
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    rows = spec.shape[0] if spec.shape else 1
    width = spec.shape[1:]
    step = max(BLOCK, CHUNK // max(math.prod(width), 1) // BLOCK * BLOCK)
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *width) if spec.shape else ()
        values = _sized(spec, torch.randn(shape, generator=noise))
        yield values if spec.dtype == "float32" else values.bfloat16().float()


def _sized(spec: TensorSpec, values: Tensor) -> Tensor:
    if any(word in spec.name for word in _AROUND_ONE):
        return 1 + 0.1 * values
    if len(spec.shape) < 2:
        return 0.1 * values
    return values if "embed" in spec.name else values * spec.shape[-1] ** -0.5
