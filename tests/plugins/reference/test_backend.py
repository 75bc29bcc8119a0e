"""What the backend says of a folder, what it refuses, and how it lays a model out in memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, HeadraceError, ModelError, RequestError, StepFailed
from headrace.machine import probe_machine
from headrace.types import EngineOptions, Fit, ModelSource, Reject

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from headrace_plugins.reference.backend import probe  # noqa: E402
from headrace_plugins.reference.facts import read_facts  # noqa: E402


def source(path: str | Path, format: str = "safetensors") -> ModelSource:
    return ModelSource(uri=str(path), path=str(path), format=format)


def edited(folder: str, tmp_path: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config.json differs; None removes a key."""
    copy = tmp_path / "edited"
    copy.mkdir()
    for file in Path(folder).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


# --- probe -----------------------------------------------------------------------------------------------------------


def test_probing_imports_no_torch(dense: Callable[..., str]) -> None:
    script = (
        "import sys; from headrace.types import ModelSource, Fit; from headrace_plugins.reference import backend\n"
        f"answer = backend.probe(None, ModelSource(uri='', path={dense()!r}, format='safetensors'))\n"
        "assert isinstance(answer, Fit), answer\n"
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_fit_tells_what_the_model_is(dense: Callable[..., str]) -> None:
    answer = probe(probe_machine(), source(dense()))
    assert isinstance(answer, Fit)
    assert answer.score == 20
    assert answer.facts["architecture"] == "Qwen3ForCausalLM"
    assert answer.facts["context"] == 256
    assert "1 file" in answer.facts["weights"]


def test_a_shard_stands_for_its_folder(dense: Callable[..., str]) -> None:
    assert isinstance(probe(probe_machine(), source(Path(dense()) / "model.safetensors")), Fit)


def test_rejects_what_is_not_its_own(tmp_path: Path) -> None:
    assert isinstance(probe(probe_machine(), source(tmp_path, "gguf")), Reject)
    lone = tmp_path / "model.safetensors"
    lone.write_bytes(b"")
    answer = probe(probe_machine(), source(lone))
    assert isinstance(answer, Reject)
    assert "config.json" in answer.why


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"architectures": None}, "HR-REFERENCE-01"),
        ({"architectures": "LlamaForCausalLM"}, "HR-REFERENCE-01"),
        ({"vocab_size": "many"}, "HR-REFERENCE-02"),
        ({"vocab_size": None}, "HR-REFERENCE-02"),
        ({"max_position_embeddings": -1}, "HR-REFERENCE-02"),
        ({"vocab_size": 10**18}, "HR-REFERENCE-02"),
        ({"max_position_embeddings": 10**400}, "HR-REFERENCE-02"),
    ],
)
def test_a_config_without_what_every_model_has(
    dense: Callable[..., str], tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    with pytest.raises(ModelError) as found:
        probe(probe_machine(), source(edited(dense(), tmp_path, **changes)))
    assert found.value.code == code
    assert str(tmp_path) in found.value.message


def test_generation_config_recommends_sampling(dense: Callable[..., str], tmp_path: Path) -> None:
    folder = edited(dense(), tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 7.0, "min_p": None}))
    assert read_facts(str(folder)).sampling_defaults == {"temperature": 0.6, "top_k": 20}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert read_facts(str(folder)).sampling_defaults == {"temperature": 0.0}
    path.write_text("[")
    with pytest.raises(ModelError, match="generation_config"):
        read_facts(str(folder))


def test_chat_templates_lie_in_two_places(dense: Callable[..., str], tmp_path: Path) -> None:
    folder = edited(dense(), tmp_path)
    assert read_facts(str(folder)).chat_template is None
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_facts(str(folder)).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert read_facts(str(folder)).chat_template == "J"


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_beside_the_weights_that_can_not_be_read(dense: Callable[..., str], tmp_path: Path, name: str) -> None:
    """What is there and unreadable is an error of this file, whatever is wrong with it; never ignored."""
    path = edited(dense(), tmp_path) / name

    def refused() -> None:
        with pytest.raises(ModelError, match=f"^HR-REFERENCE-03: .*{name}"):
            read_facts(str(path.parent))

    path.write_bytes(b"\xff\xfe")
    refused()
    if name.endswith("json"):
        for text in ('{"a":' + "[" * 100_000, "[]", "{", ""):
            path.write_text(text)
            refused()
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    refused()
    path.unlink()
    path.mkdir()
    refused()


@pytest.mark.parametrize(
    "template", [3, {"default": "T"}, [{"name": ["x"], "template": "T"}, {"name": "default", "template": 3}]]
)
def test_chat_templates_that_are_no_text(dense: Callable[..., str], tmp_path: Path, template: Any) -> None:
    folder = edited(dense(), tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ModelError, match=r"^HR-REFERENCE-03: chat_template = .* is no text"):
        read_facts(str(folder))


def test_a_tokenizer_that_is_a_dead_link_is_not_missing(dense: Callable[..., str], tmp_path: Path) -> None:
    from headrace_plugins.reference.tokenizer import tokenizer_of

    folder = edited(dense(), tmp_path)
    (folder / "tokenizer.json").symlink_to(tmp_path / "gone")
    facts = read_facts(str(folder))
    with pytest.raises(ModelError, match=r"^HR-TOKENIZER-01: .*tokenizer\.json"):
        tokenizer_of(facts)


def test_the_fingerprint_follows_config_weights_and_tokenizer(dense: Callable[..., str], tmp_path: Path) -> None:
    folder = edited(dense(), tmp_path)
    seen = {
        read_facts(dense()).fingerprint,
        read_facts(str(edited(dense(), tmp_path / "..", rope_theta=7.0))).fingerprint,
    }
    assert len(seen) == 2
    assert read_facts(str(folder)).fingerprint in seen
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    seen.add(read_facts(str(folder)).fingerprint)
    (folder / "tokenizer.json").write_text("{}")
    seen.add(read_facts(str(folder)).fingerprint)
    assert len(seen) == 4


# --- options and memory ----------------------------------------------------------------------------------------------


def test_defaults(dense: Callable[..., str]) -> None:
    from reference_driver import new_executor

    executor = new_executor(dense())
    caps, layout = executor.caps, executor.layout
    assert caps.row_invariant
    assert caps.drafts
    assert caps.prompt_logits
    assert not caps.approximations
    assert not caps.refuses
    assert layout.block_tokens == EngineOptions().block_tokens, "no rings: the engine's blocks"
    assert layout.n_blocks * layout.block_tokens == 8 * 256, "every sequence can use the whole context"
    assert (layout.n_snapshots, layout.replay_tokens, layout.rerun_tokens, layout.slack_tokens) == (0, 0, 0, 0)
    assert {each.op for each in executor.bound()} >= {"attn.paged", "linear.dense", "sample.step"}
    assert {each.kernel for each in executor.bound() if each.op == "linear.dense"} == {"torch-tiled"}


def test_options_reach_the_layout(dense: Callable[..., str]) -> None:
    from reference_driver import new_executor

    layout = new_executor(dense(), block_tokens=32, kv_tokens=500).layout
    assert (layout.block_tokens, layout.n_blocks) == (32, 16)
    per_block = layout.groups[0].grain_bytes
    assert new_executor(dense(), block_tokens=32, kv_memory=3 * per_block + 1).layout.n_blocks == 3
    half = new_executor(dense(), block_tokens=32, compute="bfloat16").layout
    assert half.groups[0].grain_bytes * 2 == per_block
    assert half.fingerprint != layout.fingerprint
    bound = new_executor(dense(), determinism="seeded", kernels={"linear.dense": "torch-tiled"}).bound()
    assert {each.op: each.kernel for each in bound}["linear.dense"] == "torch-tiled"
    assert {each.op: each.kernel for each in new_executor(dense(), determinism="seeded").bound()}[
        "linear.dense"
    ] == "torch"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_memory": 10}, "kv_memory = 10 bytes"),
        (
            {"kv_memory": 100_000, "kv_tokens": 4000},
            "kv_tokens = 4000 takes 1024000 bytes",
        ),
        ({"prefix": "replay"}, "prefix = 'replay' has no effect: a Qwen3ForCausalLM has no sliding windows"),
        ({"snapshots": 4}, "snapshots = 4 has no effect"),
        ({"replay": "compact"}, "replay = 'compact'"),
        ({"kernels": {"linear.dense": "mine"}}, "'mine'"),
    ],
)
def test_options_that_can_not_be_served(dense: Callable[..., str], options: dict[str, Any], words: str) -> None:
    from reference_driver import new_executor

    with pytest.raises(ConfigError, match=words):
        new_executor(dense(), **options)


@pytest.mark.parametrize(
    "options",
    [{"replay_keep_tokens": 5}, {"snapshots": 4, "prefix": "replay"}, {"block_tokens": 0}, {"compute": "fp8"}],
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    from headrace_plugins.reference.options import ReferenceOptions

    with pytest.raises(ValueError):
        ReferenceOptions(**options)


def test_a_model_that_does_not_fit_is_refused_with_its_size(
    dense: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import reference_driver

    machine = replace(probe_machine(), available_memory_bytes=50_000)
    monkeypatch.setattr(reference_driver, "probe_machine", lambda: machine)
    with pytest.raises(ModelError, match=r"rings .*; 0\.05 MiB are available") as found:
        reference_driver.new_executor(dense())
    assert found.value.code == "HR-MEMORY-01"
    assert "weights alone" in found.value.help
    assert "bfloat16" in found.value.help
    assert "quantised" not in found.value.help, "nothing of this checkpoint is packed"
    with pytest.raises(ModelError) as found:
        reference_driver.new_executor(dense(), compute="bfloat16")
    assert "bfloat16" not in found.value.help
    machine = replace(machine, available_memory_bytes=400_000)
    with pytest.raises(ModelError, match=r"KV \d+") as found:
        reference_driver.new_executor(dense(), kv_tokens=100_000)
    assert "kv_tokens" in found.value.help
    shrunk = reference_driver.new_executor(dense()).layout
    assert 0 < shrunk.n_blocks * shrunk.block_tokens < 8 * 256, "unset sizes take what is there"


def test_context_is_what_the_pool_holds(dense: Callable[..., str]) -> None:
    from reference_driver import Run, opened, request

    executor = opened(dense(), kv_tokens=64)
    assert executor.model.context_tokens == 64
    run = Run(executor)
    with pytest.raises(RequestError, match="the context holds 64") as found:
        run.add(request("r", range(3, 70)))
    assert "kv_tokens" in found.value.help


# --- life ------------------------------------------------------------------------------------------------------------


def test_threads_are_set_for_the_process(dense: Callable[..., str]) -> None:
    from reference_driver import opened

    before = torch.get_num_threads()
    try:
        executor = opened(dense(), threads=before + 1)
        assert torch.get_num_threads() == before + 1
        assert executor.describe()["threads"] == str(before + 1)
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_ends_a_running_forward(dense: Callable[..., str]) -> None:
    from reference_driver import opened

    from headrace.testing.rig import Rig, RigRow

    executor = opened(dense())
    rig = Rig(executor)
    real = executor._forward
    executor._forward = lambda *args: (executor.interrupt(), real(*args))[1]
    with pytest.raises(StepFailed, match="interrupted"):
        rig.step(RigRow(seq=0, tokens=[5, 6]))
    executor._forward = real
    rig.step(RigRow(seq=0, tokens=[5, 6]))


def test_a_folder_without_tokenizer_takes_ids(dense: Callable[..., str]) -> None:
    from reference_driver import opened

    tokenizer = opened(dense()).tokenizer
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_ids) == (300, 1, {2})
    assert tokenizer.token_bytes(7) == b"<7>"
    assert tokenizer.is_special(2)
    with pytest.raises(IndexError):
        tokenizer.token_bytes(300)
    with pytest.raises(HeadraceError, match=r"no tokenizer\.json"):
        tokenizer.encode("text")


def test_dummy_weights_need_no_checkpoint(dense: Callable[..., str], tmp_path: Path) -> None:
    from reference_driver import Run, new_executor, opened, request

    (tmp_path / "config.json").write_bytes((Path(dense()) / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        new_executor(str(tmp_path))
    executor = opened(str(tmp_path), dummy_weights=True)
    assert Run(executor).add(request("r", [5, 6, 7])).finish()["r"].n_generated == 8


def test_closing_frees_the_weights(dense: Callable[..., str]) -> None:
    import gc
    import weakref

    from reference_driver import opened

    executor = opened(dense())
    weights = weakref.ref(executor._model.weights["norm.weight"])
    executor.close()
    gc.collect()
    assert weights() is None
    with pytest.raises(StepFailed, match="closed"):
        executor._forward()


# --- options that change numbers -------------------------------------------------------------------------------------


def last_logits(path: str, **options: Any) -> Any:
    from reference_driver import Run, logits_of, opened, request

    executor = opened(path, determinism="seeded", **options)
    return logits_of(Run(executor).add(request("r", range(5, 25), max_tokens=0, logits=True)).finish()["r"])


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_ops_give_the_same_up_to_rounding(dense: Callable[..., str]) -> None:
    plain, compiled = last_logits(dense()), last_logits(dense(), compile=True)
    assert 0 < abs(plain - compiled).max() < 1e-4 * abs(plain).max()


def test_compiled_ops_are_not_batch_invariant(dense: Callable[..., str]) -> None:
    from headrace.llm import LLM

    with pytest.raises(ConfigError, match="batch-invariant") as found:
        LLM(dense(), backend={"use": "reference", "compile": True}, determinism="batch-invariant")
    assert found.value.code == "HR-CONFIG-10"
    assert "compile = false" in found.value.help


@pytest.mark.parametrize(
    "options",
    [{"quantise_activations": True}, {"cache": "plain"}, {"compute": "bfloat16"}, {"weights": "quantised"}],
    ids=str,
)
def test_number_formats(options: dict[str, Any]) -> None:
    """Each is near the default on a packed checkpoint, and none but packed weights is equal to it."""
    from golden import GOLDEN

    path = str(GOLDEN / "model_quant" / "q1")
    plain, other = last_logits(path), last_logits(path, **options)
    same = options == {"weights": "quantised"}
    assert (abs(plain - other).max() < 1e-4) == same
    assert abs(plain - other).mean() < 0.2 * abs(plain).max()


def test_snapshots_are_as_many_as_asked_for() -> None:
    from golden import GOLDEN
    from reference_driver import new_executor

    path = str(GOLDEN / "model_text" / "t1")
    assert new_executor(path).layout.n_snapshots == 4 * 8
    assert new_executor(path, snapshots=3).layout.n_snapshots == 3
    assert new_executor(path).layout.block_tokens == 128, "rings: few, large blocks"
    off = new_executor(path, engine=EngineOptions(prefix_cache=False)).layout
    assert (off.n_snapshots, off.has_rings) == (0, True)
    with pytest.raises(ConfigError, match=r"snapshots = 3 has no effect: engine\.prefix_cache = false") as found:
        new_executor(path, engine=EngineOptions(prefix_cache=False), snapshots=3)
    assert found.value.code == "HR-REFERENCE-14"


def test_few_kept_tokens_are_refused() -> None:
    from golden import GOLDEN
    from reference_driver import new_executor

    path = str(GOLDEN / "model_text" / "t1")
    least = new_executor(path, replay="compact").layout.rerun_tokens
    assert new_executor(path, replay="mask", replay_keep_tokens=least + 5).layout.rerun_tokens == least + 5
    with pytest.raises(ConfigError, match=f"replay_keep_tokens = {least - 1}") as found:
        new_executor(path, replay="compact", replay_keep_tokens=least - 1)
    assert found.value.code == "HR-REFERENCE-13"


def test_without_prompt_logits_it_says_why() -> None:
    from golden import GOLDEN

    from headrace.llm import LLM

    path = str(GOLDEN / "model_text" / "t1")
    with (
        LLM(path, backend={"use": "reference", "replay": "compact"}) as llm,
        pytest.raises(RequestError, match=r"^HR-REQUEST-06: logits .*backend.replay = 'compact'"),
    ):
        llm.logits([1, 2, 3])


def test_engram_without_a_tokenizer_asks_for_its_file(tmp_path: Path) -> None:
    from golden import GOLDEN
    from reference_driver import new_executor

    shutil.copytree(GOLDEN / "model_full" / "f1", tmp_path / "f1", ignore=shutil.ignore_patterns("tokenizer.json"))
    with pytest.raises(ModelError, match=r"^HR-MODEL-22: .*there is no tokenizer") as found:
        new_executor(str(tmp_path / "f1"))  # nothing is loaded
    assert "tokenizer.json" in found.value.help
