"""What engines need of a tokenizer: the bytes of its tokens, and the tokens of bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.contracts import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MOST_SPELT_BYTES = 1 << 20
"""Of texts whose tokens are kept."""


class Vocabulary:
    """The tokens of one tokenizer. Read once, then constant; any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.n_tokens = tokenizer.n_vocab
        self.n_words = -(-self.n_tokens // 32)
        """int32 words of a mask."""
        self.eos_ids = frozenset(tokenizer.eos_ids)
        special = frozenset(filter(tokenizer.is_special, range(self.n_tokens))) | self.eos_ids
        self.special_ids = special
        """Tokens that no text stands for; EOS is one."""
        self.text: Seq[bytes] = tuple(
            b"" if token in special else tokenizer.token_bytes(token) for token in range(self.n_tokens)
        )
        """The bytes of each token; none of special ones."""

        self._spelt: dict[bytes, list[int]] = {}
        self._n_spelt_bytes = 0

    def prepare(self) -> None:
        """Work out all that is kept, which takes a while: later calls are on threads that don't wait."""
        for name in ("special", "byte_tokens", "longest", "eos_words", "_sorted", "_by_bytes"):
            getattr(self, name)

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Name -> id of special tokens; the lowest where two have one name."""
        names: dict[str, int] = {}
        for token in sorted(self.special_ids):
            names.setdefault(self.tokenizer.token_bytes(token).decode("utf-8", "replace"), token)
        return names

    @cached_property
    def byte_tokens(self) -> Seq[int | None]:
        """[256] the token that stands for that one byte, if there is one."""
        tokens: list[int | None] = [None] * 256
        for token, data in enumerate(self.text):
            if len(data) == 1 and tokens[data[0]] is None:
                tokens[data[0]] = token
        return tokens

    @cached_property
    def eos_words(self) -> NDArray[np.int32]:
        """[n_words] the mask that allows the EOS tokens alone."""
        return self.mask(self.eos_ids)

    def mask(self, tokens: Iterable[int], *, negated: bool = False) -> NDArray[np.int32]:
        """[n_words] the mask that allows these tokens, or all others."""
        import numpy as np

        bits = np.zeros(32 * self.n_words, np.uint8)
        bits[: self.n_tokens] = negated
        bits[list(tokens)] = not negated
        return np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.text), default=0)

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        order = sorted((token for token, data in enumerate(self.text) if data), key=self.text.__getitem__)
        return [self.text[token] for token in order], order

    @cached_property
    def _by_bytes(self) -> Mapping[bytes, int]:
        tokens: dict[bytes, int] = {}
        for token, data in enumerate(self.text):
            if data:
                tokens.setdefault(data, token)
        return tokens

    def spell(self, data: bytes) -> list[int]:
        """Tokens whose bytes are exactly these, as the model's tokenizer spells the text in the middle of other text.

        Where it changes the text, or the bytes are no text, the longest token is taken each time. Empty where the
        vocabulary can't spell them."""
        ids = self._spelt.get(data)
        if ids is None:
            ids = self._spell(data)
            self._n_spelt_bytes += len(data)
            if self._n_spelt_bytes > MOST_SPELT_BYTES:
                self._spelt.clear()
                self._n_spelt_bytes = len(data)
            self._spelt[data] = ids
        return list(ids)

    def _spell(self, data: bytes) -> list[int]:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._greedy(data)
        # some tokenizers put a blank in front of whatever they encode; behind a line break they don't
        for before in ("", "\n"):
            ids = self.tokenizer.encode(before + text, add_bos=False)
            if before:
                prefix = self.tokenizer.encode(before, add_bos=False)
                ids = ids[len(prefix) :] if ids[: len(prefix)] == prefix else []
            if b"".join(self.text[token] for token in ids) == data:
                return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        tokens, ids, at = self._by_bytes, list[int](), 0
        while at < len(data):
            for size in range(min(self.longest, len(data) - at), 0, -1):
                token = tokens.get(data[at : at + size])
                if token is not None:
                    break
            else:
                return []
            ids.append(token)
            at += size
        return ids

    def with_prefix(self, prefix: bytes) -> Seq[int]:
        """Tokens whose bytes begin with `prefix`, sorted by bytes."""
        data, order = self._sorted
        return order[bisect_left(data, prefix) : _end(data, prefix)]

    def longer_than(self, prefix: bytes) -> Seq[int]:
        """Tokens whose bytes begin with `prefix` and go on."""
        text = self.text
        return [token for token in self.with_prefix(prefix) if len(text[token]) > len(prefix)]

    def has_longer(self, prefix: bytes) -> bool:
        """Is there a token whose bytes begin with `prefix` and go on?"""
        data, _ = self._sorted
        end = _end(data, prefix)
        return end > 0 and len(data[end - 1]) > len(prefix) and data[end - 1].startswith(prefix)


def _end(data: Seq[bytes], prefix: bytes) -> int:
    """Where the entries that begin with `prefix` end."""
    stem = prefix.rstrip(b"\xff")  # the next prefix of that length, in byte order
    return bisect_left(data, stem[:-1] + bytes([stem[-1] + 1])) if stem else len(data)
