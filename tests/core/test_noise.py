"""Noise against published vectors, a scalar reimplementation from the written spec, libm and statistics.

`python tests/core/test_noise.py` writes the golden file anew from the scalar implementation.
"""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import noise

GOLDEN = Path(__file__).parents[1] / "data" / "noise_golden.json"

# Random123 kat_vectors (philox4x32 10) and vectors cross-checked with randomgen's Philox(4x32): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ("73cf256d dda1494c 8f4d3e27 db5b5fab", "ec99108d c7fde805", "516164ca 11e69a6a 926f21de cf164bbb"),
    ("ffffffff 0000002f 00000000 00000001", "965eda32 309d6b79", "a06a99c8 6a6cc137 53631a04 0f5e0367"),
    ("cdcc6929 830c71c2 79cb9e86 a13ffe79", "9d2c67ed cb008853", "78b4f244 9000411f 34fe6952 76ced264"),
]


# --- the written spec once more, one number at a time ----------------------------------------------------------------


def f32(x: float) -> float:
    """Round to binary32. A double holds the product of two floats exactly and their sum well enough to round once."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def to_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def scalar_bits(seed: int, position: int, sample_index: int, kind: int, token: int) -> int:
    return scalar_philox([token // 4, position, sample_index, kind], [seed & 0xFFFFFFFF, seed >> 32])[token % 4]


def scalar_split(x: float) -> tuple[int, float]:
    i = (to_bits(x) - 0x3F3504F3) & 0xFFFFFFFF
    signed = i - (1 << 32) if i >> 31 else i
    return signed >> 23, from_bits((i & 0x007FFFFF) + 0x3F3504F3)


def scalar_tail(e: int, f: float) -> float:
    c = [from_bits(bits) for bits in noise.LOG_POLY]
    p = c[0]
    for coefficient in c[1:]:
        p = f32(f32(p * f) + coefficient)
    z = f32(f * f)
    y = f32(f32(p * f) * z)
    y = f32(y + f32(e * from_bits(noise.LOG_LN2_LO)))
    y = f32(y + f32(-0.5 * z))
    return f32(f32(f + y) + f32(e * from_bits(noise.LOG_LN2_HI)))


def scalar_gumbel(r: int) -> float:
    def uniform(bits: int) -> float:
        # the high and low halves are exact; their sum is the one rounding
        return f32(f32(f32((bits >> 16) * 65536.0 + (bits & 0xFFFF)) + 0.5) * 2.0**-32)

    v, w = uniform(r), uniform(0xFFFFFFFF - r)
    e, m = scalar_split(w)
    exponential = -scalar_tail(e, -v if e == 0 else f32(m - 1.0))
    e, m = scalar_split(exponential)
    return -scalar_tail(e, f32(m - 1.0))


def scalar_winner(
    logits: list[float], temperature: float, seed: int, position: int, sample_index: int, kind: int
) -> int:
    inv_t = f32(1.0 / f32(temperature))
    scores = [
        f32(f32(x * inv_t) + scalar_gumbel(scalar_bits(seed, position, sample_index, kind, token)))
        for token, x in enumerate(logits)
    ]
    return scores.index(max(scores))


def make_golden() -> dict[str, Any]:
    rng = random.Random(1)
    extremes = [0, 1, 2, 255, 256, 2**24 - 1, 2**24 + 1, 0x4AFB0CCC, 0x4AFB0CCD, 2**31, 2**32 - 2, 2**32 - 1]
    words = extremes + [rng.getrandbits(rng.choice((8, 16, 24, 32, 32))) for _ in range(52)]
    keyed = []
    for seed in (0, 20261017, 2**64 - 1, rng.getrandbits(64)):
        for position, sample_index, kind in ((0, 0, 0), (1, 0, 0), (4095, 3, 0), (2**32 - 1, 1023, 1), (77, 0, 2)):
            tokens = [0, 1, 2, 3, 4, 49151, 151935, rng.randrange(262144)]
            bits = [scalar_bits(seed, position, sample_index, kind, token) for token in tokens]
            keyed.append([seed, position, sample_index, kind, tokens, bits])
    races = []
    for temperature in (0.25, 0.8, 1.0, 1.7):
        # eighths are exact in JSON and float32
        logits = [rng.randrange(-48, 48) / 8 for _ in range(37)]
        for seed in (20261017, 7):
            winners = [
                [position, n, scalar_winner(logits, temperature, seed, position, n, noise.KIND_SAMPLE)]
                for position in (1, 2, 3, 900)
                for n in (0, 1)
            ]
            races.append({"temperature": temperature, "seed": seed, "logits": logits, "winners": winners})
    return {
        "gumbel": [[r, to_bits(scalar_gumbel(r))] for r in words],
        "bits": keyed,
        "races": races,
    }


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


# --- bits ------------------------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_philox_known_answers() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN], np.uint32)
    keys = np.array([words(key) for _, key, _ in KNOWN], np.uint32)
    expected = [words(out) for _, _, out in KNOWN]
    assert noise.philox4x32(counters, keys).tolist() == expected
    for counter, key, out in zip(counters, keys, expected, strict=True):
        assert noise.philox4x32(counter[None], key).tolist() == [out]
        assert scalar_philox(counter.tolist(), key.tolist()) == out


def test_golden_file_is_what_the_scalar_spec_gives(golden: dict[str, Any]) -> None:
    assert golden == make_golden()


def test_bits_match_golden(golden: dict[str, Any]) -> None:
    for seed, position, sample_index, kind, tokens, bits in golden["bits"]:
        got = noise.noise_bits(seed, position, sample_index, kind, np.array(tokens))
        assert got.dtype == np.uint32
        assert got.tolist() == bits


def test_one_call_may_mix_rows(golden: dict[str, Any]) -> None:
    rows = [row for row in golden["bits"] if row[3] == 0]
    flat = [
        (seed, position, n, token, r)
        for seed, position, n, _, ids, bits in rows
        for token, r in zip(ids, bits, strict=True)
    ]
    seeds, positions, samples, tokens, expected = zip(*flat, strict=True)
    got = noise.noise_bits(np.array(seeds, np.uint64), positions, samples, 0, np.array(tokens))
    assert got.tolist() == list(expected)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 4 * 8192, 4 * 8192 + 5])
def test_row_is_the_same_noise(n: int) -> None:
    seed = 2**63 + 12345
    row = noise.noise_row(seed, 9, 2, noise.KIND_SAMPLE, n)
    assert row.shape == (n,)
    assert row.tolist() == noise.noise_bits(seed, 9, 2, noise.KIND_SAMPLE, np.arange(n)).tolist()


def test_every_part_of_the_key_changes_the_noise() -> None:
    base = (5, 6, 7, 0)
    other = [(5 + 2**32, 6, 7, 0), (4, 6, 7, 0), (5, 7, 7, 0), (5, 6, 8, 0), (5, 6, 7, 1)]
    tokens = np.arange(64)
    first = noise.noise_bits(*base, tokens)
    for parts in other:
        assert not np.any(first == noise.noise_bits(*parts, tokens))


# --- bits to noise ---------------------------------------------------------------------------------------------------


def test_gumbel_matches_golden_bits(golden: dict[str, Any]) -> None:
    r, expected = np.array(golden["gumbel"], np.uint64).T.astype(np.uint32)
    assert noise.gumbel(r).view(np.uint32).tolist() == expected.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_gumbel_matches_the_scalar_spec(values: list[int]) -> None:
    got = noise.gumbel(np.array(values, np.uint32)).view(np.uint32).tolist()
    assert got == [to_bits(scalar_gumbel(r)) for r in values]


def test_gumbel_is_close_to_libm() -> None:
    rng = np.random.default_rng(3)
    r = np.concatenate(
        [rng.integers(0, 2**bits, 20_000, dtype=np.uint64) for bits in (8, 16, 24, 31, 32)]
        + [2**32 - 1 - rng.integers(0, 2**bits, 20_000, dtype=np.uint64) for bits in (8, 16, 24)]
    ).astype(np.uint32)
    v = (r.astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32
    w = ((~r).astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32
    exact = -np.log(np.where(v < 0.5, -np.log1p(-np.minimum(v, 0.5)), -np.log(w)))
    got = noise.gumbel(r).astype(np.float64)
    # The exponential's own rounding, a few units of 2^-24, moves its logarithm by as much; then one more log.
    error = np.abs(got - exact)
    assert (error <= 3 * 2.0**-23 + 2 * np.spacing(np.abs(exact).astype(np.float32))).all()
    assert np.isfinite(got).all()
    assert got.max() < 23.0
    assert got.min() > -3.2


def test_small_exponentials_keep_their_relative_precision() -> None:
    r = np.arange(4096, dtype=np.uint32)
    exact = -np.log(-np.log1p(-(r + 0.5) * 2.0**-32))
    assert np.abs(noise.gumbel(r) - exact).max() <= 1.5 * np.spacing(np.float32(22.0))


def test_a_token_needs_v_below_the_bound() -> None:
    """What the race's thresholds rest on: noise g needs v <= exp(-g), up to rounding."""
    r = np.random.default_rng(4).integers(0, 2**32, 100_000, dtype=np.uint32)
    v = (r.astype(np.float64) + 0.5) * 2.0**-32
    assert (v <= np.exp(-noise.gumbel(r).astype(np.float64)) * (1 + 1e-5)).all()


# --- statistics ------------------------------------------------------------------------------------------------------


def draws(logits: np.ndarray, temperature: float, n: int, seed: int) -> np.ndarray:
    """Winners at positions 0 .. n - 1."""
    size = len(logits)
    bits = noise.noise_bits(seed, np.repeat(np.arange(n), size), 0, noise.KIND_SAMPLE, np.tile(np.arange(size), n))
    return (noise.gumbel(bits).reshape(n, size) + (logits / temperature).astype(np.float32)).argmax(axis=1)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations above the mean of chi-square (Wilson-Hilferty)."""
    freedom = expected.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.6])
def test_winners_follow_the_categorical(temperature: float) -> None:
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.25, 0.0, 0.75])
    p = np.exp(logits / temperature)
    n = 40_000
    counts = np.bincount(draws(logits, temperature, n, seed=11), minlength=10)
    assert abs(chi_square(counts, n * p / p.sum())) < 3.5


def test_draws_at_neighbouring_positions_are_independent() -> None:
    won = draws(np.zeros(8), 1.0, 40_001, seed=12)
    for lag in (1, 2, 4):
        pairs = np.bincount(won[:-lag] * 8 + won[lag:], minlength=64)
        assert abs(chi_square(pairs, np.full(64, pairs.sum() / 64))) < 3.5


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(make_golden()).replace("], [", "],\n[") + "\n")


def test_a_few_bits_in_plain_python_are_the_same_bits() -> None:
    ids = np.array([0, 1, 2, 3, 4, 7, 1000, 49151, 151935])
    for seed, position, sample_index in ((0, 0, 0), (2**64 - 1, 2**31 - 1, 5), (20261017, 37, 1)):
        few = noise.few_bits(seed, position, sample_index, 0, ids.tolist())
        assert few == noise.noise_bits(seed, position, sample_index, 0, ids).tolist()
