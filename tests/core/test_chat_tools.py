"""The loop of tools: what a model calls is run, and whatever goes wrong is something that it can read.

The toy model is made to say a script: a constraint that one text alone satisfies.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
from plugin_text import plugin_module

from headrace import Chat, tool
from headrace.answers import ChatChunk, Reading, job_for
from headrace.catalog import Catalog
from headrace.dialogue import AnswerParser, Message, Prompt, Turn
from headrace.errors import AnswerError, ConfigError, HeadraceError, RequestError
from headrace.llm import LLM
from headrace.testing.toy_parts import ToyConstraint
from headrace.types import Chunk, Completion, Grammar, Output, SamplingParams, Timings, Usage
from headrace_plugins.dialects.hermes import Hermes

LONG = SamplingParams(max_tokens=400)
FAMILY = Hermes()


PLUGIN = """
@hookimpl
def headrace_constraints():
    yield ConstraintSpec(name="script", kinds=("choice",), factory="script_parts:engine", summary="one text")
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    parts: Any = ModuleType("script_parts")
    parts.engine = lambda options, tokenizer: ToyConstraint(tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "script_parts", parts)
        catalog = Catalog.load(extra={"script": plugin_module(PLUGIN)})
        tables: dict[str, Any] = {"engine": {"max_sequences": 4}, "constraints": {"use": "script"}}
        with LLM("toy://vocab=300,seed=3,context=4096", catalog=catalog, **tables) as llm:
            yield llm


class Script:
    """A chat format that makes the model say one text after the other, whatever it is asked."""

    name = "script"

    def __init__(self, llm: LLM, answers: Sequence[str]) -> None:
        self._tokenizer = llm.tokenizer
        self.answers = list(answers)
        self.seen: list[tuple[list[Message], Turn]] = []

    def prompt(self, messages: Sequence[Mapping[str, Any]], turn: Turn = Turn()) -> Prompt:  # noqa: B008
        self.seen.append(([dict(message) for message in messages], turn))
        text = f"{len(messages)} messages:"
        said = self.answers[len(self.seen) - 1]
        return Prompt(text, self._tokenizer.encode(text), Grammar.choice(said))

    def parser(self, prompt: Prompt, turn: Turn = Turn()) -> AnswerParser:  # noqa: B008
        return FAMILY.parser(turn.tools, prefill=turn.prefill, seed=f"{len(self.seen)}")


Talk = Callable[..., tuple[Chat, Script]]


@pytest.fixture
def talk(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """(a chat, its script) whose model says the answers."""

    def made(*answers: str, **options: Any) -> tuple[Chat, Script]:
        script = Script(llm, answers)
        monkeypatch.setattr("headrace.chat.chat_format", lambda *_: script)
        return Chat(llm, **options), script

    return made


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def roles(chat: Chat) -> list[str]:
    return [message["role"] for message in chat.history]


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def either(chat: Chat, way: str, *args: Any, **options: Any) -> Any:
    """The reply, asked for in one of four ways."""
    if way == "ask":
        return chat.ask(*args, **options)
    if way == "aask":
        return asyncio.run(chat.aask(*args, **options))
    if way == "stream":
        answer = chat.stream(*args, **options)
        list(answer)
        return answer.result()

    async def main() -> Any:
        answer = await chat.astream(*args, **options)
        async for _ in answer:
            pass
        return await answer.aresult()

    return asyncio.run(main())


WAYS = ["ask", "aask", "stream", "astream"]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_is_run_and_its_result_goes_back(talk: Talk, way: str) -> None:
    chat, script = talk("<think>\nhm\n</think>\n\nWait." + call("add", a=2, b=3), "It is 5.", tools=[add], system="s")
    reply = either(chat, way, "2 + 3?", LONG)
    assert (reply.text, reply.finish_reason, reply.tool_calls) == ("It is 5.", "stop", [])
    assert len(reply.rounds) == 2
    assert (reply.rounds[0].text, reply.rounds[0].reasoning) == ("Wait.", "hm")
    assert reply.usage.completion_tokens == sum(each.usage.completion_tokens for each in reply.rounds)
    system, user, said, result, answer = chat.history
    (made,) = said["tool_calls"]
    assert (system["content"], user["content"]) == ("s", "2 + 3?")
    assert said["reasoning_content"] == "hm"
    assert made["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert result == {"role": "tool", "tool_call_id": made["id"], "name": "add", "content": "5"}
    assert answer == {"role": "assistant", "content": "It is 5."}
    assert list(reply.messages) == chat.history[2:]
    messages, turn = script.seen[1]
    assert messages == chat.history[:4]
    assert [each["function"]["name"] for each in turn.tools] == ["add"]
    json.dumps(chat.history)


def test_the_stream_of_a_call(talk: Talk) -> None:
    chat, _ = talk("<think>\nhm\n</think>\n\nWait." + call("add", a=2), "3.", tools=[add])
    chunks = list(chat.stream("?", LONG))
    assert all(isinstance(chunk, ChatChunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "Wait.3."
    assert "".join(chunk.reasoning for chunk in chunks) == "hm"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert chunks[-1].finish_reason == "stop"
    merged: dict[int, dict[str, str]] = {}
    for delta in (delta for chunk in chunks for delta in chunk.calls):
        entry = merged.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
        for name in entry:
            entry[name] += getattr(delta, name)
    assert list(merged) == [0]
    assert (merged[0]["name"], merged[0]["arguments"]) == ("add", '{"a": 2}')
    (result,) = (result for chunk in chunks for result in chunk.results)
    assert (result.id, result.content, result.error) == (merged[0]["id"], "3", None)
    whole = [chunk for chunk in chunks if chunk.results]
    assert len(whole) == 1
    assert not whole[0].text


def test_tokens_of_a_stream(talk: Talk) -> None:
    said = "<think>\nhm\n</think>\n\nWell: é 🙂 " + "x" * 80
    chat, _ = talk(said, said)
    chunks = list(chat.stream("?", LONG))
    answer = chat.stream("?", LONG)
    begun = next(answer)
    reply = answer.result()
    assert reply.text == "".join(chunk.text for chunk in chunks) == said.partition("\n\n")[2]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(reply.token_ids)
    assert reply.text.startswith(begun.text)
    assert reply.reasoning == "hm"
    assert answer.result() is reply
    assert list(answer) == []


def test_what_is_left_of_an_answer_is_read_at_once() -> None:
    text = "<think>hm</think>Well, well."
    completion = Completion(index=0, text=text, token_ids=tuple(range(9)), finish_reason="stop")
    usage, timings = Usage(1, 9, 0), Timings(0.0, 0.0, 0.0, 0.0, 0.0)
    output = Output(request_id="r", prompt="p", prompt_token_ids=(), completions=(completion,), usage=usage,
                    timings=timings)  # fmt: skip
    for n in range(len(text)):
        reading = Reading(lambda prompt, turn: FAMILY.parser([]), Prompt("p", []), Turn(), 1)
        shown = [reading.chunk(Chunk(0, char, (i,))) for i, char in enumerate(text[:n])]
        seen = [chunk for chunk in shown if chunk is not None]
        ids = [token for chunk in seen for token in chunk.token_ids]
        assert ids == list(range(len(ids)))
        assert not reading.over
        reply = reading.reply(output)
        assert (reply.text, reply.reasoning, reply.finish_reason) == ("Well, well.", "hm", "stop")
        assert reply.text.startswith("".join(chunk.text for chunk in seen))


def test_marks_that_are_special_tokens(llm: LLM) -> None:
    """They are part of the text for the parser, and where they end an answer, they end it as tokens."""

    class Marked(Script):
        def prompt(self, messages: Sequence[Mapping[str, Any]], turn: Turn = Turn()) -> Prompt:  # noqa: B008
            marks = ("<|im_start|>", "<nothing>"), ("<|im_end|>", "</end>")
            return replace(super().prompt(messages, turn), constraint=None, shown=marks[0], stop=marks[1])

    made = Marked(llm, ["a"])
    (request, text), _ = job_for(llm, made, [{"role": "user", "content": "x"}], Turn(), {"stop": ["own"]})
    assert text == "1 messages:"
    assert request.shown_ids == {258}
    assert request.params.stop == ("own", "</end>")
    assert request.params.stop_token_ids == (259,)


def test_names_are_sent_once() -> None:
    """tool_calls-08: deltas merged by index, as clients of the OpenAI API do it."""
    text = call("skills_list", category="a")
    for size in (1, 3, 7, len(text)):
        parser = FAMILY.parser([tool(name="skills_list")(add).schema])
        deltas = [d.call for i in range(0, len(text), size) for d in parser.push(text[i : i + size]) if d.call]
        deltas += [d.call for d in parser.finish() if d.call]
        assert "".join(delta.name for delta in deltas) == "skills_list"
        assert json.loads("".join(delta.arguments for delta in deltas)) == {"category": "a"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sync", "async", "mixed", "hidden"])
def test_parallel_calls_run_at_once_and_keep_their_order(talk: Talk, way: str, kind: str) -> None:
    """Each waits until both are under way; the first one ends last."""
    both, events = threading.Barrier(2, timeout=20), {"a": threading.Event(), "b": threading.Event()}
    events["b"].set()

    def wait(letter: str) -> str:
        both.wait()
        assert events[letter].wait(20)
        events["a"].set()
        return letter

    async def later(letter: str) -> str:
        return await asyncio.to_thread(wait, letter)

    def hidden(letter: str) -> Any:
        return later(letter)

    tools = {"sync": (wait, wait), "async": (later, later), "mixed": (wait, later), "hidden": (hidden, hidden)}[kind]
    made = [tool(name=name)(function) for name, function in zip("ab", tools, strict=True)]
    chat, _ = talk(call("a", letter="a") + "\n" + call("b", letter="b"), "done", tools=made)
    reply = either(chat, way, "?", LONG)
    assert reply.text == "done"
    assert [message["content"] for message in chat.history if message["role"] == "tool"] == ["a", "b"]


@dataclass
class Found:
    name: str
    tags: set[str]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text as it is", "text as it is"),
        ("", ""),
        (None, "null"),
        ({"é": (1, 2.5, None)}, '{"é":[1,2.5,null]}'),
        (Found("a", {"x"}), '{"name":"a","tags":["x"]}'),
        (float("nan"), '"NaN"'),
        ("a\ud800b", "a?b"),
    ],
)
def test_results_are_text_or_json(talk: Talk, value: Any, text: str) -> None:
    chat, _ = talk(call("get"), "ok", tools=[tool(name="get")(lambda: value)])
    chat.ask("?", LONG)
    assert chat.history[2]["content"] == text


def test_objects_that_json_does_not_know_are_shown(talk: Talk) -> None:
    chat, _ = talk(call("get"), "ok", tools=[tool(name="get")(lambda: {"x": threading.current_thread})])
    chat.ask("?", LONG)
    assert chat.history[2]["content"].startswith('{"x":"<function')


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def failing(kind: str) -> None:
    if kind == "exit":
        sys.exit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "stop":
        raise StopIteration
    if kind == "cancelled":
        raise asyncio.CancelledError
    if kind == "broken":
        raise Broken
    raise ValueError(f"no {kind}")


async def afailing(kind: str) -> None:
    failing(kind)


@pytest.mark.parametrize("way", ["ask", "aask"])
@pytest.mark.parametrize("function", [failing, afailing])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("luck", "ValueError: no luck"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("stop", "StopIteration"),
        ("cancelled", "ancelled"),
        ("broken", "Broken"),
    ],
)
def test_an_exception_is_a_result(talk: Talk, way: str, function: Any, kind: str, text: str) -> None:
    chat, _ = talk(call("f", kind=kind) + call("add", a=1), "sorry", tools=[tool(name="f")(function), add])
    reply = either(chat, way, "?", LONG)
    assert reply.text == "sorry"
    failed, fine = (message["content"] for message in chat.history if message["role"] == "tool")
    assert text in json.loads(failed)["error"]
    assert fine == "2"
    assert [result.error is None for result in reply.results] == [False, True]


@pytest.mark.parametrize(
    ("said", "text", "code"),
    [
        (call("add", a="x"), "a: Input should be a valid integer", "HR-TOOL-03"),
        (call("add", a=1, c=2), "c: ", "HR-TOOL-03"),
        (call("add"), "a: Field required", "HR-TOOL-03"),
        (call("sub", a=1), "there is no tool named sub; there are add", "HR-TOOL-07"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "", ""),
    ],
)
def test_wrong_calls_are_results(talk: Talk, said: str, text: str, code: str) -> None:
    chat, _ = talk(said, "sorry", tools=[add])
    reply = chat.ask("?", LONG)
    if not code:  # what is no call is content
        assert reply.text in (said, "sorry")
        return
    assert reply.text == "sorry"
    assert text in json.loads(chat.history[2]["content"])["error"]
    assert isinstance(reply.results[0].error, HeadraceError)
    assert reply.results[0].error.code == code


@pytest.mark.parametrize("way", ["ask", "aask"])
def test_a_tool_that_takes_too_long(talk: Talk, way: str) -> None:
    over = threading.Event()

    def slow() -> None:
        over.wait(30)

    async def aslow() -> None:
        while True:  # does not listen to being cancelled
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if over.is_set():
                    raise

    tools = [tool(name="slow", timeout_s=0.02)(slow), aslow, add]
    said = call("slow") + call("aslow") + call("add", a=1)
    chat, _ = talk(said, "tired", tools=tools, tool_timeout_s=0.03)
    try:
        if way == "ask":
            reply = chat.ask("?", LONG)
        else:

            async def main() -> Any:
                found = await chat.aask("?", LONG)
                over.set()
                return found

            reply = asyncio.run(main())
    finally:
        over.set()
    assert reply.text == "tired"
    results = [message["content"] for message in chat.history if message["role"] == "tool"]
    assert json.loads(results[0])["error"] == "the tool slow gave no answer within 0.02 s"
    assert json.loads(results[1])["error"] == "the tool aslow gave no answer within 0.03 s"
    assert results[2] == "2"


def test_an_async_tool_that_blocks_its_loop(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    async def rude() -> None:
        over.wait(30)

    monkeypatch.setattr("headrace.calls.GRACE_S", 0.02)
    chat, _ = talk(call("rude"), "hm", call("add", a=1), "2", tools=[rude, add], tool_timeout_s=0.02)
    assert chat.ask("?", LONG).text == "hm"
    assert "blocks its event loop" in chat.history[2]["content"]
    monkeypatch.setattr("headrace.calls.GRACE_S", 20.0)
    assert [result.content for result in chat.ask("?", LONG).results] == ["2"]
    over.set()


def test_an_async_tool_hears_that_nobody_waits(talk: Talk) -> None:
    told = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            told.set()
            raise

    chat, _ = talk(call("slow"), "tired", tools=[slow], tool_timeout_s=0.02)
    assert chat.ask("?", LONG).text == "tired"
    assert told.wait(20)


def test_the_number_of_rounds_is_bounded(talk: Talk) -> None:
    chat, _ = talk(*[call("add", a=i) for i in range(4)], "at last", tools=[add], max_tool_rounds=2)
    with pytest.raises(AnswerError, match="HR-TOOL-05: after 2 rounds of tools the model calls add again") as raised:
        chat.ask("?", LONG)
    assert len(raised.value.output.rounds) == 3
    assert roles(chat) == ["user", "assistant", "tool", "assistant", "tool"]
    assert [message["content"] for message in chat.history if message["role"] == "tool"] == ["1", "2"]
    assert not chat.pending()
    assert chat.resume(params=LONG).text == "at last"
    assert roles(chat)[-3:] == ["assistant", "tool", "assistant"]
    for bad in (0, -1, True, 1.5):
        with pytest.raises(RequestError, match="max_tool_rounds"):
            talk(max_tool_rounds=bad)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_cut_off_is_not_run(talk: Talk, way: str) -> None:
    """tool_calls-06: the answer ends inside an argument."""
    ran: list[str] = []

    def note(text: str) -> None:
        ran.append(text)

    chat, script = talk("So: " + call("note", text="a long text"), "hello", tools=[note])
    reply = either(chat, way, "?", SamplingParams(max_tokens=60))
    assert reply.finish_reason == "length"
    assert not ran
    assert reply.text == "So:" or reply.text == "So: "
    (cut,) = reply.tool_calls
    assert cut["incomplete"] is True
    assert reply.message["incomplete"] is True
    assert not chat.pending()
    assert chat.ask("go on", LONG).text == "hello"
    told = script.seen[1][0][1]
    assert "tool_calls" not in told
    assert "incomplete" not in told
    assert "tool_calls" in chat.history[1]


def test_an_answer_that_is_cut_behind_its_calls_runs_nothing(talk: Talk) -> None:
    said = call("add", a=1)
    chat, _ = talk(said, "hello", tools=[add])
    reply = chat.ask("?", SamplingParams(max_tokens=len(said) - 2))
    assert reply.finish_reason == "length"
    assert roles(chat) == ["user", "assistant"]
    assert chat.ask("go on", LONG).text == "hello"


OUTSIDE = {"type": "function", "function": {"name": "outside", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("way", WAYS)
def test_calls_without_a_function_go_to_the_caller(talk: Talk, way: str) -> None:
    """tool_calls-05"""
    said = call("outside") + call("add", a=1) + call("outside")
    chat, script = talk(said, "thanks", tools=[OUTSIDE, add], tool_choice="required")
    reply = either(chat, way, "?", LONG)
    assert reply.finish_reason == "tool_calls"
    assert [each["function"]["name"] for each in reply.tool_calls] == ["outside", "add", "outside"]
    ids = [each["id"] for each in reply.tool_calls]
    assert [each["id"] for each in chat.pending()] == [ids[0], ids[2]]
    assert [result.content for result in reply.results] == ["2"]
    with pytest.raises(RequestError, match="HR-TOOL-06: calls of outside, outside have no result yet"):
        chat.ask("and?", LONG)
    with pytest.raises(RequestError, match="HR-TOOL-06"):
        chat.ask(None, LONG)
    for bad in ([], ["one"], ["1", "2", "3"], {ids[0]: 1}, {ids[0]: 1, ids[1]: 2}, "ab"):
        with pytest.raises(RequestError, match="HR-TOOL-06: the pending calls are"):
            chat.add_results(bad)
    again = chat.resume({ids[2]: {"n": 2}, ids[0]: "one"}, LONG)
    assert again.text == "thanks"
    results = [message for message in chat.history if message["role"] == "tool"]
    assert [(message["tool_call_id"], message["content"]) for message in results] == [
        (ids[0], "one"),
        (ids[1], "2"),
        (ids[2], '{"n":2}'),
    ]
    assert [turn.choice.mode for _, turn in script.seen] == ["required", "required"]
    assert roles(chat) == ["user", "assistant", "tool", "tool", "tool", "assistant"]


def test_a_restored_history_goes_on(talk: Talk) -> None:
    chat, _ = talk(call("outside"), tools=[OUTSIDE])
    chat.ask("?", LONG)
    saved = json.loads(json.dumps(chat.history))
    other, _ = talk("fine", tools=[OUTSIDE])
    with pytest.raises(RequestError, match="HR-CHAT-09"):
        other.ask(None, LONG)
    other.history = saved
    other.add_results(["x"])
    assert "".join(chunk.text for chunk in other.stream(None, LONG)) == "fine"
    assert roles(other) == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(RequestError, match="HR-CHAT-09: there is nothing to answer"):
        other.resume(params=LONG)
    third, _ = talk("hi")
    third.history = [{"role": "user", "content": "hello"}]
    assert third.ask(None, LONG).text == "hi"
    assert roles(third) == ["user", "assistant"]


def test_async_resume(talk: Talk) -> None:
    chat, _ = talk(call("outside"), "fine", tools=[OUTSIDE])
    chat.ask("?", LONG)
    assert asyncio.run(chat.aresume(["x"], LONG)).text == "fine"


def test_a_required_call_is_required_once(talk: Talk) -> None:
    chat, script = talk(call("add", a=1), "2", "no", call("add", a=1), "2", tools=[add], tool_choice="add")
    chat.ask("?", LONG)
    chat.ask("?", LONG, tool_choice="none")
    chat.ask("?", LONG, tool_choice="required")
    choices = [(turn.choice.mode, turn.choice.name) for _, turn in script.seen]
    assert choices == [("required", "add"), ("auto", None), ("none", None), ("required", None), ("auto", None)]
    with pytest.raises(RequestError, match="HR-TOOL-04"):
        chat.ask("?", LONG, tool_choice="sub")
    with pytest.raises(RequestError, match="HR-TOOL-04"):
        talk(tool_choice="required")


def test_what_a_turn_says(talk: Talk) -> None:
    options: dict[str, Any] = {"thinking": True, "thinking_budget": 5, "parallel": False, "arguments": {"x": 1}}
    chat, script = talk("yes", "5", tools=[add], schema={"type": "string"}, **options)
    chat.ask("?", LONG, "y")
    chat.ask("?", LONG, schema=int)
    (_, first), (_, second) = script.seen
    assert (first.thinking, first.thinking_budget, first.choice.parallel, first.arguments) == (True, 5, False, {"x": 1})
    assert first.prefill == "y"
    assert first.schema == Grammar.json_schema({"type": "string"})
    assert second.schema == Grammar.json_schema({"type": "integer"})
    for name, bad in (("thinking_budget", -1), ("tool_timeout_s", 0), ("tool_timeout_s", "1"), ("thinking", "yes")):
        with pytest.raises(RequestError, match=f"HR-REQUEST-01: {name} = "):
            talk(**{name: bad})


def test_parsed(talk: Talk) -> None:
    chat, _ = talk('{"name": "a", "tags": ["x", "x"]}', "[1, 2", "7", schema=Found)
    assert chat.ask("?", LONG).parsed == Found("a", {"x"})
    reply = chat.ask("?", SamplingParams(max_tokens=3))
    with pytest.raises(AnswerError, match=r"HR-CONSTRAINT-10: .*\(length\)") as raised:
        reply.parsed  # noqa: B018
    assert raised.value.output is reply
    with pytest.raises(AnswerError, match="HR-CONSTRAINT-09: the type refuses the answer: Input should be"):
        chat.ask("?", LONG).parsed  # noqa: B018
    plain, _ = talk("x")
    with pytest.raises(RequestError, match="HR-CHAT-10: this answer has no schema"):
        plain.ask("?", LONG).parsed  # noqa: B018


def test_a_constraint_of_the_params_is_the_answers_schema(talk: Talk) -> None:
    chat, script = talk("yes", "yes")
    mine = Grammar.choice("yes", "no")
    chat.ask("?", SamplingParams(constraint=mine))
    assert script.seen[0][1].schema == mine
    with pytest.raises(RequestError, match=r"HR-CONSTRAINT-11: a schema and params.constraint"):
        chat.ask("?", SamplingParams(constraint=mine), schema=int)
    with pytest.raises(RequestError, match=r"HR-CONSTRAINT-11: params.constraint has a trigger"):
        chat.ask("?", SamplingParams(constraint=Grammar("choice", '["yes"]', trigger="x")))


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sync", "async"])
def test_cancel_while_a_tool_runs(talk: Talk, way: str) -> None:
    running, over, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        over.wait(20)
        ended.set()

    chat, _ = talk(call("slow"), "never", "hello", tools=[slow])

    def stop(answer: Any) -> None:
        running.wait(20)
        answer.cancel()

    async def main() -> Any:
        answer = await chat.astream("?", LONG)
        threading.Thread(target=stop, args=(answer,)).start()
        return await answer.aresult()

    if way == "async":
        reply = asyncio.run(main())
    else:
        answer = chat.stream("?", LONG)
        threading.Thread(target=stop, args=(answer,)).start()
        reply = answer.result()
    assert reply.finish_reason == "abort"
    assert not ended.is_set()
    assert chat.history == []
    over.set()
    assert "never" in chat.ask("again", LONG).text


def test_a_cancelled_task_frees_the_chat(talk: Talk) -> None:
    running, over = threading.Event(), threading.Event()

    async def slow() -> None:
        running.set()
        await asyncio.sleep(30)

    chat, _ = talk(call("slow"), "hello", tools=[slow])

    async def main() -> None:
        task = asyncio.create_task(chat.aask("?", LONG))
        await asyncio.to_thread(running.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await chat.aask("again", LONG)).text == "hello"

    asyncio.run(main())
    over.set()
    assert roles(chat) == ["user", "assistant"]


def test_control_c_while_a_tool_runs(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """^C goes to whoever waits; the chat is free afterwards and has forgotten the turn."""

    running, told = threading.Event(), threading.Event()

    async def slow() -> None:
        running.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            told.set()
            raise

    class Interrupted:
        def put(self, _: object) -> None: ...

        def get(self, timeout: float | None = None) -> None:
            running.wait(20)
            raise KeyboardInterrupt

    chat, _ = talk(call("slow"), "hello", tools=[slow])
    with monkeypatch.context() as patched:
        patched.setattr("headrace.calls.SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.ask("?", LONG)
    assert told.wait(20)
    assert chat.history == []
    assert chat.ask("again", LONG).text == "hello"


def test_a_dropped_answer_ends_at_once(talk: Talk, llm: LLM) -> None:
    gc.collect()
    gc.disable()
    try:
        chat, _ = talk("x" * 300, "hello")
        answer = chat.stream("?", LONG)
        next(answer)
        handle = answer._rounds._handle
        assert handle is not None
        handle_id = handle.request.id
        del answer, handle
        assert chat.ask("again", LONG).text == "hello"
        assert handle_id not in llm._runner._live
    finally:
        gc.enable()


def test_a_cancelled_answer_does_not_stop_the_next_one(talk: Talk) -> None:
    old: list[Any] = []

    def meddle() -> str:
        old[0].cancel()
        return "done"

    chat, _ = talk("first", call("meddle"), "second", tools=[meddle])
    old.append(chat.stream("?", LONG))
    assert old[0].result().text == "first"
    assert chat.ask("?", LONG).text == "second"


def test_calls_of_a_cancelled_answer_are_not_run(talk: Talk) -> None:
    """Not even where the model had said all of them before."""
    ran: list[int] = []

    def note(number: int) -> None:
        ran.append(number)

    chat, _ = talk(call("note", number=1), "hello", tools=[note])
    answer = chat.stream("?", LONG)
    for chunk in answer:
        if chunk.calls:
            answer.cancel()
    assert answer.result().finish_reason == "abort"
    assert ran == []
    assert chat.history == []
    assert chat.ask("again", LONG).text == "hello"


# --- the surroundings of tools ---------------------------------------------------------------------------------------

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


@pytest.mark.parametrize("way", ["ask", "aask"])
def test_tools_see_the_callers_context(talk: Talk, way: str) -> None:
    def who() -> str:
        return WHO.get()

    async def awho() -> str:
        return WHO.get()

    chat, _ = talk(call("who") + call("awho"), "ok", tools=[who, awho])
    context = contextvars.copy_context()
    context.run(WHO.set, "me")
    context.run(either, chat, way, "?", LONG)
    assert [message["content"] for message in chat.history if message["role"] == "tool"] == ["me", "me"]


def test_async_tools_of_blocking_callers_share_a_loop(talk: Talk) -> None:
    loops: list[Any] = []

    async def where() -> None:
        loops.append(asyncio.get_running_loop())

    chat, _ = talk(call("where"), call("where"), "ok", tools=[where])
    chat.ask("?", LONG)
    assert loops[0] is loops[1]

    async def main() -> None:  # a blocking call inside a loop has its own, too
        assert Chat.ask(other, "?", LONG).text == "ok"

    other, _ = talk(call("where"), "ok", tools=[where])
    asyncio.run(main())


def test_forgotten_turns_take_their_calls_along(talk: Talk) -> None:
    chat, script = talk(call("add", a=1), "2", "b", "c", tools=[add], max_turns=2)
    for text in "abc":
        chat.ask(text, LONG)
    assert [message["content"] for message in script.seen[2][0]] == ["a", "", "2", "2", "b"]
    assert [message["content"] for message in script.seen[3][0]] == ["b", "b", "c"]


def test_n_samples_are_read_each(talk: Talk) -> None:
    chat, _ = talk("<think>\nhm\n</think>\n\nyes")
    reply = chat.ask("?", SamplingParams(max_tokens=100, n=2))
    assert [completion.text for completion in reply.completions] == ["yes", "yes"]
    chat, _ = talk("<think>\nhm\n</think>\n\nyes")
    chunks = list(chat.stream("?", SamplingParams(max_tokens=100, n=2)))
    for i in (0, 1):
        assert "".join(chunk.text for chunk in chunks if chunk.index == i) == "yes"
        assert [chunk.finish_reason for chunk in chunks if chunk.index == i][-1] == "stop"


def test_two_constraint_errors_name_what_they_are(llm: LLM) -> None:
    with pytest.raises((RequestError, ConfigError)):
        Chat(llm, schema=object())


def test_a_tool_that_raises_what_closes_coroutines(talk: Talk) -> None:
    def leaves() -> None:
        raise GeneratorExit

    chat, _ = talk(call("leaves"), "So it left.", tools=[leaves])
    assert chat.ask("leave", LONG).text == "So it left."
    (result,) = (message["content"] for message in chat.history if message["role"] == "tool")
    assert "GeneratorExit" in result


def test_options_of_the_model_need_a_model_to_open(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"(?s)no option tool_timeout.*did you mean 'tool_timeout_s'"):
        Chat(llm, tool_timeout=1)
