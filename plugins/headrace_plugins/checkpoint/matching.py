"""What a model needs against what a checkpoint has: every difference is found and named. No tensor library.

Layout of packed matrices: DeepSeek-V4.1 "Quantised linear layers".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.errors import ModelError
from headrace.modeling import Packing, TensorSpec
from headrace_plugins.checkpoint.folder import Folder
from headrace_plugins.checkpoint.header import Entry, meant, shown

BLOCK = 32
"""Numbers per scale: rows and columns of fp8_block, columns of the others."""
PLAIN = ("F32", "BF16", "F16")
SCALES = ("F8_E8M0", "U8")
CODES: Mapping[Packing, tuple[str, ...]] = {
    "none": (),
    "fp8_block": ("F8_E4M3",),
    "fp8_row": ("F8_E4M3",),
    "fp4_row": ("I8", "U8"),
}
"""Types of the file that hold the codes of a packing."""
QUANTISATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""quantization_config of the released checkpoint: the one that we read."""
_REQUIRED = ("quant_method", "weight_block_size")
"""The rest may be left unsaid: types and shapes of the tensors show it."""
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the model and where it lies."""

    spec: TensorSpec
    weight: Entry
    scale: Entry | None
    """None: stored plain."""


def scale_name(name: str) -> str:
    """`x.weight` -> `x.scale`."""
    return name.removesuffix(".weight") + ".scale"


def codes_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Of the packed tensor in the file: two e2m1 codes share a byte."""
    if spec.packing == "fp4_row":
        return (*spec.shape[:-1], spec.shape[-1] // 2)
    return spec.shape


def scale_shape(spec: TensorSpec) -> tuple[int, ...]:
    m, k = spec.shape
    return (-(-m // BLOCK) if spec.packing == "fp8_block" else m, -(-k // BLOCK))


def match(
    folder: Folder, specs: Iterable[TensorSpec], config: Mapping[str, Any], ignored: Callable[[str], bool]
) -> list[Match]:
    """Find every tensor. Raises ModelError HR-CKPT-05 that names all differences, HR-CKPT-06 for a quantisation that
    we can't read. ignored: whether a tensor that no spec names may be there."""
    wanted = list(specs)
    taken = {spec.name for spec in wanted} | {scale_name(spec.name) for spec in wanted if spec.packing != "none"}
    left = [name for name in folder.entries if name not in taken and not _is_ignored(name, ignored)]
    _check_quantisation(folder, config, [*left, *(name for name in folder.entries if name in taken)])
    matches: list[Match] = []
    faults = _Faults(left)
    for spec in wanted:
        weight = folder.entries.get(spec.name)
        scale = folder.entries.get(scale_name(spec.name)) if spec.packing != "none" else None
        if weight is None:
            faults.missing.append(spec.name)
            continue
        fault = _weight_fault(spec, weight)
        if not fault and weight.dtype in PLAIN and scale is not None:
            fault = f"is stored plain as {weight.dtype}, and yet has the scale {shown(scale.name)}"
        elif not fault and weight.dtype not in PLAIN and scale is None:
            fault = f"is stored as {weight.dtype}, but there is no {scale_name(spec.name)}"
        if fault:
            faults.wrong.append(f"{spec.name} {fault}")
        elif scale is not None and (fault := _scale_fault(spec, scale)):
            faults.wrong.append(f"{scale_name(spec.name)} {fault}")
        matches.append(Match(spec, weight, scale))
    faults.check(folder.path)
    return matches


def _is_ignored(name: str, ignored: Callable[[str], bool]) -> bool:
    return ignored(name) or (name.endswith(".scale") and ignored(name.removesuffix(".scale") + ".weight"))


def _weight_fault(spec: TensorSpec, weight: Entry) -> str:
    """What keeps a tensor from being read as its spec; empty: nothing."""
    kinds = (*PLAIN, *CODES[spec.packing])
    if weight.dtype not in kinds:
        return f"is stored as {weight.dtype}, not as {' or '.join(kinds)}"
    shape = spec.shape if weight.dtype in PLAIN else codes_shape(spec)
    if weight.shape != shape:
        return f"has the shape {list(weight.shape)}, the model needs {list(shape)}"
    return ""


def _scale_fault(spec: TensorSpec, scale: Entry) -> str:
    if scale.dtype not in SCALES:
        return f"is stored as {scale.dtype}, not as {' or '.join(SCALES)}"
    if scale.shape != scale_shape(spec):
        return f"has the shape {list(scale.shape)}, a matrix {list(spec.shape)} needs {list(scale_shape(spec))}"
    return ""


class _Faults:
    """Differences of one checkpoint, told in one error."""

    def __init__(self, surplus: list[str]) -> None:
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.surplus = surplus

    def check(self, path: str) -> None:
        counts = {"missing": len(self.missing), "wrong": len(self.wrong), "surplus": len(self.surplus)}
        if not any(counts.values()):
            return
        head = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        lines = [f"{path} does not hold the tensors that the model needs ({head}):"]
        for kind, texts in (("missing", self._missing()), ("wrong", self.wrong), ("surplus", self.surplus)):
            lines += [f"  {kind}: {shown(text)}" for text in texts[:_LISTED]]
            if counts[kind] > _LISTED:
                lines.append(f"  {kind}: and {counts[kind] - _LISTED} more")
        raise ModelError(
            "HR-CKPT-05",
            "\n".join(lines),
            "check that config.json belongs to these weights, and that the download is complete",
        )

    def _missing(self) -> list[str]:
        """Names that are listed, each with a surplus one that reads alike."""
        hints = [meant(name, self.surplus).rstrip() for name in self.missing[:_LISTED]]
        return [f"{name} ({hint})" if hint else name for name, hint in zip(self.missing, hints, strict=False)]


def _check_quantisation(folder: Folder, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse packed tensors of a quantisation that we don't know. Plain ones are read whatever the config says."""
    packed = next((folder.entries[name] for name in names if folder.entries[name].dtype not in PLAIN), None)
    declared = config.get("quantization_config")
    text = config.get("text_config")
    if declared is None and isinstance(text, dict):
        declared = text.get("quantization_config")
    if packed is None or declared is None:
        return
    if not isinstance(declared, dict):
        _refuse(folder, f"quantization_config = {shown(str(declared))}", packed)
    for key, known in QUANTISATION.items():
        if declared.get(key, None if key in _REQUIRED else known) != known:
            _refuse(folder, f"quantization_config with {key} = {shown(str(declared.get(key)))}", packed)


def _refuse(folder: Folder, what: str, packed: Entry) -> NoReturn:
    known = ", ".join(f"{key} {value}" for key, value in QUANTISATION.items())
    raise ModelError(
        "HR-CKPT-06",
        f"{folder.path}: config.json has a {what}, and {shown(packed.name)} is stored as {packed.dtype}",
        f"supported: {known}; or a checkpoint in BF16, F16 or F32",
    )
