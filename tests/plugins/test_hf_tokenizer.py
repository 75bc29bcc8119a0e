"""Tokenizers from tokenizer.json: bytes that come back, names of special tokens, BOS and EOS, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="needs tokenizers (pip install 'headrace[torch]')")

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from headrace.errors import ModelError, RequestError
from headrace.testing.conformance import TokenizerConformance
from headrace_plugins.hf_tokenizer import HFTokenizer, load_tokenizer

F1 = Path(__file__).parents[1] / "data" / "golden" / "model_full" / "f1"
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, two  blanks", "naïve café 日本語 🙂"] * 20
THINK, BLANKS = 320, 321
"""Ids of what `byte_level` adds."""
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NASTY = (
    "",
    " ",
    "  lead",
    "trail ",
    "a\u0000b",
    "\r\n\t",
    "é日🙂👩‍👩‍👧",
    "<0x41>",
    "<s>",
    "</s> x",
    "\U0010ffff",
    "\ufffe",
)


def byte_level() -> dict[str, Any]:
    """As GPT-2, Llama 3, Qwen and DeepSeek have it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|bos|>", "<|eos|>"])
    )
    made.add_tokens([tokenizers.AddedToken("<think>", special=False), tokenizers.AddedToken("   ", normalized=True)])
    return json.loads(made.to_str())


def sentencepiece_bpe() -> dict[str, Any]:
    """As Llama 2 and Mistral have it: a blank in front, bytes for what the vocabulary lacks."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    latin = [text for text in CORPUS if text.isascii()]
    made.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + BYTES))
    source: dict[str, Any] = json.loads(made.to_str())
    source["added_tokens"] = source["added_tokens"][:3]
    return source


def unigram() -> dict[str, Any]:
    """As newer sentencepiece models are converted: Metaspace, and pieces that the search itself could find."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    latin = [text for text in CORPUS if text.isascii()]
    made.train_from_iterator(latin, trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>"))
    source: dict[str, Any] = json.loads(made.to_str())
    source["model"]["vocab"] += [[name, 0.0] for name in BYTES]
    source["model"]["byte_fallback"] = True
    return source


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "byte_level": byte_level,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
}


@pytest.fixture(scope="module")
def sources() -> dict[str, dict[str, Any]]:
    return {name: make() for name, make in KINDS.items()}


def write(folder: Path, source: Any, n_vocab: int = 600, **files: Any) -> HFTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(str(folder), n_vocab)


LLAMA = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}


class TestF1(TokenizerConformance):
    """The tokenizer of a tiny DeepSeek-V4.1; its model has 12 tokens more."""

    def make(self) -> HFTokenizer:
        return load_tokenizer(str(F1), 312)


class TestByteLevel(TokenizerConformance):
    @pytest.fixture
    def tokenizer(self, tmp_path: Path, sources: dict[str, Any]) -> HFTokenizer:
        return write(tmp_path, sources["byte_level"], config={"bos_token_id": 0, "eos_token_id": [1, 7]})

    def test_end_tokens_are_special(self, tokenizer: HFTokenizer) -> None:  # type: ignore[override]
        assert all(tokenizer.is_special(token) for token in tokenizer.eos_ids)

    def test_special_names_are_text_unless_parsed(self, tokenizer: HFTokenizer) -> None:  # type: ignore[override]
        for name, token in (("<|bos|>", 0), ("<|eos|>", 1), ("<think>", THINK)):
            assert token not in tokenizer.encode(f"a{name}b", add_bos=False)
            assert tokenizer.encode(f"a{name}b", add_bos=False, parse_special=True).count(token) == 1


class TestSentencepieceBpe(TokenizerConformance):
    @pytest.fixture
    def tokenizer(self, tmp_path: Path, sources: dict[str, Any]) -> HFTokenizer:
        return write(tmp_path, sources["sentencepiece_bpe"], tokenizer_config=LLAMA)


class TestUnigram(TokenizerConformance):
    @pytest.fixture
    def tokenizer(self, tmp_path: Path, sources: dict[str, Any]) -> HFTokenizer:
        return write(tmp_path, sources["unigram"], tokenizer_config=LLAMA)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("text", NASTY)
def test_bytes_join_to_the_text(
    tmp_path: Path, sources: dict[str, Any], kind: str, text: str, parse_special: bool
) -> None:
    if kind == "unigram" and text == "<0x41>":
        pytest.skip("the library takes it for the byte")
    if parse_special and (not text.strip() or "s>" in text):
        pytest.skip("names are tokens here")
    tokenizer = write(tmp_path, sources[kind])
    ids = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert joined in (text.encode(), b" " + text.encode())
    assert not any(tokenizer.is_special(token) for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_token_by_token_is_the_librarys_decoding(kind: str, tmp_path: Path, sources: dict[str, Any]) -> None:
    tokenizer = write(tmp_path, sources[kind])
    plain = tokenizers.Tokenizer.from_str(json.dumps(sources[kind]))
    for text in (*CORPUS[:3], *NASTY[5:7]):
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == plain.encode(text, add_special_tokens=False).ids, "text without names has the ids of the library"
        joined = b"".join(tokenizer.token_bytes(token) for token in ids).decode()
        assert joined.removeprefix(" ") == plain.decode(ids).removeprefix(" ")


def test_names_that_the_vocabulary_itself_would_find(tmp_path: Path, sources: dict[str, Any]) -> None:
    """Unigram has "</s>" among its pieces, `ignore_merges` takes a word that is one of the vocabulary."""
    unigram = write(tmp_path, sources["unigram"], tokenizer_config=LLAMA)
    assert not {1, 2} & set(unigram.encode("<s>a</s>", add_bos=False))
    source = json.loads(json.dumps(sources["byte_level"]))
    source["model"]["ignore_merges"] = True
    source["pre_tokenizer"]["use_regex"] = False
    bpe = write(tmp_path, source)
    assert 1 not in bpe.encode("<|eos|>", add_bos=False)
    assert bpe.encode("<|eos|>", add_bos=False, parse_special=True) == [1]


def test_runs_of_blanks_are_tokens_and_not_names(tmp_path: Path, sources: dict[str, Any]) -> None:
    tokenizer = write(tmp_path, sources["byte_level"])
    for parse_special in (False, True):
        assert BLANKS in tokenizer.encode("a   b", add_bos=False, parse_special=parse_special)
    assert not tokenizer.is_special(BLANKS)
    assert tokenizer.token_bytes(BLANKS) == b"   "


def test_what_is_hidden_from_text(tmp_path: Path, sources: dict[str, Any]) -> None:
    source = json.loads(json.dumps(sources["byte_level"]))
    made = tokenizers.Tokenizer.from_str(json.dumps(source))
    names = ["<|unflagged|>", "<｜User｜>", "<unused7>", "<tool_call>"]
    made.add_tokens([tokenizers.AddedToken(name, special=False) for name in names])
    tokenizer = write(tmp_path, json.loads(made.to_str()))
    found = {name: tokenizer.is_special(tokenizer.encode(name, add_bos=False, parse_special=True)[0]) for name in names}
    assert found == {"<|unflagged|>": True, "<｜User｜>": True, "<unused7>": True, "<tool_call>": False}


@pytest.mark.parametrize(
    ("files", "bos", "adds"),
    [
        ({}, None, False),
        ({"config": {"bos_token_id": 0}}, 0, True),
        ({"config": {"text_config": {"bos_token_id": 0}}}, 0, True),
        ({"config": {"bos_token_id": 0}, "tokenizer_config": {"bos_token": None}}, None, False),
        ({"config": {"bos_token_id": 5}, "tokenizer_config": {"bos_token": "<|bos|>"}}, 0, False),
        ({"tokenizer_config": {"bos_token": "<|bos|>", "add_bos_token": True}}, 0, True),
        ({"tokenizer_config": {"bos_token": "<|bos|>", "add_bos_token": False}}, 0, False),
        ({"tokenizer_config": {"bos_token": "<|nowhere|>", "add_bos_token": True}}, None, False),
        ({"tokenizer_config": {"bos_token": "<|bos|>"}, "config": {"model_type": "deepseek_v41"}}, 0, True),
        ({"config": {"bos_token_id": 9999}}, None, False),
    ],
)
def test_bos(tmp_path: Path, sources: dict[str, Any], files: Any, bos: int | None, adds: bool) -> None:
    tokenizer = write(tmp_path, sources["byte_level"], **files)
    assert tokenizer.bos_id == bos
    assert (tokenizer.encode("hello")[0] == bos) == adds
    assert tokenizer.encode("<|bos|>hello", parse_special=True).count(0) == 1
    assert 0 not in tokenizer.encode("hello", add_bos=False)


def test_a_template_post_processor_asks_for_bos(tmp_path: Path, sources: dict[str, Any]) -> None:
    made = tokenizers.Tokenizer.from_str(json.dumps(sources["byte_level"]))
    template = tokenizers.processors.TemplateProcessing("<|bos|> $A", "<|bos|> $A $B", [("<|bos|>", 0)])
    made.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    config = {"bos_token": "<|bos|>"}
    assert write(tmp_path, json.loads(made.to_str()), tokenizer_config=config).encode("hi")[0] == 0
    made.post_processor = tokenizers.processors.ByteLevel()
    assert write(tmp_path, json.loads(made.to_str()), tokenizer_config=config).encode("hi")[0] != 0


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 1}}, {1}),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [5, 6]}}, {1, 5, 6}),
        ({"config": {"text_config": {"eos_token_id": [5]}}, "tokenizer_config": {"eos_token": "<|eos|>"}}, {1, 5}),
        ({"config": {"eos_token_id": [1, -1, 600]}}, {1}),
    ],
)
def test_eos(tmp_path: Path, sources: dict[str, Any], files: Any, eos: set[int]) -> None:
    tokenizer = write(tmp_path, sources["byte_level"], **files)
    assert tokenizer.eos_ids == eos
    assert all(tokenizer.is_special(token) for token in eos)


@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("value", ["1", True, 1.0, [1, None], {"id": 1}])
def test_an_eos_that_is_no_id_is_an_error(tmp_path: Path, sources: dict[str, Any], file: str, value: Any) -> None:
    """Left out in silence, the model would never stop."""
    files: dict[str, Any] = {file: {"eos_token_id": value}}
    with pytest.raises(ModelError, match=f"HR-TOKENIZER-04: eos_token_id = .*{file}.json"):
        write(tmp_path, sources["byte_level"], **files)


def test_a_model_of_more_tokens_and_one_of_fewer(tmp_path: Path, sources: dict[str, Any]) -> None:
    source = sources["byte_level"]  # 320 in the vocabulary, 2 added
    tokenizer = write(tmp_path, source, 400)
    assert (tokenizer.n_vocab, tokenizer.token_bytes(399)) == (400, b"")
    for token in (400, -1):
        with pytest.raises(IndexError):
            tokenizer.token_bytes(token)
    small = write(tmp_path, source, BLANKS)  # "<think>" has a row, "   " has none
    assert small.encode("<think>", add_bos=False, parse_special=True) == [THINK]
    for text in ("a   b", "<think>   "):
        for parse_special in (False, True):
            ids = small.encode(text, add_bos=False, parse_special=parse_special)
            assert max(ids) < BLANKS
            assert b"".join(small.token_bytes(token) for token in ids) == text.encode()
    with pytest.raises(ModelError, match=r"HR-TOKENIZER-03: .*token 319 .*ids end at 318"):
        write(tmp_path, source, 319)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, sources: dict[str, Any]) -> None:
    made = tokenizers.Tokenizer.from_str(json.dumps(sources["byte_level"]))
    made.enable_truncation(3)
    made.enable_padding(length=8)
    assert len(write(tmp_path, json.loads(made.to_str())).encode("abcdefghij" * 3)) > 8
    assert len(write(tmp_path, json.loads(made.to_str())).encode("a")) == 1


def test_lone_surrogates_are_refused(tmp_path: Path, sources: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"HR-TOKEN-01: .*character 1"):
        write(tmp_path, sources["byte_level"]).encode("a\ud800")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "{}", '{"model": 5}', '{"model": {"type": "BPE"}}', "\x80", "[" * 100_000),
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [5]}',
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"HR-TOKENIZER-0[12]") as raised:
        load_tokenizer(str(tmp_path), 300)
    assert str(path) in raised.value.message
    assert raised.value.help


def test_files_beside_it_that_are_damaged(tmp_path: Path, sources: dict[str, Any]) -> None:
    write(tmp_path, sources["byte_level"])
    for name in ("config", "tokenizer_config", "generation_config"):
        path = tmp_path / f"{name}.json"
        for text in ("{", "[1]"):
            path.write_text(text)
            with pytest.raises(ModelError, match=f"HR-TOKENIZER-01: .*{name}.json"):
                load_tokenizer(str(tmp_path), 600)
        path.unlink()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"HR-TOKENIZER-01: .*No such file"):
        load_tokenizer(str(tmp_path), 600)


def test_kinds_that_can_not_be_told_token_by_token(tmp_path: Path, sources: dict[str, Any]) -> None:
    made = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match=r"HR-TOKENIZER-02: .*'WordPiece'"):
        write(tmp_path, json.loads(made.to_str()))
    source = dict(
        sources["byte_level"], decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": False}
    )
    with pytest.raises(ModelError, match=r"HR-TOKENIZER-02: .*'CTC'"):
        write(tmp_path, source)
