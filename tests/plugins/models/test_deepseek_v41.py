"""DeepSeek-V4.1 against what other implementations computed (tests/data/golden/README.md says which, and how close)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

import v41_rig  # noqa: E402
from golden import assert_rows, model, rel, row_errors  # noqa: E402
from v41_rig import Rig, make_rig  # noqa: E402

from headrace.ops import Ops  # noqa: E402
from headrace_plugins.models.deepseek_v41.model import DeepseekV41  # noqa: E402

SEQUENCES = [("t1", 0), ("t1", 1), ("t2", 0), ("t2", 1), ("t3", 0), ("t3", 1), ("f1", 0), ("f1", 1)]
ANCHORS = [(0, 1), (0, 3), (0, 10), (0, 46), (0, 49), (1, 1), (1, 3), (1, 10), (1, 39), (1, 42)]


def run(rig: Rig, ids: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One sequence at once: logits, and what happened inside."""
    trace: dict[str, torch.Tensor] = {}
    row = rig.row(ids)
    return rig.step([(row, len(ids))], trace), trace


@pytest.mark.parametrize(("name", "number"), SEQUENCES)
def test_logits_without_rounding_in_the_caches(name: str, number: int) -> None:
    golden = model(name)
    ids = golden.expected[f"seq{number}.input_ids"].tolist()
    logits = make_rig(golden, cache="plain").logits(ids)
    assert rel(logits, golden.expected[f"seq{number}.logits_fp32_qoff"]) <= 1e-4


@pytest.mark.parametrize(("name", "number"), SEQUENCES)
def test_logits_streams_and_selections_with_rounded_caches(name: str, number: int) -> None:
    golden, at = model(name), f"seq{number}."
    expected = {key.removeprefix(at): value for key, value in golden.expected.items() if key.startswith(at)}
    logits, trace = run(make_rig(golden), expected["input_ids"].tolist())
    assert_rows(logits, expected["logits_fp32_qon"])
    for key, value in expected.items():
        kind, _, layer = key.rpartition(".")
        if kind == "trunk_qon":
            assert_rows(trace[f"trunk.{layer}"], value)
        elif kind == "topk_qon":
            same = trace[f"topk.{layer.removeprefix('layer')}"] == value
            assert same.all(1).double().mean() >= 0.98


@pytest.mark.parametrize(("name", "number"), SEQUENCES)
def test_decoding_through_the_caches(name: str, number: int) -> None:
    """In the golden chunks, and token by token from the first one on."""
    golden, at = model(name), f"seq{number}."
    ids = golden.expected[at + "input_ids"].tolist()
    rig = make_rig(golden)
    assert_rows(rig.logits(ids, [1] * len(ids)), golden.expected[at + "logits_fp32_qon"])
    if (key := at + "decode0.logits_fp32_qon") in golden.expected:
        chunks = golden.expected[at + "decode0.chunk_lens"].tolist()
        assert_rows(rig.logits(ids, chunks), golden.expected[key])


@pytest.mark.parametrize("number", [0, 1])
def test_engram_rows_and_gates(number: int) -> None:
    golden, at = model("f1"), f"seq{number}.engram.layer"
    _, trace = run(make_rig(golden), golden.expected[f"seq{number}.input_ids"].tolist())
    for layer in (1, 3):
        assert torch.equal(trace[f"engram_rows.{layer}"], golden.expected[f"{at}{layer}.rows"])
        added = trace[f"engram_after.{layer}"] - trace[f"engram_before.{layer}"]
        value = trace[f"engram_kv.{layer}"][:, -1:]
        gate = (added * value).sum(-1) / (value * value).sum(-1)
        assert (gate - golden.expected[f"{at}{layer}.gate"]).abs().max() <= 1e-4
        if (key := f"{at}{layer}.trunk_after") in golden.expected:
            assert_rows(trace[f"engram_after.{layer}"], golden.expected[key])


@pytest.mark.parametrize("placeholders", [False, True])
@pytest.mark.parametrize("chunks", [[49], [14, 5, 1, 1, 9, 19]])
def test_rows_of_images(chunks: list[int], placeholders: bool) -> None:
    """Embeddings as input, the other routing bias, no Engram, n-grams that end at an image. The mask says where images
    are, as in the golden file, which has other ids there; in a prompt the ids say so too."""
    golden = model("f1")
    expected, mask = golden.expected, golden.expected["image.mask"]
    given = expected["image.input_ids"]
    ids = (given.masked_fill(mask, golden.config["image_token_id"]) if placeholders else given).tolist()
    rig = make_rig(golden)
    row = {"image": mask, "embeds": expected["image.embeds"], "placeholders": placeholders}
    assert_rows(rig.logits(ids, chunks, **row), expected["image.logits_fp32_qon"])
    trace: dict[str, torch.Tensor] = {}
    rig.step([(rig.row(ids, **row), len(ids))], trace)
    for layer in (1, 3):
        assert torch.equal(trace[f"engram_rows.{layer}"], expected[f"image.engram.layer{layer}.rows"])


def test_features_of_the_drafter() -> None:
    golden = model("f1")
    _, trace = run(make_rig(golden, draft=True), golden.expected["seq0.input_ids"].tolist())
    features = torch.stack([trace[f"feature.{layer}"] for layer in (3, 4, 5)])
    assert_rows(features, golden.expected["seq0.target_features"], axis=1)


@pytest.mark.parametrize(("number", "anchor"), ANCHORS)
def test_drafts(number: int, anchor: int) -> None:
    """Keys of the drafter are written in chunks, some of a step that the drafts of another round were in."""
    golden, at = model("f1"), f"seq{number}.dspark.P{anchor}."
    ids = golden.expected[f"seq{number}.input_ids"].tolist()
    rig = make_rig(golden, draft=True)
    drafter = rig.model.drafter
    assert drafter is not None
    row = rig.row(ids)

    def draft(token: torch.Tensor, position: int) -> object:
        one = torch.tensor([position])
        return drafter.draft(token, one, torch.tensor([row.slot]), torch.zeros_like(one), rig.caches)

    while row.computed < anchor:
        rig.step([(row, min(7, anchor - row.computed))])
        if row.computed < anchor:
            draft(torch.tensor([5]), row.computed)
    expected = {key.removeprefix(at): v for key, v in golden.expected.items() if key.startswith(at)}
    first = expected["previous_tokens"][:1]
    made = draft(first, anchor)
    tokens, logits, confidence = drafter.greedy(made, first)  # type: ignore[arg-type]
    assert rel(made.base[0], expected["base_logits"]) <= 1e-3  # type: ignore[attr-defined]
    assert rel(made.hidden[0], expected["hidden_before_norm"]) <= 1e-3  # type: ignore[attr-defined]
    assert rel(logits[0], expected["logits_with_markov"]) <= 1e-3
    assert torch.equal(tokens[0], expected["greedy_tokens"])
    assert (confidence[0] - expected["confidence"]).abs().max() <= 1e-3


def test_drafts_of_several_requests_are_those_of_each_alone() -> None:
    golden = model("f1")
    rig = make_rig(golden, draft=True, exact=True)
    drafter = rig.model.drafter
    assert drafter is not None
    rows = [rig.row(golden.expected[f"seq{number}.input_ids"].tolist()) for number in (0, 1)]
    for row, count in zip(rows, (31, 6), strict=True):
        rig.step([(row, count)])
    tokens, positions = torch.tensor([9, 70]), torch.tensor([31, 6])
    slots, first = torch.tensor([row.slot for row in rows]), torch.tensor([0, 0])
    both = drafter.draft(tokens, positions, slots, first, rig.caches)
    for i in (0, 1):
        part = slice(i, i + 1)
        alone = drafter.draft(tokens[part], positions[part], slots[part], first[part], rig.caches)
        assert torch.equal(both.base[i], alone.base[0])
        assert torch.equal(both.hidden[i], alone.hidden[0])


def test_temperatures_of_confidences_are_per_position() -> None:
    golden = model("f1")
    rig = make_rig(golden, draft=True)
    drafter = rig.model.drafter
    assert drafter is not None
    rig.logits(golden.expected["seq0.input_ids"].tolist())
    zero = torch.tensor([0])
    draft = drafter.draft(torch.tensor([4]), torch.tensor([49]), zero, zero, rig.caches)
    _, _, plain = drafter.greedy(draft, torch.tensor([4]))
    _, _, scaled = drafter.greedy(draft, torch.tensor([4]), [1.0, 50.0, 50.0, 50.0, 50.0])
    assert torch.equal(plain[:, 0], scaled[:, 0])
    assert ((scaled[:, 1:] - 0.5).abs() < (plain[:, 1:] - 0.5).abs()).all()


@pytest.mark.parametrize("weights", ["dequant", "quantised"])
def test_packed_weights(weights: str) -> None:
    golden = model("q1")
    expected = golden.expected
    rig = make_rig(golden, weights=weights, draft=True)
    ids = expected["input_ids"].tolist()
    assert_rows(rig.logits(ids), expected["logits_fp32_qon"])
    drafter, previous, zero = rig.model.drafter, expected["dspark.previous_tokens"], torch.tensor([0])
    assert drafter is not None
    draft = drafter.draft(previous[:1], torch.tensor([len(ids)]), zero, zero, rig.caches)
    logits, confidence = drafter.heads(draft.base[0], draft.hidden[0], previous)
    assert rel(logits, expected["dspark.logits_with_markov"]) <= 1e-3
    assert (confidence - expected["dspark.confidence_logit"].sigmoid()).abs().max() <= 1e-3


def test_rounded_activations() -> None:
    """One source only computed these."""
    golden = model("q1")
    logits = make_rig(golden, quantise_activations=True).logits(golden.expected["input_ids"].tolist())
    assert_rows(logits, golden.expected["logits_fp32_qon_actquant_SINGLE_SOURCE"])
    assert row_errors(logits, golden.expected["logits_fp32_qon"]).max() > 1e-2


def test_every_packed_linear_reads_rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other does: drafts included, of which there is no golden vector."""
    plain = v41_rig.reference_ops()
    read: dict[int, bool] = {}

    def dense(x: torch.Tensor, weight: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        read[id(weight)] = torch.equal(plain.quant.activation(x), x)
        return plain.linear.dense(x, weight, *args, **settings)

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        read[id(weight)] = torch.equal(plain.quant.activation(x), x)
        return plain.linear.grouped(x, weight)

    kernels = {
        name: getattr(getattr(plain, name.partition(".")[0]), name.partition(".")[2]) for name in DeepseekV41.needs
    }
    watched = Ops(kernels | {"linear.dense": dense, "linear.grouped": grouped})
    monkeypatch.setattr(v41_rig, "reference_ops", lambda *_: watched)
    weights: dict[str, torch.Tensor] = {}
    load = v41_rig.load_weights
    monkeypatch.setattr(v41_rig, "load_weights", lambda *args: weights.update(load(*args)) or weights)
    golden = model("q1")
    rig = make_rig(golden, draft=True, quantise_activations=True)
    rig.logits(golden.expected["input_ids"].tolist())
    drafter, zero = rig.model.drafter, torch.tensor([0])
    assert drafter is not None
    draft = drafter.draft(zero + 5, zero + 42, zero, zero, rig.caches)
    drafter.greedy(draft, zero)
    linears = {spec.name: spec.packing != "none" for spec in rig.model.tensors() if id(weights[spec.name]) in read}
    assert sum(linears.values()) == 8 * 5 + 3 + 1 + 1  # of 5 blocks, 3 indexers, Engram, the drafter's projection
    assert {name: read[id(weights[name])] for name in linears} == linears


@pytest.mark.parametrize("name", ["t1", "f1"])
def test_bfloat16_resembles_float32(name: str) -> None:
    """Rounding flips selections in models this small and random, so most rows are near, not all."""
    golden = model(name)
    ids = golden.expected["seq0.input_ids"].tolist()
    logits = make_rig(golden, compute="bfloat16").logits(ids)
    assert logits.dtype == torch.float32
    near = torch.cosine_similarity(logits, golden.expected["seq0.logits_fp32_qon"])
    assert near.median() > 0.96
