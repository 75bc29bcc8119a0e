"""Number formats against golden bytes, and at their edges."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need PyTorch: pip install 'headrace[torch]'")

import golden  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_caches import round_trip  # noqa: E402

from headrace.modeling import CacheFormat, Quantised  # noqa: E402
from headrace_plugins.reference.kernels import formats  # noqa: E402

CACHE_CASES = ("Q8", "Q4", "Qm")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def cache_case(name):
    case = golden.op_case("cache_pack", name)
    return case, CacheFormat(name.lower(), case.inputs["x"].shape[1])


# --- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHE_CASES)
def test_entries_are_the_golden_bytes(name):
    case, format = cache_case(name)
    entries = formats.pack(format, case.inputs["x"])
    assert torch.equal(entries, torch.cat([case.outputs["codes"], case.outputs["scales"]], 1))
    assert entries.shape[1] == format.entry_bytes == case.params["bytes_per_token"]


@pytest.mark.parametrize("name", CACHE_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_entries_read_back_as_the_golden_numbers(name, dtype):
    case, format = cache_case(name)
    x, expected = case.inputs["x"].to(dtype), case.outputs["dequant_bf16"].to(dtype)
    assert torch.equal(formats.unpack_entries(format, formats.pack(format, x)), expected.float())
    rounded = round_trip(format, x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, expected)


def test_q4_multiplies_by_the_reciprocal_of_the_scale():
    case, format = cache_case("Q4")
    codes = formats.pack(format, case.inputs["x"])[:, : format.width // 2]
    assert not torch.equal(codes, case.outputs["codes_division"])  # the golden rows hold ties that tell


@pytest.mark.parametrize("name", ["q8", "q4", "qm"])
def test_zeros_keep_their_sign_and_tiny_groups_the_least_scale(name):
    format = CacheFormat(name, 32)
    x = torch.tensor([[0.0, -0.0] * 16, [2.0**-140, -(2.0**-140)] * 16])
    rounded = round_trip(format, x)
    assert torch.equal(rounded[0], x[0])
    assert torch.equal(torch.signbit(rounded), torch.signbit(x))
    group = {"q8": 32, "q4": 16, "qm": 32}[name]
    scale = {"q8": 2.0**-22, "q4": 2.0**-9, "qm": 2.0**-126}[name]  # of amax 1e-4, 6 * 2^-9, 6 * 2^-126
    stored = formats.pack(format, torch.zeros(1, 32))[0, -32 // group :]
    decode = formats.decode_e4m3 if name == "q4" else formats.decode_ue8m0
    assert decode(stored).tolist() == [scale] * (32 // group)


@pytest.mark.parametrize("name", ["q8", "q4", "qm"])
def test_nan_stays_in_its_group(name):
    format = CacheFormat(name, 96)
    x = torch.ones(2, 96)
    x[1, 40] = torch.nan
    rounded = round_trip(format, x)
    group = slice(32, 48) if name == "q4" else slice(32, 64)
    assert rounded[1, group].isnan().all()
    assert rounded.isnan().sum() == group.stop - group.start


def test_infinity_is_nan_or_saturates():
    x = torch.full((1, 32), -torch.inf)
    assert round_trip(CacheFormat("q8", 32), x).isnan().all()
    assert round_trip(CacheFormat("qm", 32), x).isnan().all()
    assert (round_trip(CacheFormat("q4", 32), x) == -448 * 6).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_plain_formats_are_the_numbers(name):
    x = torch.randn(3, 8)
    format = CacheFormat(name, 8)
    dtype = getattr(torch, name)
    entries = formats.pack(format, x)
    assert entries.shape == (3, format.entry_bytes)
    assert torch.equal(formats.unpack_entries(format, entries), x.to(dtype))
    assert torch.equal(round_trip(format, x), x.to(dtype).float())


@pytest.mark.parametrize("name", ["q8", "q4", "qm"])
def test_no_entries(name):
    format = CacheFormat(name, 64)
    entries = formats.pack(format, torch.empty(0, 64))
    assert entries.shape == (0, format.entry_bytes)
    assert formats.unpack_entries(format, entries).shape == (0, 64)


NUMBERS = st.lists(st.floats(-2688, 2688, width=32), min_size=64, max_size=64).map(lambda x: torch.tensor([x]))


@given(NUMBERS, st.sampled_from(["q8", "qm"]))
def test_rounding_twice_is_rounding_once(x, name):
    once = round_trip(CacheFormat(name, 64), x)
    assert torch.equal(round_trip(CacheFormat(name, 64), once), once)


@given(NUMBERS)
def test_q4_is_within_a_step_of_its_scale(x):
    error = (round_trip(CacheFormat("q4", 64), x) - x).view(4, 16).abs().amax(1)
    assert (error <= 1.1 * (x.view(4, 16).abs().amax(1) / 6).clamp_min(2.0**-9)).all()


# --- scales and codes ------------------------------------------------------------------------------------------------


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_scale_is_the_least_power_of_two_not_below(x):
    byte, scale = formats.power_of_two(torch.tensor([x]))
    assert scale.item() == 2.0 ** (int(byte) - 127)
    assert scale.item() / 2 < x <= scale.item()


def test_scale_bytes_at_the_edges():
    x = torch.tensor([1.0, 1.0000001, 2.0, 2.0**-126, torch.inf, torch.nan])
    byte, scale = formats.power_of_two(x)
    assert byte.tolist() == [127, 128, 128, 1, 255, 255]
    assert scale.isnan().tolist() == [False] * 4 + [True] * 2
    assert formats.decode_ue8m0(torch.tensor([0], dtype=torch.uint8)).item() == 2.0**-127


def test_e2m1_rounds_ties_to_even_codes_and_saturates():
    middles = [(a + b) / 2 for a, b in pairwise(E2M1)]
    below = [torch.tensor(x).nextafter(torch.tensor(0.0)).item() for x in middles]
    above = [torch.tensor(x).nextafter(torch.tensor(9.0)).item() for x in middles]
    x = torch.tensor([*E2M1, *middles, *below, *above, 7.0, torch.inf])
    even = [code + code % 2 for code in range(7)]
    codes = [*range(8), *even, *range(7), *range(1, 8), 7, 7]
    packed = formats.encode_e2m1(torch.stack([x, -x], 1))
    assert packed.squeeze(1).tolist() == [code | (code | 8) << 4 for code in codes]
    assert formats.decode_e2m1(packed[:8]).tolist() == [[m, -m] for m in E2M1]


def test_e4m3_codes_are_all_read():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = formats.decode_e4m3(codes)
    assert numbers.isnan().sum() == 2
    assert numbers.nan_to_num(0).abs().max() == 448
    real = ~numbers.isnan()
    assert torch.equal(formats.encode_e4m3(numbers[real]), codes[real])


# --- activations and weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c0", "c1"])
def test_activations_and_weights_are_the_golden_bytes(name):
    case = golden.op_case("quant_linear", name)
    x, w, out = case.inputs["x"], case.inputs["w"], case.outputs

    codes, scales = formats.quantise_activation(x)
    assert torch.equal(codes, out["x_codes"])
    assert torch.equal(scales, out["x_scale_ue8m0"])
    assert torch.equal(formats.round_activation(x).float(), out["x_dequant"])

    codes, scales = formats.quantise_fp8_block(w)
    assert torch.equal(codes, out["w_codes"])
    assert torch.equal(scales, out["w_scale_ue8m0"])
    block = Quantised(codes, scales, "fp8_block", tuple(w.shape))
    assert torch.equal(formats.unpack(block, torch.float32), out["w_dequant"])

    codes, scales = formats.quantise_fp4_row(w)
    assert torch.equal(codes, out["w4_packed"])
    assert torch.equal(scales, out["w4_scale_ue8m0"])
    rows = Quantised(codes, scales, "fp4_row", tuple(w.shape))
    assert torch.equal(formats.unpack(rows, torch.float32), out["w4_dequant"])

    x, y = formats.round_activation(x).double(), out["y_fp32"]
    assert golden.rel(x @ formats.unpack(block, torch.float64).T, y) <= 1e-5
    assert golden.rel(x @ formats.unpack(rows, torch.float64).T, out["y4_fp32"]) <= 1e-5


@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (32, 31), (70, 45), (5, 5), (0, 32)])
def test_blocks_may_be_cut_off_at_the_edges(shape):
    w = torch.randn(shape)
    codes, scales = formats.quantise_fp8_block(w)
    assert scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    back = formats.unpack(Quantised(codes, scales, "fp8_block", shape), torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            scale = 2.0 ** (int(scales[i, j]) - 127)
            assert w[part].abs().max() <= 448 * scale
            expected = (w[part] / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(back[part], expected)


@pytest.mark.parametrize("packing", ["fp8_block", "fp8_row", "fp4_row"])
def test_unpacking_in_chunks_changes_nothing(packing, monkeypatch):
    w = torch.randn(200, 64)
    codes, scales = getattr(formats, f"quantise_{packing}")(w)
    weight = Quantised(codes, scales, packing, (200, 64))
    whole = formats.unpack(weight, torch.bfloat16)
    assert whole.dtype == torch.bfloat16
    monkeypatch.setattr(formats, "CHUNK", 1)
    assert torch.equal(formats.unpack(weight, torch.bfloat16), whole)
    assert golden.rel(whole.float(), w) < 0.2


@pytest.mark.parametrize("packing", ["fp8_row", "fp4_row"])
def test_single_rows_are_those_of_the_matrix(packing):
    codes, scales = getattr(formats, f"quantise_{packing}")(torch.randn(50, 64))
    weight = Quantised(codes, scales, packing, (50, 64))
    rows = torch.tensor([49, 0, 7, 7])
    assert torch.equal(formats.unpack_rows(weight, rows, torch.float32), formats.unpack(weight, torch.float32)[rows])


def test_a_matrix_of_blocks_has_no_rows_of_its_own():
    codes, scales = formats.quantise_fp8_block(torch.randn(32, 32))
    with pytest.raises(ValueError, match="blocks"):
        formats.unpack_rows(Quantised(codes, scales, "fp8_block", (32, 32)), torch.tensor([0]), torch.float32)


def test_codes_may_come_in_torch_types():
    """As safetensors reads them: float8_e4m3fn, float8_e8m0fnu, int8."""
    codes, scales = formats.quantise_fp8_block(torch.randn(32, 64))
    plain = formats.unpack(Quantised(codes, scales, "fp8_block", (32, 64)), torch.float32)
    typed = Quantised(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), "fp8_block", (32, 64))
    assert torch.equal(formats.unpack(typed, torch.float32), plain)
    codes, scales = formats.quantise_fp4_row(torch.randn(3, 64))
    plain = formats.unpack(Quantised(codes, scales, "fp4_row", (3, 64)), torch.float32)
    typed = Quantised(codes.view(torch.int8), scales.view(torch.float8_e8m0fnu), "fp4_row", (3, 64))
    assert torch.equal(formats.unpack(typed, torch.float32), plain)
