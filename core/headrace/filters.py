"""Which tokens may be drawn: top_k, top_p, min_p and typical_p over one row of logits, without sorting the vocabulary.

All of them look at the tempered distribution p = softmax(logits / T). Tokens are ranked by logit, best first, ties by
lower id, and

    typical_p   rank by |log p + entropy| instead, keep the smallest prefix in which the mass before a token is at most
                typical_p. It comes first, since it may drop the best token; the others see what it left, renormalised.
    top_k       the first k tokens
    top_p       the tokens with a mass before them of at most top_p
    min_p       the tokens with p >= min_p * max(p)

The last three measure the same distribution and a token must pass each of them, so their order does not matter, and
the best token always stays. Off: top_k 0, top_p 1, min_p 0, typical_p 1. (top_p is thus not renormalised after top_k;
same as the joint mode of SGLang and FlashInfer, and DeepInfer.)

Masses are float64 sums of float32 exponentials; numpy's exponential may differ in its last bit between processors, so a
token whose mass ends exactly on a threshold may be in on one machine and out on another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Ids = NDArray[np.intp]

_SLACK = 1 - 1e-5
"""Lowers thresholds by more than float32 rounding can move them, so that none cuts off a token that belongs."""

_BLOCKS = 1024
_FEW = 64
_MAX_BUCKET = 4095


def survivors(
    logits: Floats, inv_t: np.float32, top_k: int, top_p: float, min_p: float, typical_p: float
) -> Ids | None:
    """Indices that pass every filter, ascending; None when all filters are off.

    logits: [n] float32 without NaN or +inf, the best one finite. -inf is allowed and has no mass.
    """
    if typical_p >= 1:
        return _ranked(logits, inv_t, top_k, top_p, min_p)
    kept = _typical(logits, inv_t, typical_p)
    rest = _ranked(logits[kept], inv_t, top_k, top_p, min_p)
    return kept if rest is None else kept[rest]


def weights(logits: Floats, inv_t: np.float32) -> Floats:
    """exp((logits - max) / T), float32: the distribution up to its sum."""
    e = np.subtract(logits, logits.max())
    e *= inv_t
    return np.exp(e, out=e)


def _ranked(logits: Floats, inv_t: np.float32, top_k: int, top_p: float, min_p: float) -> Ids | None:
    n = logits.size
    limit = top_k if 0 < top_k < n else n
    if limit == 1:
        return np.array([logits.argmax()])
    kept = top(logits, limit) if limit < n else None
    if top_p >= 1 and min_p <= 0:
        return kept
    e = weights(logits, inv_t)
    if top_p < 1:
        total = float(e.sum(dtype=np.float64))
        if kept is None:
            kept = _nucleus_candidates(e, total, top_p)
        kept = kept[_prefix(-logits[kept], inv_t, e[kept], top_p * total)]
    if min_p > 0:
        floor = np.float32(min_p)
        kept = np.flatnonzero(e >= floor) if kept is None else kept[e[kept] >= floor]
    return kept


def _prefix(rank: Floats, inv_t: np.float32, mass: Floats, limit: float) -> Ids:
    """Indices, ascending, of the smallest prefix in order of `rank` (lowest first, ties by lower index) such that the
    mass before each member is at most `limit`.

    Long inputs are cut into buckets of 1/64 nat first; only the bucket in which the limit lies is sorted.
    """
    if rank.size <= 2 * _BLOCKS:
        order = np.argsort(rank, kind="stable")
        return np.sort(order[: _count(mass[order], 0.0, limit)])
    bucket = np.minimum((rank - rank.min()) * (inv_t * np.float32(64)), np.float32(_MAX_BUCKET)).astype(np.intp)
    above = np.bincount(bucket, mass).cumsum()
    edge = min(int(np.searchsorted(above, limit, side="right")), above.size - 1)
    inside = np.flatnonzero(bucket == edge)
    inside = inside[np.argsort(rank[inside], kind="stable")]
    inside = inside[: _count(mass[inside], float(above[edge - 1]) if edge else 0.0, limit)]
    return np.sort(np.concatenate((np.flatnonzero(bucket < edge), inside)))


def _count(mass: Floats, before: float, limit: float) -> int:
    """How many leading entries have a mass before them of at most `limit`; the first always counts."""
    return 1 + int(np.searchsorted(mass.cumsum(dtype=np.float64) + before, limit, side="right"))


def _nucleus_candidates(e: Floats, total: float, top_p: float) -> Ids:
    """A superset of the nucleus that holds every token ranked before any of its members.

    If the tokens below a threshold t have less than (1 - top_p) * total of mass between them, then a token below t has
    more than top_p * total before it. n tokens below t have less than n * t, hence the first threshold; what it leaves
    out is then known exactly, which allows a higher one. A flat row keeps nearly all tokens, rightly.
    """
    outside = (1 - top_p) * total - 1e-9 * total
    kept = np.flatnonzero(e >= np.float32(outside / e.size * _SLACK))
    while kept.size > _FEW:
        inside = e[kept]
        tail = total - float(inside.sum(dtype=np.float64))
        fewer = np.flatnonzero(inside >= np.float32((outside - tail) / kept.size * _SLACK))
        if fewer.size > 0.75 * kept.size:
            break
        kept = kept[fewer]
    return kept


def _typical(logits: Floats, inv_t: np.float32, typical_p: float) -> Ids:
    x = (logits - logits.max()) * inv_t
    e = np.exp(x)
    some = np.flatnonzero(e)
    x, e = x[some], e[some]
    total = float(e.sum(dtype=np.float64))
    # -log p - entropy = log(total) - x - (log(total) - mean(x)) = mean(x) - x
    mean = (e * x).sum(dtype=np.float64) / total
    return some[_prefix(np.abs(x - np.float32(mean)), np.float32(1), e, typical_p * total)]


def top(values: Floats, k: int) -> Ids:
    """Indices of the k largest values, ties by lower index, ascending. values: [n] float32 without NaN, 0 < k <= n."""
    among = None
    if k <= _BLOCKS // 4 and values.size >= 4 * _BLOCKS:
        # the k-th largest block maximum is at most the k-th largest value: k blocks hold one at least as large
        rows = values.size // _BLOCKS
        maxima = values[: rows * _BLOCKS].reshape(rows, _BLOCKS).max(axis=0)
        among = np.flatnonzero(values >= np.partition(maxima, _BLOCKS - k)[_BLOCKS - k])
        values = values[among]
    if k >= values.size:
        return np.arange(values.size) if among is None else among
    least = np.partition(values, values.size - k)[values.size - k]
    kept = np.flatnonzero(values >= least)
    if kept.size > k:
        ties = np.flatnonzero(values == least)
        kept = np.delete(kept, np.searchsorted(kept, ties[ties.size - (kept.size - k) :]))
    return kept if among is None else among[kept]


def best(values: Floats, k: int) -> Ids:
    """Indices of the k largest values, best first, ties by lower index; fewer when values has fewer."""
    if k < 1:
        return np.empty(0, np.intp)
    kept = top(values, min(k, values.size))
    return kept[np.argsort(-values[kept], kind="stable")]
