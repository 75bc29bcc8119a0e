"""Batch files as the world writes them: odd lines, odd places, two runs at once, disks that fill up."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import EXIT_MODEL, EXIT_OK, EXIT_REQUEST, ModelError

TOY = "toy://vocab=300,seed=3,context=512"
GOOD = '{"id": "a", "prompt": "hi"}\n'

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(batch: str | bytes = GOOD, out: str = "out", source: str = "in.jsonl") -> tuple[int, str]:
        if source == "in.jsonl":
            Path(source).write_bytes(batch if isinstance(batch, bytes) else batch.encode())
        code = main(["run", TOY, "--batch", source, "--out", out, "--max-tokens", "3"])
        return code, capsys.readouterr().err

    return call


def fail(*args: object, **kwargs: object) -> None:
    raise ModelError("HR-X-01", "it can't be loaded", "")


def results(path: str = "out") -> dict[int, Any]:
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len({record["line"] for record in records}) == len(records)
    return {record["line"]: record for record in records}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "a", "prompt": "b"}', "'prompt' appears twice"),
        ('{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "'role' appears twice"),
        ('{"messages": [{"role": "user", "content": null}]}', "content that is no text: None"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content that is no text: [{"),
        ('{"prompt": "a", "constraint": 3}', "constraint = 3 is not allowed"),
        ('{"prompt": "a", "constraint": {}}', "constraint: missing"),
        ('{"prompt": "a", "constraint": {"kind": 1, "text": "x"}}', "constraint.kind = 1"),
        ('{"prompt": "a", "stop": 3}', "stop = 3 is not allowed"),
        ('{"prompt": "a", "stop": {"x": 1}}', "stop = {'x': 1} is not allowed"),
        ('{"prompt": "a", "stop_token_ids": "12"}', "stop_token_ids = '12' is not allowed"),
        ('{"prompt": "a", "logit_bias": [1]}', "logit_bias = [1] is not allowed"),
        ('{"prompt": "a", "logit_bias": {"\u0661": 1}}', "logit_bias id = '\u0661' is not allowed"),
        ('{"prompt": "a", "logit_bias": {"%s": 1}}' % ("9" * 5000), "logit_bias id = '999"),
        ('{"prompt": "a", "n": null}', "n = None is not allowed"),
        ('{"prompt": "a", "min_tokens": null, "max_tokens": 1}', "min_tokens = None is not allowed"),
        ('{"prompt": "a", "ignore_eos": "no"}', "ignore_eos = 'no' is not allowed"),
        ('{"prompt": "a", "seed": 18446744073709551616}', "seed = 18446744073709551616 is not allowed"),
        ("[" * 100_000, "not JSON"),
        ("5", "not an object but 5"),
    ],
)
def test_a_bad_line_fails_alone(run: Run, line: str, text: str) -> None:
    code, err = run(f"{line}\n{GOOD}")
    found = results()
    assert (code, len(found)) == (EXIT_REQUEST, 2)
    assert text in found[1]["error"]["message"]
    assert found[1]["error"]["help"]
    assert found[2]["text"]
    assert "Traceback" not in err


def test_invalid_utf8_and_what_windows_writes(run: Run) -> None:
    code, _ = run(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xff"}\r\n{"prompt": "b"}')
    found = results()
    assert (code, sorted(found)) == (EXIT_REQUEST, [1, 2, 3])
    assert "not UTF-8" in found[2]["error"]["message"]
    assert found[1]["text"]
    assert found[3]["text"]


@pytest.mark.parametrize("out", ["/dev/full", "/dev/null", "pipe", ".", "nowhere/out", "in.jsonl", "link"])
def test_results_go_to_regular_files_only(run: Run, out: str) -> None:
    os.mkfifo("pipe")
    Path("link").symlink_to("in.jsonl")
    code, err = run(GOOD.strip(), out=out)
    assert code == EXIT_REQUEST
    assert "HR-BATCH-01" in err
    assert "None" not in err
    assert Path("in.jsonl").read_text() == GOOD.strip()


@pytest.mark.parametrize("source", ["/dev/zero", "pipe", ".", "nowhere"])
def test_batches_come_from_files_only(run: Run, source: str) -> None:
    os.mkfifo("pipe")
    code, err = run(source=source)
    assert code == EXIT_REQUEST
    assert "HR-BATCH-01" in err


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "mine", "value": 3}',
        '{"id": "mine", "prom',
        '{"id": 1}',
        '{"id": "a", "prompt": "hi"}\n',
        "[" * 100_000 + "\n",
        '{"id": null, "line": 1.5, "input": ""}\n',
        '{"id": null, "line": "1", "input": ""}\n',
        "\n",
    ],
)
def test_what_someone_else_wrote_is_left_alone(run: Run, text: str) -> None:
    Path("out").write_text(text)
    code, err = run()
    assert code == EXIT_REQUEST
    assert "HR-BATCH-03" in err
    assert Path("out").read_text() == text


def test_a_record_cut_anywhere_is_done_again(run: Run) -> None:
    run()
    whole = Path("out").read_bytes()
    for n in (1, 6, 9, 12, 16, 22, 30, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        Path("out").write_bytes(whole[:n])
        assert run()[0] == EXIT_OK
        assert results()[1]["text"] == json.loads(whole)["text"]


def test_a_corrected_line_is_tried_again(run: Run) -> None:
    bad = '{"id": "b", "prompt": ""}\n'
    assert run(GOOD + bad + '{"id": "c"}\n')[0] == EXIT_REQUEST
    Path("out").chmod(0o640)
    first = next(line for line in Path("out").read_text().splitlines() if '"id": "a"' in line)
    code, err = run(GOOD + bad.replace('""', '"two"') + "\n")
    assert code == EXIT_OK
    assert "done: 2 results, 0 failed" in err
    assert [record["id"] for record in results().values()] == ["a", "b"]
    assert first in Path("out").read_text().splitlines()
    assert stat.S_IMODE(Path("out").stat().st_mode) == 0o640
    assert "nothing left to do" in run(GOOD + bad.replace('""', '"two"'))[1]


def test_a_changed_line_with_a_result_is_refused(run: Run) -> None:
    assert "done: 1 result, 0 failed" in run(GOOD)[1]
    before = Path("out").read_bytes()
    code, err = run(GOOD.replace("hi", "ho"))
    assert code == EXIT_REQUEST
    assert "line 1 is the result of input line 1 as it read before, or of other options" in err
    assert "only lines that failed may be changed" in err
    assert Path("out").read_bytes() == before


def test_errors_stay_until_the_model_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run(GOOD + '{"prompt": ""}\n')
    before = Path("out").read_bytes()
    monkeypatch.setattr("headrace.llm.LLM.__init__", fail)
    assert run(GOOD + '{"prompt": "b"}\n')[0] == EXIT_MODEL
    assert Path("out").read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_retry_that_can_not_start_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run(GOOD + '{"prompt": ""}\n')
    before = Path("out").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        code, err = run(GOOD + '{"prompt": "b"}\n')
    assert (code, "HR-BATCH-04" in err) == (EXIT_REQUEST, True)
    assert Path("out").read_bytes() == before
    assert sorted(os.listdir()) == ["in.jsonl", "out"]
    Path(".out.retry").write_text("left by a kill")
    assert run(GOOD + '{"prompt": "b"}\n')[0] == EXIT_OK
    assert sorted(results()) == [1, 2]


def test_a_file_that_another_run_replaced_is_not_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run()

    def flock(*args: object) -> None:
        Path("copy").write_bytes(Path("out").read_bytes())
        Path("copy").replace("out")

    monkeypatch.setattr(fcntl, "flock", flock)
    code, err = run()
    assert code == EXIT_REQUEST
    assert "HR-BATCH-05" in err


def test_two_runs_at_once(run: Run) -> None:
    with open("out", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, err = run()
        assert code == EXIT_REQUEST
        assert "HR-BATCH-05" in err
    assert run()[0] == EXIT_OK
    assert list(results()) == [1]


def test_a_full_disk_leaves_whole_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = "".join(f'{{"prompt": "{word}"}}\n' for word in ("one", "two", "three"))
    room, write = [700], os.write

    def full(fd: int, data: bytes) -> int:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return write(fd, data)
        n = min(len(data), room[0])
        room[0] -= n
        if not n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:n])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        code, err = run(batch)
    assert code == EXIT_REQUEST
    assert "HR-BATCH-04" in err
    assert len(results()) < 3
    assert run(batch)[0] == EXIT_OK
    assert sorted(results()) == [1, 2, 3]
