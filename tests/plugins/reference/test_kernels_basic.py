"""Kernels of layers and experts against golden vectors and plain formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need torch")
pytest.importorskip("safetensors", reason="golden tensors are safetensors")

from golden import OpCase, bf16_ulps, rel  # noqa: E402
from kernel_cases import cases, numbers  # noqa: E402

from headrace.modeling import Quantised  # noqa: E402
from headrace.ops import KernelContext  # noqa: E402
from headrace_plugins.reference.kernels import basic, formats  # noqa: E402

F32 = KernelContext(device="cpu", compute="float32")
BF16 = KernelContext(device="cpu", compute="bfloat16")
DENSE = (basic.linear_dense, basic.linear_dense_tiled)
GROUPED = (basic.linear_grouped, basic.linear_grouped_tiled)
EXPERTS = (basic.moe_experts, basic.moe_experts_tiled)


# --- embedding, norm, rotary positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)])
def test_embedding_picks_rows(shape: tuple[int, ...]) -> None:
    table = numbers(40, 64)
    ids = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(basic.embed_lookup(F32)(table, ids), table[ids])
    codes, scales = formats.quantise_fp8_row(table)
    packed = Quantised(codes, scales, "fp8_row", (40, 64))
    for context, dtype in ((F32, torch.float32), (BF16, torch.bfloat16)):
        got = basic.embed_lookup(context)(packed, ids)
        assert got.dtype == dtype
        assert torch.equal(got, formats.unpack(packed, dtype)[ids])


@cases("rms_norm", without="_res")
def test_rms_norm(case: OpCase) -> None:
    x, weight = case.inputs["x"], case.inputs["weight"]
    assert bf16_ulps(basic.norm_rms(BF16)(x, weight, case.params["eps"]), case.outputs["y"]) <= 1
    exact = x.double() * case.outputs["rstd"].double()[:, None] * weight.double()
    assert rel(basic.norm_rms(F32)(x.float(), weight, case.params["eps"]), exact) <= 2e-6


@cases("rms_norm", of="_res")
def test_rms_norm_of_a_sum(case: OpCase) -> None:
    total = case.inputs["x"] + case.inputs["residual"]
    assert torch.equal(total, case.outputs["residual_out"])
    assert bf16_ulps(basic.norm_rms(BF16)(total, case.inputs["weight"], case.params["eps"]), case.outputs["y"]) <= 1


def test_rms_norm_at_the_edges() -> None:
    rms = basic.norm_rms(BF16)
    weight = torch.ones(64)
    assert torch.equal(rms(torch.zeros(1, 64), weight, 1e-20), torch.zeros(1, 64, dtype=torch.bfloat16))
    assert rms(torch.full((1, 64), 1e-19), weight, 1e-20).float().max() == pytest.approx(1e-9, rel=1e-2)
    assert torch.equal(rms(torch.full((2, 64), -1e15), weight, 1e-20), torch.full((2, 64), -1.0, dtype=torch.bfloat16))
    assert rms(torch.zeros(0, 3, 64), weight, 1e-6).shape == (0, 3, 64)
    # one rounding: x is float32 here, and rounding it first would give another number
    x = numbers(50, 64)
    assert torch.equal(rms(x, weight, 1e-6), basic.norm_rms(F32)(x, weight, 1e-6).bfloat16())


@cases("rope")
def test_rope(case: OpCase) -> None:
    cos, sin = basic.rope_table(F32)(case.inputs["positions"], case.outputs["inv_freq"])
    assert (cos - case.outputs["cos"]).abs().max() <= 1e-6
    assert (sin - case.outputs["sin"]).abs().max() <= 1e-6
    x, dim = case.inputs["x"], case.params["dim"]
    apply = basic.rope_apply(BF16)
    assert bf16_ulps(apply(x, cos, sin), case.outputs["y"]) <= 1
    assert bf16_ulps(apply(x, cos, sin, inverse=True), case.outputs["y_inverse"]) <= 1
    turned = basic.rope_apply(F32)(x.float(), cos, sin)
    assert (turned[..., -dim:] - case.outputs["y_fp32_tail"]).abs().max() <= 1e-5
    assert torch.equal(turned[..., :-dim], x.float()[..., :-dim])


def test_rope_layouts_are_permutations_of_one_another() -> None:
    x = numbers(6, 3, 16)
    cos, sin = basic.rope_table(F32)(torch.arange(6) * 1000, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    apply = basic.rope_apply(F32)
    order = torch.tensor([*range(8), 8, 10, 12, 14, 9, 11, 13, 15])
    assert torch.equal(apply(x[..., order], cos, sin, layout="halves"), apply(x, cos, sin)[..., order])
    assert torch.equal(apply(x[:, 0], cos, sin), apply(x, cos, sin)[:, 0])
    back = apply(apply(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


# --- linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", DENSE)
@cases("quant_linear")
def test_quantised_linear(case: OpCase, make: Any) -> None:
    rounded = basic.quant_activation(BF16)(case.inputs["x"])
    assert torch.equal(rounded.float(), case.outputs["x_dequant"])
    m, k = case.inputs["w"].shape
    fp8 = Quantised(case.outputs["w_codes"], case.outputs["w_scale_ue8m0"], "fp8_block", (m, k))
    fp4 = Quantised(case.outputs["w4_packed"], case.outputs["w4_scale_ue8m0"], "fp4_row", (m, k))
    for weight, expected in ((fp8, case.outputs["y_fp32"]), (fp4, case.outputs["y4_fp32"])):
        assert rel(make(F32)(rounded.float(), weight), expected) <= 1e-5
        assert rel(make(BF16)(rounded, weight, wide=True), expected) <= 1e-5
        assert bf16_ulps(make(BF16)(rounded, weight), expected.bfloat16()) <= 1


@pytest.mark.parametrize("make", DENSE)
@pytest.mark.parametrize("n", [0, 1, 8, 19])
def test_dense(make: Any, n: int) -> None:
    x, weight, bias = numbers(n, 96), numbers(40, 96, seed=1), numbers(40)
    expected = x.double() @ weight.double().T + bias
    assert rel(make(F32)(x, weight, bias), expected) <= 1e-6
    narrow = make(BF16)(x.bfloat16(), weight.bfloat16(), bias)
    wide = make(BF16)(x.bfloat16(), weight.bfloat16(), bias, wide=True)
    rounded = x.bfloat16().double() @ weight.bfloat16().double().T
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert rel(wide, rounded + bias) <= 1e-6
    assert rel(narrow, rounded + bias) <= 2**-7


@pytest.mark.parametrize("make", DENSE)
def test_wide_products_convert_the_weight_in_pieces(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = numbers(3, 96).bfloat16(), numbers(40, 96, seed=1).bfloat16(), numbers(40).bfloat16()
    whole = make(BF16)(x, weight, bias, wide=True)
    monkeypatch.setattr(basic, "WIDEN", 96 * 7)
    torch.testing.assert_close(make(BF16)(x, weight, bias, wide=True), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", DENSE)
def test_weights_that_stay_float32_are_not_rounded(make: Any) -> None:
    x, weight = numbers(3, 96).bfloat16(), numbers(40, 96, seed=1)
    assert rel(make(BF16)(x, weight, wide=True), x.double() @ weight.double().T) <= 1e-6
    assert make(BF16)(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("make", GROUPED)
@pytest.mark.parametrize("n", [0, 1, 11])
def test_grouped(make: Any, n: int) -> None:
    x, weight = numbers(n, 3, 64), numbers(3 * 32, 64)
    expected = torch.einsum("ngk,gmk->ngm", x.double(), weight.double().unflatten(0, (3, 32)))
    assert rel(make(F32)(x, weight), expected) <= 1e-6
    assert rel(make(BF16)(x.bfloat16(), weight.bfloat16()), expected) <= 2e-2
    codes, scales = formats.quantise_fp8_block(weight)
    packed = Quantised(codes, scales, "fp8_block", (96, 64))
    assert torch.equal(make(F32)(x, packed), make(F32)(x, formats.unpack(packed, torch.float32)))


# --- mixture of experts ----------------------------------------------------------------------------------------------


@cases("swiglu_clamp")
def test_swiglu(case: OpCase) -> None:
    gate, up = case.inputs["gate_up"].chunk(2, -1)
    weight, limit = case.inputs["routing_weight"], case.params["limit"]
    swiglu = basic.act_swiglu(F32)
    torch.testing.assert_close(swiglu(gate, up, limit), case.outputs["h"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(swiglu(gate, up, limit, weight), case.outputs["h_weighted"], rtol=1e-6, atol=1e-7)
    assert torch.equal(basic.act_swiglu(BF16)(gate, up, limit, weight), swiglu(gate, up, limit, weight).bfloat16())


def test_swiglu_at_the_edges() -> None:
    swiglu = basic.act_swiglu(F32)
    gate = torch.tensor([[1e30, -1e30, 0.0, -0.0]])
    assert swiglu(gate, torch.full((1, 4), 2.0)).tolist() == [pytest.approx([2e30, 0.0, 0.0, 0.0])]
    assert swiglu(gate, torch.full((1, 4), -1e30), 10.0)[0, 0].item() == pytest.approx(-100, rel=1e-3)
    assert swiglu(gate[:0], gate[:0], 10.0).shape == (0, 4)


# The `_physical` cases also mask tokens and choose replicas of experts: that is for a parallel strategy to do.
@cases("moe_gate", without="_physical")
def test_route(case: OpCase) -> None:
    bias = torch.where(case.inputs["image_mask"][:, None], case.inputs["bias_vl"], case.inputs["bias"])
    route = basic.moe_route(F32)
    top, scale = case.params["top_k"], case.params["routed_scaling_factor"]
    ids, weights = route(case.inputs["logits"], bias, top, scale)
    assert torch.equal(ids, case.outputs["expert_ids"])
    torch.testing.assert_close(weights, case.outputs["weights"], rtol=1e-6, atol=1e-12)
    text = ~case.inputs["image_mask"]
    assert torch.equal(route(case.inputs["logits"][text], case.inputs["bias"], top, scale)[0], ids[text])


def test_route_at_the_edges() -> None:
    route = basic.moe_route(F32)
    ids, weights = route(torch.zeros(2, 64), torch.zeros(64), 3, 1.5)
    assert ids.tolist() == [[0, 1, 2]] * 2  # ties
    assert weights.sum(1).tolist() == pytest.approx([1.5, 1.5])
    ids, weights = route(torch.tensor([[-1e4, 300.0, -90.0]]), torch.zeros(3), 2, 1.0)
    assert ids.tolist() == [[1, 2]]
    assert weights.isfinite().all()
    assert route(torch.full((1, 4), -1e4), torch.zeros(4), 2, 1.0)[1].tolist() == [[0.0, 0.0]]
    assert [t.shape for t in route(torch.zeros(0, 4), torch.zeros(4), 2, 1.0)] == [(0, 2), (0, 2)]


def experts_of(n_experts: int, m: int, h: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], ...]:
    w = numbers(3, n_experts, m, h).to(dtype) / 8
    return list(w[0]), list(w[1]), list(w[2].mT.contiguous())


@pytest.mark.parametrize("make", EXPERTS)
@pytest.mark.parametrize("n", [0, 1, 23])
@pytest.mark.parametrize("quantise", [False, True])
def test_experts(make: Any, n: int, quantise: bool) -> None:
    w1, w3, w2 = experts_of(5, 32, 64, torch.float32)
    x = numbers(n, 64)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(n + 1)])[:n]
    weights = numbers(n, 3).abs()
    got = make(F32)(x, ids, weights, w1, w3, w2, 2.0, quantise)
    assert (got.shape, got.dtype) == ((n, 64), torch.float32)
    rounding = formats.round_activation if quantise else torch.Tensor.float
    x = rounding(x).double()
    for t in range(n):
        total = torch.zeros(64, dtype=torch.float64)
        for slot in range(3):
            e = int(ids[t, slot])
            gate, up = (w1[e].double() @ x[t]).clamp(max=2), (w3[e].double() @ x[t]).clamp(-2, 2)
            h = torch.nn.functional.silu(gate) * up * weights[t, slot]
            total += w2[e].double() @ rounding(h.float()).double()
        # with rounding, a number may fall into the neighbouring bin
        assert rel(got[t], total) <= (3e-2 if quantise else 2e-6)


@pytest.mark.parametrize("make", EXPERTS)
def test_experts_of_bfloat16(make: Any) -> None:
    w1, w3, w2 = experts_of(5, 32, 64, torch.bfloat16)
    x, ids = numbers(9, 64).bfloat16(), torch.arange(18).view(9, 2) % 5
    got = make(BF16)(x, ids, torch.ones(9, 2), w1, w3, w2)
    wide = [[w.float() for w in each] for each in (w1, w3, w2)]
    expected = make(F32)(x.float(), ids, torch.ones(9, 2), *wide)
    assert got.dtype == torch.float32
    assert rel(got, expected) <= 1e-2


@pytest.mark.parametrize("make", EXPERTS)
def test_experts_may_stay_packed(make: Any) -> None:
    dense = experts_of(4, 32, 64, torch.float32)
    packed = [[Quantised(*formats.quantise_fp4_row(w), "fp4_row", tuple(w.shape)) for w in each] for each in dense]
    unpacked = [[formats.unpack(w, torch.float32) for w in each] for each in packed]
    x, ids, weights = numbers(9, 64), torch.arange(18).view(9, 2) % 4, torch.rand(9, 2)
    assert torch.equal(make(F32)(x, ids, weights, *packed), make(F32)(x, ids, weights, *unpacked))


@pytest.mark.parametrize("make", EXPERTS)
def test_experts_are_added_in_the_order_of_their_slots(make: Any) -> None:
    w1, w3, w2 = experts_of(6, 32, 24, torch.float32)
    x, weights = numbers(20, 24), numbers(20, 6)
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i)) for i in range(20)])
    found = make(F32)(x, ids, weights, w1, w3, w2)
    alone = [make(F32)(x, ids[:, i : i + 1], weights[:, i : i + 1], w1, w3, w2) for i in range(6)]
    if make is basic.moe_experts_tiled:  # else the number of rows per expert changes their bits
        assert torch.equal(found, ((((alone[0] + alone[1]) + alone[2]) + alone[3]) + alone[4]) + alone[5])
    torch.testing.assert_close(found, sum(alone))


def test_sampling_is_the_cores() -> None:
    from headrace.sampling import sample_step

    assert basic.sample_step(F32) is sample_step
