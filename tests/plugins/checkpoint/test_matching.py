"""What a model needs against what a checkpoint has: all differences in one error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import Stored, folder_of, safetensors_bytes, zeros

from headrace.errors import ModelError
from headrace.modeling import TensorSpec
from headrace_plugins.checkpoint.folder import open_folder
from headrace_plugins.checkpoint.matching import QUANTISATION, Match, match

SPECS = (
    TensorSpec(name="norm.weight", shape=(64,)),
    TensorSpec(name="a.wq.weight", shape=(40, 64), packing="fp8_block"),
    TensorSpec(name="a.w1.weight", shape=(40, 64), packing="fp4_row"),
    TensorSpec(name="a.table.weight", shape=(40, 64), packing="fp8_row"),
)
TENSORS: dict[str, Stored] = {
    "norm.weight": zeros("BF16", 64, size=2),
    "a.wq.weight": zeros("F8_E4M3", 40, 64, size=1),
    "a.wq.scale": zeros("F8_E8M0", 2, 2, size=1),
    "a.w1.weight": zeros("I8", 40, 32, size=1),
    "a.w1.scale": zeros("U8", 40, 2, size=1),
    "a.table.weight": zeros("F8_E4M3", 40, 64, size=1),
    "a.table.scale": zeros("F8_E8M0", 40, 2, size=1),
}


@pytest.fixture
def matched(tmp_path: Path) -> Callable[..., list[Match]]:
    def run(
        tensors: dict[str, Stored | None], config: Any = None, ignored: Any = lambda name: False, specs: Any = SPECS
    ) -> list[Match]:
        kept = {name: tensor for name, tensor in (TENSORS | tensors).items() if tensor is not None}
        folder = folder_of(tmp_path, {"model.safetensors": safetensors_bytes(kept)})
        return match(open_folder(folder), specs, config or {}, ignored)

    return run


def test_packed_and_plain_ones_are_found(matched: Callable[..., list[Match]]) -> None:
    found = matched({}, {"quantization_config": QUANTISATION})
    assert [(each.spec.name, each.weight.dtype, each.scale and each.scale.dtype) for each in found] == [
        ("norm.weight", "BF16", None),
        ("a.wq.weight", "F8_E4M3", "F8_E8M0"),
        ("a.w1.weight", "I8", "U8"),
        ("a.table.weight", "F8_E4M3", "F8_E8M0"),
    ]
    for dtype, size in (("F32", 4), ("F16", 2), ("BF16", 2)):
        found = matched({"a.wq.weight": zeros(dtype, 40, 64, size=size), "a.wq.scale": None})
        assert (found[1].weight.dtype, found[1].scale) == (dtype, None)


def test_the_model_prefix_is_optional(matched: Callable[..., list[Match]]) -> None:
    moved = {f"model.{name}": tensor for name, tensor in TENSORS.items()}
    assert len(matched(moved | dict.fromkeys(TENSORS))) == 4
    assert len(matched({"norm.weight": None, "model.norm.weight": TENSORS["norm.weight"]})) == 4


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"norm.weight": None}, ["1 missing", "missing: norm.weight"]),
        (
            {"a.wq.weight": None, "a.wk.weight": TENSORS["a.wq.weight"]},
            ["missing: a.wq.weight (did you mean 'a.wk.weight'?)", "surplus: a.wk.weight"],
        ),
        ({"a.wq.weight": None, "b.wv.weight": TENSORS["a.wq.weight"]}, ["missing: a.wq.weight\n"]),
        ({"b": zeros("F32", 1, size=4)}, ["1 surplus", "surplus: b"]),
        ({"norm.weight": zeros("BF16", 63, size=2)}, ["norm.weight has the shape [63], the model needs [64]"]),
        ({"norm.weight": zeros("BF16", 64, 1, size=2)}, ["has the shape [64, 1]"]),
        ({"norm.weight": zeros("F64", 64, size=8)}, ["norm.weight is stored as F64, not as F32 or BF16 or F16"]),
        ({"norm.weight": zeros("F8_E4M3", 64, size=1)}, ["norm.weight is stored as F8_E4M3, not as"]),
        ({"a.wq.weight": zeros("I8", 40, 64, size=1)}, ["a.wq.weight is stored as I8, not as", "F8_E4M3"]),
        ({"a.w1.weight": zeros("I8", 40, 64, size=1)}, ["a.w1.weight has the shape [40, 64]", "[40, 32]"]),
        ({"a.wq.scale": None}, ["a.wq.weight is stored as F8_E4M3, but there is no a.wq.scale"]),
        ({"a.wq.scale": zeros("F8_E8M0", 40, 2, size=1)}, ["a.wq.scale has the shape [40, 2]", "needs [2, 2]"]),
        ({"a.table.scale": zeros("F8_E8M0", 2, 2, size=1)}, ["a.table.scale has the shape [2, 2]", "needs [40, 2]"]),
        ({"a.w1.scale": zeros("F32", 40, 2, size=4)}, ["a.w1.scale is stored as F32, not as F8_E8M0 or U8"]),
        ({"a.wq.weight": zeros("BF16", 40, 64, size=2)}, ["a.wq.weight is stored plain as BF16, and yet has"]),
        ({"norm.scale": zeros("U8", 2, size=1)}, ["surplus: norm.scale"]),
    ],
)
def test_differences_are_named(
    matched: Callable[..., list[Match]], tensors: dict[str, Stored | None], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        matched(tensors)
    assert caught.value.code == "HR-CKPT-05"
    for word in words:
        assert word in caught.value.message


def test_all_differences_in_one_error_and_many_are_counted(matched: Callable[..., list[Match]]) -> None:
    more = tuple(TensorSpec(name=f"layers.{i}.w", shape=(2,)) for i in range(25))
    with pytest.raises(ModelError) as caught:
        matched({"x": zeros("F32", 1, size=4), "norm.weight": zeros("F32", 1, size=4)}, specs=SPECS + more)
    message = caught.value.message
    assert "(25 missing, 1 wrong, 1 surplus)" in message
    assert message.count("missing: layers.") == 20
    assert "missing: and 5 more" in message


def test_surplus_ones_may_be_ignored(matched: Callable[..., list[Match]]) -> None:
    extra = {"mtp.w.weight": zeros("F8_E4M3", 32, 32, size=1), "mtp.w.scale": zeros("F8_E8M0", 1, 1, size=1)}
    assert len(matched(extra, ignored=lambda name: name.startswith("mtp."))) == 4
    assert len(matched(extra, ignored=lambda name: name == "mtp.w.weight")) == 4
    with pytest.raises(ModelError, match=r"surplus: mtp\.w\.weight"):
        matched(extra, ignored=lambda name: name.startswith("vision."))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, r"weight_block_size = \[128, 128\]"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "weight_block_size = None"),
        (dict(QUANTISATION) | {"scale_fmt": "float"}, "scale_fmt = float"),
        (dict(QUANTISATION) | {"expert_dtype": "fp8"}, "expert_dtype = fp8"),
        (dict(QUANTISATION) | {"fmt": "e5m2"}, "fmt = e5m2"),
        (dict(QUANTISATION) | {"activation_scheme": "static"}, "activation_scheme = static"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method = gptq"),
        ({"quant_method": "awq", "bits": 4}, "quant_method = awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "quant_method = compressed-tensors"),
        ({}, "quant_method = None"),
        ("int4", "quantization_config = int4"),
    ],
)
def test_other_quantisations_are_refused(matched: Callable[..., list[Match]], declared: Any, words: str) -> None:
    for config in ({"quantization_config": declared}, {"text_config": {"quantization_config": declared}}):
        with pytest.raises(ModelError, match=f"(?s)^HR-CKPT-06: .*{words}.*help: supported: .*ue8m0.*BF16"):
            matched({}, config)


def test_packed_tensors_that_no_spec_names_show_the_quantisation(matched: Callable[..., list[Match]]) -> None:
    """GPTQ and AWQ have other names: better say so than to call every weight missing."""
    plain = (TensorSpec(name="w.weight", shape=(8, 8)),)
    tensors: dict[str, Any] = dict.fromkeys(TENSORS) | {"w.qweight": zeros("I32", 1, 8, size=4)}
    with pytest.raises(ModelError, match=r"HR-CKPT-06: .*gptq, and w\.qweight is stored as I32"):
        matched(tensors, {"quantization_config": {"quant_method": "gptq"}}, specs=plain)


def test_plain_tensors_are_read_whatever_the_config_says(matched: Callable[..., list[Match]]) -> None:
    plain: dict[str, Any] = dict.fromkeys(TENSORS) | {spec.name: zeros("BF16", *spec.shape, size=2) for spec in SPECS}
    assert len(matched(plain, {"quantization_config": {"quant_method": "gptq"}})) == 4
