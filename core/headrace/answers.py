"""Answers as a chat's dialect reads them: chunks while they come, and the reply that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.dialogue import AnswerParser, CallDelta, ChatFormat, Delta, Message, Prompt, Turn
from headrace.errors import RequestError
from headrace.schemas import Expected, value_of
from headrace.types import Chunk, FinishReason, Output

if TYPE_CHECKING:
    from headrace.calls import ToolResult
    from headrace.contracts import Tokenizer
    from headrace.llm import LLM, Job, Params


@dataclass(frozen=True, slots=True)
class ChatChunk(Chunk):
    """A piece of an answer. `text` is content alone: marks of the format, reasoning and calls are not part of it. With
    tools, the text of all rounds is shown; finish_reason comes with the very last chunk."""

    deltas: tuple[Delta, ...] = ()
    """All that this piece says, in order."""
    results: tuple[ToolResult, ...] = ()
    """Tools that have just been run, in a chunk of their own."""

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        """Pieces of calls: names in the first one of each, arguments as they come."""
        return tuple(delta.call for delta in self.deltas if delta.call is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Output):
    """The answer of a chat. `text` is the content of the last message, `usage` counts all rounds; prompt, token ids and
    timings are those of the last round."""

    message: Message
    """The last assistant message. A call that was cut off has "incomplete": True."""
    messages: tuple[Message, ...] = ()
    """All that the history gained behind the user's message: calls, results of tools, the answer."""
    rounds: tuple[Reply, ...] = field(default=(), repr=False)
    """One per answer of the model."""
    results: tuple[ToolResult, ...] = ()
    """Of the tools that were run, in order."""
    finish: FinishReason | None = None
    """"tool_calls": calls are left for the caller."""
    wanted: Expected | None = field(default=None, repr=False)

    @property
    def finish_reason(self) -> FinishReason:
        return self.finish or self.completions[0].finish_reason

    @property
    def reasoning(self) -> str:
        return str(self.message.get("reasoning_content") or "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls") or ())

    @property
    def parsed(self) -> Any:
        """The value of the text, for an answer with a schema. Raises AnswerError HR-CONSTRAINT-10 when it was cut, -09
        when the type's own validators refuse it; RequestError HR-CHAT-10 without a schema."""
        if self.wanted is None:
            raise RequestError("HR-CHAT-10", "this answer has no schema", "ask(..., schema=Type)")
        return value_of(self.wanted, self.text, self)


class Reading:
    """Reads the samples of one request, in chunks or whole."""

    def __init__(
        self, parser: Callable[[Prompt, Turn], AnswerParser], prompt: Prompt, turn: Turn, n_samples: int
    ) -> None:
        self._turn = turn
        self._parsers = [parser(prompt, turn) for _ in range(n_samples)]
        self._n_read = [0] * n_samples
        self._over = [False] * n_samples
        self._unshown: list[tuple[int, ...]] = [()] * n_samples
        """Tokens of chunks in which there was nothing to show."""

    @property
    def over(self) -> bool:
        """Every sample was read to its end."""
        return all(self._over)

    def begin(self) -> ChatChunk | None:
        """What the prefill says."""
        deltas = self._parsers[0].push("") if self._turn.prefill else ()
        return _chunk(Chunk(0, "", ()), deltas) if deltas else None

    def chunk(self, chunk: Chunk) -> ChatChunk | None:
        """None: nothing to show yet."""
        i = chunk.index
        deltas = self._push(i, chunk.text, chunk.finish_reason is not None)
        ids = self._unshown[i] + chunk.token_ids
        self._unshown[i] = ids
        if not deltas and chunk.finish_reason is None:
            return None
        self._unshown[i] = ()
        return _chunk(replace(chunk, token_ids=ids), deltas)

    def reply(self, output: Output, wanted: Expected | None = None) -> Reply:
        """The whole answer; what was not read in chunks is read now."""
        for completion in output.completions:
            i = completion.index
            self._push(i, completion.text[self._n_read[i] :], True)
        messages = [parser.message() for parser in self._parsers]
        completions = tuple(
            replace(completion, text=messages[completion.index].get("content") or "")
            for completion in output.completions
        )
        values = {name: getattr(output, name) for name in Output.__dataclass_fields__}
        return Reply(**values | {"completions": completions}, message=messages[0], wanted=wanted)

    def _push(self, i: int, text: str, last: bool) -> list[Delta]:
        if self._over[i]:
            return []
        self._n_read[i] += len(text)
        self._over[i] = last
        return self._parsers[i].push(text) + (self._parsers[i].finish() if last else [])


def _chunk(chunk: Chunk, deltas: Sequence[Delta]) -> ChatChunk:
    text = "".join(delta.content for delta in deltas)
    return ChatChunk(chunk.index, text, chunk.token_ids, chunk.finish_reason, tuple(deltas))


def job_for(
    llm: LLM, chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]], turn: Turn, params: Params | None
) -> tuple[Job, Prompt]:
    """A checked request for the next answer, and its prompt.

    A constraint of the params that has no trigger of its own is the answer's schema. Raises RequestError: what the
    format or admission refuses, HR-CONSTRAINT-11 for two constraints that exclude each other."""
    check_thinking(turn.thinking, turn.thinking_budget)
    resolved = llm.resolve(params)
    own = resolved.constraint
    if own is not None and turn.schema is not None:
        raise _conflict("a schema and params.constraint", "leave one of them out")
    if own is not None and own.trigger is None:
        turn, own = replace(turn, schema=own), None
    prompt = chat_format.prompt(messages, turn)
    if own is not None and prompt.constraint is not None:
        raise _conflict("params.constraint has a trigger; tools or reasoning", "leave the trigger out, or the others")
    single = {mark: _single(llm.tokenizer, mark) for mark in (*prompt.shown, *prompt.stop)}
    stop_ids = [token for mark in prompt.stop if (token := single[mark]) is not None]
    asked = replace(
        resolved,
        constraint=prompt.constraint or own,
        stop=resolved.stop + tuple(mark for mark in prompt.stop if single[mark] is None),
        stop_token_ids=(*resolved.stop_token_ids, *stop_ids),
    )
    shown = frozenset(token for mark in prompt.shown if (token := single[mark]) is not None)
    return llm.request(prompt.ids, asked, prompt.text, shown_ids=shown), prompt


def check_thinking(thinking: Any, budget: Any) -> None:
    """Raises RequestError HR-REQUEST-01."""
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError("HR-REQUEST-01", f"thinking = {thinking!r:.60} is not allowed", "True, False or None")
    at_least("thinking_budget", budget, 0)


def at_least(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise RequestError("HR-REQUEST-01", f"{name} = {value!r:.60} is not allowed", f"{name} must be >= {least}")


def _conflict(what: str, help: str) -> RequestError:
    return RequestError("HR-CONSTRAINT-11", f"{what} were both asked for: one constraint holds at a time", help)


def _single(tokenizer: Tokenizer, mark: str) -> int | None:
    """The special token of that name, if there is one."""
    ids = tokenizer.encode(mark, add_bos=False, parse_special=True)
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None
