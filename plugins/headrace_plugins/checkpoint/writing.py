"""Write checkpoints in the layout, and with the quantisation, of the released ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.modeling import Quantised, TensorSpec
from headrace_plugins.checkpoint.folder import CONFIG, INDEX, SINGLE
from headrace_plugins.checkpoint.matching import BLOCK, CODES, QUANTISATION, codes_shape, scale_name, scale_shape
from headrace_plugins.reference.kernels.formats import quantise_fp4_row, quantise_fp8_block, quantise_fp8_row

SHARD_BYTES = 4 << 30
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_QUANTISE = {"fp8_block": quantise_fp8_block, "fp8_row": quantise_fp8_row, "fp4_row": quantise_fp4_row}
_WRITE_BYTES = 1 << 24


def write_checkpoint(
    folder: str | PathLike[str],
    config: Mapping[str, Any],
    tensors: Iterable[tuple[TensorSpec, Tensor | Quantised]],
    *,
    quantised: bool,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | PathLike[str] | None = None,
) -> None:
    """Write config.json, shards and their index, one tensor in memory at a time.

    quantised: pack the tensors whose spec has a packing; the config then names the quantisation. A plain tensor is
    stored in its own type, float32 where its spec says so. shard_bytes: of tensor data, at most, unless one tensor is
    larger. tokenizer: a tokenizer.json to copy.
    Raises ModelError HR-CKPT-10: the folder holds weights already, a tensor can't be stored, or the disk is full.
    """
    root = Path(folder)
    help = "name a new folder, or remove the old checkpoint"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if old := sorted(path.name for path in root.iterdir() if ".safetensors" in path.suffixes):
            raise ModelError("HR-CKPT-10", f"{root} holds a checkpoint already: {old[0]}", help)
        _write_shards(root, tensors, quantised, shard_bytes)
        written = {key: value for key, value in config.items() if key != "quantization_config"}
        if quantised:
            written["quantization_config"] = dict(QUANTISATION)
        (root / CONFIG).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, root / "tokenizer.json")
    except OSError as error:
        raise ModelError(
            "HR-CKPT-10", f"can't write {root}: {error}", "check the disk's space and permissions"
        ) from error


def quantise(spec: TensorSpec, values: Tensor) -> tuple[Tensor, Tensor]:
    """values [m, k] -> codes and scales of the spec's packing, uint8. Raises ModelError HR-CKPT-10 for odd widths."""
    if values.dim() != 2 or (spec.packing != "fp8_block" and values.shape[1] % BLOCK):
        raise ModelError(
            "HR-CKPT-10",
            f"{spec.name} {list(values.shape)} can't be packed as {spec.packing}",
            f"it needs two dimensions, and rows of a multiple of {BLOCK}",
        )
    return _QUANTISE[spec.packing](values)


def _write_shards(
    root: Path, tensors: Iterable[tuple[TensorSpec, Tensor | Quantised]], quantised: bool, shard_bytes: int
) -> None:
    shards: list[_Shard] = []
    try:
        for spec, values in tensors:
            parts = _parts(spec, values, quantised)
            size = sum(part.numel() * part.element_size() for _, _, part in parts)
            if not shards or (shards[-1].n_bytes and shards[-1].n_bytes + size > shard_bytes):
                if shards:
                    shards[-1].finish()
                shards.append(_Shard(root / f".shard-{len(shards) + 1:05d}"))
            for name, dtype, part in parts:
                shards[-1].add(name, dtype, part)
        if not shards:
            raise ModelError("HR-CKPT-10", f"{root}: there are no tensors to write", "give at least one")
        shards[-1].finish()
        _name_shards(root, shards)
    finally:
        for shard in shards:
            shard.remove()


def _name_shards(root: Path, shards: list[_Shard]) -> None:
    if len(shards) == 1:
        os.replace(shards[0].path, root / SINGLE)
        return
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        os.replace(shard.path, root / name)
        where |= dict.fromkeys(shard.header, name)
    total = sum(shard.n_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (root / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _parts(spec: TensorSpec, values: Tensor | Quantised, quantised: bool) -> list[tuple[str, str, Tensor]]:
    """What is stored for a tensor: (name, type of the file, numbers)."""
    if tuple(values.shape) != spec.shape:
        raise ModelError(
            "HR-CKPT-10", f"{spec.name} has the shape {list(values.shape)}", f"its spec says {list(spec.shape)}"
        )
    if not isinstance(values, Quantised):
        if not quantised or spec.packing == "none":
            plain = values.float() if spec.dtype == "float32" else values
            if plain.dtype not in _NAMES:
                raise ModelError(
                    "HR-CKPT-10", f"{spec.name} is {plain.dtype}", f"store one of {', '.join(_NAMES.values())}"
                )
            return [(spec.name, _NAMES[plain.dtype], plain)]
        values = Quantised(*quantise(spec, values), spec.packing, spec.shape)
    assert values.codes.shape == codes_shape(spec)
    assert values.scales.shape == scale_shape(spec)
    return [
        (spec.name, CODES[spec.packing][0], values.codes.view(torch.uint8)),
        (scale_name(spec.name), "F8_E8M0", values.scales.view(torch.uint8)),
    ]


class _Shard:
    """One file. Its header can only be written when all tensors are known, so data is gathered beside it first: in a
    file per width of its numbers, wide ones in front, which keeps each tensor aligned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.n_bytes = 0
        self._parts: dict[int, _Part] = {}

    def add(self, name: str, dtype: str, values: Tensor) -> None:
        width = values.element_size()
        part = self._parts.get(width)
        if part is None:
            part = self._parts[width] = _Part(self.path.with_suffix(f".{width}"))
        raw = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        part.tensors[name] = (dtype, list(values.shape), len(raw))
        part.file.write(raw.data)
        self.n_bytes += len(raw)

    def finish(self) -> None:
        """Header, padded to 8 bytes, then the data."""
        parts = [self._parts[width] for width in sorted(self._parts, reverse=True)]
        begin = 0
        for part in parts:
            part.file.close()
            for name, (dtype, shape, n_bytes) in part.tensors.items():
                self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + n_bytes]}
                begin += n_bytes
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.header}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with open(self.path, "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for part in parts:
                with open(part.path, "rb") as data:
                    shutil.copyfileobj(data, out, _WRITE_BYTES)
                part.path.unlink()

    def remove(self) -> None:
        """Leave nothing behind when writing failed."""
        for part in self._parts.values():
            part.file.close()
            part.path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


class _Part:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 (a shard closes it)
        self.tensors: dict[str, tuple[str, list[int], int]] = {}
        """name -> type of the file, shape, bytes"""
