"""How a model is laid out on this machine: slots, context, threads, and whether its memory fits, before any load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headrace.types import EngineOptions, MachineInfo
    from headrace_gguf.facts import GGUFFacts
    from headrace_gguf.options import GGUFOptions

AUTO_CONTEXT = 4096
AUTO_SLOTS = (8, 4, 2, 1)
AUTO_KV_SHARE = 0.25
"""Of the free memory, for the KV of automatically chosen slots."""
CONTEXT_STEP = 256
"""llama.cpp rounds a slot up to this many positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Every "auto" resolved."""

    context_tokens: int
    slots: int
    threads: int
    batch_threads: int
    gpu_layers: int
    """-1 = all."""
    batch_tokens: int
    type_k: str
    type_v: str
    needed_bytes: int
    available_bytes: int

    def describe(self, facts: GGUFFacts, options: GGUFOptions) -> Mapping[str, str]:
        """For `config explain`."""
        kv_bytes = facts.kv_bytes_per_token(self.type_k, self.type_v)
        described = {
            "context": f"{self.context_tokens} of the model's {facts.context_length} tokens",
            "slots": f"{self.slots}",
            "threads": f"{self.threads} (prompts {self.batch_threads})",
            "kv": f"{self.type_k}/{self.type_v}, {kv_bytes:.0f} bytes per token",
            "gpu layers": "all" if self.gpu_layers < 0 else f"{self.gpu_layers}",
            "flash attention": options.flash_attention,
            "memory": f"{gib(self.needed_bytes)} needed, "
            + (f"{gib(self.available_bytes)} available" if self.gpu_layers == 0 else "not checked with a GPU"),
            "sampler": options.sampler,
        }
        if facts.native_defaults and options.sampler == "core":
            named = ", ".join(f"{name} = {value:g}" for name, value in facts.native_defaults.items())
            described["not used"] = f'the model recommends {named}: honoured by sampler = "native" only'
        return described


def slot_positions(context_tokens: int) -> int:
    """Positions that llama.cpp gives a slot for so many."""
    return -(-context_tokens // CONTEXT_STEP) * CONTEXT_STEP


def gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"


def compute_bytes(facts: GGUFFacts, ubatch: int, slots: int, context: int, flash: bool) -> int:
    """Activations and logits of one pass: an estimate from above for what llama.cpp reserves."""
    wide = max(facts.metadata.get(f"{facts.architecture}.feed_forward_length", 0) or 0, 4 * facts.n_embd)
    scores = 0 if flash else ubatch * context * max(facts.n_heads, 1)
    return 4 * (ubatch * (facts.n_vocab + 8 * facts.n_embd + 3 * wide) + scores + slots * facts.n_vocab)


def resolve(
    facts: GGUFFacts, options: GGUFOptions, engine: EngineOptions, machine: MachineInfo, gpu_offload: bool
) -> Shape:
    """Choose what is "auto" and refuse what can't be: ConfigError HR-GGUF-30.., ModelError HR-MEMORY-01."""
    type_k, type_v = options.kv_type, options.kv_type_v or options.kv_type
    _check(facts, options, type_k, type_v, gpu_offload)
    available = machine.available_memory_bytes
    per_token = facts.kv_bytes_per_token(type_k, type_v)
    context = min(facts.context_length, AUTO_CONTEXT) if options.context_tokens == "auto" else options.context_tokens
    batch = engine.max_batch_tokens if options.batch_tokens == "auto" else options.batch_tokens

    def needed(slots: int, context: int) -> int:
        kv = slots * (slot_positions(context) * per_token + facts.state_bytes)
        flash = options.flash_attention != "off"
        return int(
            facts.tensor_bytes + kv + compute_bytes(facts, min(options.ubatch_tokens, batch), slots, context, flash)
        )

    def largest(slots: int) -> int:
        """Largest context that fits; 0 if none does."""
        low, high = 0, facts.context_length // CONTEXT_STEP + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed(slots, middle * CONTEXT_STEP) <= available else (low, middle - 1)
        return min(low * CONTEXT_STEP, facts.context_length)

    if options.slots == "auto":
        most = max(1, min(AUTO_SLOTS[0], engine.max_sequences))
        share = available * AUTO_KV_SHARE
        slots = next((n for n in AUTO_SLOTS if n <= most and n * context * per_token <= share), 1)
    else:
        slots = options.slots
    gpu_layers = (-1 if gpu_offload else 0) if options.gpu_layers == "auto" else options.gpu_layers
    # what goes to a GPU is not the host's to hold, and llama.cpp itself says when a GPU is full
    tight = gpu_layers == 0
    if tight and options.context_tokens == "auto" and needed(slots, context) > available:
        context = largest(slots) or context
    if tight and needed(slots, context) > available:
        raise _no_room(facts, slots, context, needed(slots, context), available, largest(slots), largest(1))
    threads = machine.physical_cores if options.threads == "auto" else options.threads
    return Shape(
        context_tokens=context,
        slots=slots,
        threads=threads,
        batch_threads=threads if options.batch_threads == "auto" else options.batch_threads,
        gpu_layers=gpu_layers,
        batch_tokens=max(batch, slots),
        type_k=type_k,
        type_v=type_v,
        needed_bytes=needed(slots, context),
        available_bytes=available,
    )


def _check(facts: GGUFFacts, options: GGUFOptions, type_k: str, type_v: str, gpu_offload: bool) -> None:
    """Options that contradict each other, the model or the build."""
    if options.gpu_layers != "auto" and options.gpu_layers > 0 and not gpu_offload:
        raise ConfigError(
            "HR-GGUF-30", f"backend.gpu_layers = {options.gpu_layers}, but this llama.cpp has no GPU support",
            'set gpu_layers = "auto" or 0, or install a llama-cpp-python built for your GPU',
        )  # fmt: skip
    if options.context_tokens != "auto" and options.context_tokens > facts.context_length:
        raise ConfigError(
            "HR-GGUF-31",
            f"backend.context_tokens = {options.context_tokens}, but {facts.name or facts.path} was trained for "
            f"{facts.context_length}",
            f"set context_tokens = {facts.context_length} or less",
        )
    if options.flash_attention == "off" and type_v not in ("f32", "f16", "bf16"):
        raise ConfigError(
            "HR-GGUF-32", f'a value cache of type {type_v} needs flash attention, which is "off"',
            'set flash_attention = "auto", or kv_type_v = "f16"',
        )  # fmt: skip


def _no_room(
    facts: GGUFFacts, slots: int, context: int, needed: int, available: int, fits: int, alone: int
) -> ModelError:
    if fits:
        help = f"set context_tokens = {fits}, or fewer slots (now {slots})"
    elif alone:
        help = f"set slots = 1 and context_tokens = {alone} or less"
    else:
        help = f"the weights alone take {gib(facts.tensor_bytes)}: use a smaller model or quantisation"
    return ModelError(
        "HR-MEMORY-01",
        f"{facts.name or facts.path} with {slots} slots of {context} tokens needs {gib(needed)}, "
        f"{gib(available)} are available; the largest context that fits is {fits}",
        help,
    )


def as_facts(facts: GGUFFacts) -> dict[str, Any]:
    """What `config explain` shows of a model."""
    return {
        "name": facts.name,
        "architecture": facts.architecture,
        "context": facts.context_length,
        "tokenizer": f"{facts.tokenizer}, {facts.n_vocab} tokens",
        "eos ids": sorted(facts.eos_ids),
        "chat template": "yes" if facts.chat_template else "no",
        "chat_template": facts.chat_template,
        "quantisation": facts.quantisation,
        "size": gib(facts.size_bytes),
        "sampling_defaults": dict(facts.sampling_defaults),
    }
