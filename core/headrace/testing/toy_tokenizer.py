"""A byte-level tokenizer: 0..255 are bytes, 256 is EOS, 257 is BOS, further ids are pieces that are hard to join."""

from __future__ import annotations

from headrace.contracts import Tokenizer

EOS = 256
BOS = 257

_SPECIAL: dict[int, bytes] = {EOS: b"<|eos|>", BOS: b"<|bos|>", 258: b"<|im_start|>", 259: b"<|im_end|>"}
_PIECES: tuple[bytes, ...] = (
    "\u00e9".encode(),
    "\u65e5\u672c".encode(),
    "\U0001f642".encode(),
    "\U0001f469\u200d\U0001f469\u200d\U0001f467".encode(),
    b"\xf0\x9f",
    b"\x98\x80",
    b" the",
    b" and",
    b"ing",
    b"end",
    b"\n\n",
    b"  ",
)
"""Ids from 260: multi-byte characters, halves of one, and common words."""


class ToyTokenizer(Tokenizer):
    """wants_bos: does the pretend model want BOS in front (then encode puts it there, once)?"""

    def __init__(self, vocab: int = 320, *, wants_bos: bool = False) -> None:
        self.n_vocab = vocab
        self.wants_bos = wants_bos
        self.bos_id = BOS
        self._special = {token: name for token, name in _SPECIAL.items() if token < vocab}
        self.eos_ids = frozenset(token for token in (EOS, 259) if token < vocab)
        self._bytes = [bytes([i]) for i in range(256)] + list(_SPECIAL.values()) + list(_PIECES)
        self._bytes += [f"<{token}>".encode() for token in range(len(self._bytes), vocab)]
        del self._bytes[vocab:]
        pieces = [(piece, token) for token, piece in enumerate(self._bytes) if token >= 260]
        self._pieces = sorted(pieces, key=lambda item: -len(item[0]))

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        vocabulary = list(self._pieces)
        if parse_special:
            vocabulary = [(name, token) for token, name in self._special.items()] + vocabulary
        by_first: dict[int, list[tuple[bytes, int]]] = {}
        for piece, token in vocabulary:
            by_first.setdefault(piece[0], []).append((piece, token))
        ids: list[int] = []
        at = 0
        while at < len(data):
            for piece, token in by_first.get(data[at], ()):
                if data.startswith(piece, at):
                    ids.append(token)
                    at += len(piece)
                    break
            else:
                ids.append(data[at])
                at += 1
        if add_bos and self.wants_bos and ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return ids

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        return token in self._special
