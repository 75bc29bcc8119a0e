"""DeepSeek-V4.1 on exact kernels: bits depend on a sequence's own tokens, not on how they were run. And replay."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from golden import model, rel, row_errors  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from v41_rig import Rig, make_rig  # noqa: E402

from headrace_plugins.models.deepseek_v41 import attention  # noqa: E402

MODELS = ["t1", "t2", "t3", "f1", "q1"]


def prompt(name: str) -> list[int]:
    expected = model(name).expected
    ids: list[int] = expected["seq0.input_ids" if "seq0.input_ids" in expected else "input_ids"].tolist()
    return ids


def cut(n: int, *pattern: int) -> list[int]:
    """`pattern` over and over, to n."""
    chunks: list[int] = []
    while (left := n - sum(chunks)) > 0:
        chunks.append(min(pattern[len(chunks) % len(pattern)], left))
    return chunks


@pytest.mark.parametrize(("name", "compute"), [*((name, "float32") for name in MODELS), ("f1", "bfloat16")])
def test_every_chunking_gives_the_same_bits(name: str, compute: str) -> None:
    ids = prompt(name)
    rig = make_rig(model(name), exact=True, compute=compute)
    once = rig.logits(ids)
    for pattern in [(1,), (5,), (3, 1, 9, 1, 1), (20, 2)]:
        assert torch.equal(rig.logits(ids, cut(len(ids), *pattern)), once), pattern


def test_plain_kernels_are_not_exact() -> None:
    """Or the tests beside this one prove nothing."""
    ids = prompt("f1")
    rig = make_rig(model("f1"))
    assert not torch.equal(rig.logits(ids, [1] * len(ids)), rig.logits(ids))


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_change_nothing(name: str) -> None:
    """Prefills longer than the rings, chunks and single tokens of five sequences in one batch."""
    ids = prompt(name)
    rig = make_rig(model(name), exact=True)
    alone = rig.logits(ids)
    one, two, three, other, last = (rig.row(ids), rig.row(ids), rig.row(ids), rig.row(ids[::-1]), rig.row(ids[::2]))
    parts: dict[int, list[torch.Tensor]] = {}
    for work in (
        [(one, 5)],
        [(other, 9), (two, 11)],
        [(two, 2), (other, 1), (one, 6), (last, 17), (three, len(ids))],
        [(one, 1), (last, 1), (two, 1)],
        [(last, 2), (one, len(ids) - 12), (other, 20), (two, len(ids) - 14)],
    ):
        logits = rig.step(work)
        for (row, _), part in zip(work, logits.split([count for _, count in work]), strict=True):
            parts.setdefault(row.slot, []).append(part)
    for row in (one, two, three):
        assert torch.equal(torch.cat(parts[row.slot]), alone)


@pytest.mark.parametrize("name", ["t2", "f1"])
def test_scoring_in_slices_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long prompts are scored, whose scores would not fit in memory at once."""
    ids = prompt(name)
    rig = make_rig(model(name), exact=True)
    whole = rig.logits(ids)
    monkeypatch.setattr(attention, "SCORES_PER_SLICE", 100)
    assert torch.equal(rig.logits(ids), whole)


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["t2", "f1"])
def test_a_rolled_back_sequence_goes_on_as_if_nothing_had_been(name: str, drafts: int) -> None:
    """Rejected drafts were written to rings and blocks; the tokens in their place overwrite them."""
    ids = prompt(name)
    rig = make_rig(model(name), exact=True)
    once = rig.logits(ids)
    row = rig.row(ids[:16] + [5] * rig.context.slack_tokens)
    rig.step([(row, len(row.tokens))])
    row.computed, row.tokens = 16, ids
    while row.computed < len(ids) - drafts - 1:
        start, kept = row.computed, row.tokens
        row.tokens = kept[: start + 1] + [(7 * start + i) % 90 + 3 for i in range(drafts)] + kept[start + 1 + drafts :]
        logits = rig.step([(row, 1 + drafts)])
        assert torch.equal(logits[0], once[start])
        row.computed, row.tokens = start + 1, kept


def test_a_ring_that_holds_nothing_before_a_hit_hides_it() -> None:
    """With `first`, as after a prefix hit whose rings were rebuilt from the tokens before it."""
    ids = prompt("t1")
    rig = make_rig(model("t1"), exact=True)
    whole = rig.row(ids)
    rig.step([(whole, len(ids))])
    hit = rig.row(ids, first=24)
    hit.blocks, hit.computed = whole.blocks, 24
    replayed = rig.step([(hit, len(ids) - 24)])
    again = rig.row(ids, first=24)
    again.blocks, again.computed = whole.blocks, 24
    in_chunks = torch.cat([rig.step([(again, count)]) for count in cut(len(ids) - 24, 1, 2)])
    assert torch.equal(replayed, in_chunks)
    assert torch.isfinite(replayed).all()


def test_blocks_below_write_from_are_left_alone() -> None:
    ids = prompt("f1")
    rig = make_rig(model("f1"), exact=True)
    row = rig.row(ids)
    rig.step([(row, 32)])
    before = {name: cache.pool.clone() for name, cache in rig.caches.items() if name.endswith(("compressed", "keys"))}
    again = rig.row(ids[:16] + [3] * 16)
    again.blocks = row.blocks
    batch = rig.batch([(again, 32)])
    batch.store = torch.zeros(32, dtype=torch.bool)
    rig.model.forward(batch, rig.caches)
    for name, pool in before.items():
        assert torch.equal(rig.caches[name].pool, pool), name
    batch.store = None
    rig.model.forward(batch, rig.caches)
    assert any(not torch.equal(rig.caches[name].pool, pool) for name, pool in before.items())


# --- replay ----------------------------------------------------------------------------------------------------------


def replayed(rig: Rig, ids: list[int], keep: int, chunks: list[int]) -> torch.Tensor:
    return rig.logits(ids, chunks, tail=len(ids) - keep)[-keep:]


@pytest.mark.parametrize("keep", [8, 13])
@pytest.mark.parametrize("name", ["t1", "t2"])
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_replay_is_that_of_another_implementation(name: str, mode: str, keep: int) -> None:
    golden = model(name)
    ids = golden.expected["seq0.input_ids"].tolist()
    expected = load_file(Path(golden.folder) / "bounded_replay.safetensors")
    for cache, field in (("plain", "qoff"), ("quantised", "qon")):
        wanted = expected[f"seq0.keep{keep}.logits_fp32_{field}_SINGLE_SOURCE"]
        for chunks in ([], cut(len(ids), 7), [20, len(ids) - 20]):
            logits = replayed(make_rig(golden, cache=cache, replay=mode), ids, keep, chunks)
            if cache == "plain":
                assert rel(logits, wanted) <= 1e-4
            errors = row_errors(logits, wanted)
            assert (errors <= 1e-4).double().mean() >= 0.9
            assert errors.max() <= 5e-2


@pytest.mark.parametrize("name", ["t1", "t2", "t3", "f1"])
def test_mask_and_compact_are_the_same_bits(name: str) -> None:
    """Also for the tokens after the prompt, in chunks or not, and with other sequences in the batch."""
    ids = prompt(name)
    n, keep = 35, 21
    results = []
    for mode in ("mask", "compact"):
        rig = make_rig(model(name), exact=True, replay=mode)
        for chunks in ([n], cut(n, 6, 1)):
            row = rig.row(ids, tail=n - keep)
            parts = [rig.step([(row, count)]) for count in chunks + cut(len(ids) - n, 1, 4)]
            results.append(torch.cat(parts)[-(keep + len(ids) - n) :])
        row, other = rig.row(ids, tail=n - keep), rig.row(ids[5:], tail=n - keep)
        rig.step([(other, 3)])
        together = rig.step([(row, n), (other, n - 5 - 3)])
        results.append(torch.cat([together[n - keep if mode == "mask" else 0 :][:keep], results[0][keep:]]))
    for result in results[1:]:
        assert torch.equal(result, results[0])
    full = make_rig(model(name), exact=True).logits(ids)
    assert not torch.equal(full[n - keep : n], results[0][:keep])


def test_compact_says_that_a_prompt_has_no_logits_before_its_tail() -> None:
    ids = prompt("t1")
    rig = make_rig(model("t1"), replay="compact")
    batch = rig.batch([(rig.row(ids, tail=20), len(ids))])
    batch.wanted = torch.tensor([19, 30])
    with pytest.raises(ValueError, match=r"before Batch\.tail"):
        rig.model.forward(batch, rig.caches)


@pytest.mark.parametrize("targets", [[1, 2, 3], [4, 5]])
def test_mask_and_compact_draft_the_same(targets: list[int]) -> None:
    """The drafter's keys are written by the half that its targets are in."""
    ids = prompt("f1")
    n, keep = 35, 21
    results = []
    for mode in ("mask", "compact"):
        rig = make_rig(model("f1"), text={"dspark_target_layer_ids": targets}, exact=True, draft=True, replay=mode)
        drafter = rig.model.drafter
        assert drafter is not None
        for chunks in ([n], cut(n, 6)):
            row = rig.row(ids, tail=n - keep)
            for count in chunks:
                rig.step([(row, count)])
            at, slot, first = (torch.tensor([value]) for value in (n, row.slot, n - keep))
            results.append(drafter.draft(torch.tensor([8]), at, slot, first, rig.caches).base)
    for result in results[1:]:
        assert torch.equal(result, results[0])
