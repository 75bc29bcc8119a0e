"""Number formats of weights, activations and caches: rounding, packing and unpacking, byte for byte.

e4m3   8 bit float, largest 448                    ue8m0  power of two 2^(byte - 127), byte 255 is NaN
e2m1   4 bit float, magnitudes 0 .5 1 1.5 2 3 4 6  packed two in a byte, low nibble = even index

Everything is done in float32 and by exact steps: scales by bit manipulation, never by a float log2; rounding is to
nearest, ties to the even code. A NaN or an infinity makes the scale of its group NaN and with it the whole group (in
q4, infinities saturate). Sources: DeepInfer 0.1.0 `kv_cache` layouts and casts, tile-kernels 2.1.0 `cast`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.modeling import CacheFormat, Quantised
from headrace.ops import KernelContext

BLOCK = 32
"""Numbers per ue8m0 scale, in weights (rows and columns), activations and caches; e4m3 scales have GROUP_Q4."""
GROUP_Q4 = 16

MAX_E4M3, MAX_E2M1 = 448.0, 6.0
FLOOR_E4M3, FLOOR_E2M1, FLOOR_Q4 = 1e-4, 6 * 2.0**-126, 6 * 2.0**-9
"""Least amax that a group is taken to have: by kind of code, and of q4, whose scales are e4m3."""
CHUNK = 1 << 21
"""Numbers that are unpacked at a time, which bounds scratch memory to a few times 8 MiB."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([sign * m for sign in (1.0, -1.0) for m in _MAGNITUDES])
_E2M1_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1)
"""[256, 2] float32: both numbers of a byte."""
_BELOW = {middle: torch.tensor(middle).nextafter(torch.tensor(0.0)).item() for middle in (0.75, 1.75, 3.5)}
_E2M1_BOUNDS = torch.tensor([0.25, _BELOW[0.75], 1.25, _BELOW[1.75], 2.5, _BELOW[3.5], 5.0])
"""Code c covers (bounds[c - 1], bounds[c]]. A midpoint belongs to the even code beside it: to the lower one where that
is even, else to the upper, whose bound then lies just below the midpoint."""


def act_dtype(context: KernelContext) -> torch.dtype:
    """The type that models compute with."""
    return torch.bfloat16 if context.compute == "bfloat16" else torch.float32


# --- scales and codes ------------------------------------------------------------------------------------------------


def power_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least power of two that isn't below x, for x > 0 in float32. -> (ue8m0 bytes, the same as float32)."""
    # round the mantissa up into the exponent; NaN runs over into the sign, beyond 255
    exponents = x.contiguous().view(torch.int32).add(0x7FFFFF).bitwise_right_shift_(23).bitwise_and_(0x1FF)
    byte = exponents.clamp_max_(255).to(torch.uint8)
    return byte, decode_ue8m0(byte)


def decode_ue8m0(scales: Tensor) -> Tensor:
    """ue8m0 bytes -> float32."""
    return scales.view(torch.float8_e8m0fnu).float()


def decode_e4m3(codes: Tensor) -> Tensor:
    """e4m3 bytes -> float32."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 -> e4m3 bytes, saturating; NaN stays NaN."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 [..., k] -> packed e2m1 bytes [..., k/2], saturating. The sign of a zero stays."""
    codes = torch.bucketize(x.abs(), _E2M1_BOUNDS.to(x.device), out_int32=True)
    codes = codes.add_(torch.signbit(x), alpha=8).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decode_e2m1(codes: Tensor) -> Tensor:
    """Packed e2m1 bytes [..., k/2] -> float32 [..., k]."""
    return torch.nn.functional.embedding(codes.int(), _E2M1_PAIRS.to(codes.device)).flatten(-2)


def _e4m3_groups(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., k] -> e4m3 bytes [..., k], ue8m0 bytes [..., k/32], rounded x as float32 groups [..., k/32, 32]."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(FLOOR_E4M3)
    byte, scale = power_of_two(amax / MAX_E4M3)
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten(-2), byte.squeeze(-1), codes.float().mul_(scale)


def _e2m1_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., k] -> packed e2m1 bytes [..., k/2], ue8m0 bytes [..., k/32]."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(FLOOR_E2M1)
    byte, scale = power_of_two(amax / MAX_E2M1)
    return encode_e2m1(groups / scale).flatten(-2), byte.squeeze(-1)


def _q4_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., k] -> packed e2m1 bytes [..., k/2], e4m3 scale bytes [..., k/16].

    The codes are those of x times the float32 reciprocal of the scale. Dividing instead (as some other programs do)
    gives other codes for about one in a thousand numbers, at exact ties.
    """
    groups = x.float().unflatten(-1, (-1, GROUP_Q4))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(FLOOR_Q4)
    scale = (amax * (1 / MAX_E2M1)).clamp_max(MAX_E4M3).to(torch.float8_e4m3fn)
    return encode_e2m1(groups * scale.float().reciprocal()).flatten(-2), scale.view(torch.uint8).squeeze(-1)


# --- activations -----------------------------------------------------------------------------------------------------


def quantise_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., k], k a multiple of 32 -> e4m3 codes [..., k], ue8m0 scales [..., k/32], both uint8."""
    codes, scales, _ = _e4m3_groups(x)
    return codes, scales


def round_activation(x: Tensor) -> Tensor:
    """x after `quantise_activation` and back. [..., k] -> like x."""
    return _e4m3_groups(x)[2].flatten(-2).to(x.dtype)


# --- weights ---------------------------------------------------------------------------------------------------------


def quantise_fp8_block(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [m, k] -> e4m3 codes [m, k], ue8m0 scales of 32 x 32 blocks [ceil(m/32), ceil(k/32)], both uint8."""
    m, k = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -k % BLOCK, 0, -m % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp_min(FLOOR_E4M3)
    byte, scale = power_of_two(amax / MAX_E4M3)
    return encode_e4m3(blocks / scale).reshape(padded.shape)[:m, :k].contiguous(), byte[:, 0, :, 0].contiguous()


def quantise_fp8_row(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [m, k] -> e4m3 codes [m, k], ue8m0 scales of 32 columns [m, k/32], both uint8."""
    return quantise_activation(w)


def quantise_fp4_row(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [m, k] -> packed e2m1 codes [m, k/2], ue8m0 scales of 32 columns [m, k/32], both uint8."""
    return _e2m1_groups(w)


def unpack(weight: Quantised, dtype: torch.dtype) -> Tensor:
    """The numbers of a packed matrix, [m, k] `dtype`. Rows are unpacked in chunks, so that the scratch memory doesn't
    grow with the matrix."""
    m, k = weight.shape
    out = torch.empty((m, k), dtype=dtype, device=weight.codes.device)
    step = max(BLOCK, CHUNK // max(k, 1) // BLOCK * BLOCK)
    for start in range(0, m, step):
        end = min(start + step, m)
        out[start:end] = _unpack_rows(weight, start, end)
    return out


def unpack_rows(weight: Quantised, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a matrix that is packed row by row. rows: [n] int64 -> [n, k] `dtype`."""
    if weight.packing == "fp8_block":
        raise ValueError("a matrix packed in blocks has no rows of its own")
    picked = Quantised(weight.codes[rows], weight.scales[rows], weight.packing, (len(rows), weight.shape[1]))
    return unpack(picked, dtype)


def _unpack_rows(weight: Quantised, start: int, end: int) -> Tensor:
    """Rows [start, end), start a multiple of 32 -> float32 [end - start, k]."""
    k = weight.shape[1]
    codes = weight.codes[start:end].view(torch.uint8)
    scales = weight.scales[start:end]
    if weight.packing == "fp8_block":
        scales = weight.scales[start // BLOCK : -(-end // BLOCK)].repeat_interleave(BLOCK, 0)[: end - start]
    scale = decode_ue8m0(scales.view(torch.uint8))
    numbers = decode_e2m1(codes) if weight.packing == "fp4_row" else decode_e4m3(codes)
    if k % BLOCK:  # only blocks may be cut off
        return numbers.mul_(scale.repeat_interleave(BLOCK, 1)[:, :k])
    return _scaled(numbers, scale)


# --- cache entries ---------------------------------------------------------------------------------------------------


def pack(format: CacheFormat, values: Tensor) -> Tensor:
    """values [n, width] -> entries [n, entry_bytes] uint8: [codes | scales], or the plain numbers."""
    match format.name:
        case "q8":
            codes, scales = quantise_activation(values)
        case "q4":
            codes, scales = _q4_groups(values)
        case "qm":
            codes, scales = _e2m1_groups(values)
        case "float32":
            return values.float().contiguous().view(torch.uint8)
        case "bfloat16":
            return values.bfloat16().contiguous().view(torch.uint8)
    return torch.cat([codes, scales], -1)


def unpack_entries(format: CacheFormat, entries: Tensor) -> Tensor:
    """Entries [..., entry_bytes] uint8 as `pack` gives them -> [..., width] float32 (bfloat16 for that format)."""
    match format.name:
        case "float32":
            return entries.contiguous().view(torch.float32)
        case "bfloat16":
            return entries.contiguous().view(torch.bfloat16)
        case "q8":
            return _scaled(decode_e4m3(entries[..., : format.width]), decode_ue8m0(entries[..., format.width :]))
    codes, scales = entries[..., : format.width // 2], entries[..., format.width // 2 :]
    return _scaled(decode_e2m1(codes), decode_e4m3(scales) if format.name == "q4" else decode_ue8m0(scales))


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """numbers [..., k] times scales [..., k/g], in place."""
    return numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1)).flatten(-2)
