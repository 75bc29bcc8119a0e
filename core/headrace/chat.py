"""`Chat`: a conversation with a model, rendered with its chat template anew each turn."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import ConfigError, RequestError
from headrace.llm import LLM, Job, Params, prefixed
from headrace.runner import Handle
from headrace.textfile import expanded, is_template, read_text
from headrace.types import Chunk, Output

if TYPE_CHECKING:
    from headrace.config import Config

Message = dict[str, Any]

KEPT = ("stop", "length")
"""An answer that ends otherwise (abort, deadline, error) leaves the history as it was."""


class ChatFormat(Protocol):
    """What a dialect's `chat_format(source, origin, tokenizer)` gives: messages to a prompt, and back. Any thread."""

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], prefill: str = "", arguments: Mapping[str, Any] | None = None
    ) -> tuple[str, list[int]]:
        """(text, ids) that asks for the next assistant message, which is to begin with `prefill`. arguments: extra
        template variables. Raises RequestError for messages that the template refuses, ModelError for a bad template.
        """
        ...

    def parse(self, text: str, prefill: str = "", arguments: Mapping[str, Any] | None = None) -> Message:
        """The assistant message that an answer is; text: all of it, `prefill` included. Has role and content, and where
        the dialect tells them apart "reasoning_content" and "tool_calls"."""
        ...


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
    entry, _ = choose_dialect(llm.catalog, llm.pipeline.model.architecture, given is not None)
    source, origin = given or _own_template(llm, needed=not entry.spec.match)
    if missing := missing_packages(entry.spec):
        raise needs(entry, missing)
    made: ChatFormat = llm.catalog.load_object(entry.spec.factory, entry)().chat_format(source, origin, llm.tokenizer)
    return made


def has_template(llm: LLM) -> bool:
    """Does the config or the model name a template, or is a dialect made for the model?"""
    from headrace.selection import choose_dialect

    model = llm.pipeline.model
    if llm.pipeline.config.chat.get("template") is not None or model.chat_template is not None:
        return True
    return bool(choose_dialect(llm.catalog, model.architecture, False)[0].spec.match)


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
    arguments: extra template variables, such as `enable_thinking`, or what else the model's dialect takes (`tools`).
    An answer is kept in the history as its dialect reads it: reasoning and tool calls apart from the content.

    One answer at a time: HR-CHAT-03 while another is under way. An answer that fails or is stopped leaves the history
    unchanged.
    """

    def __init__(
        self,
        model: LLM | str | os.PathLike[str] | Config,
        system: str | None = None,
        template: str | os.PathLike[str] | None = None,
        *,
        max_turns: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        **llm_options: Any,
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise RequestError("HR-REQUEST-01", f"max_turns = {max_turns!r} is not allowed", "max_turns must be >= 1")
        self._owned = not isinstance(model, LLM)
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
        self._turns: list[Message] = []
        self._busy = threading.Lock()

    @property
    def history(self) -> list[Message]:
        """A copy of the messages, the system message first. Assign a list to restore a conversation."""
        return self._messages(self._turns)

    @history.setter
    def history(self, messages: Iterable[Mapping[str, Any]]) -> None:
        checked = check_messages(list(messages), empty_ok=True)
        system = checked.pop(0)["content"] if checked and checked[0]["role"] == "system" else None
        self.system, self._turns = system, checked

    def reset(self) -> None:
        """Forget every message but the system's."""
        self._turns = []

    def ask(self, text: str, params: Params | None = None, prefill: str = "") -> Output:
        """Answer a user message. The text begins with `prefill`, which the model is made to continue."""
        return self.stream(text, params, prefill).result()

    def stream(self, text: str, params: Params | None = None, prefill: str = "") -> Answer:
        """The answer's chunks as they come, sync or async. Dropping the answer stops it."""
        answer = Answer(self, text, prefill)
        with answer._starting():
            answer._handle = self.llm.start(self._job(answer, params))
        return answer

    async def aask(self, text: str, params: Params | None = None, prefill: str = "") -> Output:
        return await (await self.astream(text, params, prefill)).aresult()

    async def astream(self, text: str, params: Params | None = None, prefill: str = "") -> Answer:
        answer = Answer(self, text, prefill)
        with answer._starting():
            answer._handle = await self.llm.astart(self._job(answer, params))
        return answer

    def close(self) -> None:
        """Close the LLM, if this chat made it."""
        if self._owned:
            self.llm.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _job(self, answer: Answer, params: Params | None) -> Job:
        messages = [*self._messages(self._latest()), answer.message]
        prompt, ids = self._format.prompt(messages, answer.prefill, self.arguments)
        return self.llm.request(ids, self.llm.resolve(params), prompt)

    def _messages(self, turns: list[Message]) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [dict(message) for message in (*first, *turns)]

    def _latest(self) -> list[Message]:
        """The turns that a next answer sees: max_turns - 1 pairs, from a user message on."""
        if self.max_turns is None:
            return self._turns
        starts = [i for i, message in enumerate(self._turns) if message["role"] == "user"]
        n_forgotten = max(0, len(starts) - (self.max_turns - 1))
        return self._turns[[*starts, len(self._turns)][n_forgotten] :] if n_forgotten else self._turns

    def _keep(self, message: Message, output: Output, prefill: str) -> None:
        self._turns = [*self._latest(), message, self._format.parse(output.text, prefill, self.arguments)]


class Answer:
    """One answer under way; an iterator of chunks that ends with the history extended."""

    def __init__(self, chat: Chat, text: str, prefill: str) -> None:
        self._held = False
        if not isinstance(text, str):
            raise RequestError("HR-CHAT-04", f"a message must be text, not {type(text).__name__}")
        if not chat._busy.acquire(blocking=False):
            raise RequestError(
                "HR-CHAT-03", "this chat is answering already", "wait for that answer, or use a second Chat on the LLM"
            )
        self._held = True
        self._chat = chat
        self._handle: Handle | None = None
        self.message: Message = {"role": "user", "content": text}
        self.prefill = prefill
        self._prefilled = not prefill

    def result(self) -> Output:
        """Wait for the whole answer. Raises what made it fail."""
        assert self._handle is not None
        try:
            return self._finish(self._handle.result())
        finally:
            self._release()

    async def aresult(self) -> Output:
        assert self._handle is not None
        try:
            return self._finish(await self._handle.aresult())
        finally:
            self._release()

    def cancel(self) -> None:
        """Stop the answer; the history stays as it was before it."""
        if self._handle is not None:
            self._handle.cancel()

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Chunk:
        assert self._handle is not None
        if not self._prefilled:
            return self._begin()
        try:
            return self._passed(next(self._handle))
        except Exception:  # the end, or a failure
            self._release()
            raise

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Chunk:
        assert self._handle is not None
        if not self._prefilled:
            return self._begin()
        try:
            return self._passed(await self._handle.__anext__())
        except Exception:
            self._release()
            raise

    def __del__(self) -> None:
        self._release()

    def _begin(self) -> Chunk:
        self._prefilled = True
        return Chunk(0, self.prefill, ())

    def _passed(self, chunk: Chunk) -> Chunk:
        if chunk.finish_reason is not None and self._handle is not None and self._handle.done and self._held:
            try:
                if chunk.finish_reason != "error":
                    self._finish(self._handle.result())
            finally:
                self._release()
        return chunk

    def _finish(self, output: Output) -> Output:
        if output.error is not None:
            raise output.error
        output = prefixed(output, self.prefill) if self.prefill else output
        if self._held and output.finish_reason in KEPT:
            self._chat._keep(self.message, output, self.prefill)
        return output

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """An answer that could not start is over at once; its traceback may live on."""
        try:
            yield
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._chat._busy.release()


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
