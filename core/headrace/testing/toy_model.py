"""The toy model: logits as an integer hash of the whole prefix, bit-equal on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.testing.toy_tokenizer import BOS, EOS, ToyTokenizer
from headrace.types import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ALPHABET = tuple(b" abcdefghijklmno\n")
"""What the model likes to say. Few letters, so that n-grams come back and prompt lookup finds something."""


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014), elementwise; wraps around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """murmur3's fmix32, elementwise and in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


class Recent(NamedTuple):
    """What a row that begins at `start` finds in its ring: cells of positions [start - len(cells), start)."""

    start: int
    window: int
    cells: NDArray[np.int64]


class ToyModel:
    """Logits as a hash of the whole prefix.

    One token of ALPHABET is the favourite at each position (8 above a noise of [0, 4)), so greedy text is readable.
    repeat: share of positions whose favourite depends on the last token only; those an n-gram drafter can guess.
    eos_rate: share of positions whose favourite is EOS. fast: executors skip KV and logits (see `bench scheduler`).
    """

    def __init__(
        self,
        vocab: int = 320,
        seed: int = 0,
        context: int = 4096,
        *,
        repeat: float = 0.5,
        eos_rate: float = 0.0,
        alphabet: Seq[int] = ALPHABET,
        fast: bool = False,
    ) -> None:
        if vocab < 258:
            raise ValueError(f"vocab = {vocab}: the toy tokenizer needs 256 bytes, EOS and BOS, so at least 258")
        self.vocab, self.seed, self.context, self.fast = vocab, seed, context, fast
        self.repeat, self.eos_rate = repeat, eos_rate
        self.alphabet = np.array(alphabet, np.int64)
        self._key = _mix64(np.array([seed & (2**64 - 1)], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        self._columns = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B9)

    def spec(self, uri: str = "") -> ModelSpec:
        facts = f"toy vocab={self.vocab} seed={self.seed} repeat={self.repeat} eos={self.eos_rate} {self.alphabet}"
        return ModelSpec(
            uri=uri or f"toy://vocab={self.vocab},seed={self.seed}",
            format="toy",
            architecture="toy",
            fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
            vocab_size=self.vocab,
            context_tokens=self.context,
            eos_ids=ToyTokenizer(self.vocab).eos_ids,
            bos_id=BOS,
            chat_template=CHAT_TEMPLATE,
        )

    def cells(self, tokens: Seq[int] | NDArray[np.int32], start: int) -> NDArray[np.int64]:
        """What KV holds for `tokens` at positions [start, start + len(tokens)): [n] int64."""
        ids = np.asarray(tokens, np.int64)
        return (np.arange(start, start + len(ids), dtype=np.int64) << 32) | ids

    def logits_from(self, cells: NDArray[np.int64], first: int, recent: Recent | None = None) -> NDArray[np.float32]:
        """Logits after each position of [first, len(cells)), given the cells of positions [0, len(cells)).

        recent: what positions within the window are read from instead, `first` at or after its start.
        Returns [len(cells) - first, vocab] float32.
        """
        total = np.cumsum(_mix64(cells.view(np.uint64) + self._key), dtype=np.uint64)[first:]
        if recent is not None:
            total = total + self._difference(cells, recent, np.arange(first, len(cells)))
        total = _mix64(total + self._key)
        local = _mix64((cells[first:] & 0xFFFFFFFF).view(np.uint64) * np.uint64(0xD6E8FEB86659FD93) ^ self._key)
        noise = _mix32((total.astype(np.uint32))[:, None] ^ self._columns[None, :])
        logits = (noise >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-22)
        guessable = ((total >> np.uint64(40)) & np.uint64(0xFFFF)) < np.uint64(round(self.repeat * 65536))
        source = np.where(guessable, local, total)
        favourite = self.alphabet[((source >> np.uint64(8)) % np.uint64(len(self.alphabet))).astype(np.int64)]
        if self.eos_rate:
            ends = ((total >> np.uint64(20)) & np.uint64(0xFFFF)) < np.uint64(round(self.eos_rate * 65536))
            favourite = np.where(ends, EOS, favourite)
        logits[np.arange(len(total)), favourite] += np.float32(8.0)
        return logits

    def _difference(self, cells: NDArray[np.int64], recent: Recent, at: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the sums at positions `at` gain by reading the part of their windows before `start` from the ring."""
        start, n = recent.start, len(recent.cells)
        instead = _mix64(recent.cells.view(np.uint64) + self._key)
        gains = instead - _mix64(cells[start - n : start].view(np.uint64) + self._key)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(gains[::-1], dtype=np.uint64)])
        return sums[np.clip(recent.window - 1 - (at - start), 0, n)]

    def logits(self, tokens: Seq[int]) -> NDArray[np.float32]:
        """Logits of the token that follows `tokens` (at least one), without any executor: [vocab] float32."""
        return self.logits_from(self.cells(tokens, 0), len(tokens) - 1)[0]

    def generate(self, tokens: Seq[int], n: int) -> list[int]:
        """n greedy tokens after `tokens`: the plain loop that every executor and engine must agree with."""
        text = list(tokens)
        for _ in range(n):
            text.append(int(np.argmax(self.logits(text))))
        return text[len(tokens) :]
