"""`headrace run` and `headrace chat` on a toy model: text, JSON, batches that are cut and continued, ^C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import EXIT_CONFIG, EXIT_INTERRUPT, EXIT_MODEL, EXIT_OK, EXIT_PLUGIN, EXIT_REQUEST, EXIT_USAGE
from headrace.llm import LLM

TOY = "toy://vocab=300,seed=3,context=512,repeat=0.5,eos_rate=0.0"
LONG = "toy://vocab=300,seed=3,context=60000,blocks=4000,block_tokens=16,eos_rate=0.0"

Outcome = tuple[int, str, str]


@pytest.fixture
def headrace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)

    def call(*args: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def completed(prompt: str, **params: Any) -> str:
    with LLM(TOY) as llm:
        return llm.generate(prompt, {"max_tokens": 8, **params}).text


def chat_prompt(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


# --- one prompt ------------------------------------------------------------------------------------------------------


def test_chat_is_the_default_and_raw_is_not(headrace: Any) -> None:
    code, out, err = headrace("run", TOY, "hello", "--max-tokens", "8")
    assert (code, out) == (EXIT_OK, completed(chat_prompt("hello")) + "\n")
    assert "8 generated at" in err
    assert headrace("run", TOY, "--raw", "hello", "--max-tokens", "8", "-q")[1:] == (completed("hello") + "\n", "")
    assert headrace("run", TOY, "--max-tokens", "8", "--chat", "hello")[1] == out


def test_prompt_from_stdin(headrace: Any) -> None:
    expected = completed("hello") + "\n"
    assert headrace("run", TOY, "--raw", "--max-tokens", "8", stdin="hello\n")[1] == expected
    assert headrace("run", TOY, "-", "--raw", "--max-tokens", "8", stdin="hello")[1] == expected


def test_config_file_and_settings(headrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.toml").write_text(f'model = "{TOY}"\n[sampling]\ntemperature = 0.0\n')
    greedy = completed("hello", temperature=0.0) + "\n"
    options = ("--raw", "--max-tokens", "8", "-q")
    assert headrace("run", "p.toml", "hello", *options)[1] == greedy
    assert headrace("run", "--config", "p.toml", "hello", *options)[1] == greedy
    assert headrace("run", "--config", "p.toml", TOY, "hello", *options)[1] == greedy
    monkeypatch.setenv("HEADRACE_CONFIG", "p.toml")
    assert headrace("run", *options, stdin="hello\n")[1] == greedy
    assert headrace("chat", *options[1:], stdin="hello\n") == headrace("chat", "p.toml", *options[1:], stdin="hello\n")
    hot = headrace("run", "p.toml", "hello", *options, "--set", "sampling.temperature=1.5")[1]
    assert hot == completed("hello", temperature=1.5) + "\n"
    code, _, err = headrace("run", "p.toml", "hello", "--set", "sampling.temprature=1.5")
    assert code == EXIT_CONFIG
    assert "did you mean 'temperature'" in err


def test_json(headrace: Any) -> None:
    code, out, _ = headrace(
        "run", TOY, "hello", "--raw", "--json", "--n", "2", "--logprobs", "1", "--max-tokens", "8", "--echo"
    )
    found = json.loads(out)
    assert code == EXIT_OK
    assert found["text"] == "hello" + completed("hello")
    assert [len(each["token_ids"]) for each in found["completions"]] == [13, 13]
    assert [len(each["logprobs"]) for each in found["completions"]] == [8, 8]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "cached_tokens": 0, "total_tokens": 21}


def test_system_message(headrace: Any) -> None:
    def asked(system: str) -> str:
        return completed(f"<|im_start|>system\n{system}<|im_end|>\n" + chat_prompt("hello")) + "\n"

    Path("p.toml").write_text(f'model = "{TOY}"\n[chat]\nsystem = "C"\n')
    assert headrace("run", "p.toml", "hello", "--max-tokens", "8")[1] == asked("C")
    assert headrace("run", "p.toml", "hello", "--max-tokens", "8", "--system", "S")[1] == asked("S")
    assert asked("C") != asked("S")


def test_text_options(headrace: Any) -> None:
    _, out, _ = headrace("run", TOY, "hello", "--prefill", "Sure", "--max-tokens", "8")
    assert out == "Sure" + completed(chat_prompt("hello") + "Sure") + "\n"
    assert headrace("run", TOY, "hello", "--raw", "--echo", "--max-tokens", "8")[1] == f"hello{completed('hello')}\n"
    _, out, _ = headrace("run", TOY, "hello", "--raw", "--n", "2", "--max-tokens", "8")
    assert out.startswith(f"--- 1\n{completed('hello')}\n--- 2\n")
    stop = completed("hello")[2:4]
    _, out, err = headrace("run", TOY, "hello", "--raw", "--stop", stop, "--max-tokens", "8")
    assert out == completed("hello").partition(stop)[0] + "\n"
    assert "stop]" in err


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["run"], EXIT_USAGE, "no model was given"),
        (["run", TOY, "a", "b"], EXIT_USAGE, "one word too many: 'b'"),
        (["run", TOY, "a", "--out", "x"], EXIT_USAGE, "--batch and --out belong together"),
        (["run", TOY, "a", "--raw", "--system", "s"], EXIT_USAGE, "--system and --prefill need a chat template"),
        (["run", TOY, "a", "--top-k", "x"], EXIT_USAGE, "--top-k"),
        (
            ["run", TOY, ""],
            EXIT_REQUEST,
            "HR-REQUEST-02: the prompt is empty\nhelp: write some text: headrace run MODEL",
        ),
        (["run", TOY], EXIT_REQUEST, "HR-REQUEST-02: the prompt is empty: nothing came from stdin\nhelp: write some"),
        (["run", TOY, "-", "--raw"], EXIT_REQUEST, "nothing came from stdin"),
        (["run", TOY, " "], EXIT_REQUEST, "HR-REQUEST-02: the prompt is empty: only blanks\nhelp: write some text"),
        (
            ["run", "What is a river?"],
            EXIT_MODEL,
            'help: the prompt comes after the model: headrace run MODEL "What is',
        ),
        (["run", TOY, "a", "--top-p", "2"], EXIT_REQUEST, "top_p = 2.0 is not allowed"),
        (["run", TOY, "a", "--temperature", "nan"], EXIT_REQUEST, "temperature = nan is not allowed"),
        (["run", TOY, "x" * 600], EXIT_REQUEST, "tokens, the context holds 512"),
        (["chat"], EXIT_USAGE, "no model was given"),
        (["run", TOY, "a", "--backend", "toi"], EXIT_PLUGIN, "did you mean 'toy'?"),
        (["chat", TOY, "--backend", "toi"], EXIT_PLUGIN, "did you mean 'toy'?"),
    ],
)
def test_bad_calls(headrace: Any, args: list[str], code: int, text: str) -> None:
    found, out, err = headrace(*args)
    assert (found, out) == (code, "")
    assert text in err
    assert "Traceback" not in err


def test_a_lone_word_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    for word, help in (("What is a river?", "the prompt comes after the model: "), (TOY, "give one, pipe one in")):
        assert main(["run", word]) == EXIT_USAGE
        assert f"HR-USAGE-04: no prompt was given\nhelp: {help}" in capsys.readouterr().err


def read_until(fd: int, mark: bytes, seen: bytes = b"", timeout_s: float = 60) -> bytes:
    """Read a pipe or terminal until the mark comes; what came after it. Fails with what came instead."""
    deadline = time.monotonic() + timeout_s
    while mark not in seen:
        ready, _, _ = select.select([fd], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {mark!r} within {timeout_s} s, only {seen[-2000:]!r}"
        data = os.read(fd, 4096)
        assert data, f"it ended without {mark!r}: {seen[-2000:]!r}"
        seen += data
    return seen.partition(mark)[2]


def test_a_wait_for_output_ends() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"one two")
    assert read_until(ours, b"one") == b" two"
    with pytest.raises(AssertionError, match="no b'four' within 0 s, only b'three'"):
        read_until(ours, b"four", b"three", timeout_s=0)
    os.close(theirs)
    with pytest.raises(AssertionError, match="it ended without b'four'"):
        read_until(ours, b"four")
    os.close(ours)


def start(*args: str, **environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    )
    assert process.stdin is not None
    return process


def test_interrupt_ends_in_order() -> None:
    process = start("run", LONG, "hello", "--raw")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPT
    assert b"abort]" in err
    assert b"Traceback" not in err


STUCK = """
import sys, threading
from headrace.hooks import BackendSpec, hookimpl
from headrace.types import Fit, ModelSource
headrace_api = 1

@hookimpl
def headrace_resolve(uri):
    return ModelSource(uri=uri, path="", format="stuck") if uri == "stuck://" else None

@hookimpl
def headrace_backends():
    yield BackendSpec(name="stuck", formats=("stuck",), probe="stuck:probe", factory="stuck:make", summary="")

def probe(machine, source):
    return Fit(1, "")

def make(source, options, context):
    from headrace.testing.toy import ToyModel, ToyPaged

    class Stuck(ToyPaged):
        def forward(self, plan):
            if self.n_forward == 40:
                print("stuck", file=sys.stderr, flush=True)
                threading.Event().wait()
            return super().forward(plan)

        def interrupt(self):
            print("interrupted", file=sys.stderr, flush=True)

    return Stuck(ToyModel(vocab=300, eos_rate=0.0))
"""


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    """Also when a device hangs, so that the first one can't end in order."""
    (tmp_path / "stuck.py").write_text(STUCK)
    info = tmp_path / "stuck-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[headrace]\nstuck = stuck\n")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    process = start("run", "stuck://", "hello", "--raw", PYTHONPATH=path)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        read_until(process.stderr.fileno(), b"stuck\n")
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        read_until(process.stderr.fileno(), b"interrupted\n")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT
    finally:
        process.kill()
        process.communicate()


# --- batch -----------------------------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"id": "a", "prompt": "one", "max_tokens": 5},
    {"prompt": "two", "temperature": 0.0},
    {"id": 7, "prompt_ids": [1, 2, 3], "seed": 5, "n": 2},
    {"messages": [{"role": "user", "content": "hi"}], "stop": ["z"]},
    *({"id": f"x{i}", "prompt": f"more {i}"} for i in range(8)),
]
BATCH = ("run", TOY, "--batch", "in.jsonl", "--out", "out.jsonl", "--max-tokens", "9")


def write(items: list[Any]) -> None:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    Path("in.jsonl").write_text("\n".join(lines) + "\n")


def results() -> dict[int, dict[str, Any]]:
    """By line number, timings taken off."""
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert len({record["line"] for record in found}) == len(found)
    return {record["line"]: {k: v for k, v in record.items() if k not in ("timings", "usage")} for record in found}


def test_batch(headrace: Any) -> None:
    write(GOOD)
    code, out, err = headrace(*BATCH)
    assert (code, out) == (EXIT_OK, "")
    assert "12 results, 0 failed" in err
    found = results()
    assert [found[line]["id"] for line in (1, 2, 3)] == ["a", None, 7]
    assert found[1]["text"] == headrace("run", TOY, "one", "--max-tokens", "5", "-q")[1].removesuffix("\n")
    assert [len(each["token_ids"]) for each in found[3]["completions"]] == [9, 9]
    assert found[4]["prompt"] == chat_prompt("hi")


BAD: list[tuple[Any, str]] = [
    ("{not json", "not JSON"),
    ("[1]", "is not an object but [1]"),
    ({"id": "p", "prompt": "x", "max_tokns": 5}, "unknown key 'max_tokns'"),
    ({"id": "a", "prompt": "x"}, "id 'a' was used in line 1 already"),
    ({"id": [1], "prompt": "x"}, "neither text nor a number"),
    ({"id": "q"}, "needs one of prompt, messages, prompt_ids"),
    ({"prompt": "x", "prompt_ids": [1]}, "this has prompt and prompt_ids"),
    ({"prompt": 5}, "prompt must be text"),
    ({"prompt_ids": "x"}, "prompt_ids must be a list of ids"),
    ({"prompt_ids": [999]}, "999 is outside the vocabulary"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "x" * 600}, "tokens, the context holds 512"),
    ({"prompt": "x", "temperature": -1}, "temperature = -1 is not allowed"),
    ('{"prompt": "x", "top_p": NaN}', "top_p = nan is not allowed"),
    ({"prompt": "x", "stop": 5}, "is not"),
    ({"prompt": "x", "logit_bias": {"999": 1.0}}, "logit_bias[0] = 999 is outside"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "message 0 has no role or no content"),
    ("[" * 100_000, "not JSON"),
]


def test_bad_lines_have_their_own_error_and_the_rest_goes_on(headrace: Any) -> None:
    write(GOOD)
    headrace(*BATCH)
    good = results()
    Path("out.jsonl").unlink()
    write([*GOOD, "", *(item for item, _ in BAD)])
    code, _, err = headrace(*BATCH)
    assert code == EXIT_REQUEST
    assert f"{len(GOOD) + len(BAD)} results, {len(BAD)} failed" in err
    found = results()
    for line, (_, text) in enumerate(BAD, len(GOOD) + 2):
        assert text in found[line]["error"]["message"], found[line]
        assert found[line]["error"]["code"].startswith("HR-")
    assert {line: found[line] for line in good} == good
    assert "; the same command tries those again" in err
    assert headrace(*BATCH)[0] == EXIT_REQUEST  # they are tried again, and fail again
    assert results() == found
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]


def test_batch_goes_on_where_it_was_cut(headrace: Any) -> None:
    write(GOOD)
    headrace(*BATCH)
    whole, expected = Path("out.jsonl").read_bytes(), results()
    lines = whole.splitlines(keepends=True)
    for n_bytes in (0, 1, 5, len(lines[0]) - 1, len(lines[0]), len(b"".join(lines[:7])) + 40, len(whole) - 1):
        Path("out.jsonl").write_bytes(whole[:n_bytes])
        assert headrace(*BATCH)[0] == EXIT_OK
        n_kept = whole[:n_bytes].count(b"\n")
        assert Path("out.jsonl").read_bytes().splitlines(keepends=True)[:n_kept] == lines[:n_kept]
        assert results() == expected
    Path("out.jsonl").write_bytes(b"".join(lines[:-1]) + b'{"id": null, "line": 12, "text": "' + b"x" * 9999)
    assert headrace(*BATCH)[0] == EXIT_OK
    assert results() == expected
    assert "nothing left to do" in headrace(*BATCH)[2]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"my diary, no line end", "line 1 is no result"),
        (b"my diary\n", "line 1 is no result"),
        (b'{"id": null, "line": 99, "input": "0"}\n', "the result of input line 99, and there is none"),
        (
            b'{"id": null, "line": 1, "input": "0123456789abcdef"}\n',
            "line 1 is the result of input line 1 as it read before",
        ),
        (b"5\n", "line 1 is no result"),
    ],
)
def test_foreign_result_file_is_left_alone(headrace: Any, content: bytes, why: str) -> None:
    write(GOOD)
    Path("out.jsonl").write_bytes(content)
    code, _, err = headrace(*BATCH)
    assert code == EXIT_REQUEST
    assert why in err
    assert "HR-BATCH-03" in err
    assert Path("out.jsonl").read_bytes() == content


def test_other_options_are_noticed(headrace: Any) -> None:
    write(GOOD)
    headrace(*BATCH)
    code, _, err = headrace(*BATCH, "--temperature", "0.1")
    assert code == EXIT_REQUEST
    assert "or of other options" in err
    code, _, err = headrace(*BATCH, "--set", "sampling.temperature=0.1")
    assert code == EXIT_REQUEST
    assert "or of other options" in err
    assert headrace(*BATCH[:2], "--batch", "nowhere.jsonl", "--out", "o.jsonl")[0] == EXIT_REQUEST


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_batch_is_stopped_and_resumed(headrace: Any, how: signal.Signals, tmp_path: Path) -> None:
    write([{"prompt": f"p{i}", "max_tokens": 40 + i, "ignore_eos": True} for i in range(60)])
    options = BATCH[2:6]
    process = start("run", TOY, *options, "--set", "engine.max_sequences=2")
    out = Path("out.jsonl")
    while not (out.exists() and out.stat().st_size) and process.poll() is None:
        os.sched_yield()
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (EXIT_INTERRUPT if how is signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in err
    done = out.read_bytes()
    n_whole = done.count(b"\n")
    assert 0 < n_whole < 60
    assert headrace("run", TOY, *options)[0] == EXIT_OK
    assert out.read_bytes().startswith(done[: done.rfind(b"\n") + 1])
    found = results()
    assert [len(found[line]["completions"][0]["token_ids"]) for line in range(1, 61)] == [40 + i for i in range(60)]


# --- chat ------------------------------------------------------------------------------------------------------------


def test_chat_in_a_pipe(headrace: Any) -> None:
    code, out, err = headrace("chat", TOY, "--max-tokens", "8", stdin="hello\n\n/what\n/reset\nhello\n/quit\nnever\n")
    answer = completed(chat_prompt("hello"))
    answer = answer if answer.endswith("\n") else answer + "\n"
    assert (code, out) == (EXIT_OK, answer * 2)
    assert "unknown command /what" in err
    assert "forgotten" in err


def test_chat_keeps_history_and_system(headrace: Any) -> None:
    Path("t.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}")
    _, out, _ = headrace("chat", TOY, "--system", "S", "--template", "t.jinja", "--max-tokens", "3", stdin="a\nb\n")
    first = completed("sS|ua|", max_tokens=3)
    second = completed(f"sS|ua|a{first}|ub|", max_tokens=3)
    assert out == "".join(text if text.endswith("\n") else text + "\n" for text in (first, second))


def test_chat_forgets_what_lies_further_back(headrace: Any) -> None:
    Path("t.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}")
    options = ("--template", "t.jinja", "--max-tokens", "3", "--max-turns", "1")
    _, out, _ = headrace("chat", TOY, *options, stdin="a\nb\n")
    answers = [completed(prompt, max_tokens=3) for prompt in ("ua|", "ub|")]
    assert out == "".join(text if text.endswith("\n") else text + "\n" for text in answers)


def test_chat_reports_a_failed_turn(headrace: Any) -> None:
    code, out, err = headrace("chat", TOY, "--max-tokens", "8", stdin="x" * 600 + "\nhello\n")
    assert code == EXIT_REQUEST
    assert "the context holds 512" in err
    assert out.startswith(completed(chat_prompt("hello")))


def test_chat_help(headrace: Any) -> None:
    assert "/reset" in headrace("chat", TOY, stdin="/help\n")[2]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_chat_on_a_terminal() -> None:
    """^C stops an answer only; at the prompt it leaves."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "chat", LONG],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        seen = read_until(ours, b"> ")
        os.write(ours, b"hello\n")
        seen = read_until(ours, b"tok/s", seen)
        os.write(ours, b"\x03")
        seen = read_until(ours, b"stopped; this turn is forgotten", seen)
        seen = read_until(ours, b"> ", seen)
        os.write(ours, b"/help\n")
        seen = read_until(ours, b"forget the conversation", seen)
        read_until(ours, b"> ", seen)
        for _ in range(30):  # readline may lose one that comes just before it waits
            os.write(ours, b"\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.returncode == EXIT_INTERRUPT
    finally:
        process.kill()
        process.wait()
        os.close(ours)
