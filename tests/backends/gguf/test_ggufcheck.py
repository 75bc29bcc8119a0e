"""Every rule of the file checker, each with a small file that breaks just that rule."""

from __future__ import annotations

import os
import re
import struct
import time
import tracemalloc

import pytest
from gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    I8,
    I32,
    STRING,
    U16,
    U32,
    U64,
    File,
    Tensor,
    array,
    key,
    sound_keys,
    text,
    value,
)

from headrace.errors import ModelError
from headrace_gguf.facts import read_facts
from headrace_gguf.ggufcheck import MAX_STRINGS, read_gguf

A, T = "llama.", "tokenizer.ggml."


def keys(**changed: bytes | None) -> dict[str, bytes]:
    """Sound metadata with entries changed, added or (None) left out; "." is written "__"."""
    entries = sound_keys()
    for name, entry in changed.items():
        if entry is None:
            del entries[name.replace("__", ".")]
        else:
            entries[name.replace("__", ".")] = entry
    return entries


def two(second: Tensor, first: Tensor | None = None) -> list[Tensor]:
    return [first or Tensor(), second]


def with_key(name: str | bytes, kind: int, content: object) -> File:
    return File(keys=sound_keys() | {str(name): key(name, kind, content)})


def with_array(name: str, kind: int, contents: list, entries: dict[str, bytes] | None = None) -> File:
    return File(keys=(entries or sound_keys()) | {name: array(name, kind, contents)})


def raw_key(content: bytes) -> File:
    """A key "x" with type and value as given."""
    return File(keys=sound_keys() | {"x": text("x") + content})


def without(name: str) -> File:
    return File(keys={k: v for k, v in sound_keys().items() if k != name})


BAD: dict[str, tuple[str, str, File | bytes]] = {
    # name: (code, words of the message, file)
    "empty": ("02", "is empty", b""),
    "short magic": ("02", "not a GGUF", b"GG"),
    "other format": ("02", r"not a GGUF file: it starts with b'PK", b"PK\3\4" + bytes(64)),
    "swapped magic": ("02", "FUGG", File(magic=b"FUGG")),
    "header cut": ("04", "ends early", b"GGUF\3\0\0\0\1"),
    "version 0": ("03", "version 0", File(version=0)),
    "version 1": ("03", "version 1,", File(version=1)),
    "version 4": ("03", "version 4,", File(version=4)),
    "big endian": ("03", "byte-swapped", File(version=3 << 24)),
    "tensor count": ("05", "tensor count", File(n_tensors=1 << 40)),
    "negative tensor count": ("05", "tensor count", File(n_tensors=(1 << 64) - 1)),
    "key count": ("05", "key count", File(n_keys=1 << 62)),
    "more tensors than there are": ("0[48]", "", File(n_tensors=3)),
    "key length": ("06", "at most 65535", File(keys={"x": struct.pack("<Q", 1 << 62) + b"x"})),
    "key beyond the file": ("04", "ends early", File(keys={"x": struct.pack("<Q", 60000) + b"x"}, data=b"")),
    "key not utf-8": ("06", "not UTF-8", with_key(b"\xff\xfe", U32, 1)),
    "empty key": ("06", "empty key", with_key("", U32, 1)),
    "key twice": ("06", "twice", File(keys=keys(x=key(A + "block_count", U32, 1)))),
    "value type": ("06", "unknown value type 13", raw_key(struct.pack("<I", 13))),
    "bool of 2": ("06", "a bool with value 2", raw_key(struct.pack("<IB", BOOL, 2))),
    "string length": ("04", "", raw_key(struct.pack("<IQ", STRING, 1 << 63))),
    "string not utf-8": ("06", "not UTF-8", with_key("general.name", STRING, b"\xff")),
    "nested array": ("06", "array of arrays", raw_key(struct.pack("<IIQ", ARRAY, ARRAY, 1))),
    "array type": ("06", "element type 77", raw_key(struct.pack("<IIQ", ARRAY, 77, 1))),
    "array length": ("04", "", raw_key(struct.pack("<IIQ", ARRAY, U64, 1 << 61))),
    "array wraps": ("04", "", raw_key(struct.pack("<IIQ", ARRAY, U64, (1 << 61) + 1))),
    "string array length": ("05", "strings", raw_key(struct.pack("<IIQ", ARRAY, STRING, 1 << 50))),
    "string in array": (
        "04", "", raw_key(struct.pack("<IIQQ", ARRAY, STRING, 1, 1 << 60))
    ),
    "array string not utf-8": ("06", "not UTF-8", with_array("x", STRING, ["a", b"\xe9\x80"])),
    "alignment 0": ("07", "power of two", with_key("general.alignment", U32, 0)),
    "alignment 12": ("07", "power of two", with_key("general.alignment", U32, 12)),
    "alignment 2 GiB": ("07", "", with_key("general.alignment", U32, 1 << 31)),
    "alignment text": ("07", "", with_key("general.alignment", STRING, "32")),
    "no dimensions": ("08", "0 dimensions", File(tensors=[Tensor(shape=())])),
    "five dimensions": ("08", "5 dimensions", File(tensors=[Tensor(shape=(1, 1, 1, 1, 1))])),
    "dimension 0": ("08", "below 1", File(tensors=[Tensor(shape=(8, 0))])),
    "negative dimension": ("08", "below 1", File(tensors=[Tensor(shape=(-8, 4))])),
    "two negative dimensions": ("08", "below 1", File(tensors=[Tensor(shape=(-8, -4))])),
    "elements wrap": ("08", "needs", File(tensors=[Tensor(shape=(1 << 33, 1 << 31))])),
    "bytes wrap": ("08", "needs", File(tensors=[Tensor(shape=(1 << 62, 32), kind=2)])),
    "tensor type": ("08", "unknown tensor type 999", File(tensors=[Tensor(kind=999)])),
    "removed type": ("08", "unknown tensor type 4", File(tensors=[Tensor(kind=4)])),
    "block size": ("08", "multiple of the block size 32 of Q4_0", File(tensors=[Tensor(shape=(8, 4), kind=2)])),
    "long tensor name": ("06", "at most 63", File(tensors=[Tensor(name="x" * 64)])),
    "unaligned offset": ("09", "multiple of the alignment", File(tensors=[Tensor(offset=7)])),
    "same name": ("09", "twice", File(tensors=two(Tensor(offset=128)), data=bytes(256))),
    "overlap": ("09", "overlaps", File(tensors=two(Tensor("b", offset=96)), data=bytes(256))),
    "offset beyond": ("04", "data ends at", File(tensors=[Tensor(offset=1 << 40)])),
    "offset wraps": ("04", "data ends at", File(tensors=[Tensor(offset=(1 << 64) - 32)])),
    "data cut": ("04", "data ends at", File(data=bytes(100))),
    "no architecture": ("10", "missing", without("general.architecture")),
    "architecture number": ("10", "general.architecture", with_key("general.architecture", U32, 7)),
    "encoder": ("10", "does not generate", with_key("general.architecture", STRING, "bert")),
    "adapter": ("10", "not 'model'", with_key("general.type", STRING, "adapter")),
    "no tensors": ("10", "token_embd", File(tensors=[], data=b"")),
    "no tokenizer": ("11", "model' is missing", without("tokenizer.ggml.model")),
    "vocabulary none": ("11", "no tokenizer", with_key(T + "model", STRING, "none")),
    "no tokens": ("11", "tokens' is missing", without("tokenizer.ggml.tokens")),
    "tokens not strings": ("11", "not an array of string", with_array(T + "tokens", I32, [1] * 4)),
    "token types short": ("11", "3 entries for 4", with_array(T + "token_type", I32, [1] * 3)),
    "token types of bytes": ("11", "i32", with_array(T + "token_type", I8, [1] * 4)),
    "scores short": ("11", "1 entries for 4", with_array(T + "scores", F32, [0])),
    "token twice": ("11", "twice", with_array(T + "tokens", STRING, ["a", "b", "c", "a"])),
    "epsilon NaN": ("12", "epsilon' = nan", with_key(A + "attention.layer_norm_rms_epsilon", F32, float("nan"))),
    "epsilon negative": ("12", "epsilon' = -1", with_key(A + "attention.layer_norm_rms_epsilon", F32, -1.0)),
    "rope infinite": ("12", "freq_base' = inf", with_key(A + "rope.freq_base", F32, float("inf"))),
    "no merges": ("11", "merges", with_key(T + "model", STRING, "gpt2")),
    "merges of numbers": ("11", "merges", with_array(T + "merges", I32, [1])),
    "eos outside": ("11", "outside the vocabulary of 4", with_key(T + "eos_token_id", U32, 4)),
    "bos negative": ("11", "outside", with_key(T + "bos_token_id", I32, -7)),
    "embedding rows": ("11", "for 4 tokens", File(tensors=[Tensor(shape=(8, 3))])),
    "no context length": ("12", "context_length' is missing", without("llama.context_length")),
    "context length 0": ("12", "context_length' = 0", with_key(A + "context_length", U32, 0)),
    "context length huge": ("12", "4294967295", with_key(A + "context_length", U32, 2**32 - 1)),
    "context length text": ("12", "context_length", with_key(A + "context_length", STRING, "4k")),
    "rope dimensions 0": ("12", "dimension_count' = 0", with_key(A + "rope.dimension_count", U32, 0)),
    "layers huge": ("12", "block_count", with_key(A + "block_count", U32, 10**6)),
    "heads per layer short": (
        "12", "1 entries for 2 layers",
        with_array(A + "attention.head_count_kv", I32, [1], keys(llama__block_count=key(A + "block_count", U32, 2))),
    ),
    "name a number": ("12", "general.name", with_key("general.name", U32, 1)),
    "add_bos a number": ("12", "not a bool", with_key(T + "add_bos_token", U32, 1)),
    "template a number": ("12", "chat_template", with_key("tokenizer.chat_template", U32, 1)),
    "split 65535": ("13", "split.count = 65535", with_key("split.count", U16, 65535)),
    "split number": ("13", "split.no = 2", File(keys=keys(x=key("split.count", U16, 2), y=key("split.no", U16, 2)))),
    "split, other name": ("13", "its name does not", with_key("split.count", U16, 2)),
    "sampling top_p 2": ("14", "top_p", with_key("general.sampling.top_p", F32, 2.0)),
    "sampling temp NaN": ("14", "temperature", with_key("general.sampling.temp", F32, float("nan"))),
    "sampling temp text": ("14", "temperature", with_key("general.sampling.temp", STRING, "hot")),
    "mirostat infinite": ("14", "mirostat_tau", with_key("general.sampling.mirostat_tau", F32, float("inf"))),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_broken_rule_is_named(tmp_path, name):
    code, words, file = BAD[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(file if isinstance(file, bytes) else file.pack())
    with pytest.raises(ModelError) as raised:
        read_facts(str(path))
    error = raised.value
    assert re.fullmatch(f"HR-GGUF-{code}", error.code), error
    assert re.search(words, error.message), error
    assert str(path) in error.message
    assert error.help


def test_a_sound_file_passes(tmp_path):
    facts = read_facts(File().write(tmp_path / "m.gguf"))
    assert (facts.architecture, facts.n_vocab, facts.context_length) == ("llama", 4, 128)
    assert (facts.bos_id, facts.eos_ids, facts.add_bos) == (1, {2}, True)
    assert facts.tensor_bytes == 128
    assert facts.quantisation == "F32"
    assert facts.kv_bytes_per_token("f16", "q8_0") == 8 * 2 + 8 * 34 / 32
    assert read_facts(File(version=2).write(tmp_path / "2.gguf")).n_vocab == 4


def test_empty_tokens_may_repeat(tmp_path):
    assert read_facts(with_array(T + "tokens", STRING, ["", "b", "", "a"]).write(tmp_path / "m.gguf")).n_vocab == 4


def test_every_prefix_of_a_file_is_an_error(tmp_path):
    whole = File().pack()
    path = tmp_path / "cut.gguf"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"HR-GGUF-0[2-6]"):
            read_facts(str(path))


def test_paths_that_hold_no_file(tmp_path):
    for path, words in ((tmp_path / "none.gguf", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(ModelError, match=words) as raised:
            read_facts(str(path))
        assert raised.value.code == "HR-GGUF-01"
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        read_facts(str(tmp_path / "pipe.gguf"))
    with pytest.raises(ModelError, match="HR-GGUF-01"):
        read_facts("nul\0byte.gguf")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = File().write(tmp_path / "m.gguf")
    os.chmod(path, 0)
    with pytest.raises(ModelError, match=r"can't read .*Permission"):
        read_facts(path)


def test_a_permission_error_is_told(tmp_path, monkeypatch):
    path = File().write(tmp_path / "m.gguf")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ModelError, match=r"HR-GGUF-01: can't read .*Permission denied"):
        read_gguf(path)


def test_sampling_defaults_become_parameters(tmp_path):
    s = "general.sampling."
    entries = keys(
        a=key(s + "temp", F32, 0.5), b=key(s + "top_k", I32, -1), c=key(s + "min_p", F32, 0.25),
        d=key(s + "penalty_repeat", F32, 1.5), e=key(s + "mirostat", I32, 2), f=key(s + "xtc_probability", F32, 0.5),
    )  # fmt: skip
    facts = read_facts(File(keys=entries).write(tmp_path / "m.gguf"))
    assert facts.sampling_defaults == {"temperature": 0.5, "top_k": 0, "min_p": 0.25, "repetition_penalty": 1.5}
    assert facts.native_defaults == {"mirostat": 2, "xtc_probability": 0.5}


def test_all_ids_that_end_a_text(tmp_path):
    entries = keys(
        x=key(T + "eot_token_id", U32, 3),
        y=key(T + "eom_token_id", U32, 0),
        z=key(T + "padding_token_id", U32, 2**32 - 1),
    )
    assert read_facts(File(keys=entries).write(tmp_path / "m.gguf")).eos_ids == {2, 3, 0}


def test_fingerprints_tell_models_apart(tmp_path):
    a = read_facts(File().write(tmp_path / "a.gguf")).fingerprint
    assert read_facts(File().write(tmp_path / "b.gguf")).fingerprint == a
    other_weights = File(data=bytes(100) + b"\1" + bytes(27))
    assert read_facts(other_weights.write(tmp_path / "c.gguf")).fingerprint != a
    other_keys = File(keys=keys(llama__context_length=key(A + "context_length", U32, 64)))
    assert read_facts(other_keys.write(tmp_path / "d.gguf")).fingerprint != a


def shards(folder, count: int = 3, **changed) -> list[str]:
    """A model in `count` files: embeddings in the first."""
    paths = []
    for no in range(count):
        entries = {"split.count": key("split.count", U16, count), "split.no": key("split.no", U16, no)}
        entries["split.tensors.count"] = key("split.tensors.count", I32, changed.get("announced", count))
        entries |= sound_keys() if no == 0 else {}
        tensor = Tensor() if no == 0 else Tensor(f"blk.{no}.weight")
        paths.append(File(keys=entries, tensors=[tensor]).write(folder / f"m-{no + 1:05d}-of-{count:05d}.gguf"))
    return paths


def test_shards_side_by_side_are_one_model(tmp_path):
    paths = shards(tmp_path)
    facts = read_facts(paths[0])
    assert facts.shards == tuple(paths)
    assert facts.n_tensors == 3
    assert facts.tensor_bytes == 3 * 128


def test_shard_faults(tmp_path):
    paths = shards(tmp_path)
    with pytest.raises(ModelError, match=r"shard 2 of 3\nhelp: name the first one"):
        read_facts(paths[1])
    os.rename(paths[2], tmp_path / "kept")
    with pytest.raises(ModelError, match=r"HR-GGUF-13: shard .*00003-of-00003.gguf of 3 is missing"):
        read_facts(paths[0])
    os.link(paths[1], paths[2])
    with pytest.raises(ModelError, match="does not say that it is shard 3 of 3"):
        read_facts(paths[0])
    os.remove(paths[2])
    (tmp_path / "kept").rename(paths[2])
    with open(paths[2], "r+b") as file:
        file.truncate(80)
    with pytest.raises(ModelError, match="HR-GGUF-04"):
        read_facts(paths[0])
    short = tmp_path / "short"
    short.mkdir()
    with pytest.raises(ModelError, match="9 tensors are announced, the shards hold 3"):
        read_facts(shards(short, announced=9)[0])


def test_hostile_sizes_cost_neither_memory_nor_time(tmp_path):
    """A sparse 8 GiB file whose lengths all point inside it."""
    path = tmp_path / "sparse.gguf"
    bodies = [
        text("x") + struct.pack("<IQ", STRING, 4 << 30),
        text("x") + struct.pack("<IIQ", ARRAY, U64, 1 << 29),
        text("x") + struct.pack("<IIQ", ARRAY, STRING, 1 << 29),
        text("x") + struct.pack("<IIQ", ARRAY, STRING, MAX_STRINGS + 1),
    ]
    for body in bodies:
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body)
        os.truncate(path, 8 << 30)
        tracemalloc.start()
        started = time.process_time()
        with pytest.raises(ModelError, match="HR-GGUF-05"):
            read_facts(str(path))
        assert time.process_time() - started < 5
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()


def test_value_helper_writes_what_the_format_says():
    assert value(U16, 258) == b"\2\1"
