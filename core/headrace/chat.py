"""`Chat`: a conversation with a model, rendered anew each turn; and the loop that runs the tools it calls."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from headrace.answers import ChatChunk, Reading, Reply, at_least, check_thinking, job_for
from headrace.calls import Caller, ToolResult, text_of
from headrace.dialogue import ChatFormat, Message, ToolChoice, Turn
from headrace.errors import AnswerError, ConfigError, RequestError, did_you_mean
from headrace.llm import LLM, Params
from headrace.schemas import Expected, expected
from headrace.textfile import expanded, is_template, read_text
from headrace.tools import Tool, choice_of, is_seconds, toolbox
from headrace.types import FinishReason, Grammar, Usage

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.runner import Handle

KEPT = ("stop", "length", "tool_calls")
"""An answer that ends otherwise (abort, deadline, error) leaves the history as it was."""


def chat_format(llm: LLM, template: str | os.PathLike[str] | None = None) -> ChatFormat:
    """What turns messages into a prompt for this model.

    A template is rendered by the "jinja" dialect: the argument, else the config's [chat] template (either may be a path
    or the source itself: anything with "{%", "{{" or a line break). Without these, a dialect that is made for the
    model's architecture, else the template in its metadata. Raises RequestError HR-CHAT-01 if there is none,
    PluginError for a dialect whose packages are missing.
    """
    from headrace.catalog import missing_packages, needs
    from headrace.selection import choose_dialect

    given = _given_template(llm, template)
    asked = llm.pipeline.config.chat.get("dialect")
    entry, _ = choose_dialect(llm.catalog, llm.pipeline.model.architecture, given is not None, asked)
    source, origin = given or _own_template(llm, needed=not entry.spec.match)
    if missing := missing_packages(entry.spec):
        raise needs(entry, missing)
    model = llm.pipeline.model
    made: ChatFormat = llm.catalog.load_object(entry.spec.factory, entry)().chat_format(
        source, origin, llm.tokenizer, architecture=model.architecture, name=model.uri, family=asked
    )
    return made


def has_template(llm: LLM) -> bool:
    """Does the config or the model name a template, or is a dialect made for the model?"""
    from headrace.selection import choose_dialect

    model = llm.pipeline.model
    if llm.pipeline.config.chat.get("template") is not None or model.chat_template is not None:
        return True
    asked = llm.pipeline.config.chat.get("dialect")
    return bool(choose_dialect(llm.catalog, model.architecture, False, asked)[0].spec.match)


def _given_template(llm: LLM, template: str | os.PathLike[str] | None) -> tuple[str, str] | None:
    """(source, where it came from) of the user's own, if there is one."""
    configured = llm.pipeline.config.chat.get("template")
    for given, where in ((template, "template argument"), (configured, "[chat] template")):
        if given is not None:
            return _from_user(os.fspath(given), where)
    return None


def _own_template(llm: LLM, needed: bool) -> tuple[str, str]:
    model = llm.pipeline.model
    if model.chat_template is None and needed:
        raise RequestError(
            "HR-CHAT-01",
            f"'{model.uri}' has no chat template",
            'give one with [chat] template = "file.jinja" in the config, or use raw completion (`headrace run --raw`)',
        )
    return model.chat_template or "", f"the chat template of '{model.uri}'"


def _from_user(given: str, where: str) -> tuple[str, str]:
    if is_template(given):
        return given, f"the {where}"
    try:
        return read_text(expanded(given)), f"the chat template {given}"
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        message = f"the {where} {given!r:.200} can't be read: {why}"
        raise ConfigError("HR-CHAT-05", message, "give a path, or the template's source") from error


class Chat:
    """A conversation: `Chat("model.gguf").ask("Hi").text`.

    model: an LLM to share, or what LLM takes (then `close()` closes it). system: the system message, else the config's
    [chat] system. template: see `chat_format` for the order. max_turns: older user-assistant pairs are forgotten.
    arguments: extra template variables. An answer is kept in the history as its dialect reads it: reasoning and tool
    calls apart from the content.

    tools: callables, `Tool`s, or dicts of the Chat Completions API. tool_choice: "auto", "none", "required" or a name;
    parallel: may one answer hold several calls? Calls are run at once, their results go back to the model, and it
    answers again, at most `max_tool_rounds` times (then AnswerError HR-TOOL-05; what was done is in the history, and
    `resume()` goes on). A call that fails, or takes longer than `tool_timeout_s` (None: no bound), has the error as its
    result. "required" and names hold for the first round only. Calls of tools without a function end the answer with
    finish_reason "tool_calls"; `resume(results)` goes on.

    thinking: True, False, or the model's default. thinking_budget: most tokens of reasoning. schema: what the content
    of answers must be, see `LLM.generate`; `Reply.parsed` is the value.

    One answer at a time: HR-CHAT-03 while another is under way. An answer that fails or is stopped leaves the history
    unchanged, whatever its tools did.
    """

    def __init__(
        self,
        model: LLM | str | os.PathLike[str] | Config,
        system: str | None = None,
        template: str | os.PathLike[str] | None = None,
        *,
        tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        parallel: bool = True,
        max_tool_rounds: int = 8,
        tool_timeout_s: float | None = 30.0,
        thinking: bool | None = None,
        thinking_budget: int | None = None,
        schema: Any = None,
        max_turns: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        **llm_options: Any,
    ) -> None:
        at_least("max_turns", max_turns, 1)
        at_least("max_tool_rounds", max_tool_rounds, 1)
        check_thinking(thinking, thinking_budget)
        if tool_timeout_s is not None and not is_seconds(tool_timeout_s):
            raise RequestError("HR-REQUEST-01", f"tool_timeout_s = {tool_timeout_s!r} is not allowed", "give > 0")
        self.tools: Mapping[str, Tool] = toolbox(tools)
        self.tool_choice, self.parallel = tool_choice, parallel
        choice_of(tool_choice, parallel, self.tools)
        self.max_tool_rounds = max_tool_rounds
        self.thinking, self.thinking_budget = thinking, thinking_budget
        self._expected = None if schema is None else expected(schema)
        self._owned = not isinstance(model, LLM)
        if llm_options and not self._owned:
            name, known = next(iter(llm_options)), inspect.signature(Chat).parameters
            raise RequestError("HR-REQUEST-01", f"an open LLM takes no option {name}", did_you_mean(name, known))
        self.llm = model if isinstance(model, LLM) else LLM(model, **llm_options)
        try:
            self._format = chat_format(self.llm, template)
        except BaseException:
            self.close()
            raise
        configured = self.llm.pipeline.config.chat.get("system")
        self.system: str | None = system if system is not None else configured
        self.max_turns = max_turns
        self.arguments = dict(arguments or {})
        self._caller = Caller(self.tools, tool_timeout_s)
        self._turns: list[Message] = []
        self._busy = threading.Lock()

    @property
    def history(self) -> list[Message]:
        """A copy of the messages, the system message first: plain data. Assign a list to restore a conversation."""
        return copy.deepcopy(self._messages(self._turns))

    @history.setter
    def history(self, messages: Iterable[Mapping[str, Any]]) -> None:
        checked = check_messages(list(messages), empty_ok=True)
        system = checked.pop(0)["content"] if checked and checked[0]["role"] == "system" else None
        self.system, self._turns = system, copy.deepcopy(checked)

    def reset(self) -> None:
        """Forget every message but the system's."""
        self._turns = []

    def ask(
        self,
        text: str | None,
        params: Params | None = None,
        prefill: str = "",
        *,
        schema: Any = None,
        tool_choice: str | None = None,
    ) -> Reply:
        """Answer a user message; None: answer the history as it is, whose last message is the user's or a tool's.

        The text begins with `prefill`, which the model is made to continue. schema, tool_choice: instead of the chat's.
        """
        return self.stream(text, params, prefill, schema=schema, tool_choice=tool_choice).result()

    def stream(
        self,
        text: str | None,
        params: Params | None = None,
        prefill: str = "",
        *,
        schema: Any = None,
        tool_choice: str | None = None,
    ) -> Answer:
        """The answer's chunks as they come, sync or async. Dropping the answer stops it."""
        answer = Answer(_Rounds(self, text, params, prefill, schema, tool_choice))
        with answer._starting() as step:
            answer._value = step.now()
        return answer

    async def aask(self, text: str | None, params: Params | None = None, prefill: str = "", **options: Any) -> Reply:
        """`ask` without blocking the event loop, in which async tools run then."""
        return await (await self.astream(text, params, prefill, **options)).aresult()

    async def astream(
        self,
        text: str | None,
        params: Params | None = None,
        prefill: str = "",
        *,
        schema: Any = None,
        tool_choice: str | None = None,
    ) -> Answer:
        """`stream` without blocking the event loop."""
        answer = Answer(_Rounds(self, text, params, prefill, schema, tool_choice))
        with answer._starting() as step:
            answer._value = await step.later()
        return answer

    def pending(self) -> list[dict[str, Any]]:
        """Calls of the last answer that have no result yet."""
        return _pending(self._turns)

    def add_results(self, results: Mapping[str, Any] | Seq[Any]) -> None:
        """Results of the pending calls, all of them: by id, or in the order of the calls. Text is taken as it is,
        anything else as JSON. Raises RequestError HR-TOOL-06."""
        calls = self.pending()
        ids = [call["id"] for call in calls]
        given = dict(results) if isinstance(results, Mapping) else dict(zip(ids, results, strict=False))
        if isinstance(results, str) or len(results) != len(ids) or set(given) != set(ids):
            got = list(results) if isinstance(results, Mapping) else f"{len(results)} results"
            message = f"the pending calls are {ids}, given were {got!s:.200}"
            raise RequestError("HR-TOOL-06", message, "give one result for each, in order or by id")
        if calls:
            start = max(i for i, message in enumerate(self._turns) if message["role"] == "assistant")
            order = [call["id"] for call in self._turns[start]["tool_calls"]]
            made = [ToolResult(call["id"], call["function"]["name"], text_of(given[call["id"]])) for call in calls]
            told = [*self._turns[start + 1 :], *(result.message for result in made)]
            told.sort(key=lambda message: order.index(message["tool_call_id"]))
            self._turns = [*self._turns[: start + 1], *told]

    def resume(
        self, results: Mapping[str, Any] | Seq[Any] = (), params: Params | None = None, *, schema: Any = None
    ) -> Reply:
        """Go on after the results of pending calls (see `add_results`), without a new user message. To stream:
        `add_results(results)`, then `stream(None)`."""
        self.add_results(results)
        return self.ask(None, params, schema=schema)

    async def aresume(
        self, results: Mapping[str, Any] | Seq[Any] = (), params: Params | None = None, *, schema: Any = None
    ) -> Reply:
        """`resume` without blocking the event loop."""
        self.add_results(results)
        return await self.aask(None, params, schema=schema)

    def close(self) -> None:
        """Close the LLM, if this chat made it."""
        if self._owned:
            self.llm.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _messages(self, turns: list[Message]) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [dict(message) for message in (*first, *turns)]

    def _latest(self, n_new: int) -> list[Message]:
        """The turns that a next answer sees: max_turns pairs with the new user messages, from a user message on."""
        if self.max_turns is None:
            return self._turns
        starts = [i for i, message in enumerate(self._turns) if message["role"] == "user"]
        n_forgotten = max(0, len(starts) - (self.max_turns - n_new))
        return self._turns[[*starts, len(self._turns)][n_forgotten] :] if n_forgotten else self._turns


@dataclass(frozen=True, slots=True)
class _Wait:
    """Something to wait for, either way."""

    now: Callable[[], Any]
    later: Callable[[], Awaitable[Any]]


class Answer:
    """One answer under way, with all its rounds; an iterator of chunks that ends with the history extended."""

    def __init__(self, rounds: _Rounds) -> None:
        self._rounds = rounds
        self._steps = rounds.run()
        self._value: Any = None
        """What the step under way waited for."""
        self._waiting: _Wait | None = None
        self._failure: Exception | None = None

    def result(self) -> Reply:
        """Wait for the whole answer. Raises what made it fail."""
        self._rounds.whole = True
        try:
            for _ in self:
                pass
        finally:
            self._rounds.release()
        return self._replied()

    async def aresult(self) -> Reply:
        """`result` without blocking the event loop."""
        self._rounds.whole = True
        try:
            async for _ in self:
                pass
        finally:
            self._rounds.release()
        return self._replied()

    def cancel(self) -> None:
        """Stop the answer, and wait no more for a tool that runs; the history stays as it was before it. Any thread,
        and handlers of signals."""
        self._rounds.cancel()

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> ChatChunk:
        while True:
            try:
                if isinstance(step := self._next(), ChatChunk):
                    return step
                self._value, self._waiting = step.now(), None
            except Exception as error:
                self._ended(error)
                raise

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> ChatChunk:
        while True:
            try:
                if isinstance(step := self._next(), ChatChunk):
                    return step
                self._value, self._waiting = await step.later(), None
            except StopIteration as end:
                self._ended(end)
                raise StopAsyncIteration from None
            except Exception as error:
                self._ended(error)
                raise

    def __del__(self) -> None:
        self._rounds.release()

    def _next(self) -> _Wait | ChatChunk:
        """What comes next. What was waited for when ^C came is waited for again."""
        if self._waiting is not None:
            return self._waiting
        value, self._value = self._value, None
        step = self._steps.send(value)
        if isinstance(step, _Wait):
            self._waiting = step
        return step

    def _ended(self, error: Exception) -> None:
        self._rounds.release()
        if not isinstance(error, StopIteration):
            self._failure = error

    def _replied(self) -> Reply:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        assert self._rounds.reply is not None
        return self._rounds.reply

    @contextlib.contextmanager
    def _starting(self) -> Iterator[_Wait]:
        """An answer that could not start is over at once; its traceback may live on."""
        try:
            step = self._next()
            assert isinstance(step, _Wait)
            yield step
            self._waiting = None
        except BaseException:
            self._rounds.release()
            raise


class _Rounds:
    """What happens in an answer, as steps to wait for and chunks to show. Whoever drives it may block or not.

    Not part of `Answer`: a generator and its object keep each other, and an answer that is dropped must end at once.
    """

    def __init__(
        self, chat: Chat, text: str | None, params: Params | None, prefill: str, schema: Any, tool_choice: str | None
    ) -> None:
        if text is not None and not isinstance(text, str):
            raise RequestError("HR-CHAT-04", f"a message must be text, not {text!r:.60}", 'chat.ask("Hi")')
        self._choice = choice_of(chat.tool_choice if tool_choice is None else tool_choice, chat.parallel, chat.tools)
        self._expected: Expected | None = chat._expected if schema is None else expected(schema)
        if not chat._busy.acquire(blocking=False):
            raise RequestError(
                "HR-CHAT-03", "this chat is answering already", "wait for that answer, or use a second Chat on the LLM"
            )
        self._held = True
        self._chat = chat
        self._params = params
        self._prefill = prefill
        self._asked: list[Message] = [] if text is None else [{"role": "user", "content": text}]
        self._handle: Handle | None = None
        self._cancelled = False
        self.whole = False
        """Nobody looks at chunks any more."""
        self.reply: Reply | None = None

    def cancel(self) -> None:
        if self._held:
            self._cancelled = True
            if self._handle is not None:
                self._handle.cancel()
            self._chat._caller.cancel()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._chat._busy.release()

    def run(self) -> Generator[_Wait | ChatChunk, Any, None]:
        self._check()
        chat, said, rounds, results = self._chat, list[Message](), list[Reply](), list[ToolResult]()
        for number in count():
            reply, last = yield from self._round(number, said)
            rounds.append(reply)
            reason: FinishReason | None = reply.finish_reason
            calls = reply.tool_calls
            own = [call for call in calls if self._is_own(call)] if reason == "stop" else []
            if own and number == chat.max_tool_rounds:
                raise self._too_many(said, rounds, results)
            if reason == "length" and calls:
                reply.message["incomplete"] = True
            said.append(reply.message)
            if reason == "stop" and calls:
                reason = "tool_calls" if len(own) < len(calls) else None
            if own:
                yield from _shown(last, None)
                called = _Wait(partial(chat._caller.run, own), partial(chat._caller.arun, own))
                found = None if self._cancelled else (yield called)
                if found is None or self._cancelled:
                    found, reason = [], "abort"
                results += found
                said += [result.message for result in found]
                last = None
                if found:
                    yield ChatChunk(0, "", (), None, (), tuple(found))
            if reason is not None:
                break
        self.reply = replace(_joined(rounds), finish=reason, messages=tuple(said), results=tuple(results))
        if reason in KEPT:
            self._keep(said)
        self.release()
        yield from _shown(last or ChatChunk(0, "", ()), reason)

    def _check(self) -> None:
        calls, turns = self._chat.pending(), self._chat._turns
        if calls:
            help = "give their results with resume(results), or add_results; or reset()"
            raise RequestError("HR-TOOL-06", f"calls of {_names(calls)} have no result yet", help)
        if not self._asked and (not turns or turns[-1]["role"] not in ("user", "tool")):
            raise RequestError("HR-CHAT-09", "there is nothing to answer: no message came after the last answer", "ask")

    def _round(
        self, number: int, said: list[Message]
    ) -> Generator[_Wait | ChatChunk, Any, tuple[Reply, ChatChunk | None]]:
        """One answer of the model, and its last chunk, which is shown when it is known what follows."""
        chat, llm = self._chat, self._chat.llm
        turn = self._turn(number)
        messages = sayable(chat._messages([*chat._latest(len(self._asked)), *self._asked, *said]))
        job, prompt = job_for(llm, chat._format, messages, turn, self._params)
        self._handle = handle = yield _Wait(partial(llm.start, job), partial(llm.astart, job))
        if self._cancelled:
            handle.cancel()
        reading = Reading(chat._format.parser, prompt, turn, job[0].params.n)
        last = reading.begin()
        while not self.whole:
            if last is not None:
                if reading.over:
                    break
                yield last
            chunk = yield _Wait(partial(next, handle, None), partial(anext, handle, None))
            if chunk is None:
                last = None
                break
            last = reading.chunk(chunk)
        output = yield _Wait(handle.result, handle.aresult)
        if output.error is not None:
            yield from _shown(last, "error")
            blame = partial(self._blamed, output.error)
            raise (yield _Wait(blame, partial(_in_thread, blame)))
        return reading.reply(output, self._expected), last

    def _turn(self, number: int) -> Turn:
        """What is asked for in this round: calls can be required in the first one only."""
        chat, choice = self._chat, self._choice
        if number and choice.mode == "required":
            choice = ToolChoice(parallel=choice.parallel)
        return Turn(
            prefill="" if number else self._prefill,
            tools=tuple(tool.schema for tool in chat.tools.values()),
            choice=choice,
            thinking=chat.thinking,
            thinking_budget=chat.thinking_budget,
            schema=self._expected.grammar if self._expected is not None else None,
            arguments=chat.arguments,
        )

    def _blamed(self, error: Exception) -> Exception:
        """The error of a grammar that can't be made, by the name of the tool whose schema is at fault."""
        engine = self._chat.llm.pipeline.constraints
        if engine is None or not isinstance(error, RequestError) or error.code not in _NO_GRAMMAR:
            return error
        for tool in self._chat.tools.values():
            try:
                engine.compile(Grammar.json_schema(tool.parameters))
            except RequestError as own:
                blamed = RequestError("HR-TOOL-02", f"the tool {tool.name!r}: {own.message}", own.help)
                blamed.__cause__ = error
                return blamed
        return error

    def _is_own(self, call: Mapping[str, Any]) -> bool:
        """Is the call run here? One of an unknown tool is answered with an error."""
        tool = self._chat.tools.get(call["function"]["name"])
        return tool is None or tool.function is not None

    def _too_many(self, said: list[Message], rounds: list[Reply], results: list[ToolResult]) -> AnswerError:
        self._keep(said)
        return AnswerError(
            "HR-TOOL-05",
            f"after {len(rounds) - 1} rounds of tools the model calls {_names(rounds[-1].tool_calls)} again",
            "raise max_tool_rounds, or go on with chat.resume(): the history holds what was done",
            output=replace(_joined(rounds), messages=tuple(said), results=tuple(results)),
        )

    def _keep(self, said: list[Message]) -> None:
        if self._held:
            self._chat._turns = [*self._chat._latest(len(self._asked)), *self._asked, *said]


_NO_GRAMMAR = ("HR-CONSTRAINT-02", "HR-CONSTRAINT-03", "HR-CONSTRAINT-04")


async def _in_thread(function: Callable[[], Any]) -> Any:
    import asyncio

    return await asyncio.to_thread(function)


def _shown(chunk: ChatChunk | None, reason: FinishReason | None) -> Iterator[ChatChunk]:
    """A last chunk with what is known now; nothing, if it says nothing."""
    if chunk is not None and (reason is not None or chunk.deltas or chunk.token_ids):
        yield replace(chunk, finish_reason=reason)


def _names(calls: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(call["function"]["name"] for call in calls)


def _joined(rounds: list[Reply]) -> Reply:
    """The last round, with the usage of all."""
    usages = [each.usage for each in rounds]
    total = Usage(*(sum(getattr(usage, name) for usage in usages) for name in Usage.__slots__))
    return replace(rounds[-1], usage=total, rounds=tuple(rounds))


def _pending(turns: Seq[Message]) -> list[dict[str, Any]]:
    answered = set()
    for message in reversed(turns):
        if message["role"] != "tool":
            calls = [] if message.get("incomplete") else message.get("tool_calls") or []
            return [call for call in calls if call.get("id") not in answered]
        answered.add(message.get("tool_call_id"))
    return []


def sayable(messages: Iterable[Message]) -> list[Message]:
    """The messages as a dialect is told them: without calls that were cut off and never answered."""
    messages = list(messages)
    answered = {message.get("tool_call_id") for message in messages if message["role"] == "tool"}
    found: list[Message] = []
    for message in messages:
        cut = message.get("incomplete")
        told = {key: value for key, value in message.items() if key not in ("tool_calls", "incomplete")}
        calls = [
            {key: value for key, value in call.items() if key != "incomplete"}
            for call in message.get("tool_calls") or ()
            if not (cut or call.get("incomplete")) or call.get("id") in answered
        ]
        found.append({**told, "tool_calls": calls} if calls else {**told, "content": told.get("content") or ""})
    return found


def check_messages(messages: Any, *, empty_ok: bool = False) -> list[Message]:
    """Copies of messages, each a mapping with a role and content. Raises RequestError HR-CHAT-04."""
    if not isinstance(messages, (list, tuple)) or not (messages or empty_ok):
        raise RequestError("HR-CHAT-04", "messages must be a list with at least one message", _MESSAGE_HELP)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError("HR-CHAT-04", f"message {i} has no role or no content: {message!r:.80}", _MESSAGE_HELP)
        content = message["content"]
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError("HR-CHAT-04", f"message {i} has content that is no text: {content!r:.80}", _MESSAGE_HELP)
    return [dict(message) for message in messages]


_MESSAGE_HELP = 'a message looks like {"role": "user", "content": "Hi"}'
