"""Tokenizers of Hugging Face checkpoints: tokenizer.json on the `tokenizers` library, without transformers or torch."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.contracts import Tokenizer
from headrace.errors import ModelError, RequestError
from headrace.textfile import read_text

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"

MODELS = ("BPE", "Unigram")
"""Kinds whose tokens stand for bytes that can be told."""

_AGAIN = "download the model's files again"
_CONTROL = re.compile(r"<[|｜].*[|｜]>|<unused\d+>", re.DOTALL)
"""Names of control tokens that many checkpoints forget to flag as special (llama.cpp has the same rule)."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(folder: str, n_vocab: int) -> HFTokenizer:
    """The tokenizer of a checkpoint folder, for a model of `n_vocab` tokens.

    Reads tokenizer.json and what tokenizer_config.json, generation_config.json and config.json say of BOS and EOS.
    Raises ModelError: HR-TOKENIZER-01 (a file that is damaged), -02 (a kind of tokenizer that can't be served),
    -03 (more tokens than the model has), -04 (an id in a config file that is none).
    """
    path = os.path.join(folder, FILE)
    try:
        source = json.loads(read_text(path, None))
        kind = source["model"]["type"] if isinstance(source, dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    if kind not in MODELS:
        raise ModelError(
            "HR-TOKENIZER-02", f"{path} is a {kind!r:.40} tokenizer", f"served are {', '.join(MODELS)}; give token ids"
        )
    said = _Said(folder)
    return HFTokenizer(source, n_vocab, said, path)


def token_ids(values: Mapping[str, Any], key: str, origin: str) -> list[int]:
    """What a config file says at `key`: an id, a list of them, or nothing; a negative number is nothing, too. Raises
    ModelError HR-TOKENIZER-04 for anything else: a model without its EOS would never stop."""
    value = values.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ModelError(
                "HR-TOKENIZER-04", f"{key} = {value!r:.60} ({origin}) is no token id", "write a whole number, or a list"
            )
    return [token for token in found if token >= 0]


class _Said:
    """What the files beside tokenizer.json say of the ends of a text."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = _json_object(os.path.join(folder, "tokenizer_config.json"))
        self.generation = _json_object(os.path.join(folder, "generation_config.json"))
        self.model = _json_object(os.path.join(folder, "config.json"))

    def ids(self, key: str) -> Iterator[int]:
        """Of "bos_token_id" or "eos_token_id": a number, a list, or nothing, at each place that may say it."""
        nested = self.model.get("text_config")
        for place, origin in (
            (self.generation, "generation_config.json"),
            (self.model, "config.json"),
            (nested if isinstance(nested, dict) else {}, "config.json, text_config"),
        ):
            yield from token_ids(place, key, origin)

    def name(self, key: str) -> str | None:
        """Of "bos_token" or "eos_token": a text, or a table that holds it."""
        value = self.tokenizer.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None


class HFTokenizer(Tokenizer):
    """Text to ids and back. Thread-safe.

    Names of added tokens ("<|im_end|>", "<think>") are text unless `parse_special`; runs of blanks that were added as
    tokens are always tokens, as they name nothing. A model may have more tokens than its tokenizer: those stand for no
    bytes. Added tokens that the model has no row for are unknown here.

    The bytes of encode(text) join to the text's UTF-8, but for what the tokenizer itself changes: a normaliser, a blank
    put in front of the text, and in Unigram vocabularies the text "<0x41>", which the library takes for that byte.
    """

    def __init__(self, source: Mapping[str, Any], n_vocab: int, said: _Said, path: str) -> None:
        """source: tokenizer.json, parsed; path: where it lies, for error texts."""
        self.n_vocab = n_vocab
        self._path = path
        self._source = dict(source, truncation=None, padding=None, post_processor=None)
        self._full = _build(self._source, path)  # which checks what the code below takes for granted
        added = source.get("added_tokens") or []
        beyond = [token["content"] for token in added if token["id"] >= n_vocab]
        self._names = [*beyond, *(token["content"] for token in added if token["content"].strip())]
        if beyond:
            self._full = _build(_renamed(self._source, beyond), path)
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._added = {token: each for token, each in self._full.get_added_tokens_decoder().items() if token < n_vocab}
        self._check_size()
        self._spell = _speller(source, path)
        self._bytes: list[bytes | None] = [None] * n_vocab
        self.bos_id = self._bos_id(said)
        ends = {token for token in said.ids("eos_token_id") if token < n_vocab}
        self.eos_ids = frozenset(ends | self._ids_of(said.name("eos_token")))
        self._adds_bos = self.bos_id is not None and _adds_bos(source, said, self.bos_id)
        self._special = frozenset(
            {token for token, each in self._added.items() if each.special or _CONTROL.fullmatch(each.content)}
            | self.eos_ids
            | ({self.bos_id} if self.bos_id is not None else set())
        )

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "HR-TOKEN-01", f"the text holds a lone surrogate at character {error.start}", "send valid Unicode"
            ) from error
        tokenizer = self._full if parse_special else self._plain_one()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside the vocabulary of {self.n_vocab} tokens")
        piece = self._bytes[token]
        if piece is None:  # two threads may fill an entry at once, with the same bytes
            added = self._added.get(token)
            if added is not None:
                piece = added.content.encode()
            else:
                name = self._full.id_to_token(token)
                piece = b"" if name is None else self._spell(name)
            self._bytes[token] = piece
        return piece

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _plain_one(self) -> tokenizers.Tokenizer:
        """The same tokenizer, whose added tokens have names that nobody can write. Leaving them out would not do: a
        Unigram model and BPE with `ignore_merges` find them in the vocabulary too, and ids of others would move."""
        with self._lock:
            if self._plain is None:
                self._plain = _build(_renamed(self._source, self._names), self._path)
            return self._plain

    def _check_size(self) -> None:
        vocab = self._full.get_vocab(with_added_tokens=False)
        name = max(vocab, key=vocab.__getitem__, default=None)
        if name is not None and vocab[name] >= self.n_vocab:
            raise ModelError(
                "HR-TOKENIZER-03",
                f"{self._path} has the token {vocab[name]} ({name!r:.60}), the model's ids end at {self.n_vocab - 1}",
                "the tokenizer is another model's; " + _AGAIN,
            )

    def _ids_of(self, name: str | None) -> set[int]:
        token = None if name is None else self._full.token_to_id(name)
        return {token} if token is not None and token < self.n_vocab else set()

    def _bos_id(self, said: _Said) -> int | None:
        if "bos_token" in said.tokenizer:
            return next(iter(self._ids_of(said.name("bos_token"))), None)
        return next((token for token in said.ids("bos_token_id") if token < self.n_vocab), None)


def _adds_bos(source: Mapping[str, Any], said: _Said, bos_id: int) -> bool:
    """Does BOS belong in front of a prompt? DeepSeek-V4's models always want it. Of others, tokenizer_config.json says
    it, else the post-processor of tokenizer.json does it; where nothing at all is said, a known BOS is wanted."""
    if str(said.model.get("model_type", "")).startswith("deepseek_v4"):
        return True
    asked = said.tokenizer.get("add_bos_token")
    if isinstance(asked, bool):
        return asked
    steps = _flat(source.get("post_processor"), "processors")
    if steps or said.tokenizer:
        return any(bos_id in _first_ids(step) for step in steps)
    return True


def _first_ids(step: Mapping[str, Any]) -> list[int]:
    """Ids that a template post-processor puts in front of a single text."""
    template = step.get("single")
    first = template[0] if isinstance(template, list) and template else {}
    special = first.get("SpecialToken") if isinstance(first, dict) else None
    known = step.get("special_tokens")
    entry = known.get(special.get("id")) if isinstance(special, dict) and isinstance(known, dict) else None
    ids = entry.get("ids") if isinstance(entry, dict) else None
    return ids if isinstance(ids, list) else []


# --- bytes of tokens -------------------------------------------------------------------------------------------------


def _speller(source: Mapping[str, Any], path: str) -> Callable[[str], bytes]:
    """Token text -> its bytes, as the decoder of tokenizer.json has it (token by token: what the decoder does to a
    whole text, such as dropping its first blank, is left out). Raises ModelError HR-TOKENIZER-02."""
    steps = _flat(source.get("decoder"), "decoders")
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level
    replaced: list[tuple[str, str]] = []
    for step in steps:
        if step.get("type") == "Replace" and isinstance(pattern := step.get("pattern"), dict) and "String" in pattern:
            replaced.append((pattern["String"], str(step.get("content", ""))))
        elif step.get("type") == "Metaspace":
            replaced.append((str(step.get("replacement", "▁")), " "))
        elif step.get("type") not in ("ByteFallback", "Fuse", "Strip"):
            raise ModelError(
                "HR-TOKENIZER-02", f"{path} decodes with {step.get('type')!r:.40}, which can't be told token by token",
                "give token ids instead of text",
            )  # fmt: skip
    with_bytes = "ByteFallback" in kinds or bool(source["model"].get("byte_fallback"))

    def spell(name: str) -> bytes:
        found = _BYTE.fullmatch(name) if with_bytes else None
        if found is not None:
            return bytes([int(found[1], 16)])
        for old, new in replaced:
            name = name.replace(old, new)
        return name.encode("utf-8", "surrogatepass")

    return spell


def _byte_level(name: str) -> bytes:
    """A character for each byte (GPT-2's table); text that is not written so stands for itself."""
    try:
        return bytes(_BYTE_OF[char] for char in name)
    except KeyError:
        return name.encode("utf-8", "surrogatepass")


def byte_characters() -> list[str]:
    """The character that stands for each byte, GPT-2's table: printable ones of Latin-1 for themselves, the others from
    U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


_BYTE_OF: Mapping[str, int] = {char: byte for byte, char in enumerate(byte_characters())}


# --- files -----------------------------------------------------------------------------------------------------------


def _renamed(source: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The tokenizer with other names, of the same ids, for these tokens: a secret makes them impossible to write."""
    secret = secrets.token_hex(12)
    new = {name: f"\U0010ffff{secret}:{i}" for i, name in enumerate(names)}
    model = dict(source["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {new.get(name, name): token for name, token in model["vocab"].items()}
    else:
        model["vocab"] = [[new.get(entry[0], entry[0]), *entry[1:]] for entry in model["vocab"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in new]
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    added = [{**token, "content": new.get(token["content"], token["content"])} for token in source["added_tokens"]]
    return {**source, "model": model, "added_tokens": added}


def _merged(merge: Any) -> str:
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _build(source: Mapping[str, Any], path: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(json.dumps(source))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what panics in Rust is no Exception
        raise _damaged(path, error) from error


def _flat(step: Any, key: str) -> list[Mapping[str, Any]]:
    """The steps of a decoder or post-processor, those of sequences in their place."""
    if not isinstance(step, dict):
        return []
    return [each for part in step[key] for each in _flat(part, key)] if isinstance(step.get(key), list) else [step]


def _json_object(path: str) -> Mapping[str, Any]:
    """A JSON object that may be missing: then it is empty."""
    if not os.path.exists(path):
        return {}
    try:
        found = json.loads(read_text(path, None))
        if not isinstance(found, dict):
            raise TypeError("it holds no JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    return found


def _damaged(path: str, error: BaseException) -> ModelError:
    why = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
    return ModelError("HR-TOKENIZER-01", f"{path} can't be read: {why:.300}", _AGAIN)
