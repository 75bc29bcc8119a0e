"""llama.cpp's own sampler chain, one per running sequence, for `sampler = "native"`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.sampling import INFINITE, NAN, NOTHING, apply_mask, step_result

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.types import LogprobRows, MaskBatch, SamplingTable, StepPlan, StepResult
    from headrace_gguf.llama import Context

REFUSES: Mapping[str, str] = {
    "logprobs": 'the native sampler reports none; set sampler = "core"',
}
"""SamplingParams fields that this sampler can't honour."""

DEFAULTS: Mapping[str, Any] = {
    "penalty_last_n": 64, "xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}  # fmt: skip
"""llama.cpp's own, for what neither the options nor the model's metadata say."""

_COLUMNS = (
    "seed", "sample_index", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition", "presence",
    "frequency",
)  # fmt: skip


def merged(options: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Native options: those set by the user, else the model's own, else llama.cpp's."""
    chosen = dict(options)
    for name, value in DEFAULTS.items():
        if chosen.get(name) is None:
            chosen[name] = model.get(name, value)
    return chosen


@dataclass(slots=True)
class _Chain:
    key: tuple[Any, ...]
    """Columns that it was built from."""
    handle: Any
    next_pos: int
    """Position of the token that it samples next, if the sequence goes on."""


class NativeSampler:
    """Owns the chains. A chain starts anew, with the slot's tokens as its history, whenever the row at its index is not
    the next position of the sequence it served: another sequence took the index, or it was preempted."""

    def __init__(self, context: Context, options: Mapping[str, Any], n_slots: int) -> None:
        self._context = context
        self._options = options
        self._chains: dict[int, _Chain] = {}
        self._tokens = np.zeros((n_slots, context.slot_tokens), np.int32)
        """What each slot's positions hold."""

    def close(self) -> None:
        for chain in self._chains.values():
            self._context.library.c.llama_sampler_free(chain.handle)
        self._chains.clear()

    def fork(self, src: int, dst: int) -> None:
        self._tokens[dst] = self._tokens[src]

    def note(self, slots: NDArray[np.int32], positions: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """The step puts these tokens at these positions. All [T] int32."""
        self._tokens[slots, positions] = tokens

    def sample(
        self, plan: StepPlan, rows: list[NDArray[np.float32]], masks: MaskBatch | None, prompt: LogprobRows | None
    ) -> StepResult:
        """One token per sampling row. rows[k]: [vocab] logits of the k-th of them; changed in place."""
        sampling = np.flatnonzero(plan.sample)
        tokens = np.zeros(len(sampling), np.int32)
        status: dict[int, str] = {}
        for name in ("bias", "banned"):
            self._edit(plan.sampling, name, sampling, rows)
        for k, row in enumerate(sampling.tolist()):
            logits = rows[k]
            if masks is not None and masks.starts[row] < masks.starts[row + 1]:
                apply_mask(logits, masks.bits[masks.starts[row]])
            # llama.cpp ends the process where nothing can be selected
            largest = logits.max()
            if not np.isfinite(largest):
                status[row] = NAN if np.isnan(largest) else INFINITE if largest > 0 else NOTHING
                continue
            tokens[k] = self._one(plan, row)
        emitted = np.zeros(len(plan.seq), np.int32)
        emitted[sampling] = 1
        emitted[list(status)] = 0
        result = step_result(tokens[emitted[sampling] == 1], emitted)
        result.status, result.prompt_logprobs = status, prompt
        return result

    def _edit(self, table: SamplingTable, name: str, sampling: NDArray[Any], rows: list[NDArray[np.float32]]) -> None:
        """Add logit biases, or ban ids: the sparse columns of the table."""
        sparse = getattr(table, name)
        if sparse is None:
            return
        where = {row: k for k, row in enumerate(sampling.tolist())}
        for i, row in enumerate(sparse.rows.tolist()):
            k = where.get(row)
            if k is not None:
                entries = slice(sparse.starts[i], sparse.starts[i + 1])
                if name == "banned":
                    rows[k][sparse.ids[entries]] = -np.inf
                else:
                    rows[k][sparse.ids[entries]] += sparse.values[entries]

    def _one(self, plan: StepPlan, row: int) -> int:
        index, pos = int(plan.seq[row]), int(plan.start[row] + plan.length[row])
        key = tuple(getattr(plan.sampling, name)[index].item() for name in _COLUMNS)
        chain = self._chains.get(index)
        slot = int(plan.slot[row])
        if chain is None or chain.key != key or chain.next_pos != pos or int(plan.length[row]) != 1:
            if chain is not None:
                self._context.library.c.llama_sampler_free(chain.handle)
            chain = self._chains[index] = _Chain(key, self._build(key), pos)
            self._accept(chain, self._tokens[slot, :pos])
        chain.next_pos = pos + 1
        last = int(plan.offset[row + 1]) - 1
        return int(self._context.library.c.llama_sampler_sample(chain.handle, self._context.handle, last))

    def _accept(self, chain: _Chain, history: NDArray[np.int32]) -> None:
        """Tell a new chain what its penalties should know."""
        accept = self._context.library.c.llama_sampler_accept
        for token in history.tolist():
            accept(chain.handle, token)

    def _build(self, key: tuple[Any, ...]) -> Any:
        """The chain in llama.cpp's default order: penalties, DRY, filters, temperature, choice."""
        seed, sample_index, temperature, top_k, top_p, min_p, typical_p, repetition, presence, frequency = key
        c, o = self._context.library.c, self._options
        # 32 bits of the seed, another stream per sample of n > 1
        seed32 = (seed ^ (seed >> 32)) + 0x9E3779B9 * sample_index & 0xFFFFFFFF
        if seed32 == 0xFFFFFFFF:  # LLAMA_DEFAULT_SEED means "random"
            seed32 = 0xFFFFFFFE
        handle = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())

        def add(sampler: Any) -> None:
            c.llama_sampler_chain_add(handle, sampler)

        n_vocab, n_context = self._context.model.n_vocab, self._context.slot_tokens
        if (repetition, presence, frequency) != (1.0, 0.0, 0.0):
            last = n_context if o["penalty_last_n"] < 0 else int(o["penalty_last_n"])
            add(c.llama_sampler_init_penalties(n_vocab, last, repetition, frequency, presence))
        if o["dry_multiplier"] > 0:
            breakers = [text.encode() for text in o["dry_sequence_breakers"]]
            array = (ctypes.c_char_p * len(breakers))(*breakers)
            last = n_context if o["dry_last_n"] < 0 else o["dry_last_n"]
            add(
                c.llama_sampler_init_dry(
                    self._context.model.vocab, o["dry_multiplier"], o["dry_base"], o["dry_allowed_length"], last, array,
                    len(breakers),
                )
            )  # fmt: skip
        if temperature <= 0:
            add(c.llama_sampler_init_greedy())
            return handle
        if o["mirostat"]:
            add(c.llama_sampler_init_temp(temperature))
            tau, eta = o["mirostat_tau"], o["mirostat_eta"]
            if o["mirostat"] == 1:
                add(c.llama_sampler_init_mirostat(n_vocab, seed32, tau, eta, 100))
            else:
                add(c.llama_sampler_init_mirostat_v2(seed32, tau, eta))
            return handle
        if o["top_n_sigma"] >= 0:
            add(c.llama_sampler_init_top_n_sigma(o["top_n_sigma"]))
        if top_k > 0:
            add(c.llama_sampler_init_top_k(top_k))
        if typical_p < 1:
            add(c.llama_sampler_init_typical(typical_p, 1))
        if top_p < 1:
            add(c.llama_sampler_init_top_p(top_p, 1))
        if min_p > 0:
            add(c.llama_sampler_init_min_p(min_p, 1))
        if o["xtc_probability"] > 0:
            add(c.llama_sampler_init_xtc(o["xtc_probability"], o["xtc_threshold"], 1, seed32))
        add(c.llama_sampler_init_temp(temperature))
        add(c.llama_sampler_init_dist(seed32))
        return handle
