"""The model's own tokenizer, through llama.cpp."""

from __future__ import annotations

from headrace.contracts import Tokenizer
from headrace.errors import RequestError
from headrace_gguf.llama import ATTR_CONTROL, ATTR_UNKNOWN, Model


class GGUFTokenizer(Tokenizer):
    """Text to ids and back. Any thread, until the executor is closed; then `encode` raises ModelError."""

    def __init__(self, model: Model, *, bos_id: int | None, eos_ids: frozenset[int], add_bos: bool) -> None:
        self.n_vocab = model.n_vocab
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self._model = model
        self._add_bos = add_bos and bos_id is not None
        # filled on demand: two threads may fill an entry at once, with the same bytes
        self._pieces: list[bytes | None] = [None] * model.n_vocab
        with model.held():
            self._special = frozenset(
                token for token, attr in enumerate(model.attributes()) if attr & (ATTR_CONTROL | ATTR_UNKNOWN)
            )

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "HR-TOKEN-01", f"the text holds a lone surrogate at character {error.start}", "send valid Unicode"
            ) from error
        with self._model.held() as model:
            ids = model.tokenize(encoded, parse_special)
        # BOS is put here and not by llama.cpp, which adds one even where the text begins with it
        if add_bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside the vocabulary of {self.n_vocab} tokens")
        piece = self._pieces[token]
        if piece is None:
            with self._model.held() as model:
                piece = self._pieces[token] = model.piece(token)
        return piece

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _rebind(self, model: Model) -> None:
        """Use a reopened model: those who hold this tokenizer keep it."""
        self._model = model
