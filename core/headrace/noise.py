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

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

KIND_SAMPLE = 0
KIND_DRAFT = 1
KIND_RESIDUAL = 2

ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MULTIPLIERS = np.array([[_M0], [_M1]], np.uint64)
_WEYLS = np.array([[_W0], [_W1]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
FEW = 12
"""Tokens up to which `few_bits` is quicker than `noise_bits`."""
_CHUNK = 8192
"""Counters per pass: the buffers (384 KiB) stay in a level-2 cache and are used again, since fresh pages cost more than
the arithmetic."""

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
    words = np.array(np.asarray(counter, np.uint32).T, np.uint64, order="C")
    _rounds(words, np.empty_like(words), _schedule(np.asarray(key, np.uint64).T))
    return _interleaved(words, np.empty((words.shape[1], 4), np.uint32))


def _schedule(key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Keys of the ten rounds, [10, 2, 1] or [10, 2, n]. key: [2] or [2, n]."""
    steps = np.arange(ROUNDS, dtype=np.uint64)[:, None, None]
    return (key.reshape(2, -1) + steps * _WEYLS) & _LOW


def _rounds(words: NDArray[np.uint64], scratch: NDArray[np.uint64], keys: NDArray[np.uint64]) -> None:
    """Ten rounds in place. words: [4, n] counters, scratch: [4, n].

    Words 0 and 2 go through each operation together: five numpy calls a round, which is what a short draw costs.
    """
    even, odd = words[0::2], words[1::2]
    product, other = scratch[:2], scratch[2:]
    for key in keys:
        np.multiply(even, _MULTIPLIERS, out=product)
        np.right_shift(product, _HALF, out=even)
        np.bitwise_xor(even[::-1], odd, out=other)
        np.bitwise_xor(other, key, out=other)
        np.bitwise_and(product[::-1], _LOW, out=odd)
        even, other = other, even


def _interleaved(words: NDArray[np.uint64], out: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for i in range(4):  # word by word: one transposed assignment takes numpy five times as long
        out[:, i] = words[i]
    return out


def noise_bits(
    seed: ArrayLike, position: ArrayLike, sample_index: ArrayLike, kind: int, token_ids: NDArray[np.integer]
) -> NDArray[np.uint32]:
    """Noise bits of single tokens. The other arguments are scalars or one value per token. Returns [n] uint32."""
    n = len(token_ids)
    seeds = np.asarray(seed, np.uint64)
    words = np.empty((4, n), np.uint64)
    words[0], words[1], words[2], words[3] = token_ids >> 2, position, sample_index, kind
    _rounds(words, np.empty_like(words), _schedule(np.stack((seeds & _LOW, seeds >> _HALF))))
    return words[token_ids & 3, np.arange(n)].astype(np.uint32)


def few_bits(seed: int, position: int, sample_index: int, kind: int, token_ids: list[int]) -> list[int]:
    """What `noise_bits` gives, in plain Python: the quicker way for up to `FEW` tokens, as most nuclei are."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    keys = [((low + i * _W0) & 0xFFFFFFFF, (high + i * _W1) & 0xFFFFFFFF) for i in range(ROUNDS)]
    bits = []
    for token in token_ids:
        c0, c1, c2, c3 = token >> 2, position, sample_index, kind
        for k0, k1 in keys:
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        bits.append((c0, c1, c2, c3)[token & 3])
    return bits


def noise_row(seed: int, position: int, sample_index: int, kind: int, n_tokens: int) -> NDArray[np.uint32]:
    """Noise bits of tokens 0 .. n_tokens - 1, four to a counter: what `noise_bits` gives for all of them."""
    n = -(-n_tokens // 4)
    out = np.empty((n, 4), np.uint32)
    keys = _schedule(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64))
    buffer, scratch = np.empty((4, min(n, _CHUNK)), np.uint64), np.empty((4, min(n, _CHUNK)), np.uint64)
    for a in range(0, n, _CHUNK):
        size = min(_CHUNK, n - a)
        words = buffer[:, :size]
        words[0], words[1], words[2], words[3] = np.arange(a, a + size), position, sample_index, kind
        _rounds(words, scratch[:, :size], keys)
        _interleaved(words, out[a : a + size])
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


def race(z: NDArray[np.float32], bits: NDArray[np.uint32]) -> int:
    """Index of the largest z + gumbel(bits), lowest on ties, without the logarithms of tokens that can't win.

    The largest score lies around log(sum(exp(z))). With a guess `bound` below that, only tokens with
    v <= exp(z - bound) can reach it (see above), about exp(margin) of them; if one of those does reach it, the
    best of them has won, else the guess was too high. `slack` covers every rounding: float32 z, exp and logarithms.
    """
    largest = float(z.max())
    most = np.exp(z - z.max())
    total = float(most.sum(dtype=np.float64))
    slack = 1e-4 + (abs(largest) + 64.0) * 2.0**-20
    r = bits.astype(np.float32)
    rounds = ((2.0, 2.0**32 * math.exp(2.0 + slack) / total), (6.0, math.exp(4.0))) if slack < 10.0 else ()
    for margin, factor in rounds:
        bound = largest + math.log(total) - margin
        most *= np.float32(factor)
        some = np.flatnonzero(r <= most)
        if some.size:
            scores = z[some] + gumbel(bits[some])
            at = int(scores.argmax())
            if scores[at] >= bound:
                return int(some[at])
    return int((z + gumbel(bits)).argmax())
