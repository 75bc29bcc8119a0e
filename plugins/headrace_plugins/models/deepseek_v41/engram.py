"""Engram: n-gram memory that a few layers add to the streams.

Source: DeepSeek-V4.1 model description, "Engram" (DeepInfer `v4_modules/engram.py`, `engram_metadata.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.contracts import Tokenizer
from headrace.errors import ModelError
from headrace.modeling import Batch, Weight
from headrace.ops import Ops
from headrace_plugins.hf_tokenizer import byte_characters
from headrace_plugins.models.deepseek_v41.config import EngramConfig, TextConfig

SEED_PER_LAYER = 10007


# --- the compressed vocabulary ---------------------------------------------------------------------------------------


def compress_vocabulary(tokenizer: Tokenizer) -> list[int]:
    """Number of each token's normalised text, in the order of first appearance: tokens that differ only in case,
    accents or white space share one. -1 for ids that the tokenizer has nothing for."""
    numbers: dict[str, int] = {}
    characters, normalise = byte_characters(), _normaliser()
    result = []
    for token in range(tokenizer.n_vocab):
        data = tokenizer.token_bytes(token)
        if not data:
            result.append(-1)
            continue
        text = data.decode("utf-8", "replace")
        key = "".join(characters[byte] for byte in data) if "\ufffd" in text else normalise(text) or text
        result.append(numbers.setdefault(key, len(numbers)))
    return result


def _normaliser() -> Callable[[str], str]:
    """By the library that the released tables were made with: marks that it takes for accents (vowel signs of Indic
    scripts among them), blanks and the version of Unicode are its own, not Python's."""
    from tokenizers import Regex, normalizers

    blank = "\ue000"  # in place of a lone blank, while blanks at the ends go
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), blank)]
    steps += [normalizers.Strip(), normalizers.Replace(blank, " ")]
    normalise: Callable[[str], str] = normalizers.Sequence(steps).normalize_str
    return normalise


# --- hashing ---------------------------------------------------------------------------------------------------------


def multipliers(config: EngramConfig, layer: int) -> Tensor:
    """Odd factors, one per position of the n-gram; many are beyond 2^53. -> [max_ngram] int64"""
    high = max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
    drawn = np.random.default_rng(SEED_PER_LAYER * layer).integers(0, high, size=config.max_ngram)
    return torch.from_numpy(drawn.astype(np.int64) * 2 + 1)


def primes(config: EngramConfig) -> list[list[int]]:
    """Per layer, one prime per n and head, no prime twice: the next one from vocab_size on, again for every n."""
    seen: set[int] = set()
    result = []
    for _ in config.layers:
        row = []
        for _ in range(config.max_ngram - 1):
            number = config.vocab_size - 1
            for _ in range(config.heads):
                number = _next_prime(number + 1, seen)
                seen.add(number)
                row.append(number)
        result.append(row)
    return result


def _next_prime(number: int, seen: set[int]) -> int:
    while number in seen or not _is_prime(number):
        number += 1
    return number


def _is_prime(number: int) -> bool:
    """By division; the released tables have primes around 1.6e7."""
    return number >= 2 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


# --- the layers ------------------------------------------------------------------------------------------------------


class Grams:
    """The n-grams that end at each token, as compressed ids."""

    def __init__(self, config: EngramConfig, text: TextConfig, tokenizer: Tokenizer, device: torch.device) -> None:
        compressed = compress_vocabulary(tokenizer)[: text.vocab_size]
        found = max(compressed, default=-1) + 1
        self.pad = compressed[config.pad_token] if config.pad_token < len(compressed) else -1
        if found != config.compressed_vocab_size or self.pad < 0:
            raise ModelError(
                "HR-MODEL-22",
                f"the tokenizer has {found} distinct normalised tokens, config.json says engram_compressed_vocab_size"
                f" = {config.compressed_vocab_size}: the n-gram tables were made for another tokenizer",
                "use the tokenizer.json that came with the checkpoint",
            )
        self.n = config.max_ngram
        table = torch.full((text.vocab_size + 2,), self.pad, dtype=torch.int64)
        known = torch.tensor(compressed)
        table[1 : len(known) + 1] = torch.where(known < 0, self.pad, known)
        table[0] = table[-1] = -1
        if text.image_token is not None and text.image_token < text.vocab_size:
            table[text.image_token + 1] = -1
        self.table = table.to(device)
        """[vocab + 2] int64: compressed id of token t at t + 1; -1 for what ends an n-gram: no token, a token beyond
        the vocabulary, an image."""

    def __call__(self, batch: Batch) -> Tensor:
        """An n-gram that meets a blocked token on its way back is padded from there on. -> [T, n] int64, newest
        first"""
        assert batch.history is not None
        newest = batch.tokens if batch.image is None else batch.tokens.masked_fill(batch.image, -1)
        tokens = torch.cat((newest[:, None], batch.history[:, : self.n - 1]), 1)
        ids = self.table[tokens.clamp(-1, len(self.table) - 2) + 1]
        blocked = (ids < 0).cumsum(1) > 0
        return ids.masked_fill_(blocked, self.pad)


class Engram:
    """R_j += sigmoid(..) v, with keys and value from the rows that the token's n-grams name."""

    def __init__(self, ops: Ops, config: TextConfig, layer: int, quantise: bool) -> None:
        self.ops, self.layer, self.quantise = ops, layer, quantise
        self.streams, self.eps = config.streams, config.eps

    def load(self, weights: Mapping[str, Weight], config: EngramConfig, moduli: Iterable[int]) -> None:
        """moduli: [(max_ngram - 1) heads], primes of this layer."""
        at = f"layers.{self.layer}.engram."
        self.embed, self.wkv = weights[at + "embed.weight"], weights[at + "wkv.weight"]
        self.q_weight, self.k_weight = weights[at + "q_weight"], weights[at + "k_weight"]
        device = self.q_weight.device
        self.primes = torch.tensor(list(moduli), device=device)
        self.offsets = self.primes.cumsum(0) - self.primes
        self.multipliers = multipliers(config, self.layer).to(device)

    def __call__(
        self, streams: Tensor, grams: Tensor, image: Tensor | None, trace: dict[str, Tensor] | None = None
    ) -> Tensor:
        """streams: [n, s, H]; grams: [n, max_ngram] int64; image: [n] bool, left unchanged. -> [n, s, H]"""
        ops = self.ops
        rows = ops.engram.hash(grams, self.multipliers, self.primes, self.offsets)
        read = ops.embed.lookup(self.embed, rows).flatten(1)
        read = ops.quant.activation(read) if self.quantise else read
        kv = ops.linear.dense(read, self.wkv).unflatten(1, (self.streams + 1, -1))
        result: Tensor = ops.engram.gate(streams, kv, self.q_weight, self.k_weight, self.eps, image)
        if trace is not None:
            trace[f"engram_rows.{self.layer}"] = rows
            trace[f"engram_kv.{self.layer}"] = kv
            trace[f"engram_before.{self.layer}"] = streams
            trace[f"engram_after.{self.layer}"] = result
        return result
