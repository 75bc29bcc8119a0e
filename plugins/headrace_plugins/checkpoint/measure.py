"""How much resident memory loading a checkpoint takes: python -m headrace_plugins.checkpoint.measure FOLDER

Prints one JSON object. growth_bytes is the peak of resident memory while loading, less what was resident before, and
touched_bytes the same after every byte that is held was read once. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from headrace.modeling import Packing, Quantised, TensorSpec
from headrace_plugins.checkpoint.folder import Folder, open_folder
from headrace_plugins.checkpoint.loading import load_weights
from headrace_plugins.checkpoint.matching import BLOCK, scale_name


def specs_of(folder: Folder) -> Iterator[TensorSpec]:
    """What a model would have to ask for to get every tensor of a checkpoint, as far as types and shapes tell."""
    scales = {scale_name(name) for name in folder.entries if name.endswith(".weight")} & folder.entries.keys()
    for name, entry in folder.entries.items():
        if name in scales:
            continue
        shape = entry.shape
        packing: Packing = "none"
        if scale_name(name) in scales:
            rows = folder.entries[scale_name(name)].shape[0]
            if entry.dtype != "F8_E4M3":
                shape, packing = (*shape[:-1], 2 * shape[-1]), "fp4_row"
            else:
                packing = "fp8_row" if rows == shape[0] > -(-shape[0] // BLOCK) else "fp8_block"
        yield TensorSpec(
            name=name, shape=shape, packing=packing, dtype="float32" if entry.dtype == "F32" else "compute"
        )


def measure(folder: str, *, keep: str, compute: str) -> dict[str, float | int | str]:
    """Load once, in this process."""
    specs = list(specs_of(open_folder(folder)))
    torch.ones(8).to(torch.float8_e4m3fn).float().aminmax()  # what torch sets up on first use is not the load's
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = _status("VmRSS"), time.perf_counter()
    weights = load_weights(
        folder,
        specs,
        compute=torch.bfloat16 if compute == "bfloat16" else torch.float32,
        keep="quantised" if keep == "quantised" else "dequant",
    )
    seconds, peak = time.perf_counter() - start, _status("VmHWM")
    tensors = [
        tensor
        for weight in weights.values()
        for tensor in ((weight.codes, weight.scales) if isinstance(weight, Quantised) else (weight,))
    ]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for tensor in tensors:
        if tensor.numel():
            tensor.view(torch.uint8).view(-1)[::4096].max()
    growth, touched = peak - before, _status("VmHWM") - before
    return {
        "weights": keep,
        "compute": compute,
        "held_bytes": held,
        "growth_bytes": growth,
        "touched_bytes": touched,
        "growth_ratio": round(growth / held, 4),
        "touched_ratio": round(touched / held, 4),
        "seconds": round(seconds, 2),
    }


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, field
    return int(found[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what loading a checkpoint takes.")
    parser.add_argument("folder")
    parser.add_argument("--weights", choices=("dequant", "quantised"), default="dequant")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    print(json.dumps(measure(args.folder, keep=args.weights, compute=args.compute)))


if __name__ == "__main__":
    main()
