"""Headers, indices and configs: what is damaged is refused by name, without a tensor library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import folder_of, framed, safetensors_bytes, zeros

from headrace.errors import ModelError
from headrace_plugins.checkpoint import inspect, read_config

A = {"a.weight": zeros("F32", 2, 3, size=4)}
B = {"b.weight": zeros("BF16", 4, size=2)}


def _refused(code: str, *words: str) -> Any:
    return pytest.raises(ModelError, match=f"^{code}: (?s:.*)" + "(?s:.*)".join(words))


def _shards(**index: str) -> dict[str, object]:
    """Two shards, one.safetensors and two.safetensors, and their index."""
    weight_map = index or {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    return {
        "one.safetensors": safetensors_bytes(A),
        "two.safetensors": safetensors_bytes(B),
        "model.safetensors.index.json": {"metadata": {}, "weight_map": weight_map},
    }


def test_facts_of_one_file_and_of_shards(tmp_path: Path) -> None:
    one = inspect(folder_of(tmp_path / "one", {"model.safetensors": safetensors_bytes({**A, **B})}))
    two = inspect(folder_of(tmp_path / "two", _shards()))
    for facts in (one, two):
        assert (facts.n_tensors, facts.bytes_by_dtype, facts.tensor_bytes) == (2, {"F32": 24, "BF16": 8}, 32)
    assert [os.path.basename(path) for path in two.files] == ["one.safetensors", "two.safetensors"]


def test_the_digest_names_config_and_weights(tmp_path: Path) -> None:
    raw = safetensors_bytes(A)
    folders = {
        "same": ({}, raw),
        "again": ({}, raw),
        "other weights": ({}, raw[:-1] + b"\1"),
        "other config": ({"a": 1}, raw),
    }
    digests = {
        name: inspect(folder_of(tmp_path / name, {"model.safetensors": data}, config)).digest
        for name, (config, data) in folders.items()
    }
    assert digests["same"] == digests["again"]
    assert len(set(digests.values())) == 3


def test_inspecting_imports_no_tensor_library(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"model.safetensors": safetensors_bytes(A)})
    code = (
        "import sys; from headrace_plugins.checkpoint import inspect, read_config;"
        f" inspect({str(folder)!r}); print(sorted({{'torch', 'numpy', 'safetensors'}} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "holds a list"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [-1e999]}', "-1e999 is too large"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_damaged_configs(tmp_path: Path, content: bytes, words: str) -> None:
    with _refused("HR-CKPT-01", words):
        read_config(folder_of(tmp_path, {"config.json": content}))


def test_missing_configs(tmp_path: Path) -> None:
    with _refused("HR-CKPT-01", "No such file"):
        read_config(tmp_path)
    with _refused("HR-CKPT-01", "not a folder"):
        read_config(tmp_path / "none")
    (tmp_path / "config.json").mkdir()
    with _refused("HR-CKPT-01", "no file"):
        read_config(tmp_path)


# --- which files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("consolidated.safetensors", "neither model.safetensors nor"),
        ("pytorch_model.bin", "pickled"),
        ("readme.md", "holds no model.safetensors"),
    ],
)
def test_folders_without_weights_that_we_read(tmp_path: Path, name: str, words: str) -> None:
    with _refused("HR-CKPT-02", words):
        inspect(folder_of(tmp_path, {name: safetensors_bytes(A)}))


def test_things_that_are_no_file(tmp_path: Path) -> None:
    folder_of(tmp_path, {})
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait forever
    with _refused("HR-CKPT-02", "not a regular file"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../two.safetensors", "/two.safetensors", "a/../../two.safetensors", "C:\\two", "..\\two", "", ".", "a\0b", "\n"],
)
def test_shards_outside_the_folder(tmp_path: Path, name: str) -> None:
    folder_of(tmp_path, {"two.safetensors": safetensors_bytes(A)})
    inner = folder_of(tmp_path / "inner", _shards(**{"a.weight": name}))
    with _refused("HR-CKPT-04", "not the name of a shard"):
        inspect(inner)


def test_shards_in_a_folder_below_and_links(tmp_path: Path) -> None:
    """The cache of the hub keeps files elsewhere and links to them."""
    folder_of(tmp_path / "blobs", {"x": safetensors_bytes(A)})
    index = {"weight_map": {"a.weight": "sub/one.safetensors"}}
    folder_of(tmp_path / "model", {"sub/two": b"", "model.safetensors.index.json": index})
    (tmp_path / "model/sub/one.safetensors").symlink_to(tmp_path / "blobs/x")
    assert inspect(tmp_path / "model").n_tensors == 1


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_links_that_lead_nowhere(tmp_path: Path, name: str) -> None:
    folder_of(tmp_path, {})
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=rf"^HR-CKPT-0[24]: can't read .*{name}: No such file"):
        inspect(tmp_path)


def test_names_of_shards_are_cut(tmp_path: Path) -> None:
    with _refused("HR-CKPT-04", r"xxx\.\.\. not found"):
        inspect(folder_of(tmp_path, {"model.safetensors.index.json": {"weight_map": {"a": "x" * 5000}}}))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (_shards(**{"a.weight": "three.safetensors"}), "three.safetensors not found"),
        (_shards(**{"a.wieght": "one.safetensors"}), "a.wieght is not in its shard one.safetensors"),
        (_shards(**{"a.weight": "two.safetensors"}), "a.weight is not in its shard two.safetensors"),
        (_shards() | {"two.safetensors": safetensors_bytes(A | B)}, "a.weight .* second time"),
        (_shards() | {"model.safetensors.index.json": {"weight_map": []}}, "no table weight_map"),
        (_shards() | {"model.safetensors.index.json": {"weight_map": {"a": 1}}}, "no table weight_map"),
        (_shards() | {"model.safetensors.index.json": [1]}, "no table weight_map"),
        (_shards() | {"model.safetensors.index.json": b"{"}, "not JSON"),
        (
            _shards() | {"model.safetensors.index.json": b'{"weight_map": {"a.weight": "one", "a.weight": "two"}}'},
            "appears twice",
        ),
    ],
)
def test_damaged_indices(tmp_path: Path, files: dict[str, object], words: str) -> None:
    with _refused("HR-CKPT-04", words):
        inspect(folder_of(tmp_path, files))


def test_one_tensor_under_both_spellings_of_its_name(tmp_path: Path) -> None:
    raw = safetensors_bytes({"a": zeros("F32", size=4), "model.a": zeros("F32", size=4)})
    with _refused("HR-CKPT-04", "second time"):
        inspect(folder_of(tmp_path, {"model.safetensors": raw}))


# --- headers ---------------------------------------------------------------------------------------------------------


def _entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        ((1 << 60).to_bytes(8, "little") + b"{}", f"a header of {1 << 60} bytes"),
        ((100).to_bytes(8, "little") + b"{}", "a header of 100 bytes"),
        (b"GGUF" + bytes(100), "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
        (framed(b""), "not JSON"),
        (framed(b"[]"), "not a JSON object"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[" * 100_000), "not JSON"),
        (framed(b'{"a": 1' + b"1" * 5000 + b"}"), "not JSON"),
        (framed(b'{"a": {}, "a": {}}'), "'a' appears twice"),
        (safetensors_bytes({}, header={"a": 1}), "tensor a: dtype, shape or data_offsets"),
        (safetensors_bytes(A, header={"a.weight": _entry(shape=[-2, -3])}), "not a shape"),
        (safetensors_bytes(A, header={"a.weight": _entry(shape=[True, 6])}), "not a shape"),
        (safetensors_bytes(A, header={"a.weight": _entry(shape=[2.0, 3])}), "not a shape"),
        (safetensors_bytes(A, header={"a.weight": _entry(shape=[1] * 9)}), "not a shape"),
        (safetensors_bytes(A, header={"a.weight": _entry(shape=[1 << 62] * 8)}), "its offsets are"),
        (safetensors_bytes(A, header={"a.weight": _entry(offsets=[24, 0])}), "are not offsets"),
        (safetensors_bytes(A, header={"a.weight": _entry(offsets=[0])}), "are not offsets"),
        (safetensors_bytes(A, header={"a.weight": _entry(offsets=[0, 20])}), "takes 24 bytes"),
        (safetensors_bytes(A)[:-1], "truncated: tensor a.weight"),
        (safetensors_bytes(A) + b"\0", "1 bytes at its end"),
        (safetensors_bytes(A, header={"b": _entry("U8", [4], [20, 24])}), "a.weight and b overlap"),
        (safetensors_bytes({}, header={"b": _entry("U8", [1], [2, 3])}) + bytes(3), "2 bytes before tensor b"),
    ],
)
def test_damaged_headers(tmp_path: Path, raw: bytes, words: str) -> None:
    with _refused("HR-CKPT-03", words):
        inspect(folder_of(tmp_path, {"model.safetensors": raw}))


def test_unknown_types_are_named(tmp_path: Path) -> None:
    raw = safetensors_bytes(A, header={"a.weight": _entry("F9")})
    with _refused("HR-CKPT-08", "a.weight has the unknown type 'F9'"):
        inspect(folder_of(tmp_path, {"model.safetensors": raw}))


def test_a_huge_header_length_takes_no_memory(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"model.safetensors": (90 << 20).to_bytes(8, "little") + b"{}"})
    tracemalloc.start()
    try:
        with _refused("HR-CKPT-03"):
            inspect(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_of_the_file_cant_break_a_message(tmp_path: Path) -> None:
    raw = safetensors_bytes({}, header={"\x1b[31m\n" + "x" * 500: 1})
    with _refused("HR-CKPT-03") as caught:
        inspect(folder_of(tmp_path, {"model.safetensors": raw}))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


def test_empty_tensors_are_fine(tmp_path: Path) -> None:
    raw = safetensors_bytes({"none": ("F32", [0, 5], b""), "one": ("F32", [], bytes(4))})
    assert json.dumps(inspect(folder_of(tmp_path, {"model.safetensors": raw})).bytes_by_dtype) == '{"F32": 4}'
