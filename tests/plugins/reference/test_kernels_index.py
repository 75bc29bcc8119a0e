"""Addresses, scores of the indexer, and the choice of entries and blocks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need PyTorch: pip install 'headrace[torch]'")

import golden  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_caches import context, make_cache, make_paged, round_trip  # noqa: E402

from headrace.modeling import CacheFormat  # noqa: E402
from headrace_plugins.reference.kernels import cache  # noqa: E402
from headrace_plugins.reference.kernels import index as kernels  # noqa: E402

SCORERS = {"plain": kernels.index_score, "tiled": kernels.index_score_tiled}

index_window = kernels.index_window(context())
index_entries = kernels.index_entries(context())
index_topk = kernels.index_topk(context())
index_candidates = kernels.index_candidates(context())
draft_index = kernels.draft_index(context())


# --- addresses against golden lists ----------------------------------------------------------------------------------
#
# Of the golden file's other cases: "cat" joins two index lists for one key buffer and "swa_pivots" lists two spans of
# such a buffer, which attn.sparse never builds (it takes one list per cache); "draft_pool_store" keeps a drafter's
# probabilities, and verification by match needs none. The rest belongs to kernels of other modules.


def spans(case):
    """Golden (offset, length) rows as first and last position, int64."""
    offset, length = case.inputs["offset_len"].long().unbind(1)
    return offset, offset + length - 1


def entries_of(first, last, width):
    entries = first.unsqueeze(1) + torch.arange(width)
    return entries.masked_fill(entries > last.unsqueeze(1), -1)


def test_golden_window_of_a_ring():
    case = golden.op_case("kv_index", "swa_ring_decode")
    window, ring = case.params["window"], case.params["ring"]
    first, last = spans(case)
    # a golden list may start anywhere: at positions of a ring that begins at slot 0 and may be far around
    slot = torch.div(first, ring, rounding_mode="floor")
    got = index_window(slot, last - slot * ring, first - slot * ring, window + 4, ring)[:, :window]
    assert torch.equal(got, case.outputs["index"].long())


def test_golden_entries_of_one_block_table():
    case = golden.op_case("kv_index", "ca_decode")
    entries = entries_of(*spans(case), case.params["width"])
    table = case.inputs["block_table"].long().unsqueeze(0)
    got = index_entries(entries, table, torch.zeros(len(entries)).long(), case.params["tokens_per_block"])
    assert torch.equal(got, case.outputs["index"].long())


def test_golden_entries_without_blocks():
    case = golden.op_case("kv_index", "ca_prefill")
    entries = entries_of(*spans(case), case.params["width"])
    got = index_entries(entries, torch.zeros(1, 1).long(), torch.zeros(len(entries)).long(), 1000)
    assert torch.equal(got, case.outputs["index"].long())


def test_golden_conversion_by_block_tables():
    case = golden.op_case("kv_index", "convert")
    chosen, counts = case.inputs["topk"].long(), case.inputs["context_lens"].long()
    chosen = chosen.masked_fill(torch.arange(chosen.shape[2]) >= counts.unsqueeze(2), -1)  # ours are padded
    table = case.inputs["block_tables"].long()
    row = torch.arange(len(table)).repeat_interleave(chosen.shape[1])
    got = index_entries(chosen.flatten(0, 1), table, row, case.params["block_size"])
    assert torch.equal(got, case.outputs["index"].long().flatten(0, 1))


def test_golden_draft_window():
    case = golden.op_case("kv_index", "draft_input")
    ring, gamma, window = (case.params[name] for name in ("ring", "gamma", "window"))
    rows = (case.inputs["first_row"] + case.inputs["last_valid_offset"]).long()
    anchor = case.inputs["positions"].long()[rows] + 1
    slot = case.inputs["slot_mapping_swa"].long()[rows] // ring
    got = draft_index(slot, anchor, torch.zeros_like(slot), window, ring, gamma)
    lists = case.outputs["kv_index"].long()
    stores = case.outputs["store_slots"].long().view(len(rows), gamma)
    for row in range(len(rows)):
        expected = lists[row * gamma]
        expected = expected[expected >= 0]  # golden lists are padded on the left too
        assert got[row].tolist() == [*expected.tolist(), *[-1] * (window + gamma - len(expected))]
        assert torch.equal(got[row][got[row] >= 0][-gamma:], stores[row])
        assert torch.equal(lists[row * gamma : (row + 1) * gamma], lists[row * gamma].expand(gamma, -1))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 40)), max_size=6))
def test_windows_are_those_of_a_loop(rows):
    window, ring, gamma = 5, 9, 3
    rows = [(slot, max(a, b), min(a, b)) for slot, a, b in rows]
    slot, positions, first = torch.tensor(rows, dtype=torch.int64).view(-1, 3).unbind(1)
    got = index_window(slot, positions, first, window, ring)
    drafts = draft_index(slot, positions, first, window, ring, gamma)
    assert got.shape == (len(rows), window)
    assert drafts.shape == (len(rows), window + gamma)
    for (s, p, f), own, draft in zip(rows, got.tolist(), drafts.tolist(), strict=True):
        expected = [s * ring + q % ring for q in range(max(f, p - window + 1), p + 1)]
        assert own == expected + [-1] * (window - len(expected))
        expected = [s * ring + q % ring for q in range(max(f, p - window), p + gamma)]
        assert draft == expected + [-1] * (window + gamma - len(expected))


def test_entries_of_missing_blocks_are_none():
    table = torch.tensor([[4, -1], [2, 7]])
    got = index_entries(torch.tensor([[0, 2, -1], [0, 3, -1]]), table, torch.tensor([0, 1]), 2)
    assert got.tolist() == [[8, -1, -1], [4, 15, -1]]
    assert index_entries(torch.empty(0, 3).long(), table, torch.empty(0).long(), 2).shape == (0, 3)


# --- index.score -----------------------------------------------------------------------------------------------------


def golden_scores(case, compute, make, grain=7):
    """Our scores of a golden case, through a Qm cache in blocks, and what the tokens see."""
    q, k, weights = (case.inputs[name].to(getattr(torch, compute)) for name in ("q", "k", "weights"))
    format = CacheFormat("qm", k.shape[1])
    assert torch.equal(round_trip(format, q), case.outputs["q_dequant"].to(q.dtype))
    n_blocks = -(-len(k) // grain)
    keys, table = make_cache(format, n_blocks + 1, grain), torch.arange(n_blocks, 0, -1).unsqueeze(0)
    at = torch.arange(len(k))
    cache.store(keys, table[0, at // grain] * grain + at % grain, k)
    ratio = {"c0": 2, "c1": 1}[case.name]
    visible = (case.inputs["positions"] + 1) // ratio
    row = torch.zeros(len(q), dtype=torch.int64)
    score = make(context(compute))
    q = round_trip(format, q)

    def scores(blocks=None, block=0):
        return score(q, weights, keys, table, row, visible, blocks, block)

    return scores, visible


def params(name):
    return {
        "c0": {"topk": 6, "block": 4, "blocks": 3},
        "c1": {"topk": 16, "block": 8, "blocks": 4},
    }[name]


@pytest.mark.parametrize("make", SCORERS.values(), ids=SCORERS)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["c0", "c1"])
def test_golden_indexer(name, compute, make):
    case = golden.op_case("indexer", name)
    scores, visible = golden_scores(case, compute, make)
    got, out, chosen = scores(), case.outputs, params(name)
    m = int(visible.max())
    seen = torch.arange(m) < visible.unsqueeze(1)
    assert got.shape == (len(visible), m)
    assert (got[~seen] == -torch.inf).all()
    if compute == "float32":
        assert golden.rel(got[seen], out["logits_fp32"][:, :m][seen]) <= 1e-5
    else:
        assert golden.bf16_ulps(got[seen], out["logits_bf16"][:, :m][seen]) <= 1
    assert torch.equal(index_topk(got, chosen["topk"]), out["topk"].long())

    blocks = index_candidates(got, visible, chosen["block"], chosen["blocks"])
    within = scores(blocks, chosen["block"])
    mask = out["candidate_mask"][:, :m]
    assert torch.equal(within, got.masked_fill(~mask, -torch.inf))
    assert torch.equal(index_topk(within, chosen["topk"]), out["topk_in_candidates"].long())


def batch_of(lengths, tokens, heads, d, compute, seed=0):
    """Rows of `lengths[i]` entries with queries of the last `tokens[i]` positions."""
    act = getattr(torch, compute)
    random = torch.Generator().manual_seed(seed)
    paged = make_paged(CacheFormat("qm", d), lengths, 8, seed)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(tokens))
    visible = torch.cat([torch.arange(n - t + 1, n + 1) for n, t in zip(lengths, tokens, strict=True)])
    q = torch.randn(len(row), heads, d, generator=random).to(act)
    weights = torch.randn(len(row), heads, generator=random).to(act)
    return paged, row, visible, q, weights


LENGTHS = [1, 300, 17, 5, 600, 256, 257, 40]
TOKENS = [1, 1, 3, 2, 45, 1, 9, 1]


@pytest.mark.parametrize("make", SCORERS.values(), ids=SCORERS)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_scores_are_those_of_a_loop(compute, make, monkeypatch):
    paged, row, visible, q, weights = batch_of(LENGTHS, TOKENS, 4, 32, compute)

    def scores():
        return make(context(compute))(q, weights, paged.cache, paged.table, row, visible)

    got, close = scores(), 1e-5 if compute == "float32" else 2**-8
    for token, (r, n) in enumerate(zip(row.tolist(), visible.tolist(), strict=True)):
        keys = round_trip(paged.cache.format, paged.values[r][:n]).double()
        expected = weights[token].double() @ (q[token].double() @ keys.T).relu()
        assert golden.rel(got[token, :n], expected) <= close
        assert (got[token, n:] == -torch.inf).all()
    for scratch in ("SCRATCH", "PLAIN_SCRATCH"):
        monkeypatch.setattr(kernels, scratch, 1)  # cut into the smallest pieces
    assert golden.rel(scores().nan_to_num(neginf=0), got.nan_to_num(neginf=0)) <= (
        1e-5 if compute == "float32" else 2**-8
    )


@pytest.mark.parametrize("make", SCORERS.values(), ids=SCORERS)
def test_scores_of_nothing(make):
    paged, row, visible, q, weights = batch_of([4, 3], [1, 1], 2, 32, "float32")
    score = make(context())
    none = score(q, weights, paged.cache, paged.table, row, torch.zeros(2).long())
    assert none.shape == (2, 0)
    assert index_topk(none, 3).tolist() == [[-1] * 3] * 2
    assert index_candidates(none, torch.zeros(2).long(), 4, 2).tolist() == [[-1] * 2] * 2
    half = score(q, weights, paged.cache, paged.table, row, torch.tensor([0, 3]))
    assert (half[0] == -torch.inf).all()
    assert half[1].isfinite().all()
    empty = score(q[:0], weights[:0], paged.cache, paged.table, row[:0], visible[:0])
    assert empty.shape == (0, 0)
    nowhere = score(q, weights, paged.cache, paged.table, row, visible, torch.full((2, 3), -1), 2)
    assert (nowhere == -torch.inf).all()


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_exact_scores_dont_depend_on_neighbours(compute, heads):
    lengths = [*LENGTHS, *range(30, 67)]
    tokens = [*TOKENS, *[1] * 37]
    assert len(lengths) == 45
    paged, row, visible, q, weights = batch_of(lengths, tokens, heads, 32, compute)
    score = kernels.index_score_tiled(context(compute, exact=True))

    def run(at):
        return score(q[at], weights[at], paged.cache, paged.table, row[at], visible[at])

    alone = [run(torch.tensor([token]))[0] for token in range(len(row))]
    rows = [(row == r).nonzero().squeeze(1) for r in range(45)]
    for picked in ([4], [0, 4, 1], [7, 2, 0, 3, 1, 6, 5, 4], range(45), torch.randperm(45).tolist()):
        at = torch.cat([rows[r] for r in picked])
        for token, got in zip(at.tolist(), run(at), strict=True):
            n = int(visible[token])
            assert torch.equal(got[:n], alone[token][:n])
    chunk = rows[4]  # the same tokens in other chunks
    assert torch.equal(torch.cat([run(part)[:, :500] for part in chunk.split(7)]), run(chunk)[:, :500])


# --- index.topk, index.candidates ------------------------------------------------------------------------------------

SMALL = st.sampled_from([-torch.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0])  # ties everywhere
MATRICES = st.integers(0, 12).flatmap(lambda m: st.lists(st.lists(SMALL, min_size=m, max_size=m), max_size=5))


def best_of(scores, k):
    """Indices of the k largest, the lower first on ties, ascending, padded."""
    order = sorted((i for i, s in enumerate(scores) if s > -torch.inf), key=lambda i: (-scores[i], i))[:k]
    return sorted(order) + [-1] * (k - len(order))


@settings(max_examples=200)
@given(MATRICES, st.integers(1, 8), st.sampled_from([torch.float32, torch.bfloat16]))
def test_topk_is_a_stable_sort(rows, k, dtype):
    scores = torch.tensor(rows, dtype=dtype).view(len(rows), len(rows[0]) if rows else 0)
    got = index_topk(scores, k)
    assert got.dtype == torch.int64
    assert got.tolist() == [best_of(row, k) for row in rows]


def test_topk_in_slices(monkeypatch):
    scores = torch.randn(9, 50).round()
    whole = index_topk(scores, 7)
    monkeypatch.setattr(kernels, "SCRATCH", 120)
    assert torch.equal(index_topk(scores, 7), whole)


@pytest.mark.parametrize("name", ["c0", "c1", "c2"])
def test_golden_candidate_blocks(name):
    case = golden.op_case("candidate_blocks", name)
    block, top = case.params["block_size"], case.params["topk_blocks"]
    visible, out = case.inputs["valid_lens"].long(), case.outputs
    scores = case.inputs["logits"]
    m = scores.shape[1]
    scores = scores.masked_fill(torch.arange(m) >= visible.unsqueeze(1), -torch.inf)
    blocks = index_candidates(scores, visible, block, top)
    assert torch.equal(blocks, out["candidate_blocks_top4"].long())
    entries = kernels._entries_of_blocks(blocks, block, -(-m // block) * block)
    assert torch.equal((entries[:, :m] & (torch.arange(m) < visible.unsqueeze(1))).sum(1), out["compact_lens"].long())
    # golden consumers score a compact list of the candidates' entries; ours keep the entries' own numbers
    for mask, compact, restored in zip(entries, case.inputs["compact_indices"], out["restored"], strict=True):
        own = mask.nonzero().squeeze(1).tolist()
        assert [own[i] if 0 <= i < len(own) else -1 for i in compact.tolist()] == restored.tolist()


@settings(max_examples=100)
@given(MATRICES, st.integers(1, 4), st.integers(1, 4), st.data())
def test_candidates_are_the_best_blocks_and_the_last(rows, block, top, data):
    m = len(rows[0]) if rows else 0
    visible = [data.draw(st.integers(0, m)) for _ in rows]
    rows = [[s if i < n else -torch.inf for i, s in enumerate(row)] for row, n in zip(rows, visible, strict=True)]
    got = index_candidates(torch.tensor(rows).view(len(rows), m), torch.tensor(visible, dtype=torch.int64), block, top)
    for row, n, blocks in zip(rows, visible, got.tolist(), strict=True):
        scores = [max(row[b : b + block]) for b in range(0, m, block)]
        if n:
            scores[(n - 1) // block] = torch.inf
        assert blocks == best_of(scores, top)


def test_the_last_block_stays_whatever_the_others_score():
    scores = torch.tensor([[torch.inf, 0.0, torch.inf, 1.0, 2.0]])
    assert index_candidates(scores, torch.tensor([5]), 2, 1).tolist() == [[2]]
    assert index_candidates(scores, torch.tensor([5]), 2, 2).tolist() == [[0, 2]]
