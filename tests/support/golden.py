"""Golden vectors: what other implementations of DeepSeek-V4.1 computed (tests/data/golden/README.md), and how to
compare with them. Needs torch where tensors are read, not on import."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


class OpCase(NamedTuple):
    """One call of an op. Tensors, or plain lists where the file has JSON."""

    name: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]


class ModelGolden(NamedTuple):
    """A tiny model with what it gives."""

    folder: Path
    """config.json, model.safetensors, and tokenizer.json where the model has Engram."""
    expected: dict[str, Any]
    """Tensors by name: "seq0.input_ids", "seq0.logits_fp32_qon", ..."""
    meta: dict[str, Any]
    """"token_map": the compressed vocabulary, of models with Engram."""

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.json").read_text()))


def op_cases(op: str, prefix: str = "") -> list[OpCase]:
    """The cases of ops/<op>.{json,safetensors} whose name starts with `prefix`, in the file's order."""
    return [case for case in _all_cases(op) if case.name.startswith(prefix)]


def op_case(op: str, name: str) -> OpCase:
    """One case by its exact name."""
    return next(case for case in _all_cases(op) if case.name == name)


def model(name: str) -> ModelGolden:
    """A model by its short name: t1, t2, t3 (text), f1 (Engram, images, DSpark), q1 (packed checkpoint)."""
    (folder,) = GOLDEN.glob(f"model_*/{name}")
    meta = json.loads((folder / "meta.json").read_text())
    return ModelGolden(folder, _tensors(folder / "expected.safetensors"), meta)


@cache
def _all_cases(op: str) -> list[OpCase]:
    declared = json.loads((GOLDEN / "ops" / f"{op}.json").read_text())
    if "vectors" in declared:  # known answers, integers only
        return [
            OpCase(f"v{i}", {}, {"counter": v["counter"], "key": v["key"]}, {"out": v["out"]})
            for i, v in enumerate(declared["vectors"])
        ]
    cases = {
        name: OpCase(name, case.get("params", {}), dict(case.get("in", {})), dict(case.get("out", {})))
        for name, case in declared.items()
    }
    path = GOLDEN / "ops" / f"{op}.safetensors"
    for key, tensor in _tensors(path).items() if path.exists() else ():
        name, side, field = _split(key)
        case = cases.setdefault(name, OpCase(name, {}, {}, {}))
        (case.inputs if side == "in" else case.outputs)[field] = tensor
    return list(cases.values())


def _split(key: str) -> tuple[str, str, str]:
    """ "<case>.<in|out>.<field>"; a case may have dots of its own."""
    for side in ("in", "out"):
        name, found, field = key.rpartition(f".{side}.")
        if found:
            return name, side, field
    raise ValueError(f"{key} is no input or output of a case")


def _tensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


# --- comparing -------------------------------------------------------------------------------------------------------


def rel(actual: Any, expected: Any) -> float:
    """max |actual - expected| / max |expected|, in float64. Shapes must be equal; a NaN gives NaN, which passes no
    `<=`."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp_min(1e-300)
    return float((actual.double() - expected.double()).abs().max() / scale)


def row_errors(actual: Any, expected: Any, axis: int = 0) -> Any:
    """Per position: max |actual - expected| of its row / max |expected| of all. axis: the one of positions."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, expected {tuple(expected.shape)}"
    scale = expected.double().abs().max().clamp_min(1e-300)
    difference = (actual.double() - expected.double()).abs().movedim(axis, 0)
    return difference.reshape(difference.shape[0], -1).amax(1) / scale


def assert_rows(
    actual: Any, expected: Any, *, axis: int = 0, close: float = 1e-4, share: float = 0.9, worst: float = 5e-2
) -> None:
    """The rule for quantised caches: a value that falls into the neighbouring bin is legal and moves single rows, so
    `share` of the rows must be within `close`, and all within `worst`."""
    errors = row_errors(actual, expected, axis)
    within = float((errors <= close).double().mean())
    assert within >= share, f"{within:.1%} of {len(errors)} rows within {close:g}; errors {errors.tolist()}"
    assert bool((errors <= worst).all()), f"a row is off by {float(errors.max()):.3g} (limit {worst:g})"


def bf16_ulps(actual: Any, expected: Any) -> int:
    """Largest distance of two bfloat16 tensors in units in the last place. -0.0 equals 0.0; NaN is an error."""
    import torch

    assert actual.dtype == expected.dtype == torch.bfloat16, f"{actual.dtype} and {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert not bool(actual.isnan().any() | expected.isnan().any()), "NaN"

    def order(x: Any) -> Any:  # sign and magnitude -> a number line
        bits = x.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((order(actual) - order(expected)).abs().max()) if actual.numel() else 0
