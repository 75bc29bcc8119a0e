"""Storing and loading cache entries, and the compressor with its ring."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need PyTorch: pip install 'headrace[torch]'")

import golden  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_caches import JUNK, context, make_cache, round_trip  # noqa: E402

from headrace.modeling import Cache, CacheFormat  # noqa: E402
from headrace_plugins.reference.kernels import cache as kernels  # noqa: E402

FORMATS = ("q8", "q4", "qm", "float32", "bfloat16")

kv_store = kernels.kv_store(context())
kv_load = kernels.kv_load(context())


# --- kv.store, kv.load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q8", "Q4", "Qm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_hold_the_golden_bytes(name, dtype):
    case = golden.op_case("cache_pack", name)
    x, slots, expected = case.inputs["x"], case.inputs["slots"].long(), case.outputs["paged_cache"]
    format = CacheFormat(name.lower(), x.shape[1])
    cache = make_cache(format, len(expected), case.params["block_size"])
    cache.pool.zero_()
    kv_store(cache, slots, x.to(dtype))
    assert torch.equal(cache.pool, expected)
    back = kernels.kv_load(context("bfloat16"))(cache, slots)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back[slots >= 0], case.outputs["dequant_bf16"][slots >= 0])
    assert (back[slots < 0] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_entries_come_back_from_any_address_and_shape(name):
    format = CacheFormat(name, 64)
    cache = make_cache(format, 5, 3)
    values = torch.randn(15, 64)
    order = torch.randperm(15)
    kv_store(cache, order, values)
    expected = torch.empty(15, 64)
    expected[order] = round_trip(format, values)
    assert torch.equal(kv_load(cache, torch.arange(15)), expected)
    slots = torch.tensor([[14, -1], [0, 0], [-1, 7]])
    shaped = kv_load(cache, slots)
    assert shaped.shape == (3, 2, 64)
    assert torch.equal(shaped, torch.where((slots >= 0).unsqueeze(2), expected[slots], 0.0))


@pytest.mark.parametrize("name", FORMATS)
def test_the_later_value_wins_and_minus_one_writes_nothing(name):
    format = CacheFormat(name, 32)
    cache = make_cache(format, 2, 4)
    cache.pool.zero_()
    values = torch.randn(6, 32)
    kv_store(cache, torch.tensor([3, -1, 3, 6, -1, 3]), values)
    expected = torch.zeros(8, 32)
    expected[[3, 6]] = round_trip(format, values[[5, 3]])
    assert torch.equal(kv_load(cache, torch.arange(8)), expected)


def test_the_later_value_wins_in_a_long_call():
    """As a prefill longer than its ring stores; several threads may write then."""
    cache, values = make_cache(CacheFormat("float32", 32), 1, 8), torch.randn(8000, 32)
    kv_store(cache, torch.arange(8000) % 8, values)
    assert torch.equal(kv_load(cache, torch.arange(8)), values[-8:])


@pytest.mark.parametrize("name", FORMATS)
def test_stores_stay_within_their_entries(name):
    format = CacheFormat(name, 32)
    pool = torch.full((4, 1024), JUNK, dtype=torch.uint8)
    size = 3 * format.entry_bytes
    cache = Cache(pool[:, 64 : 64 + size], format, 3)
    kv_store(cache, torch.tensor([4]), torch.zeros(1, 32))
    touched = pool != JUNK
    assert touched.sum() == format.entry_bytes
    assert touched[1, 64 : 64 + size].sum() == format.entry_bytes


def test_a_pool_may_be_longer_than_its_grain():
    format = CacheFormat("qm", 32)
    pool = torch.zeros(2, 128, dtype=torch.uint8)
    kv_store(Cache(pool, format, 3), torch.tensor([0, 2]), torch.ones(2, 32))
    assert pool[0, :16].ne(0).all()  # codes of entry 0
    assert pool[0, 16:32].eq(0).all()
    assert pool[0, 48:51].tolist() == [125, 0, 125]  # scales follow the codes: 1 = 4 * 2^-2


def test_types_that_loads_give():
    values, slots = torch.randn(2, 32), torch.tensor([0, 1])
    for name in FORMATS:
        cache = make_cache(CacheFormat(name, 32), 1, 2)
        kv_store(cache, slots, values)
        wide = kernels.kv_load(context("bfloat16"))(cache, slots)
        assert wide.dtype == (torch.float32 if name == "float32" else torch.bfloat16)
        assert kv_load(cache, slots).dtype == torch.float32


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_to_do(name):
    cache = make_cache(CacheFormat(name, 32), 1, 2)
    none = torch.empty(0, dtype=torch.int64)
    kv_store(cache, none, torch.empty(0, 32))
    kv_store(cache, torch.tensor([-1, -1]), torch.ones(2, 32))
    assert (cache.pool == JUNK).all()
    assert kv_load(cache, none).shape == (0, 32)
    assert kv_load(cache, torch.full((2, 0), -1)).shape == (2, 0, 32)
    assert (kv_load(cache, torch.tensor([-1])) == 0).all()


@settings(max_examples=40)
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(-1, 19), max_size=12), max_size=5),
)
def test_stores_and_loads_are_those_of_a_dict(name, grain, calls):
    format = CacheFormat(name, 32)
    grains = -(-20 // grain)
    cache, memory = make_cache(format, grains, grain), {}
    for count, call in enumerate(calls):
        values = torch.randn(len(call), 32, generator=torch.Generator().manual_seed(count))
        kv_store(cache, torch.tensor(call, dtype=torch.int64), values)
        memory |= {slot: value for slot, value in zip(call, values, strict=True) if slot >= 0}
    for slot, value in memory.items():
        assert torch.equal(kv_load(cache, torch.tensor([slot]))[0], round_trip(format, value))


# --- compress.pool ---------------------------------------------------------------------------------------------------


def golden_ring(state):
    """A ring cache with the golden state [slots, ring, 2, d]."""
    slots, ring, _, d = state.shape
    cache = make_cache(CacheFormat("float32", 2 * d), slots, ring)
    cache.pool.copy_(state.reshape(slots, -1).contiguous().view(torch.uint8))
    return cache


def ring_state(cache, shape):
    return cache.pool.contiguous().view(torch.float32).view(shape)


pool_bf16 = kernels.compress_pool(context("bfloat16"))


@pytest.mark.parametrize("name", ["prefill0", "prefill1"])
def test_golden_prefill(name):
    case = golden.op_case("compressor", name)
    given = case.inputs
    cache = golden_ring(given["state"])
    starts, ends = given["cu_seqlens_q"][:-1].tolist(), given["cu_seqlens_q"][1:].tolist()
    lengths = given["cu_seqlens_k"].diff().tolist()
    slot = torch.cat([torch.full((e - s,), i) for s, e, i in zip(starts, ends, given["state_slots"], strict=True)])
    positions = torch.cat([torch.arange(n - (e - s), n) for s, e, n in zip(starts, ends, lengths, strict=True)])
    pooled = pool_bf16(cache, given["latent"], given["score"], slot, positions)
    closes = positions % 2 == 1
    assert golden.bf16_ulps(pooled[closes], case.outputs["kv"]) <= 1
    assert (pooled[~closes] == 0).all()
    assert torch.equal(ring_state(cache, given["state"].shape), case.outputs["state"])


@pytest.mark.parametrize("name", ["decode0", "decode1"])
def test_golden_decode_with_rollbacks(name):
    steps = golden.op_cases("compressor", name)
    state = steps[0].inputs["state"]
    cache = golden_ring(state)
    for step in steps:
        given = step.inputs
        positions = given["context_lens"].long() - 1
        pooled = pool_bf16(cache, given["latent"], given["score"], given["state_slots"].long(), positions)
        assert golden.bf16_ulps(pooled, step.outputs["kv"]) <= 1
    assert torch.equal(ring_state(cache, state.shape), steps[-1].outputs["state"])


def straight(latent, score):
    """Pairs of one sequence, in float64. latent, score: [n, d] from position 0 -> {odd position: [d]}"""
    odd = range(1, len(latent), 2)
    return {p: (latent[p - 1 : p + 1].double() * score[p - 1 : p + 1].double().softmax(0)).sum(0) for p in odd}


@settings(max_examples=60)
@given(st.data())
def test_any_chunking_and_rollback_gives_the_pairs(data):
    """A ring of ratio + slack - 1 entries takes steps of up to `slack` rows, of which any number may be taken back."""
    slack, d = data.draw(st.integers(1, 6)), 4
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    cache = make_cache(CacheFormat("float32", 2 * d), 3, 2 + slack - 1)
    pool = kernels.compress_pool(context())
    latent, score = torch.empty(0, d), torch.empty(0, d)
    for _ in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.integers(1, slack))
        latent = torch.cat([latent, torch.randn(rows, d, generator=random)])
        score = torch.cat([score, torch.randn(rows, d, generator=random) * 20])
        positions = torch.arange(len(latent) - rows, len(latent))
        pooled = pool(cache, latent[positions], score[positions], torch.full((rows,), 1), positions)
        expected = straight(latent, score)
        for p, row in zip(positions.tolist(), pooled, strict=True):
            assert torch.allclose(row.double(), expected.get(p, torch.zeros(d).double()), rtol=1e-5, atol=1e-6)
        kept = len(latent) - data.draw(st.integers(0, rows - 1))
        latent, score = latent[:kept], score[:kept]


def test_a_run_longer_than_the_ring_leaves_its_end():
    cache = make_cache(CacheFormat("float32", 16), 2, 4)
    latent, score = torch.randn(11, 8), torch.randn(11, 8)
    kernels.compress_pool(context())(cache, latent, score, torch.ones(11, dtype=torch.int64), torch.arange(11))
    ring = kv_load(cache, 4 + torch.arange(7, 11) % 4)
    assert torch.equal(ring, torch.cat([score, latent], 1)[7:])
    assert kv_load(cache, torch.arange(4)).isnan().all()  # the other sequence's


def test_scores_of_any_size():
    cache = make_cache(CacheFormat("float32", 4), 1, 2)
    score = torch.tensor([[1e30, -1e30], [-1e30, 1e30]])
    latent = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    pooled = kernels.compress_pool(context())(cache, latent, score, torch.zeros(2).long(), torch.arange(2))
    assert pooled.tolist() == [[0, 0], [1, 4]]


def test_no_tokens():
    cache = make_cache(CacheFormat("float32", 8), 1, 2)
    none = torch.empty(0, dtype=torch.int64)
    pooled = kernels.compress_pool(context())(cache, torch.empty(0, 4), torch.empty(0, 4), none, none)
    assert pooled.shape == (0, 4)


@pytest.mark.parametrize("d", [4, 16, 33, 64])
def test_bits_dont_depend_on_neighbours(d):
    """Each sequence alone, among others, and one token at a time."""
    pool = kernels.compress_pool(context(exact=True))
    lengths, ring = [1, 3, 8, 45, 2, 7], 9
    random = torch.Generator().manual_seed(d)
    latents = [torch.randn(n, d, generator=random) for n in lengths]
    scores = [torch.randn(n, d, generator=random) * 3 for n in lengths]

    def run(order, chunks):
        cache = make_cache(CacheFormat("float32", 2 * d), len(lengths), ring)
        found = {i: [] for i in order}
        for start, end in chunks:
            parts = [(i, torch.arange(start, min(end, lengths[i]))) for i in order if lengths[i] > start]
            pooled = pool(
                cache,
                torch.cat([latents[i][at] for i, at in parts]),
                torch.cat([scores[i][at] for i, at in parts]),
                torch.cat([torch.full_like(at, i) for i, at in parts]),
                torch.cat([at for _, at in parts]),
            )
            for (i, _), rows in zip(parts, pooled.split([len(at) for _, at in parts]), strict=True):
                found[i].append(rows)
        return {i: torch.cat(rows) for i, rows in found.items()}

    alone = {i: run([i], [(0, 45)])[i] for i in range(len(lengths))}
    for order in ([0, 1, 2, 3, 4, 5], [3, 5, 0, 2, 1, 4]):
        for chunks in ([(0, 45)], [(t, t + 1) for t in range(45)], [(0, 5), (5, 6), (6, 45)]):
            assert all(torch.equal(rows, alone[i]) for i, rows in run(order, chunks).items())
