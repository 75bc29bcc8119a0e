"""Written checkpoints: read back as they were, by us and by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="checkpoints are written with PyTorch")

from headrace.errors import ModelError  # noqa: E402
from headrace.modeling import Quantised, TensorSpec  # noqa: E402
from headrace_plugins.checkpoint import (  # noqa: E402
    dummy_weights,
    inspect,
    load_weights,
    random_checkpoint,
    random_weights,
    read_config,
    write_checkpoint,
)
from headrace_plugins.checkpoint.folder import open_folder  # noqa: E402
from headrace_plugins.checkpoint.header import DTYPE_BITS  # noqa: E402
from headrace_plugins.checkpoint.matching import QUANTISATION  # noqa: E402
from headrace_plugins.reference.kernels.formats import quantise_fp8_block, unpack  # noqa: E402

SPECS = (
    TensorSpec(name="embed.weight", shape=(50, 64)),
    TensorSpec(name="attn_norm.weight", shape=(64,)),
    TensorSpec(name="hc_base", shape=(24,), dtype="float32"),
    TensorSpec(name="hc_fn", shape=(24, 256), dtype="float32"),
    TensorSpec(name="none.weight", shape=(0, 64)),
    TensorSpec(name="wq.weight", shape=(70, 50), packing="fp8_block"),
    TensorSpec(name="w1.weight", shape=(70, 64), packing="fp4_row"),
    TensorSpec(name="table.weight", shape=(7, 96), packing="fp8_row"),
)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Quantised):
        return isinstance(b, Quantised) and a.packing == b.packing and a.shape == b.shape and (
            torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
        )  # fmt: skip
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("keep", ["dequant", "quantised"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_those_of_a_random_checkpoint(tmp_path: Path, keep: Any, compute: Any) -> None:
    random_checkpoint(tmp_path, SPECS, {}, seed=5, shard_bytes=4000)
    loaded = load_weights(tmp_path, SPECS, compute=compute, keep=keep)
    dummy = dummy_weights(SPECS, compute=compute, keep=keep, seed=5)
    assert list(loaded) == list(dummy)
    for name, weight in loaded.items():
        assert _equal(weight, dummy[name]), name


def test_seeds_and_names_make_the_numbers() -> None:
    def dummy(seed: int, *specs: TensorSpec) -> dict[str, Any]:
        return dummy_weights(specs, compute=torch.float32, keep="dequant", seed=seed)

    a, b = (TensorSpec(name=name, shape=(8, 64)) for name in "ab")
    assert torch.equal(dummy(0, a, b)["b"], dummy(0, b)["b"])
    assert not torch.equal(dummy(0, a)["a"], dummy(1, a)["a"])
    assert not torch.equal(dummy(0, a)["a"], dummy(0, b)["b"])


def test_random_numbers_are_sane(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (
        TensorSpec(name="embed.weight", shape=(100, 64)),
        TensorSpec(name="attn_norm.weight", shape=(1000,)),
        TensorSpec(name="gate.bias", shape=(1000,), dtype="float32"),
        TensorSpec(name="wq.weight", shape=(100, 256), packing="fp8_block"),
    )
    weights = dummy_weights(specs, compute=torch.float32, keep="dequant")
    stds = [weights[spec.name].std().item() for spec in specs]
    assert stds == pytest.approx([1, 0.1, 0.1, 1 / 16], rel=0.1)
    assert weights["attn_norm.weight"].mean().item() == pytest.approx(1, abs=0.02)
    monkeypatch.setattr(random_weights, "CHUNK", 64 * 32)
    pieces = dummy_weights(specs, compute=torch.float32, keep="dequant")["embed.weight"]
    assert pieces.unique(dim=0).shape[0] == 100  # no piece repeats another


@pytest.mark.parametrize("shard_bytes", [1, 4000, 1 << 30])
def test_the_safetensors_library_reads_them(tmp_path: Path, shard_bytes: int) -> None:
    safetensors = pytest.importorskip("safetensors", reason="the safetensors library is a second opinion")
    random_checkpoint(tmp_path, SPECS, {}, shard_bytes=shard_bytes)
    ours = load_weights(tmp_path, SPECS, compute=torch.bfloat16, keep="quantised")
    theirs: dict[str, Any] = {}
    for path in inspect(tmp_path).files:
        with safetensors.safe_open(path, "pt") as file:
            theirs |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    assert len(theirs) == len(SPECS) + 3
    types = {"wq.weight": torch.float8_e4m3fn, "w1.weight": torch.int8, "table.scale": torch.float8_e8m0fnu}
    assert {name: theirs[name].dtype for name in types} == types
    for name, weight in ours.items():
        if isinstance(weight, Quantised):
            assert torch.equal(theirs[name].view(torch.uint8), weight.codes)
            assert torch.equal(theirs[name.replace("weight", "scale")].view(torch.uint8), weight.scales)
        else:
            assert torch.equal(theirs[name], weight)


def test_shards_and_their_index(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "many", SPECS, {}, shard_bytes=4000)
    random_checkpoint(tmp_path / "one", SPECS, {})
    one = open_folder(tmp_path / "one").entries.values()
    assert all(entry.begin % (DTYPE_BITS[entry.dtype] // 8) == 0 for entry in one)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 2
    for header in open_folder(tmp_path / "many").headers:
        sizes = [entry.n_bytes for entry in header.entries.values()]
        packed = sum("scale" in name for name in header.entries)  # codes and scales stay together
        assert sum(sizes) <= 4000 or len(sizes) == 1 + packed
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    facts = inspect(tmp_path / "many")
    assert index["metadata"] == {"total_size": facts.tensor_bytes}
    assert len(index["weight_map"]) == facts.n_tensors == len(SPECS) + 3
    assert not [path.name for path in (tmp_path / "many").iterdir() if path.name.startswith(".")]


def test_the_config_tells_the_quantisation(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "quantization_config": {"quant_method": "gptq"}}
    random_checkpoint(tmp_path / "packed", SPECS, config)
    random_checkpoint(tmp_path / "plain", SPECS, config, quantised=False)
    assert read_config(tmp_path / "packed") == config | {"quantization_config": QUANTISATION}
    assert read_config(tmp_path / "plain") == {"architectures": ["X"]}


def test_tensors_of_the_caller(tmp_path: Path) -> None:
    """Plain ones keep their type; packed ones are packed, or stay what they were."""
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    specs = [TensorSpec(name=name, shape=(40, 64), packing="fp8_block") for name in ("a.weight", "b.weight")]
    packed = Quantised(*quantise_fp8_block(2 * values), "fp8_block", (40, 64))
    norm = TensorSpec(name="norm.weight", shape=(64,))
    half = values[0].half()
    tensors = [(specs[0], values.t().contiguous().t()), (specs[1], packed), (norm, half)]
    write_checkpoint(tmp_path, {}, tensors, quantised=True)
    loaded = load_weights(tmp_path, [*specs, norm], compute=torch.float32, keep="quantised")
    assert _equal(loaded["a.weight"], Quantised(*quantise_fp8_block(values), "fp8_block", (40, 64)))
    assert _equal(loaded["b.weight"], packed)
    assert torch.equal(loaded["norm.weight"], half.float())
    assert inspect(tmp_path).bytes_by_dtype == {"F16": 128, "F8_E4M3": 2 * 40 * 64, "F8_E8M0": 2 * 4}
    assert (unpack(loaded["a.weight"], torch.float32) - values).abs().max() < 0.07 * values.abs().max()


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text("{}")
    random_checkpoint(tmp_path / "model", SPECS, {}, tokenizer=tmp_path / "some.json")
    assert (tmp_path / "model/tokenizer.json").read_text() == "{}"


def test_writing_never_mixes_two_checkpoints(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, SPECS, {"a": 1})
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ModelError, match=r"HR-CKPT-10: .* holds a checkpoint already: model\.safetensors"):
        random_checkpoint(tmp_path, SPECS, {"a": 2}, seed=1)
    assert read_config(tmp_path)["a"] == 1
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("spec", "values", "words"),
    [
        (TensorSpec(name="w.weight", shape=(4, 40), packing="fp4_row"), torch.ones(4, 40), "can't be packed"),
        (TensorSpec(name="w.weight", shape=(4, 64)), torch.ones(4, 65), "has the shape"),
        (TensorSpec(name="w.weight", shape=(4,)), torch.ones(4, dtype=torch.int64), "w.weight is torch.int64"),
    ],
)
def test_tensors_that_cant_be_stored_leave_nothing_behind(
    tmp_path: Path, spec: TensorSpec, values: Any, words: str
) -> None:
    good = (TensorSpec(name="a", shape=(4,)), torch.ones(4))
    with pytest.raises(ModelError, match=f"HR-CKPT-10: .*{words}"):
        write_checkpoint(tmp_path / "model", {}, [good, (spec, values)], quantised=True)
    assert list((tmp_path / "model").iterdir()) == []


def test_a_checkpoint_has_tensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there are no tensors"):
        write_checkpoint(tmp_path, {}, [], quantised=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't write"):
        random_checkpoint(tmp_path / "file", SPECS, {})
