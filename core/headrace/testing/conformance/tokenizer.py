"""What every tokenizer must do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.contracts import Tokenizer

TEXTS = (
    "Hello, world",
    "a",
    "  two  blanks",
    "tabs\tand\nnewlines\n\n",
    "naïve café",
    "日本語",
    "🙂👩‍👩‍👧",
    "x = {1: 2}",
)


class TokenizerConformance:
    """Subclass and return a tokenizer from `make()`."""

    exact = True
    """Bytes of encode(text) join to the text; False for tokenizers that normalise."""

    def make(self) -> Tokenizer:
        raise NotImplementedError("return your tokenizer from make()")

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return self.make()

    def _text(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        return b"".join(tokenizer.token_bytes(token) for token in ids).decode()

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_comes_back(self, tokenizer: Tokenizer, text: str) -> None:
        if not self.exact:
            pytest.skip("exact is False")
        back = self._text(tokenizer, tokenizer.encode(text, add_bos=False))
        assert back in (text, " " + text), "a blank in front is all that a tokenizer may add"

    def test_empty_text(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("", add_bos=False) == []

    def test_ids_are_of_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        for text in TEXTS:
            assert all(0 <= token < tokenizer.n_vocab for token in tokenizer.encode(text))

    def test_bos_comes_at_most_once(self, tokenizer: Tokenizer) -> None:
        with_bos, without = tokenizer.encode("Hello"), tokenizer.encode("Hello", add_bos=False)
        assert with_bos in (without, [tokenizer.bos_id, *without])
        if tokenizer.bos_id is not None:
            name = tokenizer.token_bytes(tokenizer.bos_id).decode()
            again = tokenizer.encode(name + "Hello", parse_special=True)
            assert again.count(tokenizer.bos_id) <= 1

    def test_special_names_are_text_unless_parsed(self, tokenizer: Tokenizer) -> None:
        for eos in tokenizer.eos_ids:
            name = tokenizer.token_bytes(eos).decode()
            if not name:
                continue
            assert eos not in tokenizer.encode(name, add_bos=False)
            assert tokenizer.encode(name, add_bos=False, parse_special=True) == [eos]

    def test_end_tokens_are_special(self, tokenizer: Tokenizer) -> None:
        assert all(tokenizer.is_special(token) for token in tokenizer.eos_ids)
        assert not any(tokenizer.is_special(token) for token in tokenizer.encode("Hello", add_bos=False))

    @pytest.mark.parametrize("offset", [0, 1000])
    def test_ids_outside_the_vocabulary_raise(self, tokenizer: Tokenizer, offset: int) -> None:
        with pytest.raises(IndexError):
            tokenizer.token_bytes(tokenizer.n_vocab + offset)
        with pytest.raises(IndexError):
            tokenizer.token_bytes(-1 - offset)

    def test_every_token_has_bytes(self, tokenizer: Tokenizer) -> None:
        assert all(isinstance(tokenizer.token_bytes(token), bytes) for token in range(min(tokenizer.n_vocab, 1000)))

    def test_several_threads(self, tokenizer: Tokenizer) -> None:
        want = [tokenizer.encode(text) for text in TEXTS]
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(lambda _: [tokenizer.encode(text) for text in TEXTS], range(8)):
                assert got == want
