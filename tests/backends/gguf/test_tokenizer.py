"""The model's tokenizer: round trips, special tokens, and exactly one BOS."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_synth import BOS, EOS, N_VOCAB

from headrace.errors import ModelError, RequestError

pytestmark = pytest.mark.gguf

TEXTS = ["", "Hello, world", "  two  spaces\n\ttab ", "é一🎉👩‍👩‍👧", "\0 nul", "a" * 5000]


def bytes_of(tokenizer, ids) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tiny, opened, text):
    tokenizer = opened(tiny()).tokenizer
    assert bytes_of(tokenizer, tokenizer.encode(text)) == text.encode()


def test_special_texts_are_plain_unless_asked_for(tiny, opened):
    tokenizer = opened(tiny()).tokenizer
    plain, special = (tokenizer.encode("a<|im_end|>b", parse_special=flag) for flag in (False, True))
    assert len(plain) == len("a<|im_end|>b")
    assert special == [ord("a"), EOS, ord("b")]
    assert tokenizer.token_bytes(EOS) == b"<|im_end|>"
    assert [token for token in range(N_VOCAB) if tokenizer.is_special(token)] == [256, 257, 258]


def test_exactly_one_bos_where_the_model_wants_it(tiny, opened):
    wants = opened(tiny(tokenizer__ggml__add_bos_token=True)).tokenizer
    assert wants.encode("ab") == [BOS, *b"ab"]
    assert wants.encode("") == [BOS]
    assert wants.encode("ab", add_bos=False) == [*b"ab"]
    # a chat template that prints BOS itself
    assert wants.encode("<|end|>ab", parse_special=True) == [BOS, *b"ab"]
    assert wants.encode("<|end|>ab") == [BOS, *b"<|end|>ab"]
    assert opened(tiny()).tokenizer.encode("ab") == [*b"ab"]


def test_ends_of_text_that_llama_cpp_knows_by_name(tiny, opened):
    executor = opened(tiny())
    assert executor.model.eos_ids == executor.tokenizer.eos_ids
    assert EOS in executor.model.eos_ids


def test_bad_input(tiny, opened):
    tokenizer = opened(tiny()).tokenizer
    for token in (-1, N_VOCAB):
        with pytest.raises(IndexError):
            tokenizer.token_bytes(token)
    with pytest.raises(RequestError, match="surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_use_after_close_is_an_error(tiny, opened):
    executor = opened(tiny())
    executor.close()
    with pytest.raises(ModelError, match="closed"):
        executor.tokenizer.encode("a")


def test_threads_encode_while_the_model_is_reopened(tiny, opened):
    executor = opened(tiny())
    expected, wrong = executor.tokenizer.encode("some text"), []

    def encode() -> None:
        for _ in range(200):
            try:
                if executor.tokenizer.encode("some text") != expected:
                    wrong.append("ids")
            except ModelError:
                continue  # between close and open

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        executor.close()
        executor.open()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_smollm2(smollm2, opened):
    tokenizer = opened(smollm2).tokenizer
    for text in TEXTS:
        assert bytes_of(tokenizer, tokenizer.encode(text)) == text.encode()
    assert tokenizer.encode("<|im_start|>user", parse_special=True)[0] == 1
    assert tokenizer.eos_ids >= {2}
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(tokenizer.encode(" the")[0])


def test_close_waits_for_users_and_lets_no_new_ones_in(tiny, opened):
    """Threads that tokenize without a pause must not keep a model open."""
    executor = opened(tiny())
    tokenizer, model = executor.tokenizer, executor._library_model
    closing = threading.Thread(target=executor.close)
    with model.held():
        closing.start()
        for _ in range(5000):
            if model.handle:
                closing.join(0.001)
        with pytest.raises(ModelError, match="HR-GGUF-22"):
            tokenizer.encode("late")
        assert closing.is_alive()
    closing.join(30)
    assert not closing.is_alive()
