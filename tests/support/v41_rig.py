"""DeepSeek-V4.1 on the reference kernels without an executor: sequences with blocks, slots and batches made by hand.

Needs torch, which its users ask for first.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from golden import ModelGolden
from safetensors.torch import load_file
from torch import Tensor

from headrace.modeling import Batch, Cache, ModelContext, Quantised, StateSpec, Weight
from headrace.ops import KernelContext, Ops
from headrace_plugins.hf_tokenizer import load_tokenizer
from headrace_plugins.models.deepseek_v41.model import DeepseekV41
from headrace_plugins.reference.kernels.formats import unpack
from headrace_plugins.reference.specs import kernels


def reference_ops(exact: bool = False, compute: Literal["float32", "bfloat16"] = "float32") -> Ops:
    """The reference kernels that the model needs: plain, or the exact ones."""
    context = KernelContext(device="cpu", compute=compute, exact=exact)
    chosen: dict[str, Any] = {}
    for spec in sorted(kernels(), key=lambda spec: spec.priority):
        if spec.op in DeepseekV41.needs and (spec.exact or not exact):
            module, _, name = spec.factory.partition(":")
            chosen[spec.op] = getattr(importlib.import_module(module), name)(context)
    return Ops(chosen)


@dataclass
class Row:
    """One sequence."""

    tokens: list[int]
    slot: int
    blocks: list[int]
    computed: int = 0
    first: int = 0
    tail: int | None = None
    image: Tensor | None = None
    """[n] bool"""
    embeds: Tensor | None = None
    """[n, H]"""
    placeholders: bool = False
    """The tokens of images say what they are, and the history has them as they stand."""

    def text(self, position: int) -> int:
        """The token there; -1 before the start and where the input is an embedding."""
        hidden = self.image is not None and not self.placeholders and bool(self.image[max(position, 0)])
        return -1 if position < 0 or hidden else self.tokens[position]


@dataclass
class Rig:
    """A model with caches for a few sequences."""

    model: DeepseekV41
    context: ModelContext
    caches: Mapping[str, Cache] = field(default_factory=dict)
    n_rows: int = 0
    blocks_per_row: int = 8

    def row(self, tokens: Iterable[int], **settings: Any) -> Row:
        """A new sequence, in a slot and blocks of its own. Its blocks don't lie in order."""
        slot = self.n_rows
        self.n_rows += 1
        blocks = [1 + slot * self.blocks_per_row + (i * 3 + slot) % self.blocks_per_row for i in range(7)]
        return Row(list(map(int, tokens)), slot, blocks, **settings)

    def batch(self, work: Sequence[tuple[Row, int]], trace: dict[str, Any] | None = None) -> Batch:
        """(row, how many tokens of it) -> a batch that wants the logits of every token that has some."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "positions", "row", "slot", "first", "history")
        }
        tails, images, embeds = [], [], []
        reach = self.model.history_tokens
        for number, (row, count) in enumerate(work):
            for p in range(row.computed, row.computed + count):
                columns["tokens"].append(row.tokens[p])
                columns["positions"].append(p)
                columns["row"].append(number)
                columns["slot"].append(row.slot)
                columns["first"].append(row.first)
                columns["history"].append([row.text(p - r) for r in range(1, reach + 1)])
                tails.append(row.tail or 0)
                images.append(bool(row.image is not None and row.image[p]))
                embeds.append(row.embeds[p] if row.embeds is not None else torch.zeros(self.model.config.hidden))
        made = {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
        tail = torch.tensor(tails) if any(row.tail is not None for row, _ in work) else None
        cut = tail is not None and self.context.replay == "compact"
        return Batch(
            **made,
            tail=tail,
            table=torch.tensor([row.blocks for row, _ in work], dtype=torch.int64),
            block_tokens=self.context.block_tokens,
            image=torch.tensor(images) if any(images) else None,
            embeds=torch.stack(embeds) if any(images) else None,
            wanted=(made["positions"] >= tail).nonzero()[:, 0] if cut else torch.arange(len(tails)),
            trace=trace,
        )

    def step(self, work: Sequence[tuple[Row, int]], trace: dict[str, Any] | None = None) -> Tensor:
        """Run a batch. -> [M, vocab] logits of every token, of those from `tail` on in mode compact"""
        logits: Tensor = self.model.forward(self.batch(work, trace), self.caches)
        for row, count in work:
            row.computed += count
        return logits

    def logits(self, tokens: Iterable[int], chunks: Sequence[int] = (), **settings: Any) -> Tensor:
        """One new sequence in chunks of these lengths (empty: at once). -> [T, vocab]"""
        row = self.row(tokens, **settings)
        return torch.cat([self.step([(row, count)]) for count in chunks or [len(row.tokens)]])


def make_caches(states: Iterable[StateSpec], n_blocks: int, n_slots: int, block_tokens: int) -> dict[str, Cache]:
    """Filled with noise, as memory that other sequences used is."""
    caches = {}
    noise = torch.Generator().manual_seed(7)
    for state in states:
        paged = state.kind == "paged"
        grain = block_tokens // state.ratio if paged else state.entries
        size = (n_blocks if paged else n_slots, grain * state.format.entry_bytes)
        pool = torch.randint(0, 120, size, dtype=torch.uint8, generator=noise)
        caches[state.name] = Cache(pool, state.format, grain)
    return caches


def load_weights(
    path: Path, model: DeepseekV41, kept: Literal["dequant", "quantised"] = "dequant"
) -> dict[str, Weight]:
    """A checkpoint in the types that the model asks for; packed matrices unpacked, or as they are. A plain tensor that
    the model wants smaller is cut."""
    tensors = load_file(path)
    act = torch.float32 if model.context.compute == "float32" else torch.bfloat16
    weights: dict[str, Weight] = {}
    for spec in model.tensors():
        dtype = torch.float32 if spec.dtype == "float32" else act
        scales = tensors.get(spec.name.removesuffix("weight") + "scale")
        if scales is None:
            weights[spec.name] = tensors[spec.name][tuple(map(slice, spec.shape))].to(dtype)
            continue
        packed = Quantised(tensors[spec.name].view(torch.uint8), scales.view(torch.uint8), spec.packing, spec.shape)
        weights[spec.name] = packed if kept == "quantised" else unpack(packed, dtype)
    return weights


def make_rig(
    golden: ModelGolden,
    *,
    weights: Literal["dequant", "quantised"] = "dequant",
    exact: bool = False,
    text: Mapping[str, Any] | None = None,
    n_slots: int = 16,
    **settings: Any,
) -> Rig:
    """text: what is different in text_config; settings: of ModelContext, where cache "quantised" is qon of the golden
    data and "plain" is qoff."""
    tokenizer = None
    if (golden.folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(golden.folder), golden.config["text_config"]["vocab_size"])
    settings = {"block_tokens": 16, "slack_tokens": 5, "compute": "float32"} | settings
    context = ModelContext(tokenizer=tokenizer, **settings)
    config = golden.config
    config["text_config"].update(text or {})
    model = DeepseekV41(config, reference_ops(exact, context.compute), context)
    model.load(load_weights(golden.folder / "model.safetensors", model, weights))
    rig = Rig(model, context)
    rig.caches = make_caches(model.states(), n_slots * rig.blocks_per_row + 1, n_slots, context.block_tokens)
    return rig
