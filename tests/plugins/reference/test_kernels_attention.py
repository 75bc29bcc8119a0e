"""Attention over chosen entries with sinks, and over all blocks of a row."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need PyTorch: pip install 'headrace[torch]'")

import golden  # noqa: E402
from kernel_caches import context, make_cache, make_paged, round_trip  # noqa: E402

from headrace.modeling import CacheFormat  # noqa: E402
from headrace_plugins.reference.kernels import attention as kernels  # noqa: E402
from headrace_plugins.reference.kernels import cache  # noqa: E402

SPARSE = {"plain": kernels.attn_sparse, "tiled": kernels.attn_sparse_tiled}
PAGED = {"plain": kernels.attn_paged, "tiled": kernels.attn_paged_tiled}
CLOSE = {"float32": 1e-5, "bfloat16": 2**-8}
"""Of the largest number; for bfloat16 the rounding of the result."""


# --- attn.sparse -----------------------------------------------------------------------------------------------------


def filled(values, name, grain):
    """A cache that holds values [n, d] at addresses 0, 1, ..."""
    store = make_cache(CacheFormat(name, values.shape[1]), -(-len(values) // grain), grain)
    cache.store(store, torch.arange(len(values)), values)
    return store


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["c0", "c1"])
def test_golden_attention_with_sinks(name, compute, make):
    case = golden.op_case("attention_sinks", name)
    given, dtype = case.inputs, getattr(torch, compute)
    scale = {"c0": 0.125, "c1": 512**-0.5}[name]
    got = make(context(compute))(
        given["q"].to(dtype),
        filled(given["window_kv"], "bfloat16", 4),
        given["window_index"].long(),
        filled(given["compressed_kv"], "bfloat16", 3),
        given["compressed_index"].long(),
        given["sink"],
        scale,
    )
    assert got.dtype == dtype
    assert golden.rel(got, case.outputs["o_fp32"]) <= (1e-5 if compute == "float32" else 2e-2)
    alone = ((given["window_index"] >= 0).sum(1) + (given["compressed_index"] >= 0).sum(1)) == 0
    assert alone.any()
    assert (got[alone] == 0).all()


def expected_sparse(q, sets, sink, scale):
    """One token, in float64. q: [h, d]; sets: keys [k, d] of each cache."""
    keys = torch.cat(sets).double()
    scores = q.double() @ keys.T * scale
    sinks = sink.double().unsqueeze(1) if sink is not None else torch.empty(len(q), 0).double()
    return torch.cat([scores, sinks], 1).softmax(1)[:, : len(keys)] @ keys


def sparse_batch(counts, compute, name=("q8", "q4"), seed=0, heads=4, d=64, window=11, k=7):
    """Tokens with `counts[i]` = (window keys, compressed keys)."""
    random = torch.Generator().manual_seed(seed)
    values = [torch.randn(60, d, generator=random) for _ in range(2)]
    caches = [filled(v, format, grain) for v, format, grain in zip(values, name, (12, 5), strict=True)]
    lists = []
    for side, width in enumerate((window, k)):
        index = torch.full((len(counts), width), -1)
        for token, count in enumerate(counts):
            index[token, : count[side]] = torch.randperm(60, generator=random)[: count[side]]
        lists.append(index)
    q = (torch.randn(len(counts), heads, d, generator=random) * 2).to(getattr(torch, compute))
    sink = torch.randn(heads, generator=random)
    return q, caches, lists, sink, [round_trip(c.format, v) for c, v in zip(caches, values, strict=True)]


COUNTS = [(11, 7), (1, 0), (0, 0), (0, 3), (4, 7), (11, 0), (8, 1)]


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("sinks", [True, False])
def test_sparse_is_a_softmax_over_all_keys(sinks, compute, make, monkeypatch):
    q, caches, lists, sink, values = sparse_batch(COUNTS, compute)
    sink = sink if sinks else None

    def attend():
        return make(context(compute))(q, caches[0], lists[0], caches[1], lists[1], sink, 0.3)

    got = attend()
    for token, counts in enumerate(COUNTS):
        if counts == (0, 0):
            assert (got[token] == 0).all()
            continue
        sets = [v[index[token][index[token] >= 0]] for v, index in zip(values, lists, strict=True)]
        assert golden.rel(got[token], expected_sparse(q[token], sets, sink, 0.3)) <= CLOSE[compute]
    monkeypatch.setattr(kernels, "SCRATCH", 1)  # one token at a time
    assert golden.rel(attend(), got) <= CLOSE[compute]


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_with_one_cache_and_holes(make):
    q, caches, lists, sink, values = sparse_batch([(11, 0), (5, 0)], "float32")
    index = lists[0]
    index[0, [0, 4]] = -1  # not only at the end
    got = make(context())(q, caches[0], index, None, None, sink, 0.2)
    for token in range(2):
        sets = [values[0][index[token][index[token] >= 0]]]
        assert golden.rel(got[token], expected_sparse(q[token], sets, sink, 0.2)) <= 1e-5


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("sinks", [True, False])
def test_sparse_over_nothing(sinks, make):
    q, caches, lists, sink, _ = sparse_batch([(0, 0)] * 3, "float32")
    sink = sink if sinks else None
    attend = make(context())
    assert (attend(q, caches[0], lists[0], caches[1], lists[1], sink, 1.0) == 0).all()
    none = torch.empty(3, 0, dtype=torch.int64)
    assert (attend(q, caches[0], none, None, None, sink, 1.0) == 0).all()
    assert attend(q[:0], caches[0], lists[0][:0], caches[1], lists[1][:0], sink, 1.0).shape == (0, 4, 64)


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_large_scores_dont_overflow(make):
    q, caches, lists, sink, values = sparse_batch([(3, 2)], "float32")
    got = make(context())(q * 1e4, caches[0], lists[0], caches[1], lists[1], sink, 1.0)
    sets = [v[index[0][index[0] >= 0]] for v, index in zip(values, lists, strict=True)]
    assert golden.rel(got[0], expected_sparse(q[0] * 1e4, sets, sink, 1.0)) <= 1e-5
    low = make(context())(q * 0, caches[0], lists[0], caches[1], lists[1], sink + 1e4, 1.0)
    assert (low == 0).all()  # the sink takes it all


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "d"), [(4, 64), (3, 96), (8, 32)])
def test_exact_sparse_doesnt_depend_on_neighbours(compute, heads, d):
    random = torch.Generator().manual_seed(heads)
    counts = [tuple(torch.randint(0, n, (1,), generator=random).item() for n in (12, 8)) for _ in range(45)]
    q, caches, lists, sink, _ = sparse_batch(counts, compute, heads=heads, d=d)
    attend = kernels.attn_sparse_tiled(context(compute, exact=True))

    def run(at):
        return attend(q[at], caches[0], lists[0][at], caches[1], lists[1][at], sink, 0.3)

    alone = torch.cat([run(torch.tensor([token])) for token in range(45)])
    for n in (1, 3, 8, 45):
        for seed in range(3):
            at = torch.randperm(45, generator=torch.Generator().manual_seed(seed))[:n]
            assert torch.equal(run(at), alone[at])


# --- attn.paged ------------------------------------------------------------------------------------------------------

LENGTHS = [1, 300, 17, 130, 128, 129, 40, 260]
TOKENS = [1, 1, 3, 45, 1, 9, 40, 1]


def paged_batch(lengths, tokens, compute, heads=6, kv_heads=2, d=32, name="float32"):
    """Rows of `lengths[i]` positions with queries at the last `tokens[i]`."""
    format = CacheFormat(name, kv_heads * d)
    keys, values = (make_paged(format, lengths, 16, seed) for seed in (1, 1))
    values.values = [torch.randn(v.shape, generator=torch.Generator().manual_seed(2)) for v in values.values]
    for row, own in enumerate(values.values):
        at = torch.arange(len(own))
        cache.store(values.cache, values.table[row, at // 16] * 16 + at % 16, own)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(tokens))
    positions = torch.cat([torch.arange(n - t, n) for n, t in zip(lengths, tokens, strict=True)])
    q = torch.randn(len(row), heads, d, generator=torch.Generator().manual_seed(3)).to(getattr(torch, compute))
    return q, keys, values, row, positions


def expected_paged(q, keys, values, scale):
    """One token, in float64. q: [heads, d]; keys, values: [n, kv_heads d]"""
    heads, d = q.shape
    keys, values = (
        x.double().view(len(x), -1, d).repeat_interleave(heads * d // x.shape[1], 1) for x in (keys, values)
    )
    shares = (torch.einsum("hd,nhd->hn", q.double(), keys) * scale).softmax(1)
    return torch.einsum("hn,nhd->hd", shares, values)


@pytest.mark.parametrize("make", PAGED.values(), ids=PAGED)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "q8"])
def test_paged_is_causal_attention(name, compute, make, monkeypatch):
    q, keys, values, row, positions = paged_batch(LENGTHS, TOKENS, compute, name=name)

    def attend():
        return make(context(compute))(q, keys.cache, values.cache, keys.table, row, positions, 0.4)

    got = attend()
    assert got.dtype == q.dtype
    for token, (r, p) in enumerate(zip(row.tolist(), positions.tolist(), strict=True)):
        own = [round_trip(keys.cache.format, x.values[r][: p + 1]) for x in (keys, values)]
        assert golden.rel(got[token], expected_paged(q[token], *own, 0.4)) <= CLOSE[compute]
    monkeypatch.setattr(kernels, "SCRATCH", 1)
    assert golden.rel(attend(), got) <= CLOSE[compute]


@pytest.mark.parametrize("make", PAGED.values(), ids=PAGED)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_paged_head_groups(heads, kv_heads, make):
    q, keys, values, row, positions = paged_batch([9, 5], [2, 5], "float32", heads, kv_heads)
    got = make(context())(q, keys.cache, values.cache, keys.table, row, positions, 0.4)
    for token, (r, p) in enumerate(zip(row.tolist(), positions.tolist(), strict=True)):
        own = [x.values[r][: p + 1] for x in (keys, values)]
        assert golden.rel(got[token], expected_paged(q[token], *own, 0.4)) <= 1e-5


@pytest.mark.parametrize("make", PAGED.values(), ids=PAGED)
def test_paged_without_tokens(make):
    q, keys, values, row, positions = paged_batch([3], [1], "float32")
    got = make(context())(q[:0], keys.cache, values.cache, keys.table, row[:0], positions[:0], 1.0)
    assert got.shape == (0, 6, 32)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(6, 2, 32), (4, 4, 16), (5, 1, 24)])
def test_exact_paged_doesnt_depend_on_neighbours(compute, heads, kv_heads, d):
    lengths, tokens = [*LENGTHS, *range(20, 57)], [*TOKENS, *[1] * 37]
    q, keys, values, row, positions = paged_batch(lengths, tokens, compute, heads, kv_heads, d)
    attend = kernels.attn_paged_tiled(context(compute, exact=True))

    def run(at):
        return attend(q[at], keys.cache, values.cache, keys.table, row[at], positions[at], 0.4)

    alone = torch.cat([run(torch.tensor([token])) for token in range(len(row))])
    rows = [(row == r).nonzero().squeeze(1) for r in range(45)]
    for picked in ([3], [0, 3, 1], [7, 2, 0, 3, 1, 6, 5, 4], range(45), torch.randperm(45).tolist()):
        at = torch.cat([rows[r] for r in picked])
        assert torch.equal(run(at), alone[at])
    for size in (1, 5, 8, 13):  # the same tokens in other chunks
        assert torch.equal(torch.cat([run(part) for part in rows[3].split(size)]), alone[rows[3]])


@pytest.mark.parametrize("counts", [[1], [8], [9], [3, 17, 8, 1, 1, 16], []])
def test_tiles_hold_every_token_once_and_one_row_each(counts):
    row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)) * 3
    tiles = kernels.row_tiles(row, 8)
    assert tiles.shape == (sum(-(-n // 8) for n in counts), 8)
    assert tiles[tiles >= 0].tolist() == list(range(len(row)))
    for tile in tiles:
        real = tile[tile >= 0]
        assert (tile[: len(real)] == real).all()
        assert len(row[real].unique()) == 1
