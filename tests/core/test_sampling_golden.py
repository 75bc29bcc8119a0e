"""Masks, filters and noise against the golden vectors of other programs."""

from __future__ import annotations

import numpy as np
import pytest
from golden import OpCase, op_cases

from headrace import noise
from headrace.filters import survivors
from headrace.sampling import apply_mask

TOP_P_MARGIN = 1e-5
"""A threshold this close to a cumulative mass may fall either way in float32."""


def test_philox_gives_the_published_answers() -> None:
    cases = op_cases("philox4x32_10")
    assert len(cases) >= 3
    for case in cases:
        counter, key = (np.array(case.inputs[name], np.uint32) for name in ("counter", "key"))
        assert noise.philox4x32(counter[None], key).tolist() == [case.outputs["out"]], case.name


def tensor_cases(op: str, prefix: str) -> list[OpCase]:
    pytest.importorskip("torch", reason="golden tensors are read with torch")
    pytest.importorskip("safetensors", reason="golden tensors are safetensors")
    return op_cases(op, prefix)


def test_filters_match_deepinfer() -> None:
    checked = 0
    for case in tensor_cases("sampling_filter", "c"):
        given = {name: tensor.numpy() for name, tensor in case.inputs.items()}
        for r, logits in enumerate(given["logits"]):
            inv_t = np.float32(1 / given["temperature"][r])
            top_k, top_p = max(0, int(given["top_k"][r])), float(given["top_p"][r])  # -1 is off there, 0 here
            ids = survivors(logits, inv_t, top_k, top_p, 0.0, 1.0)
            kept = np.zeros(logits.size, bool)
            kept[slice(None) if ids is None else ids] = True
            if case.params["top_p_margin"][r] <= TOP_P_MARGIN:
                continue
            checked += 1
            assert (kept == case.outputs["kept"][r].numpy()).all(), f"{case.name} row {r}"
            z = logits.astype(np.float64) * inv_t
            logprobs = z - z[kept].max()
            logprobs -= np.log(np.exp(logprobs[kept]).sum())
            np.testing.assert_allclose(logprobs[kept], case.outputs["logprobs"][r].numpy()[kept], rtol=0, atol=1e-5)
    assert checked >= 20


def test_masks_match_deepinfer() -> None:
    # These masks cover the whole vocabulary. Tokens beyond a narrower one are left as they are by DeepInfer, and banned
    # here: no token that the grammar doesn't know may come through.
    cases = [case for case in tensor_cases("bitmask", "c") if masked_rows(case)]
    assert len(cases) >= 6
    for case in cases:
        logits, bits = case.inputs["logits"].numpy().copy(), case.inputs["bitmask"].numpy()
        for request, row in masked_rows(case):
            apply_mask(logits[row], bits[request])
        np.testing.assert_array_equal(logits, case.outputs["logits"].numpy(), err_msg=case.name)


def masked_rows(case: OpCase) -> list[tuple[int, int]]:
    """(request, row of the logits) that the case masks: the row at `step` of each request that has so many."""
    requests = case.inputs["requests"].tolist()
    if "step" not in case.params:
        return [(request, request) for request in requests]
    ends = [*case.inputs["first_row"].tolist(), len(case.inputs["logits"])]
    rows = [(request, ends[request] + case.params["step"]) for request in requests]
    return [(request, row) for request, row in rows if row < ends[request + 1]]
