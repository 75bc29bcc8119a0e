"""How a model is laid out in this machine's memory: blocks, rings, snapshots, and whether they fit, before any load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headrace.modeling import Model, TensorSpec
    from headrace.types import BuildContext
    from headrace_plugins.reference.caches import Arrangement
    from headrace_plugins.reference.facts import ModelFacts
    from headrace_plugins.reference.options import ReferenceOptions

KV_SHARE = 0.25
"""Of the memory that the weights leave, for KV blocks of an automatic number."""
SNAPSHOT_SHARE = 1 / 16
"""The same for ring snapshots."""
SNAPSHOTS_PER_SEQUENCE = 4
_PACKED_BITS = {"fp8_block": 8 + 8 / 1024, "fp8_row": 8 + 8 / 32, "fp4_row": 4 + 8 / 32}
"""Bits per number of a packed matrix, scales included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Every automatic size resolved."""

    n_blocks: int
    block_tokens: int
    block_bytes: int
    n_slots: int
    n_snapshots: int
    ring_bytes: int
    weight_bytes: int
    """Estimated; quantised: as if every matrix that may be packed were."""
    available_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.n_blocks * self.block_bytes

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + (self.n_slots + self.n_snapshots) * self.ring_bytes

    def describe(self) -> Mapping[str, str]:
        """For `config explain`."""
        blocks = f"{self.n_blocks} blocks of {self.block_tokens} tokens, {gib(self.kv_bytes)}"
        if not self.ring_bytes:
            rings = "none"
        else:
            n_bytes = (self.n_slots + self.n_snapshots) * self.ring_bytes
            rings = f"{self.n_slots} slots, {self.n_snapshots} snapshots, {gib(n_bytes)}"
        return {
            "kv": blocks,
            "rings": rings,
            "memory": f"{gib(self.needed_bytes)} needed, {gib(self.available_bytes)} available",
        }


def gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**25 else f"{n_bytes / 2**20:.2f} MiB"


def weight_bytes(specs: Iterable[TensorSpec], options: ReferenceOptions) -> int:
    """What the weights will hold in memory."""
    bits = 0.0
    for spec in specs:
        plain = 32 if spec.dtype == "float32" or options.compute == "float32" else 16
        packed = _PACKED_BITS.get(spec.packing) if options.weights == "quantised" else None
        bits += math.prod(spec.shape) * (packed or plain)
    return math.ceil(bits / 8)


def resolve(
    facts: ModelFacts, model: Model, arrangement: Arrangement, block_tokens: int, options: ReferenceOptions,
    context: BuildContext,
) -> Sizes:  # fmt: skip
    """Choose what is not set and refuse what can't be: ConfigError HR-REFERENCE-11 and -14, ModelError HR-MEMORY-01."""
    _check_hits(facts, arrangement, options, context)
    n_slots, available = context.engine.max_sequences, context.machine.available_memory_bytes
    weights = weight_bytes(model.tensors(), options)
    free = max(0, available - weights - n_slots * arrangement.ring_bytes)
    block_bytes = arrangement.block_bytes
    wanted = options.kv_tokens or n_slots * model.context_tokens
    n_blocks = -(-wanted // block_tokens)
    if options.kv_memory is not None:
        most = options.kv_memory // max(1, block_bytes)
        if most < 1:
            raise ConfigError(
                "HR-REFERENCE-11",
                f"backend.kv_memory = {options.kv_memory} bytes holds no block of {block_tokens} tokens, "
                f"which takes {block_bytes}",
                f"set kv_memory to {block_bytes} or more, or fewer block_tokens",
            )
        if options.kv_tokens is not None and n_blocks > most:
            raise ConfigError(
                "HR-REFERENCE-11",
                f"backend.kv_tokens = {options.kv_tokens} takes {n_blocks * block_bytes} bytes, more than "
                f"backend.kv_memory = {options.kv_memory}",
                "leave one of them out, or set a smaller kv_tokens or a larger kv_memory",
            )
        n_blocks = min(n_blocks, most)
    elif options.kv_tokens is None:
        n_blocks = min(n_blocks, max(1, int(free * KV_SHARE) // max(1, block_bytes)))
    n_snapshots = 0
    if arrangement.ring_bytes and options.prefix == "snapshot" and context.engine.prefix_cache:
        automatic = min(SNAPSHOTS_PER_SEQUENCE * n_slots, int(free * SNAPSHOT_SHARE) // arrangement.ring_bytes)
        n_snapshots = automatic if options.snapshots is None else options.snapshots
    sizes = Sizes(
        n_blocks=n_blocks, block_tokens=block_tokens, block_bytes=block_bytes, n_slots=n_slots,
        n_snapshots=n_snapshots, ring_bytes=arrangement.ring_bytes, weight_bytes=weights, available_bytes=available,
    )  # fmt: skip
    if sizes.needed_bytes > available:
        raise _no_room(facts, model, sizes, options)
    return sizes


def _check_hits(facts: ModelFacts, arrangement: Arrangement, options: ReferenceOptions, context: BuildContext) -> None:
    """What is set for the sliding windows of prefix hits must have an effect."""
    if options.prefix == "replay":
        asked = "prefix = 'replay'"
    elif options.snapshots:
        asked = f"snapshots = {options.snapshots}"
    else:
        return
    if not arrangement.ring_bytes:
        why = f"a {facts.architecture} has no sliding windows"
    elif not context.engine.prefix_cache:
        why = "engine.prefix_cache = false allows no prefix hit"
    else:
        return
    raise ConfigError("HR-REFERENCE-14", f"backend.{asked} has no effect: {why}", "leave it out")


def _no_room(facts: ModelFacts, model: Model, sizes: Sizes, options: ReferenceOptions) -> ModelError:
    rings = (sizes.n_slots + sizes.n_snapshots) * sizes.ring_bytes
    if sizes.weight_bytes > sizes.available_bytes:
        smaller = {'compute = "bfloat16"': {"compute": "bfloat16"}, 'weights = "quantised"': {"weights": "quantised"}}
        edits = [
            edit for edit, update in smaller.items()
            if weight_bytes(model.tensors(), options.model_copy(update=update)) < sizes.weight_bytes
        ]  # fmt: skip
        help = "the weights alone are too large: " + " or ".join(
            [*(f"set {edit}" for edit in edits), "choose a smaller model"]
        )
    else:
        help = "set fewer kv_tokens or snapshots, or engine.max_sequences"
    return ModelError(
        "HR-MEMORY-01",
        f"{facts.folder} needs {gib(sizes.needed_bytes)}: weights {gib(sizes.weight_bytes)}, "
        f"KV {gib(sizes.kv_bytes)}, rings {gib(rings)}; {gib(sizes.available_bytes)} are available",
        help,
    )
