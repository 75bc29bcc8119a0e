"""The noise of sampling: Philox4x32-10 bits and a bit-exact map from bits to Gumbel noise.

A token's noise is a pure function of (seed, absolute position, sample index, kind, token id). It does not depend on
batching, chunking, preemption, drafts or the device, so a sampled text repeats wherever the logits do.

Bits. Philox4x32-10 as in Random123 (Salmon et al., SC'11), with

    key     = (seed mod 2^32, seed div 2^32)                                        seed: 64 bit
    counter = (token id div 4, absolute position, sample index, kind)
    bits of the token = output word (token id mod 4)

where sample index numbers the n samples of one request and kind is KIND_SAMPLE, KIND_DRAFT or KIND_RESIDUAL.

Noise. Every step below is one IEEE-754 binary32 operation rounded to nearest even: additions and multiplications
only, never fused, no division, no libm. Integer steps are on unsigned 32-bit words; LOG_* are given as bit patterns.

    gumbel(r):
      v = (float(r) + 0.5) * 2^-32;  w = (float(2^32 - 1 - r) + 0.5) * 2^-32          (w stands for 1 - v)
          float(r) is r rounded to nearest even. It equals float(r div 2^16) * 2^16 + float(r mod 2^16), for devices
          that convert only small integers.
      (e, m) = split(w);  E = -tail(e, -v if e == 0 else m - 1)                       (E = -log(1 - v))
      (e, m) = split(E);  g = -tail(e, m - 1)                                         (g = -log(E))
      split(x):  i = bits(x) - 0x3f3504f3 (mod 2^32);  e = i as signed, shifted right by 23 (arithmetic);
                 m = float with bits ((i & 0x007fffff) + 0x3f3504f3), in [sqrt(1/2), sqrt(2))
      tail(e, f):  p = c0;  p = p * f + c1;  ...  p = p * f + c8          (Horner, LOG_POLY in order)
                   z = f * f;  y = (p * f) * z;  y = y + float(e) * LOG_LN2_LO;  y = y + (-0.5) * z
                   (f + y) + float(e) * LOG_LN2_HI

Small r means large noise. v keeps its relative precision near 0, which is where winners come from, and w keeps it
near v = 1. The largest value is about 23.6, the smallest about -3.2. Since v <= -log(1 - v), a token can reach a
score of B only if v <= exp(logit - B): callers compare integers before they take logarithms.

Polynomial and split of ln 2: Cephes `logf` (S. L. Moshier, netlib.org/cephes); reduction by the exponent as in fdlibm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

KIND_SAMPLE = 0
KIND_DRAFT = 1
KIND_RESIDUAL = 2

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_CHUNK = 16384
"""Counters per pass: three [2, n] uint64 buffers stay in a level-2 cache, and numpy's cost per call is paid off."""

LOG_POLY = (
    0x3D9021BB, 0xBDEBD1B8, 0x3DEF251A, 0xBDFE5D4F, 0x3E11E9BF, 0xBE2AAE50, 0x3E4CCEAC, 0xBE7FFFFC, 0x3EAAAAAA,
)  # fmt: skip
"""Bit patterns of c0 .. c8."""
LOG_LN2_HI = 0x3F318000
LOG_LN2_LO = 0xB95E8083
_SQRT_HALF = 0x3F3504F3


def _f32(bits: int) -> np.float32:
    return np.frombuffer(bits.to_bytes(4, "little"), "<f4")[0]


_POLY = tuple(_f32(bits) for bits in LOG_POLY)
_LN2_HI, _LN2_LO = _f32(LOG_LN2_HI), _f32(LOG_LN2_LO)
_ONE, _POINT_FIVE, _SCALE = np.float32(1), np.float32(0.5), np.float32(2.0**-32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10. counter: [n, 4] uint32, key: [2] or [n, 2] uint32, word 0 first. Returns [n, 4] uint32."""
    words = np.asarray(counter, np.uint32)
    keys = np.asarray(key, np.uint32).reshape(-1, 2).T
    out = np.empty_like(words)
    for a in range(0, len(words), _CHUNK):
        part = words[a : a + _CHUNK]
        high, low = np.empty((2, len(part)), np.uint64), np.empty((2, len(part)), np.uint64)
        high[0], low[0], high[1], low[1] = part[:, 0], part[:, 1], part[:, 2], part[:, 3]
        _rounds(high, low, keys if keys.shape[1] == 1 else keys[:, a : a + _CHUNK])
        _interleave(high, low, out[a : a + _CHUNK])
    return out


def _interleave(high: NDArray[np.uint64], low: NDArray[np.uint64], out: NDArray[np.uint32]) -> None:
    # word by word: one transposed assignment takes numpy five times as long
    for i in (0, 1):
        out[:, 2 * i] = high[i]
        out[:, 2 * i + 1] = low[i]


def _rounds(high: NDArray[np.uint64], low: NDArray[np.uint64], keys: ArrayLike) -> None:
    """Ten rounds in place. high: counter words (0, 2), low: words (1, 3), both [2, n]; keys: [2, n or 1]."""
    multipliers = np.array(_MULTIPLIERS, np.uint64)[:, None]
    weyl = np.array(_WEYL, np.uint64)[:, None]
    schedule = (np.asarray(keys, np.uint64) + weyl * np.arange(ROUNDS, dtype=np.uint64)[:, None, None]) & _LOW
    product = np.empty_like(high)
    crossed = product[::-1]
    for key in schedule:
        np.multiply(high, multipliers, out=product)
        np.right_shift(crossed, _HALF, out=high)
        np.bitwise_xor(high, low, out=high)
        np.bitwise_xor(high, key, out=high)
        np.bitwise_and(crossed, _LOW, out=low)


def noise_bits(
    seed: ArrayLike, position: ArrayLike, sample_index: ArrayLike, kind: int, token_ids: NDArray[np.integer]
) -> NDArray[np.uint32]:
    """Noise bits of single tokens. The other arguments are scalars or one value per token. Returns [n] uint32."""
    ids = np.asarray(token_ids)
    seeds = np.asarray(seed, np.uint64)
    high, low = np.empty((2, len(ids)), np.uint64), np.empty((2, len(ids)), np.uint64)
    high[0], high[1], low[0], low[1] = ids >> 2, sample_index, position, kind
    _rounds(high, low, np.stack((seeds & _LOW, seeds >> _HALF)).reshape(2, -1))
    out = np.empty((len(ids), 4), np.uint32)
    _interleave(high, low, out)
    return out[np.arange(len(ids)), ids & 3]


def noise_row(seed: int, position: int, sample_index: int, kind: int, n_tokens: int) -> NDArray[np.uint32]:
    """Noise bits of tokens 0 .. n_tokens - 1, four to a counter: what `noise_bits` gives for all of them."""
    n = -(-n_tokens // 4)
    out = np.empty((n, 4), np.uint32)
    keys = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint64)
    for a in range(0, n, _CHUNK):
        b = min(a + _CHUNK, n)
        high, low = np.empty((2, b - a), np.uint64), np.empty((2, b - a), np.uint64)
        high[0], high[1], low[0], low[1] = np.arange(a, b), sample_index, position, kind
        _rounds(high, low, keys)
        _interleave(high, low, out[a:b])
    return out.reshape(-1)[:n_tokens]


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Gumbel(0, 1) noise, float32, from uniform bits; bit-exact on every machine (see the module text)."""
    v = (bits.astype(np.float32) + _POINT_FIVE) * _SCALE
    w = ((~bits).astype(np.float32) + _POINT_FIVE) * _SCALE
    exponent, mantissa = _split(w)
    f = np.where(exponent == 0, -v, mantissa - _ONE)
    exponent, mantissa = _split(-_log_tail(exponent, f))
    return -_log_tail(exponent, mantissa - _ONE)


def _split(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """x = 2^e * m with m in [sqrt(1/2), sqrt(2)), for positive normal x. Returns (e as float32, m)."""
    shifted = x.view(np.int32) - np.int32(_SQRT_HALF)
    mantissa = (shifted & np.int32(0x007FFFFF)) + np.int32(_SQRT_HALF)
    return (shifted >> np.int32(23)).astype(np.float32), mantissa.view(np.float32)


def _log_tail(exponent: NDArray[np.float32], f: NDArray[np.float32]) -> NDArray[np.float32]:
    """log(2^exponent * (1 + f)), each operation rounded by itself."""
    p = np.full_like(f, _POLY[0])
    for c in _POLY[1:]:
        p *= f
        p += c
    z = f * f
    p *= f
    p *= z
    p += exponent * _LN2_LO
    z *= -_POINT_FIVE
    p += z
    p += f
    p += exponent * _LN2_HI
    return p
