"""Kernels of residual streams, Engram and the drafter's heads against golden vectors and plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need torch")
pytest.importorskip("safetensors", reason="golden tensors are safetensors")

from golden import OpCase, bf16_ulps, op_case, rel  # noqa: E402
from kernel_cases import cases, numbers  # noqa: E402

from headrace.ops import KernelContext  # noqa: E402
from headrace_plugins.reference.kernels import streams  # noqa: E402

F32 = KernelContext(device="cpu", compute="float32")
BF16 = KernelContext(device="cpu", compute="bfloat16")
MIX = (streams.mhc_mix, streams.mhc_mix_tiled)


# --- mHC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MIX)
@cases("mhc", without="extreme")
def test_mix(case: OpCase, make: Any) -> None:
    given, params = case.inputs, case.params
    arguments = (given["fn"], given["base"], given["scale"], params["rms_eps"], params["hc_eps"], params["iters"])
    found = make(BF16)(given["R"], *arguments)
    for name, tensor in zip(("pre", "post", "comb"), found, strict=True):
        assert tensor.dtype == torch.float32
        assert (tensor - case.outputs[name]).abs().max() <= 2e-6, name
    for of_float, of_bfloat in zip(make(F32)(given["R"].float(), *arguments), found, strict=True):
        assert torch.equal(of_float, of_bfloat)


@cases("mhc", of="extreme")
def test_sinkhorn_of_extreme_logits(case: OpCase) -> None:
    comb = streams.sinkhorn(case.inputs["logits"], case.params["hc_eps"], case.params["iters"])
    assert (comb - case.outputs["comb"]).abs().max() <= 1e-5


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("s", [2, 4, 5])
def test_sinkhorn_is_what_the_formula_says(iters: int, s: int) -> None:
    logits = numbers(7, s, s) * 3
    comb = logits.double().softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    found = streams.sinkhorn(logits, 1e-6, iters)
    assert found.is_contiguous()
    assert (found - comb).abs().max() <= 2e-6


@cases("mhc", without="extreme")
def test_collapse_and_update(case: OpCase) -> None:
    given, given_out = case.inputs, case.outputs
    collapsed = streams.mhc_collapse(BF16)(given["R"], given["prev_pre"])
    assert bf16_ulps(collapsed, given_out["collapsed"]) <= 1
    updated = streams.mhc_update(BF16)(given["R"], given["sublayer_out"], given_out["post"], given_out["comb"])
    assert bf16_ulps(updated, given_out["R_new"]) <= 1


def test_comb_goes_from_its_first_index_to_its_second() -> None:
    r, comb = torch.eye(4).expand(1, 4, 4), numbers(1, 4, 4)
    updated = streams.mhc_update(F32)(r, torch.zeros(1, 4), torch.zeros(1, 4), comb)
    assert torch.equal(updated[0], comb[0].T)  # stream j gets comb[i, j] of stream i, which is the i-th unit vector


@pytest.mark.parametrize("make", MIX)
def test_mhc_of_no_tokens(make: Any) -> None:
    none = torch.zeros(0, 4, 64)
    pre, post, comb = make(F32)(none, numbers(24, 256), numbers(24), numbers(3), 1e-20, 1e-6, 20)
    assert (pre.shape, post.shape, comb.shape) == ((0, 4), (0, 4), (0, 4, 4))
    assert streams.mhc_collapse(F32)(none, pre).shape == (0, 64)
    assert streams.mhc_update(F32)(none, none[:, 0], post, comb).shape == (0, 4, 64)


@pytest.mark.parametrize("make", MIX)
def test_mix_of_zeros_and_of_large_streams_is_finite(make: Any) -> None:
    for value in (0.0, -0.0, 1e-15, 1e15):
        r = torch.full((2, 4, 64), value)
        for tensor in make(F32)(r, numbers(24, 256), numbers(24), numbers(3), 1e-20, 1e-6, 20):
            assert tensor.isfinite().all(), value


# --- Engram ----------------------------------------------------------------------------------------------------------


@cases("engram", of="hash_")
def test_hash(case: OpCase) -> None:
    kernel = streams.engram_hash(F32)
    ngrams = case.inputs["ngram_ids"].long()
    for layer, rows in enumerate(case.outputs["rows"]):
        primes, offsets = (case.outputs[name][layer].flatten().long() for name in ("primes", "offsets"))
        found = kernel(ngrams, case.outputs["multipliers_i64"][layer], primes, offsets)
        assert found.dtype == torch.int64
        assert torch.equal(found, rows.long())
        assert int(found.max()) < case.params["table_rows"][layer]
        assert kernel(ngrams[:0], case.outputs["multipliers_i64"][layer], primes, offsets).shape == (0, rows.shape[1])


def test_hash_wraps_and_leaves_no_negative_remainder() -> None:
    ngrams = np.array([[2**62, 3], [99091, 1]])
    multipliers = np.array([5, 2**62 + 1])
    expected = []
    for a, b in ngrams.tolist():
        word = (a * 5 ^ b * (2**62 + 1)) % 2**64
        word -= 2**64 if word >= 2**63 else 0
        expected.append([word % 97, word % 101 + 97])
    tensors = (torch.from_numpy(ngrams), torch.from_numpy(multipliers), torch.tensor([97, 101]), torch.tensor([0, 97]))
    assert streams.engram_hash(F32)(*tensors).tolist() == expected


@cases("engram", of="gate")
def test_gate(case: OpCase) -> None:
    given, eps = case.inputs, case.params["eps"]
    weights = (given["q_weight"], given["k_weight"])
    gates = streams.engram_gates(given["R"], given["kv"][:, :-1], *weights, eps)
    assert (gates - case.outputs["gate"]).abs().max() <= 2e-6
    found = streams.engram_gate(BF16)(given["R"], given["kv"], *weights, eps, given["image_mask"])
    assert bf16_ulps(found, case.outputs["R_new"]) <= 1
    assert torch.equal(found[given["image_mask"]], given["R"][given["image_mask"]])
    unmasked = streams.engram_gate(BF16)(given["R"], given["kv"], *weights, eps)
    assert torch.equal(unmasked[~given["image_mask"]], found[~given["image_mask"]])
    assert not torch.equal(unmasked, found)


def test_gate_of_no_tokens_and_of_zeros() -> None:
    gate = streams.engram_gate(F32)
    weight = torch.ones(4, 32)
    assert gate(torch.zeros(0, 4, 32), torch.zeros(0, 5, 32), weight, weight, 1e-20).shape == (0, 4, 32)
    opened = gate(torch.zeros(1, 4, 32), torch.ones(1, 5, 32), weight, weight, 1e-20)
    assert opened.tolist() == [[[0.5] * 32] * 4]  # sign(0) = 0
    keys = torch.ones(1, 1, 32)
    keys[..., 1::2] = -1
    keys[..., 0] += 1e-6  # almost orthogonal to the streams: the root is taken of 1e-6, not of less
    gates = streams.engram_gates(torch.ones(1, 1, 32), keys, weight[:1], weight[:1], 1e-20)
    assert gates.item() == pytest.approx(1 / (1 + np.exp(-1e-3)), abs=1e-6)


# --- drafting --------------------------------------------------------------------------------------------------------


@cases("kv_index", of="confidence_")
def test_confidence(case: OpCase) -> None:
    given = case.inputs
    arguments = (given["hidden_before_norm"], given["markov_embed"], given["weight"], case.params["temperature"])
    found = streams.draft_confidence(BF16)(*arguments)
    assert (found.shape, found.dtype) == ((6,), torch.float32)
    assert (found - case.outputs["confidence"]).abs().max() <= 1e-6


def test_confidence_is_clamped() -> None:
    confidence = streams.draft_confidence(F32)
    weight = torch.ones(1, 3)
    found = confidence(torch.tensor([[1e9, 0.0], [-1e9, 0.0]]), torch.zeros(2, 1), weight, 1.0)
    assert found[0] == 1
    assert found[1].item() == pytest.approx(np.exp(-60), rel=1e-4, abs=0)
    assert confidence(torch.zeros(0, 2), torch.zeros(0, 1), weight, 1.0).shape == (0,)


def test_target_feature() -> None:
    case = op_case("kv_index", "target_feature")
    assert bf16_ulps(streams.draft_feature(BF16)(case.inputs["R"]), case.outputs["feature"]) <= 1
    r = numbers(5, 4, 48)
    assert rel(streams.draft_feature(F32)(r), r.double().mean(1)) <= 1e-6
