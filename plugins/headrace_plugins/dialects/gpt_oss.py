"""gpt-oss: answers in the Harmony format, whose messages go to channels and recipients.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Format: docs/format.md of github.com/openai/harmony, and the template of openai/gpt-oss-20b.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import AnswerParser, CallDelta, Delta, Message, Tool, ToolChoice
from headrace_plugins.dialects.answer import told_call
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, with_objects
from headrace_plugins.dialects.history import one_call_each
from headrace_plugins.dialects.reading import Broken, Call, CallReader, Cursor, Ended, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, " to=", *ENDS)
"""What the header of a message may begin with; <|start|>assistant is in the prompt."""
_MARKS = re.compile(r"<\|[a-z]+\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
_APART = "\n\n"
"""Between the texts of two messages of one kind."""


_AGAIN: Expression = {"opt": {"seq": [{"special": START}, "assistant"]}}
"""Begins every message but the first, whose beginning is in the prompt."""


class GptOss(Family):
    """Reasoning, content and calls are messages; a call ends the turn."""

    name = "gpt-oss"
    think = (f"{CHANNEL}analysis{MESSAGE}", "<|end|>")
    trim = ""
    triggers = (" to=functions.",)
    shown = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    stop = ("<|call|>", "<|return|>")
    ends = ENDS
    before_prefill = f"{CHANNEL}final{MESSAGE}"

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        """One call: the model ends its turn behind it. Its header begins in the text before."""
        return any_of([_call(*function_of(tool)) for tool in tools])

    def only_calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return {"seq": [_AGAIN, {"special": CHANNEL}, "commentary", self.calls(tools, choice)]}

    def content(self, body: Expression) -> Expression:
        kind = {"opt": {"seq": [" ", {"special": CONSTRAIN}, "json"]}}
        return {"seq": [_AGAIN, {"special": CHANNEL}, "final", kind, {"special": MESSAGE}, body]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        raise NotImplementedError("Harmony's answers are read as a whole, by `parser`")

    def parser(
        self, tools: Seq[Tool], *, opened: bool = False, calls: bool = True, prefill: str = "", seed: str = ""
    ) -> AnswerParser:
        return HarmonyAnswer(self, opened=opened, calls=calls and bool(tools), prefill=prefill, seed=seed)

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """Reasoning is `thinking`; a message has one call, and no content beside its reasoning."""
        return [_with_thinking(message) for message in one_call_each([with_objects(message) for message in messages])]

    def switch(self, thinking: bool | None) -> dict[str, Any]:
        """The model always reasons; it can be told to do so briefly."""
        return {"reasoning_effort": "low"} if thinking is False else {}


def _call(name: str, schema: dict[str, Any]) -> Expression:
    channel = {"opt": {"seq": [{"special": CHANNEL}, "commentary"]}}
    kind = {"seq": [{"opt": " "}, {"special": CONSTRAIN}, "json"]}
    return {"seq": [f" to=functions.{name}", channel, kind, {"special": MESSAGE}, {"schema": schema}]}


class HarmonyAnswer:
    """Parser of an answer that follows <|start|>assistant. opened: the prompt ends inside the reasoning; prefill: the
    beginning of the content, which the prompt ends with."""

    def __init__(self, family: Family, *, opened: bool, calls: bool, prefill: str, seed: str) -> None:
        self._family, self._seed = family, seed
        self._with_calls = calls
        self._texts = {"content": prefill, "reasoning": ""}
        self._apart = dict.fromkeys(self._texts, "")
        self._calls: list[tuple[Call, str]] = []
        self._cursor = Cursor()
        self._cursor.forget(recall=False)
        self._out: list[Delta] = [Delta(content=prefill)] if prefill else []
        self._script = self._read("reasoning" if opened else "content" if prefill else "")
        self._over = False

    def push(self, text: str) -> list[Delta]:
        self._cursor.add(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        self._cursor.closed = True
        return self._advance()

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self._texts["content"]}
        if self._texts["reasoning"]:
            message["reasoning_content"] = self._texts["reasoning"]
        if self._calls:
            message["tool_calls"] = [told_call(call, id) for call, id in self._calls]
        return message

    def _advance(self) -> list[Delta]:
        if not self._over:
            try:
                next(self._script)
            except (StopIteration, Ended):
                self._over = True
        out, self._out = self._out, []
        return out

    def _read(self, part: str) -> Steps[None]:
        """Messages, the first of which may have begun in the prompt."""
        cursor = self._cursor
        mark = (yield from self._body(part)) if part else ""
        while True:
            begin = mark if mark == START else (yield from cursor.take(*_BEGINS))
            if not begin:
                mark = yield from self._body("content")  # a text without a header
            elif begin in ENDS:
                mark = ""
            else:
                mark = yield from self._message(begin)

    def _message(self, begin: str) -> Steps[str]:
        """A message from its header on; gives the mark behind it."""
        pieces = [begin]
        mark = MESSAGE if begin == MESSAGE else (yield from self._cursor.flow(pieces.append, MESSAGE, START, *ENDS))
        header = "".join(pieces)
        if mark != MESSAGE:  # there is no message, but perhaps a text
            self._say("content", _MARKS.sub("", header) if CHANNEL in header else "")
            return mark
        recipient = _RECIPIENT.search(header)
        if recipient and self._with_calls:
            return (yield from self._call(recipient[1].removeprefix("functions.")))
        channel = _CHANNEL.search(header)
        return (yield from self._body("reasoning" if channel and channel[1] == "analysis" else "content"))

    def _body(self, part: str) -> Steps[str]:
        mark = yield from self._cursor.flow(lambda text: self._say(part, text), START, *ENDS)
        self._apart[part] = _APART
        return mark

    def _call(self, name: str) -> Steps[str]:
        cursor, index = self._cursor, len(self._calls)
        call, id = Call(name), self._family.call_id(self._seed, index, name)
        self._calls.append((call, id))
        self._out.append(Delta(call=CallDelta(index, name=name, id=id)))

        def write(text: str) -> None:
            call.pieces.append(text)
            self._out.append(Delta(call=CallDelta(index, arguments=text)))

        yield from cursor.blanks()
        if mark := (yield from cursor.take(*ENDS)):
            write("{}")
            call.complete = True
            return mark
        try:
            yield from cursor.json(write)
            call.complete = True
        except Broken:
            pass
        return (yield from cursor.flow(lambda _: None, START, *ENDS))

    def _say(self, part: str, text: str) -> None:
        if not text:
            return
        said = self._apart[part] + text if self._texts[part] else text
        self._apart[part] = ""
        self._texts[part] += said
        self._out.append(Delta(content=said) if part == "content" else Delta(reasoning=said))


def _with_thinking(message: Message) -> Message:
    if not message.get("tool_calls"):
        reasoning = message.get("reasoning_content")
        return {**message, "thinking": reasoning} if reasoning else message
    texts = [message.get("reasoning_content"), message["content"]]
    return {**message, "thinking": _APART.join(text for text in texts if text), "content": ""}
