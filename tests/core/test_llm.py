"""LLM on toy models: prompts in every form, order, batches beyond the queue, errors that name their prompt."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.config import load_config
from headrace.errors import Busy, ConfigError, RequestError
from headrace.llm import LLM, _arm, params_from
from headrace.machine import probe_machine
from headrace.runner import Handle
from headrace.types import SamplingParams

TOY = "toy://vocab=300,seed=3,context=256,repeat=0.5,eos_rate=0.0"
SHORT = SamplingParams(max_tokens=6)


def load(model: Any = TOY, **options: Any) -> LLM:
    return LLM(model, **{"engine": {"max_sequences": 4, "max_waiting": 4}, **options})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load() as llm:
        yield llm


def test_one_prompt_gives_one_output(llm: LLM) -> None:
    output = llm.generate("hello", SHORT)
    assert output.prompt == "hello"
    assert len(output.token_ids) == 6
    assert output.finish_reason == "length"
    assert output.text == llm.detokenize(output.token_ids, skip_special=True)
    forms: list[Any] = [list(b"hello"), tuple(b"hello"), np.array(list(b"hello"), np.int32)]
    for ids in forms:
        same = llm.generate(ids, SHORT)
        assert same.token_ids == output.token_ids
        assert same.prompt is None


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (5, None, "a prompt can't be 5 (int)"),
        (None, None, "a prompt can't be None (NoneType)"),
        (b"hello", None, "a prompt can't be b'hello' (bytes)"),
        ({"role": "user"}, None, "a prompt can't be {'role': 'user'} (dict)"),
        (np.array(5), None, "(ndarray)"),
        (["a", 5], None, "prompt 1: a prompt can't be 5 (int)"),
        ([5, "a"], None, "prompt_ids[1] = 'a' is outside the vocabulary"),
        ("a", 5, "params can't be 5 (int)"),
        ("a", "b", "params can't be 'b' (str)"),
        (["a", "b"], [SHORT, 5], "params can't be 5 (int)"),
        (["a", "b"], [SHORT], "2 prompts, but 1 params"),
    ],
)
def test_wrong_kinds_are_named(llm: LLM, prompts: Any, params: Any, text: str) -> None:
    calls: list[Any] = [llm.generate, lambda *args: asyncio.run(llm.agenerate(*args))]
    if not isinstance(prompts, list):
        calls.append(llm.stream)
    for call in calls:
        with pytest.raises(RequestError) as raised:
            call(prompts, params)
        assert text in raised.value.message
        assert raised.value.help


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    for prompts in ([], ["a"], ["a", "b"], np.array([[1, 2], [3, 4]])):
        with pytest.raises(RequestError, match="a stream takes one prompt"):
            llm.stream(prompts)  # type: ignore[arg-type]


def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    rows = np.array([list(b"one"), list(b"two")], np.int32)
    found = [output.token_ids for output in llm.generate(rows, SHORT)]  # type: ignore[call-overload]
    assert found == [llm.generate(text, SHORT).token_ids for text in ("one", "two")]


def test_list_keeps_order_beyond_the_queue(llm: LLM) -> None:
    prompts: list[Any] = [f"prompt {i}" if i % 3 else list(f"prompt {i}".encode()) for i in range(40)]
    params = [SamplingParams(max_tokens=1 + 7 * i % 5) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == [each.max_tokens for each in params]
    for i in (0, 1, 17, 39):
        assert llm.generate(prompts[i], params[i]).token_ids == outputs[i].token_ids
    assert llm.generate([], SHORT) == []


def test_n_samples_differ_and_repeat(llm: LLM) -> None:
    params = {"max_tokens": 12, "n": 3, "temperature": 1.0}
    first, again = llm.generate("x", params), llm.generate("x", params)
    texts = [completion.text for completion in first.completions]
    assert len(set(texts)) == 3
    assert [completion.text for completion in again.completions] == texts


def test_echo(llm: LLM) -> None:
    plain = llm.generate("hello", SHORT)
    echoed = llm.generate("hello", SHORT, echo=True)
    assert echoed.text == "hello" + plain.text
    assert echoed.token_ids == (*b"hello", *plain.token_ids)
    assert llm.generate([list(b"hello")], SHORT, echo=True)[0].text == echoed.text


def test_prompt_text_may_name_special_tokens(llm: LLM) -> None:
    assert llm.generate("<|im_start|>a", SHORT).prompt_token_ids == (258, 97)
    assert llm.tokenize("<|im_start|>") != [258]
    assert llm.tokenize("<|im_start|>", parse_special=True) == [258]
    assert llm.detokenize([97, 0xE2, 98]) == "a\ufffdb"


def test_every_prompt_is_checked_before_work_starts(llm: LLM) -> None:
    n_steps = llm._runner.engine.n_steps
    bad: list[tuple[Any, str]] = [
        ("", r"prompt 1: the prompt is empty"),
        ([], r"prompt 1: the prompt is empty"),
        ([5, 300], r"prompt 1: prompt_ids\[1\] = 300 is outside the vocabulary"),
        ([5, -1], r"prompt 1: .*-1 is outside"),
        ([5, 1.5], r"prompt 1: .*1.5 is outside"),
        (["a", "b"], r"prompt 1: .*'a' is outside"),
        ("x" * 300, r"prompt 1: the prompt has 300 tokens, the context holds 256"),
    ]
    for prompt, message in bad:
        with pytest.raises(RequestError, match=message):
            llm.generate(["fine", prompt], SHORT)
    with pytest.raises(RequestError, match="250 prompt tokens \\+ max_tokens 100"):
        llm.generate("x" * 250, {"max_tokens": 100})
    assert llm._runner.engine.n_steps == n_steps


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 prompts, but 2 params"):
        llm.generate(["a", "b", "c"], [SHORT, SHORT])
    with pytest.raises(RequestError, match=r"'temprature'\n.*did you mean 'temperature'"):
        llm.generate("a", {"temprature": 0})
    with pytest.raises(RequestError, match="one prompt, not a list"):
        llm.stream(["a", "b"], SHORT)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="n = 5, but the queue holds 4"):
        llm.generate("a", {"n": 5})


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "min_tokens", "n", "logprobs", "prompt_logprobs", "seed"])
@pytest.mark.parametrize("value", [-1, -(2**31), 2**64, 1e308, float("nan"), "1", True])
def test_integers_out_of_range_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        params_from({field: value})


def test_logprob_and_bias_bounds(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logprobs"):
        llm.generate("a", {"logprobs": 2**31})
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate("a", {"logit_bias": {300: 1.0}})
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate("a", {"logit_bias": dict.fromkeys(range(5000), 1.0)})


def test_failure_of_one_prompt_is_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["aaaa", "~~~~", "cccc"]
    fine = llm.generate(prompts, SHORT)

    def nan(plan: Any, row: int) -> bool:
        return plan.tokens[plan.offset[row + 1] - 1] == ord("~")

    monkeypatch.setattr(llm.pipeline.executor, "nan", nan)
    outputs = llm.generate(prompts, SHORT)
    assert outputs[1].error is not None
    assert outputs[1].finish_reason == "error"
    assert [outputs[i].token_ids for i in (0, 2)] == [fine[i].token_ids for i in (0, 2)]


# --- logits -----------------------------------------------------------------------------------------------------------


def by_hand(llm: LLM, ids: list[int]) -> Any:
    """[n, vocab] float32 of the toy model, without executor or engine."""
    toy = llm.pipeline.executor.toy  # type: ignore[attr-defined]
    return toy.logits_from(toy.cells(ids, 0), 0)


@pytest.mark.parametrize("chunk", [None, 1, 3, np.int64(7), 1000])
def test_logits_of_every_position(llm: LLM, chunk: Any) -> None:
    ids = list(b"the logits of a prompt of more than one block")
    found = llm.logits(ids, chunk=chunk)
    assert (found.shape, found.dtype) == ((len(ids), 300), np.float32)
    assert found.flags.writeable
    np.testing.assert_array_equal(found, by_hand(llm, ids))


def test_logits_take_prompts_in_every_form(llm: LLM) -> None:
    expected = by_hand(llm, list(b"hello"))
    forms: list[Any] = ["hello", tuple(b"hello"), np.array(list(b"hello"), np.int32)]
    for prompt in forms:
        np.testing.assert_array_equal(llm.logits(prompt), expected)
    whole = list(range(97, 97 + 26)) * 9 + [97] * 22
    assert llm.logits(whole).shape == (256, 300), "a prompt may fill the context: nothing is generated"


def test_logits_use_no_prefix_and_leave_one() -> None:
    with load() as llm:
        ids = list(b"a prompt that was read before, twice")
        llm.generate(ids, SHORT)
        np.testing.assert_array_equal(llm.logits(ids), by_hand(llm, ids))
        assert llm.generate(ids, SHORT).usage.cached_tokens > 0


def test_logits_chunks_are_steps() -> None:
    with load() as llm:
        lengths: list[int] = []
        llm.pipeline.executor.on_forward = lambda plan: lengths.append(int(plan.length[0]))  # type: ignore[attr-defined]
        llm.logits(list(range(97, 97 + 20)), chunk=6)
        assert lengths == [6, 6, 6, 2]


def test_logits_beside_other_requests(llm: LLM) -> None:
    prompts = [f"prompt number {i} of several" for i in range(6)]
    expected = llm.generate(prompts, {"max_tokens": 20})
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, llm.logits(prompts[i], chunk=1 + i))) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    outputs = llm.generate(prompts, {"max_tokens": 20})
    for thread in threads:
        thread.join()
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for i in range(3):
        np.testing.assert_array_equal(found[i], by_hand(llm, list(prompts[i].encode())))


@pytest.mark.parametrize(
    ("prompt", "chunk", "text"),
    [
        ("", None, "HR-REQUEST-02"),
        ([], None, "HR-REQUEST-02"),
        ([5, 300], None, r"HR-REQUEST-05: prompt_ids\[1\] = 300"),
        ([5, -1], None, "HR-REQUEST-05"),
        ([5, "a"], None, "HR-REQUEST-05"),
        ("x" * 257, None, "HR-REQUEST-03"),
        (5, None, "HR-REQUEST-15"),
        (["a", "b"], None, "HR-REQUEST-13"),
        ([[1, 2], [3]], None, "HR-REQUEST-13"),
        ("a", 0, "HR-REQUEST-16: prefill_chunk_tokens = 0"),
        ("a", -3, "HR-REQUEST-16"),
        ("a", 1.5, "HR-REQUEST-16"),
        ("a", True, "HR-REQUEST-16"),
        ("a", "2", "HR-REQUEST-16"),
    ],
)
def test_logits_refuse_by_name(llm: LLM, prompt: Any, chunk: Any, text: str) -> None:
    n_steps = llm._runner.engine.n_steps
    with pytest.raises(RequestError, match=text) as raised:
        llm.logits(prompt, chunk)
    assert raised.value.help
    assert llm._runner.engine.n_steps == n_steps


def test_logits_of_an_executor_that_has_none() -> None:
    with load(f"{TOY},fast=1") as llm, pytest.raises(RequestError, match=r"HR-REQUEST-06: .*no logits"):
        llm.logits("a")


def test_logits_that_memory_can_not_hold(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(probe_machine(), available_memory_bytes=4 * 300 * 5)
    monkeypatch.setattr("headrace.machine.probe_machine", lambda: machine)
    assert llm.logits("12345").shape == (5, 300)
    with pytest.raises(RequestError, match="HR-REQUEST-17: the logits of 6 tokens"):
        llm.logits("123456")


def test_logits_that_are_nan_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.pipeline.executor, "nan", lambda plan, row: ord("~") in plan.tokens)
    with pytest.raises(RequestError, match=r"HR-STEP-02: .*NaN"):
        llm.logits("aaa~aaa", chunk=2)
    np.testing.assert_array_equal(llm.logits("aaa"), by_hand(llm, list(b"aaa")))


def test_logits_of_a_model_that_is_closed_meanwhile() -> None:
    llm = load()
    llm.pipeline.executor.on_forward = lambda plan: llm._runner.close(wait=False)  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="HR-CLOSED-01"):
        llm.logits("x" * 50)
    with pytest.raises(RequestError, match="HR-CLOSED-01"):
        llm.logits("a")


def test_logits_are_of_the_output_too(llm: LLM) -> None:
    """A request may generate after the prompt whose logits it keeps; each of n samples has the same prompt."""
    handle = llm.start(llm.request("hello", llm.resolve({"max_tokens": 6, "n": 2}), want_logits=True))
    output = handle.result()
    np.testing.assert_array_equal(output.prompt_logits, by_hand(llm, list(b"hello")))
    same = llm.generate("hello", {"max_tokens": 6, "n": 2})
    assert [each.token_ids for each in output.completions] == [each.token_ids for each in same.completions]
    assert same.prompt_logits is None


def test_streams(llm: LLM) -> None:
    expected = llm.generate("hello", SHORT)
    chunks = list(llm.stream("hello", SHORT))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    with llm.stream("hello", {"max_tokens": 200}) as stream:
        next(stream)
    assert stream.result().finish_reason == "abort"


def test_async_forms(llm: LLM) -> None:
    expected = [output.text for output in llm.generate([f"p{i}" for i in range(20)], SHORT)]

    async def stream(i: int) -> str:
        return "".join([chunk.text async for chunk in await llm.astream(f"p{i}", SHORT)])

    async def main() -> None:
        assert [output.text for output in await llm.agenerate([f"p{i}" for i in range(20)], SHORT)] == expected
        singles = await asyncio.gather(*(llm.agenerate(f"p{i}", SHORT) for i in range(20)))
        assert [output.text for output in singles] == expected
        assert await asyncio.gather(*(stream(i) for i in range(4))) == expected[:4]
        with pytest.raises(RequestError, match="prompt is empty"):
            await llm.agenerate("", SHORT)
        task = asyncio.create_task(llm.agenerate("x", {"max_tokens": 200}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    llm.generate("drain", SHORT)
    assert not llm._runner._live


def test_threads_share_one_llm(llm: LLM) -> None:
    expected = llm.generate("hello", SHORT).text
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(llm.generate("hello", SHORT).text)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 12


def test_sampling_defaults_in_order() -> None:
    with load(sampling={"temperature": 0.25, "top_k": 7}) as llm:
        resolved = llm.resolve({"top_k": 3})
        assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.25, 3, 0.95)


def test_models_come_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(f'model = "{TOY}"\n[engine]\nmax_sequences = 2\n')
    expected = None
    for source in (TOY, str(file), file, load_config(file)):
        with LLM(source) as llm:
            text = llm.generate("hello", SHORT).text
            expected = expected or text
            assert text == expected
    with LLM(file, backend="toy", engine={"max_waiting": 3}) as llm:
        assert (llm.pipeline.config.engine.max_sequences, llm.pipeline.config.engine.max_waiting) == (2, 3)
    with pytest.raises(ConfigError, match="can't be combined with engine"):
        LLM(load_config(file), engine={})
    with pytest.raises(ConfigError, match="unknown key 'contxt'"):
        LLM(TOY, contxt=5)


def test_two_at_once_and_closed_ones() -> None:
    one, two = load(), load()
    assert one.generate("x", SHORT).text == two.generate("x", SHORT).text
    one.close()
    one.close()
    with pytest.raises(RequestError, match="HR-CLOSED-01"):
        one.generate("x", SHORT)
    with pytest.raises(RequestError, match="HR-CLOSED-01"):
        one.generate(["x", "y"], SHORT)
    assert two.generate("x", SHORT).finish_reason == "length"
    two.close()


def test_closed_llm_says_so_before_it_tokenizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed model's tokenizer has errors of its own, and after a fork its lock may be held for good."""
    llm = load()
    llm.close()
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *args, **more: 1 // 0)
    for use in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="HR-CLOSED-01"):
            use("hello", SHORT)


def test_a_retry_is_watched_though_its_first_try_ended_unseen(llm: LLM) -> None:
    """A request that the full queue refuses comes again under its name; the batch must wake up for it."""
    job = llm.request("hello", llm.resolve(SHORT))
    first = llm.start(job)
    first.wait()
    armed: set[str] = set()
    fired: list[str] = []
    _arm([first], armed, fired.append)
    again = Handle(llm._runner, job[0], None, None)
    _arm([again], armed, fired.append)
    assert len(again._waiters) == 1
    again.cancelled = True


def test_dropped_llm_frees_itself_and_streams_keep_it() -> None:
    llm = load()
    thread = llm._runner._thread
    stream = llm.stream("hello", SHORT)
    ref = weakref.ref(llm)
    del llm
    gc.collect()
    assert ref() is not None
    assert stream.result().finish_reason == "length"
    del stream
    gc.collect()
    assert ref() is None
    thread.join(30)
    assert not thread.is_alive()


def test_stream_raises_busy_at_once() -> None:
    with load(engine={"max_sequences": 1, "max_waiting": 1}) as llm:
        streams = [llm.stream("hello", {"max_tokens": 200})]

        def fill() -> None:
            streams.extend(llm.stream("hello", {"max_tokens": 200}) for _ in range(9))

        with pytest.raises(Busy, match="the queue holds 1"):
            fill()
        for stream in streams:
            stream.cancel()


def test_progress_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SHORT, progress=True)
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert "tok/s" in captured.err
    assert captured.out == ""
    llm.generate(["a", "b"], SHORT)
    assert capsys.readouterr().err == ""


def test_lazy_imports() -> None:
    assert headrace.LLM is LLM
    script = (
        "import sys, headrace.llm\n"
        "with headrace.llm.LLM('toy://vocab=300') as llm: print(len(llm.generate('x', {'max_tokens': 3}).token_ids))\n"
        "print([name for name in ('asyncio', 'jinja2', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["3", "[]"], done.stderr
