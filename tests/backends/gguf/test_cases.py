"""Hostile files: a typed error in time, little memory, and the process goes on. Small ones made here, and a folder of
them from outside where HEADRACE_CASES names one."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_driver import MACHINE, Driver, new_executor

from headrace.errors import HeadraceError
from headrace.types import Fit, ModelSource
from headrace_gguf.backend import probe

pytestmark = pytest.mark.gguf

TEMPLATES = {
    "runs code": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "grows": "{{ 'A' * 8000000000 }}",
    "nests": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
}


def load(path: str) -> None:
    source = ModelSource(uri=path, path=path, format="gguf")
    assert isinstance(probe(MACHINE, source), Fit)
    executor = new_executor(path)
    try:
        executor.open()
    finally:
        executor.close()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def case_files() -> list[Path]:
    root = os.environ.get("HEADRACE_CASES")
    folder = Path(root) / "malformed_gguf" if root else None
    return sorted(folder.glob("*.gguf")) if folder else []


@pytest.mark.skipif(not case_files(), reason="HEADRACE_CASES does not name a folder with malformed_gguf/")
def test_hostile_files_from_outside(tiny):
    good = tiny()
    load(good)
    listed = {entry["file"] for entry in json.loads((case_files()[0].parent / "MANIFEST.json").read_text())}
    for path in case_files():
        before, started = peak_bytes(), time.monotonic()
        with pytest.raises(HeadraceError) as raised:
            load(str(path))
        assert time.monotonic() - started < 5, path
        assert peak_bytes() - before < 512 << 20, path
        assert raised.value.code.startswith("HR-"), path
        load(good)
    assert listed <= {path.name for path in case_files()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_data_to_the_loader(tiny, name, tmp_path, monkeypatch):
    """It loads, since nothing is rendered here; the template reaches the front door as it is."""
    monkeypatch.chdir(tmp_path)
    path = tiny(tokenizer__chat_template=TEMPLATES[name])
    executor = new_executor(path)
    executor.open()
    assert executor.model.chat_template == TEMPLATES[name]
    executor.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "gguf-tried"


def test_what_llama_cpp_would_abort_on_ends_a_trial_process(tiny, home):
    """Metadata that is in order by every rule, yet ends the process: rotary dimensions above the head size."""
    executor = new_executor(tiny("gemma3", gemma3__rope__dimension_count=255), trial_load=True)
    for _ in range(2):  # not remembered as good
        with pytest.raises(HeadraceError, match=r"HR-GGUF-26: .*trial load in a separate process ended .*ASSERT"):
            executor.open()
    load(tiny())


def test_a_model_that_passed_is_not_tried_again(tiny, home, monkeypatch):
    executor = new_executor(tiny(), trial_load=True)
    executor.open()
    assert len(list(home.iterdir())) == 1
    monkeypatch.setattr("subprocess.run", None)
    executor.open()
    executor.close()


def test_a_trial_that_can_not_be_remembered_is_no_error(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    executor = new_executor(tiny(), trial_load=True)
    executor.open()
    executor.close()


def test_a_cut_model_is_refused_and_the_whole_one_loads(tiny, tmp_path):
    whole = Path(tiny()).read_bytes()
    path = tmp_path / "cut.gguf"
    for end in (3, 30, 1000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:end])
        with pytest.raises(HeadraceError):
            load(str(path))
    path.write_bytes(whole)
    load(str(path))


def test_what_llama_cpp_refuses_is_said_in_its_words(tiny, tmp_path):
    """The checker does not know every tensor that an architecture needs; llama.cpp does."""
    whole = Path(tiny()).read_bytes()
    path = tmp_path / "odd.gguf"
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(HeadraceError, match=r"HR-GGUF-20: llama.cpp can't load .*blk.1.attn_q.weight"):
        load(str(path))
    load(tiny())


def test_nan_weights_end_a_row_only(tiny, tmp_path):
    """A model with NaN in one token's embedding: rows without that token go on."""
    import numpy as np
    from gguf_driver import Row

    from headrace_gguf.ggufcheck import read_gguf

    path = tmp_path / "nan.gguf"
    raw = bytearray(Path(tiny()).read_bytes())
    file = read_gguf(tiny())
    embeddings = next(t for t in file.tensors if t.name == "token_embd.weight")
    start = file.data_start + embeddings.offset + 4 * embeddings.shape[0] * 65
    raw[start : start + 4] = np.float32("nan").tobytes()
    path.write_bytes(raw)
    executor = new_executor(str(path))
    executor.open()
    result = Driver(executor).step([Row(0, 0, [1, 2, 65]), Row(1, 0, [1, 2, 3])])
    executor.close()
    assert list(result.status) == [0]
    assert "NaN" in result.status[0]
