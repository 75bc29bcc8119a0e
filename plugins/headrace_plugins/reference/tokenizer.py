"""The tokenizer of a checkpoint; a folder without one is served by token ids."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.contracts import Tokenizer
from headrace.errors import RequestError
from headrace_plugins.hf_tokenizer import load_tokenizer, token_ids

if TYPE_CHECKING:
    from headrace_plugins.reference.facts import ModelFacts


def tokenizer_of(facts: ModelFacts) -> Tokenizer:
    """What tokenizer.json says, or ids alone."""
    if not os.path.lexists(os.path.join(facts.folder, "tokenizer.json")):  # a link that leads nowhere is an error
        return IdTokenizer(facts)
    return load_tokenizer(facts.folder, facts.vocab_size)


class IdTokenizer(Tokenizer):
    """Prompts are token ids; token 7 reads as "<7>". Any thread."""

    def __init__(self, facts: ModelFacts) -> None:
        self.n_vocab = facts.vocab_size
        self.bos_id = next(iter(_ids(facts.config, "bos_token_id")), None)
        self.eos_ids = frozenset(token for token in _ids(facts.config, "eos_token_id") if token < self.n_vocab)
        self._folder = facts.folder

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        raise RequestError(
            "HR-TOKEN-02", f"{self._folder} has no tokenizer.json, so text can't be read", "give prompts as token ids"
        )

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside the vocabulary of {self.n_vocab} tokens")
        return f"<{token}>".encode()

    def is_special(self, token: int) -> bool:
        return token == self.bos_id or token in self.eos_ids


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    """Here or in text_config."""
    text = config.get("text_config")
    nested = text if isinstance(text, dict) and key not in config else config
    return token_ids(nested, key, "config.json")
