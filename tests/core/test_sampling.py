"""Sampling against its plain definition: full sorts, all the noise, one position at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import filters, noise, sampling
from headrace.filters import best, survivors, top
from headrace.types import (
    DEFAULT_SEED,
    FALLBACK_SAMPLING,
    WANT_LOGITS,
    WANT_LOGPROBS,
    WANT_TOKEN,
    MaskBatch,
    SamplingParams,
    SparseRows,
    StepPlan,
    StepResult,
)

DATA = Path(__file__).parents[1] / "data"
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


class Row:
    """One plan row. `tokens` are fed at positions from `start`; the last `n_draft` of them are drafts."""

    def __init__(self, params: dict[str, Any], tokens: list[int] | None = None, n_draft: int = 0, **rest: Any) -> None:
        self.params = SamplingParams(**{**PLAIN, **params}).resolved(FALLBACK_SAMPLING)
        self.tokens = tokens or [0]
        self.n_draft = n_draft
        self.start: int = rest.get("start", 10)
        self.sample: bool = rest.get("sample", True)
        self.wants: int = rest.get("wants", WANT_TOKEN)
        self.n: int = rest.get("n", 0)
        self.bias: dict[int, float] = rest.get("bias", {})
        self.banned: list[int] = rest.get("banned", [])
        self.counts: dict[int, int] = rest.get("counts", {})


def sparse(rows: list[dict[int, float]]) -> SparseRows | None:
    some = [r for r, row in enumerate(rows) if row]
    if not some:
        return None
    return SparseRows(
        rows=np.array(some, np.int32),
        starts=np.cumsum([0, *(len(rows[r]) for r in some)]).astype(np.int32),
        ids=np.array([i for r in some for i in rows[r]], np.int32),
        values=np.array([v for r in some for v in rows[r].values()], np.float32),
    )


def make_plan(rows: list[Row]) -> StepPlan:
    # rows live at table indices that differ from their plan rows
    table = sampling.new_table(len(rows) + 3)
    seq = [len(rows) + 2 - r for r in range(len(rows))]
    for index, row in zip(seq, rows, strict=True):
        sampling.set_row(table, index, row.params, row.n)
    table.bias = sparse([row.bias for row in rows])
    table.banned = sparse([dict.fromkeys(row.banned, 0.0) for row in rows])
    table.counts = sparse([{i: float(c) for i, c in row.counts.items()} for row in rows])
    return StepPlan(
        step=0,
        seq=np.array(seq, np.int32),
        slot=np.arange(len(rows), dtype=np.int32),
        start=np.array([row.start for row in rows], np.int32),
        length=np.array([len(row.tokens) for row in rows], np.int32),
        n_draft=np.array([row.n_draft for row in rows], np.int32),
        offset=np.cumsum([0, *(len(row.tokens) for row in rows)]).astype(np.int32),
        tokens=np.array([token for row in rows for token in row.tokens], np.int32),
        sample=np.array([row.sample for row in rows], np.bool_),
        wants=np.array([row.wants for row in rows], np.uint8),
        sampling=table,
    )


def emitted(result: StepResult) -> list[list[int]]:
    return [result.tokens[a:b].tolist() for a, b in zip(result.starts, result.starts[1:], strict=False)]


def sample(rows: list[Row], logits: list[Any], masks: MaskBatch | None = None) -> StepResult:
    return sampling.sample_step(make_plan(rows), [np.array(x, np.float32) for x in logits], masks)


def draw(logits: Any, position: int = 11, n: int = 0, **params: Any) -> int:
    (tokens,) = emitted(sample([Row(params, start=position - 1, n=n)], [logits]))
    return tokens[0]


def pack(allowed: list[list[int]], vocab: int) -> np.ndarray:
    bits = np.zeros((len(allowed), -(-vocab // 32)), np.uint32)
    for m, ids in enumerate(allowed):
        for i in ids:
            bits[m, i // 32] |= np.uint32(1 << (i % 32))
    return bits.view(np.int32)


def mask_rows(per_row: list[list[list[int]]], vocab: int) -> MaskBatch:
    return MaskBatch(
        starts=np.cumsum([0, *map(len, per_row)]).astype(np.int32),
        bits=pack([ids for row in per_row for ids in row], vocab),
    )


def rough(rng: np.random.Generator, n: int, scale: float) -> np.ndarray:
    """Logits with many ties, both zeros and some -inf."""
    logits: np.ndarray = (rng.standard_normal(n) * scale).astype(np.float32)
    if rng.integers(2):
        logits = np.round(logits * 2) / 2
    logits[rng.integers(0, n, max(1, n // 20))] = -np.inf
    logits[int(rng.integers(n))] = -0.0
    return logits.astype(np.float32)


# --- the plain definition --------------------------------------------------------------------------------------------


def plain_survivors(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    p = np.exp(((logits - logits.max()) * np.float32(1.0 / np.float32(temperature))).astype(np.float64))
    p /= p.sum()
    order = np.argsort(-logits, kind="stable")
    passes = np.ones(len(logits), bool)
    if top_p < 1:
        passes &= np.cumsum(p[order]) - p[order] <= top_p
        passes[0] = True
    if top_k > 0:
        passes &= np.arange(len(logits)) < top_k
    if min_p > 0:
        passes &= p[order] >= min_p * p.max()
    return sorted(order[passes].tolist())


def plain_winner(logits: np.ndarray, ids: list[int], temperature: float, seed: int, position: int, n: int) -> int:
    z = logits[ids] * np.float32(1.0 / np.float32(temperature))
    bits = noise.noise_bits(seed, position, n, noise.KIND_SAMPLE, np.array(ids))
    return ids[int((z + noise.gumbel(bits)).argmax())]


# --- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_the_largest() -> None:
    logits = np.array([1, 7, -3, 7, 7, 0], np.float32)
    assert draw(logits, temperature=0.0) == 1
    assert draw(logits, temperature=0.0, top_p=0.1, top_k=3, min_p=0.9, typical_p=0.2) == 1
    assert draw(logits, temperature=0.0, logit_bias={}) == 1


@pytest.mark.parametrize("as_array", [True, False])
def test_plain_rows_are_only_read(as_array: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    logits.setflags(write=False)
    plan = make_plan([Row({"temperature": 0.0}) for _ in range(40)])
    result = sampling.sample_step(plan, logits if as_array else list(logits), None)
    assert result.tokens.tolist() == logits.argmax(axis=1).tolist()
    assert result.tokens.dtype == result.starts.dtype == result.accepted.dtype == np.int32
    hot = make_plan([Row({"temperature": 0.7, "top_p": 0.9}) for _ in range(40)])
    sampling.sample_step(hot, logits if as_array else list(logits), None)


def test_a_step_may_be_empty_or_sample_nothing() -> None:
    for masks in (None, MaskBatch(starts=np.zeros(1, np.int32), bits=np.zeros((0, 1), np.int32))):
        result = sampling.sample_step(make_plan([]), [], masks)
        assert (result.tokens.size, result.starts.tolist(), result.accepted.size) == (0, [0], 0)
    result = sampling.sample_step(make_plan([]), np.empty((0, 8), np.float32), None)
    assert result.starts.tolist() == [0]
    rows = [Row({}, sample=False), Row({"temperature": 0.0}), Row({}, sample=False)]
    assert emitted(sample(rows, [[0, 1]])) == [[], [1], []]


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", json.loads((DATA / "sampling_filter_golden.json").read_text())["rows"])
def test_filters_match_deepinfer(row: dict[str, Any]) -> None:
    logits = np.array(row["logits"], np.float32)
    inv_t = np.float32(1.0 / row["temperature"])
    kept = survivors(logits, inv_t, row["top_k"], row["top_p"], 0.0, 1.0)
    assert kept is not None
    assert kept.tolist() == row["kept"]
    # its log-probabilities, through the front: filtered, all survivors asked for
    params = {key: row[key] for key in ("temperature", "top_k", "top_p")}
    params |= {"logprobs": 97, "logprobs_mode": "filtered"}
    result = sample([Row(params, wants=WANT_LOGPROBS)], [logits])
    assert result.logprobs is not None
    found = dict(zip(result.logprobs.ids[0][1:], result.logprobs.values[0][1:], strict=True))
    assert sorted(found) == row["kept"]
    assert [found[i] for i in row["kept"]] == pytest.approx(row["logprobs"], abs=1e-5)


unit = st.sampled_from([0.0, 0.03, 0.3, 0.77, 0.95, 0.999, 1.0])


ROWS: dict[str, Any] = {
    "seed": st.integers(0, 2**32 - 1),
    "n": st.sampled_from([1, 2, 7, 100, 700, 5000]),
    "scale": st.sampled_from([0.01, 1.0, 3.0]),
    "temperature": st.sampled_from([0.02, 0.5, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 1, 2, 40, 300, 6000]),
    "top_p": unit,
    "min_p": unit,
}


@settings(deadline=None)
@given(**ROWS)
def test_filters_match_the_full_sort(
    seed: int, n: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    # float32 masses and the reference's float64 may disagree on a token only if a threshold falls between them
    logits = rough(np.random.default_rng(seed), n, scale)
    kept = survivors(logits, np.float32(1.0 / np.float32(temperature)), top_k, top_p, min_p, 1.0)
    got = list(range(n)) if kept is None else kept.tolist()
    low, high = 1 - 1e-5, 1 + 1e-5
    assert got == sorted(set(got))
    assert int(logits.argmax()) in got
    assert set(plain_survivors(logits, temperature, top_k, top_p * low, min_p * high)) <= set(got)
    assert set(got) <= set(plain_survivors(logits, temperature, top_k, top_p * high, min_p * low))


@settings(deadline=None)
@given(**ROWS, typical_p=st.sampled_from([0.0, 0.03, 0.3, 0.77, 0.95]))
def test_typical_p_comes_first(
    seed: int, n: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    logits = rough(np.random.default_rng(seed), n, scale)
    inv_t = np.float32(1.0 / np.float32(temperature))
    kept = survivors(logits, inv_t, 0, 1.0, 0.0, typical_p)
    assert kept is not None
    assert np.all(np.diff(kept) > 0)
    x = ((logits - logits.max()) * inv_t).astype(np.float64)
    p = np.exp(x) / np.exp(x).sum()
    seen = p > 1e-30
    surprise = np.full(n, np.inf)
    surprise[seen] = np.abs(np.log(p[seen]) - (p[seen] * np.log(p[seen])).sum())
    out = np.setdiff1d(np.arange(n), kept)
    if out.size:
        assert surprise[kept].max() <= surprise[out].min() + 1e-4
        assert p[kept].sum() > typical_p - 1e-5
    assert p[kept].sum() - p[kept[surprise[kept] >= surprise[kept].max() - 1e-4]].sum() <= typical_p + 1e-5
    rest = survivors(logits[kept], inv_t, top_k, top_p, min_p, 1.0)
    both = survivors(logits, inv_t, top_k, top_p, min_p, typical_p)
    assert both is not None
    assert both.tolist() == (kept if rest is None else kept[rest]).tolist()


@pytest.mark.parametrize("scale", [0.05, 1.5, 6.0])
def test_a_large_nucleus_is_the_smallest_prefix(scale: float) -> None:
    logits = (np.random.default_rng(5).standard_normal(30_000) * scale).astype(np.float32)
    for top_p in (0.2, 0.9, 0.99):
        kept = survivors(logits, np.float32(1), 0, top_p, 0.0, 1.0)
        assert kept is not None
        p = np.exp(logits.astype(np.float64) - logits.max())
        p /= p.sum()
        ranked = kept[np.argsort(-logits[kept], kind="stable")]
        assert ranked.tolist() == np.argsort(-logits, kind="stable")[: len(kept)].tolist()
        assert p[ranked[:-1]].sum() <= top_p + 1e-6
        assert p[ranked].sum() > top_p - 1e-6


def test_typical_p_drops_the_best_token_when_it_is_too_predictable() -> None:
    # entropy is near 1.9 nats; the best token's surprise is 1.2, the others' 2.3
    logits = np.log(np.array([0.3, *[0.1] * 7], np.float64)).astype(np.float32)
    kept = survivors(logits, np.float32(1), 0, 1.0, 0.0, 0.25)
    assert kept is not None
    assert kept.tolist() == [1, 2, 3]
    both = survivors(logits, np.float32(1), 2, 0.5, 0.0, 0.25)
    assert both is not None
    assert both.tolist() == [1, 2]


@pytest.mark.parametrize("n", [4, 4096])
def test_a_token_stays_if_the_mass_before_it_equals_top_p(n: int) -> None:
    flat = np.zeros(n, np.float32)
    kept = survivors(flat, np.float32(1), 0, 0.5, 0.0, 1.0)
    assert kept is not None
    assert kept.tolist() == list(range(n // 2 + 1))
    # the same at the edge of two sorting buckets
    rank = np.repeat(np.array([0, 1], np.float32), n)
    assert filters._prefix(rank, np.float32(1), np.ones(2 * n, np.float32), n).tolist() == list(range(n + 1))


@pytest.mark.parametrize("n", [5, 900, 6000])
def test_top_takes_lower_ids_on_ties(n: int) -> None:
    values = np.random.default_rng(n).integers(-9, 9, n).astype(np.float32)
    for k in (1, 2, 5, min(n, 200), n):
        order = np.argsort(-values, kind="stable")[:k]
        assert best(values, k).tolist() == order.tolist()
        assert top(values, k).tolist() == sorted(order.tolist())


# --- the race --------------------------------------------------------------------------------------------------------


def test_golden_winners() -> None:
    for race in json.loads((DATA / "noise_golden.json").read_text())["races"]:
        for position, n, winner in race["winners"]:
            got = draw(race["logits"], position, n, temperature=race["temperature"], seed=race["seed"])
            assert got == winner


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([3, 64, 1500, 5000]),
    st.sampled_from([0.0, 0.3, 2.0, 8.0, 1e6]),
    st.sampled_from([1e-4, 0.1, 0.8, 1.0, 2.5, 100.0]),
    st.sampled_from(
        [(0, 1.0, 0.0, 1.0), (0, 0.95, 0.0, 1.0), (50, 1.0, 0.0, 1.0), (0, 1.0, 0.05, 1.0), (9, 0.7, 0.1, 0.9)]
    ),
)
def test_shortcuts_find_the_plain_winner(
    seed: int, n: int, scale: float, temperature: float, filters: tuple[int, float, float, float]
) -> None:
    rng = np.random.default_rng(seed)
    logits = rough(rng, n, scale)
    top_k, top_p, min_p, typical_p = filters
    for position in range(1, 9):
        params: dict[str, Any] = {"temperature": temperature, "seed": seed}
        params |= {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
        inv_t = np.float32(1.0 / np.float32(temperature))
        rounded = [float(np.float32(value)) for value in (top_p, min_p, typical_p)]
        kept = survivors(logits, inv_t, top_k, *rounded)
        ids = list(range(n)) if kept is None else kept.tolist()
        with np.errstate(over="ignore"):
            expected = plain_winner(logits, ids, temperature, seed, position, 0)
        assert draw(logits, position, **params) == expected


def test_a_miss_of_the_first_bound_falls_back() -> None:
    """4,000 draws from a flat row: some best scores lie far below the usual, so every fallback runs."""
    z = np.zeros(1100, np.float32)
    margins = []
    for position in range(4000):
        bits = noise.noise_row(3, position, 0, noise.KIND_SAMPLE, z.size)
        scores = noise.gumbel(bits)
        margins.append(math.log(z.size) - float(scores.max()))
        assert noise.race(z, bits) == int(scores.argmax())
    assert max(margins) > 2.0


def test_winners_need_no_large_noise_to_be_found() -> None:
    z = np.linspace(0, 1, 2000).astype(np.float32)
    weak = np.full(2000, 2**32 - 1, np.uint32)
    assert noise.race(z, weak) == 1999
    weak[7] = 2**31
    assert noise.race(z, weak) == 7


def test_a_likely_token_with_a_bad_draw_loses() -> None:
    """It passes every threshold, alone; the others, which none passes at first, still beat it."""
    z = np.full(2000, -8.0, np.float32)
    z[0] = 0.0
    bits = np.full(2000, int(0.002 * 2**32), np.uint32)
    bits[0] = 2**32 - 1
    assert noise.race(z, bits) == 1


@pytest.mark.parametrize(("likely", "unlikely"), [(0.3, 0.6), (0.004, 0.009), (0.0004, 0.0008)])
def test_thresholds_let_every_token_through_that_can_reach_the_bound(likely: float, unlikely: float) -> None:
    """Two scores just above the first bound; the better one belongs to an unlikely token."""
    z = np.full(2000, -8.0, np.float32)
    z[0] = 0.0
    bound = math.log(1 + 1999 * math.exp(-8.0)) - 2.0
    bits = np.full(2000, 2**31, np.uint32)
    for token, score in ((0, bound + likely), (1234, bound + unlikely)):
        bits[token] = int(-math.expm1(-math.exp(z[token] - score)) * 2**32)
    assert noise.race(z, bits) == 1234


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}, {"temperature": 0.0}])
def test_draws_do_not_depend_on_batch_mates(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    logits = [rough(rng, 1200, 2.0) for _ in range(9)]
    mates: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.5, "seed": 4}, {"temperature": 2.0}]
    rows = [Row(params if r % 2 else mates[r % 3], start=5 * r, n=r % 4) for r in range(9)]
    together = emitted(sample(rows, logits))
    alone = [emitted(sample([row], [x]))[0] for row, x in zip(rows, logits, strict=True)]
    assert together == alone


def test_samples_of_one_request_differ_and_repeat() -> None:
    logits = np.zeros(500, np.float32)
    first = [draw(logits, n=n) for n in range(6)]
    assert len(set(first)) > 3
    assert first == [draw(logits, n=n) for n in range(6)]
    assert draw(logits, seed=1) != draw(logits, seed=2) or draw(logits, 12, seed=1) != draw(logits, 12, seed=2)


def test_distribution_of_filtered_draws() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, -2.0, -9.0])
    rows = [Row({"temperature": 0.8, "top_p": 0.95}, start=position) for position in range(6000)]
    counts = np.bincount(sample(rows, [logits] * 6000).tokens, minlength=6)
    ids = plain_survivors(logits.astype(np.float32), 0.8, 0, 0.95, 0.0)
    p = np.zeros(6)
    p[ids] = np.exp(logits[ids] / 0.8)
    p /= p.sum()
    assert counts[p == 0].sum() == 0
    expected = 6000 * p[ids]
    assert ((counts[ids] - expected) ** 2 / expected).sum() < 16  # chi-square, 3 degrees: one in 900


# --- bias, bans, penalties, masks ------------------------------------------------------------------------------------


def filtered(row: Row, logits: Any, masks: MaskBatch | None = None) -> dict[int, float]:
    """Log-probabilities after every transform, by token."""
    row.wants |= WANT_LOGPROBS
    row.params = SamplingParams(
        **{
            **{name: getattr(row.params, name) for name in FALLBACK_SAMPLING},
            "logprobs": 64,
            "logprobs_mode": "filtered",
        }
    )
    result = sample([row], [logits], masks)
    assert result.logprobs is not None
    return dict(zip(result.logprobs.ids[0][1:], result.logprobs.values[0][1:], strict=True))


def log_softmax(x: np.ndarray) -> dict[int, float]:
    y = x.astype(np.float64)
    y = y - y.max()
    y -= math.log(np.exp(y).sum())
    return {i: float(v) for i, v in enumerate(y) if v > -math.inf}


def test_transforms_in_order() -> None:
    logits = np.array([2.0, -1.0, 0.5, 3.0, 0.0, 1.0], np.float32)
    params = {"temperature": 0.5, "repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    row = Row(params, bias={0: -4.0, 2: 1.0, 5: -math.inf}, banned=[3], counts={0: 1, 2: 3, 3: 9})
    expected = np.array(
        [
            (2.0 - 4.0) * 2.0 - 0.25 - 0.5,  # bias made it negative: the penalty multiplies
            -1.0,
            (0.5 + 1.0) / 2.0 - 0.25 - 1.5,
            -np.inf,
            0.0,
            -np.inf,
        ]
    )
    got = filtered(row, logits)
    assert got == pytest.approx(log_softmax(expected / 0.5), abs=1e-6)


def test_bans_win_over_bias() -> None:
    assert draw([0.0, 9.0], temperature=0.0) == 1
    rows = [Row({"temperature": 0.0}, banned=[1], bias={1: 50.0}), Row({"temperature": 0.0})]
    assert emitted(sample(rows, [[0.0, 9.0], [0.0, 9.0]])) == [[0], [1]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("vocab", [32, 70])
def test_masks_allow_exactly_their_tokens(temperature: float, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal(vocab).astype(np.float32)
    for allowed in ([vocab - 1], [0, 31], [int(logits.argmax()), 3], list(range(0, vocab, 3))):
        row = Row({"temperature": temperature, "top_p": 0.9})
        got = emitted(sample([row], [logits], mask_rows([[allowed]], vocab)))[0][0]
        only = np.full(vocab, -np.inf, np.float32)
        only[allowed] = logits[allowed]
        assert got == draw(only, temperature=temperature, top_p=0.9)
        shown = filtered(Row({"temperature": temperature}), logits, mask_rows([[allowed]], vocab))
        assert sorted(shown) == sorted(set(allowed))


def test_a_mask_of_fewer_words_excludes_the_rest() -> None:
    logits = np.arange(70, dtype=np.float32)
    masks = mask_rows([[[2, 5]]], 32)
    assert emitted(sample([Row({"temperature": 0.0})], [logits], masks)) == [[5]]


def test_rows_without_a_mask_row_are_free() -> None:
    rows = [Row({"temperature": 0.0}), Row({"temperature": 0.0})]
    assert emitted(sample(rows, [[1, 2, 3], [1, 2, 3]], mask_rows([[], [[0]]], 3))) == [[2], [0]]


# --- drafts ----------------------------------------------------------------------------------------------------------

VOCAB = 24


def model(prefix: list[int]) -> np.ndarray:
    """Logits as a function of the whole prefix."""
    seed = [len(prefix), *prefix]
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 2).astype(np.float32)


def allowed_after(prefix: list[int]) -> list[int]:
    return [i for i in range(VOCAB) if (i + prefix[-1]) % 3]


def generate(
    params: dict[str, Any],
    n_tokens: int,
    propose: Callable[[list[int]], list[int]] | None,
    masked: bool = False,
    mask_limit: Callable[[int], int] = lambda n: n,
) -> tuple[list[int], int]:
    """Decode n_tokens after a prompt of 4 with or without drafts. Returns (tokens, steps)."""
    prompt = [3, 1, 4, 1]
    tokens, steps = list(prompt), 0
    while len(tokens) - len(prompt) < n_tokens:
        drafts = propose(tokens) if propose else []
        counts = {i: tokens.count(i) for i in set(tokens)}
        fed = [tokens[-1], *drafts]
        row = Row(params, fed, len(drafts), start=len(tokens) - 1, counts=counts)
        prefixes = [tokens + drafts[:j] for j in range(len(drafts) + 1)]
        masks = None
        if masked:
            masks = mask_rows([[allowed_after(prefix) for prefix in prefixes[: mask_limit(len(prefixes))]]], VOCAB)
        result = sample([row], [model(prefix) for prefix in prefixes], masks)
        (new,) = emitted(result)
        assert result.accepted.tolist() == [len(new) - 1]
        assert new[:-1] == drafts[: len(new) - 1]
        tokens += new
        steps += 1
    return tokens[len(prompt) :][:n_tokens], steps


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.1, "top_k": 5, "min_p": 0.05, "typical_p": 0.9},
]


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_drafts_never_change_the_output(params: dict[str, Any], masked: bool) -> None:
    plain, n = generate(params, 40, None, masked)
    assert n == 40
    truth = [3, 1, 4, 1, *plain, 0, 0, 0, 0]

    def oracle(tokens: list[int]) -> list[int]:
        return truth[len(tokens) : len(tokens) + 3]

    def noisy(tokens: list[int]) -> list[int]:
        return [(i + (k + len(tokens)) % 3 // 2) % VOCAB for k, i in enumerate(oracle(tokens))]

    for propose in (oracle, noisy, lambda _: [7, 7]):
        assert generate(params, 40, propose, masked)[0] == plain
    assert generate(params, 40, oracle, masked)[1] == 10
    if masked:
        assert generate(params, 40, oracle, True, lambda n: max(1, n - 2))[0] == plain


def test_a_row_ends_after_its_last_mask_row() -> None:
    row = Row({"temperature": 0.0}, [9, 1, 1], 2)
    masks = mask_rows([[[0, 1], [0, 1]]], 3)
    result = sample([row], [[0, 5, 9]] * 3, masks)
    assert emitted(result) == [[1, 1]]
    assert result.accepted.tolist() == [1]


@pytest.mark.parametrize("as_array", [True, False])
def test_verification_of_many_rows(as_array: bool) -> None:
    rng = np.random.default_rng(2)
    rows: list[Row] = []
    logits: list[np.ndarray] = []
    expected: list[list[int]] = []
    for r in range(200):
        n_draft = int(rng.integers(0, 5))
        truth = rng.integers(0, 3, n_draft + 1).tolist()
        drafts = [i if rng.random() < 0.7 else (i + 1) % 3 for i in truth[:n_draft]]
        if r % 7 == 6:
            rows.append(Row({"temperature": 0.0}, [1, 2], sample=False))
            expected.append([])
            continue
        rows.append(Row({"temperature": 0.0}, [0, 0, *drafts], n_draft))
        logits += [np.eye(3, dtype=np.float32)[i] for i in truth]
        agreed = next((j for j in range(n_draft) if drafts[j] != truth[j]), n_draft)
        expected.append(truth[: agreed + 1])
    plan = make_plan(rows)
    result = sampling.sample_step(plan, np.stack(logits) if as_array else logits, None)
    assert emitted(result) == expected
    assert result.accepted.tolist() == [max(0, len(tokens) - 1) for tokens in expected]
    # the general path agrees with the short one
    rows[0].wants |= WANT_LOGITS
    assert emitted(sampling.sample_step(make_plan(rows), logits, None)) == expected


# --- rows that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 2}])
def test_a_bad_row_fails_alone(temperature: float, params: dict[str, Any]) -> None:
    good = [0.0, 4.0, 1.0]
    bad = [[1.0, math.nan, 2.0], [math.inf, 0.0, 1.0], [-math.inf] * 3, [math.inf, -math.inf, math.nan]]
    rows = [Row({**params, "temperature": temperature}, start=r) for r in range(9)]
    logits = [bad[r // 2] if r % 2 else good for r in range(8)] + [good]
    result = sample(rows, logits)
    alone = [emitted(sample([rows[r]], [good]))[0] for r in (0, 2, 4, 6, 8)]
    assert emitted(result) == [alone[0], [], alone[1], [], alone[2], [], alone[3], [], alone[4]]
    assert result.status == {1: sampling.NAN, 3: sampling.INFINITE, 5: sampling.NOTHING, 7: sampling.NAN}


def test_nothing_allowed_is_a_status() -> None:
    rows = [Row({"temperature": t}, banned=[0, 1, 2]) for t in (0.0, 1.0)]
    rows += [Row({"temperature": t}) for t in (0.0, 1.0)]
    result = sample(rows, [[1.0, 2.0, 3.0]] * 4, mask_rows([[], [], [[]], [[]]], 3))
    assert emitted(result) == [[], [], [], []]
    assert result.status == dict.fromkeys(range(4), sampling.NOTHING)


def test_a_bad_draft_position_ends_the_row_before_it() -> None:
    bad = [math.nan, 0.0, 0.0]
    row = Row({"temperature": 0.0}, [0, 1, 1], 2, wants=WANT_TOKEN | WANT_LOGITS | WANT_LOGPROBS)
    result = sample([row], [[0, 5, 0], [0, 5, 0], bad])
    assert emitted(result) == [[1, 1]]
    assert result.accepted.tolist() == [1]
    assert not result.status
    assert len(result.arrays["logits"][0]) == 2
    row.wants = WANT_TOKEN
    assert emitted(sample([row], [[0, 5, 0], [0, 5, 0], bad])) == [[1, 1]]
    # behind a mismatch it is not even looked at
    assert emitted(sample([row], [[5, 0, 0], [0, 5, 0], bad])) == [[0]]


def test_nan_is_seen_behind_a_mask() -> None:
    result = sample([Row({})], [[1.0, math.nan, 2.0]], mask_rows([[[0]]], 3))
    assert result.status == {0: sampling.NAN}


# --- what rows want back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_logprobs_are_the_models_own(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 3.0, -2.0, 0.5], np.float32)
    row = Row(
        {"temperature": temperature, "top_k": 2, "logprobs": 3, "repetition_penalty": 3.0},
        wants=WANT_TOKEN | WANT_LOGPROBS,
        banned=[1],
        bias={4: 20.0},
        counts={2: 2},
    )
    result = sample([Row({"temperature": temperature}), row], [logits, logits])
    found = result.logprobs
    assert found is not None
    assert found.row.tolist() == [1]
    assert found.position.tolist() == [11]
    assert found.ids == [[4, 1, 2, 0]]
    truth = log_softmax(logits)
    assert found.values[0] == pytest.approx([truth[i] for i in found.ids[0]], abs=1e-6)


def test_logprobs_and_logits_of_accepted_drafts() -> None:
    row = Row({"temperature": 0.0, "logprobs": 0}, [0, 2, 1, 1], 3, wants=WANT_TOKEN | WANT_LOGPROBS | WANT_LOGITS)
    logits = np.array([[0, 1, 2], [0, 3, 1], [4, 1, 1], [0, 0, 9]], np.float32)
    result = sampling.sample_step(make_plan([Row({"temperature": 0.0}), row]), [logits[0], *logits], None)
    assert emitted(result) == [[2], [2, 1, 0]]
    assert result.logprobs is not None
    assert result.logprobs.position.tolist() == [11, 12, 13]
    assert result.logprobs.ids == [[2], [1], [0]]
    index, values = result.arrays["logits"]
    assert index.tolist() == [1, 1, 1]
    assert values.tolist() == logits[:3].tolist()
    assert not np.shares_memory(values, logits)


def test_prompt_logprobs() -> None:
    rows = [Row({}), Row({"prompt_logprobs": 2}, [4, 2, 0, 1], start=6)]
    plan = make_plan(rows)
    plan.targets = np.array([-1, 2, 0, 1, -1], np.int32)
    logits = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    found = sampling.prompt_logprobs(plan, [(1, logits)])
    assert found.row.tolist() == [1, 1, 1]
    assert found.position.tolist() == [7, 8, 9]
    for i, target in enumerate((2, 0, 1)):
        truth = log_softmax(logits[i])
        assert found.ids[i] == [target, *sorted(truth, key=lambda t: -truth[t])[:2]]
        assert found.values[i] == pytest.approx([truth[t] for t in found.ids[i]], abs=1e-6)
    empty = sampling.prompt_logprobs(plan, [])
    assert empty.row.size == 0
    assert empty.ids == []


# --- the table -------------------------------------------------------------------------------------------------------


def test_table_rows() -> None:
    table = sampling.new_table(3)
    params = SamplingParams(seed=2**64 - 1, top_k=7, logprobs=0, logprobs_mode="filtered").resolved(FALLBACK_SAMPLING)
    sampling.set_row(table, 1, params, 4)
    assert table.seed.tolist() == [DEFAULT_SEED, 2**64 - 1, DEFAULT_SEED]
    assert table.sample_index.tolist() == [0, 4, 0]
    assert table.top_k.tolist() == [0, 7, 0]
    assert table.n_logprobs.tolist() == [-1, 0, -1]
    assert table.filtered_logprobs.tolist() == [False, True, False]
    assert table.temperature.dtype == np.float32
    sampling.set_row(table, 1, SamplingParams().resolved(FALLBACK_SAMPLING), 0)
    assert (int(table.top_k[1]), int(table.n_logprobs[1])) == (0, -1)


def test_seeds() -> None:
    assert sampling.resolve_seed(SamplingParams()) == DEFAULT_SEED
    assert sampling.resolve_seed(SamplingParams(seed=5)) == 5
    fresh = {sampling.resolve_seed(SamplingParams(seed="random")) for _ in range(4)}
    assert len(fresh) == 4
    assert all(0 <= seed < 2**64 for seed in fresh)
    with pytest.raises(ValueError, match="random"):
        sampling.set_row(sampling.new_table(1), 0, SamplingParams(seed="random").resolved(FALLBACK_SAMPLING), 0)


def test_temperatures_that_float32_cannot_tell_apart_are_greedy() -> None:
    logits = np.array([1.0, 1.0000001, 0.0], np.float32)
    assert draw(logits, temperature=1e-6) == 1
    assert draw(logits * np.float32(1e30), temperature=1e-4, top_p=0.5) == 1
