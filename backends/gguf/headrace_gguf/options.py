"""Options of the gguf backend: the `[backend]` table when `use = "gguf"`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.options import Options

KVType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
MOST = (1 << 31) - 1
"""llama.cpp counts in 32-bit integers; ctypes would cut off what is larger."""
LookBack = Annotated[int, Field(ge=-1, le=1 << 20)]
"""llama.cpp allocates a ring of that size for each request, and ends the process when it can't."""
Count = Annotated[int, Field(ge=1, le=MOST)]
Threads = Annotated[int, Field(ge=1, le=512)]
"""GGML_MAX_N_THREADS is 512: ggml ends the process beyond it."""
Share = Annotated[float, Field(ge=0, le=1)]


class NativeSampler(Options):
    """llama.cpp's own samplers, for `sampler = "native"`. What is left out comes from the model's metadata."""

    penalty_last_n: LookBack | None = None
    """Tokens that the repetition penalties look back on; -1 = all, 0 = none. Unset: the model's, else 64."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Strength of the DRY repetition penalty; 0 = off."""
    dry_base: Annotated[float, Field(ge=1, le=100)] = 1.75
    """DRY: growth of the penalty per repeated token."""
    dry_allowed_length: Annotated[int, Field(ge=0, le=MOST)] = 2
    """DRY: repeats of up to this many tokens are free."""
    dry_last_n: LookBack = -1
    """DRY: tokens that it looks back on; -1 = the whole context."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """DRY: texts that end a repeat."""
    xtc_probability: Share | None = None
    """XTC: chance that the top choices are cut; 0 = off. Unset: the model's, else 0."""
    xtc_threshold: Share | None = None
    """XTC: probability above which a choice may be cut. Unset: the model's, else 0.1."""
    top_n_sigma: Annotated[float, Field(ge=-1, le=100)] = -1.0
    """Keep logits within this many standard deviations of the largest; -1 = off."""
    mirostat: Literal[0, 1, 2] | None = None
    """Mirostat version, 0 = off. On, it replaces top_k, top_p, min_p and typical_p. Unset: the model's, else 0."""
    mirostat_tau: Annotated[float, Field(gt=0, le=100)] | None = None
    """Mirostat: target surprise, in nats. Unset: the model's, else 5."""
    mirostat_eta: Annotated[float, Field(gt=0, le=100)] | None = None
    """Mirostat: learning rate. Unset: the model's, else 0.1."""


class GGUFOptions(Options):
    """Run a GGUF model on llama.cpp."""

    context_tokens: Count | Literal["auto"] = "auto"
    """Positions per slot: the longest prompt plus answer. auto: the model's own length, at most 4096, and less where
    memory is short."""
    slots: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    """Sequences that run at once. auto: 8, or fewer where their KV would take over a quarter of the free memory."""
    threads: Threads | Literal["auto"] = "auto"
    """Threads for generation. auto: the physical cores that this process may use."""
    batch_threads: Threads | Literal["auto"] = "auto"
    """Threads for prompts. auto: as `threads`."""
    gpu_layers: Annotated[int, Field(ge=0, le=MOST)] | Literal["auto"] = "auto"
    """Layers to put on the GPU. auto: all of them if llama.cpp was built for a GPU, else none."""
    flash_attention: Literal["auto", "on", "off"] = "auto"
    """Fused attention kernels. off makes the logits of a prompt independent of how it is cut into chunks."""
    kv_type: KVType = "f16"
    """Number format of the KV cache."""
    kv_type_v: KVType | None = None
    """Number format of the values alone, where it differs from `kv_type`."""
    batch_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one step. auto: `engine.max_batch_tokens`."""
    ubatch_tokens: Count = 512
    """Tokens that one pass through the layers takes: more is faster for long prompts and takes more memory."""
    mmap: bool = True
    """Map the weights from the file: loads faster, and processes share the memory."""
    mlock: bool = False
    """Keep the weights from being swapped out."""
    trial_load: bool = True
    """Load an unknown file in a separate process first, since llama.cpp ends the process on some damaged files. A file
    that passed is remembered in the cache folder."""
    sampler: Literal["core", "native"] = "core"
    """core: the sampling and noise of every other backend. native: llama.cpp's chain, with mirostat, DRY and XTC."""
    native_sampler: NativeSampler = NativeSampler()
    """Options of the native chain."""

    @model_validator(mode="after")
    def _native_only(self) -> GGUFOptions:
        if self.sampler == "core" and self.native_sampler.model_fields_set:
            raise ValueError('native_sampler has no effect with sampler = "core": set sampler = "native"')
        return self
