"""Reads an answer while it comes: reasoning, content and tool calls apart, whatever the cuts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from headrace.dialogue import CallDelta, Delta, Message, Tool
from headrace_plugins.dialects.reading import BLANKS, Call, CallReader, held, one_of

if TYPE_CHECKING:
    from headrace_plugins.dialects.family import Family

MOST_BLANKS = 64
"""Before the mark of reasoning, or of a call that has none: what comes behind more than these is content."""


class Answer:
    """Parser of an answer of a family whose parts come in this order: reasoning, then content with blocks of calls.

    opened: the prompt ends inside the reasoning. calls: are there tools that could be called; else marks are content.
    prefill: the answer's own beginning, which is not pushed; its deltas come with the first push. seed: whatever tells
    this answer from others (its prompt), for the ids of its calls.

    Content: blanks beside a block of calls are left out, unless content follows on content. Line breaks around
    reasoning are left out too (`Family.trim`). End-of-turn marks at the end of the answer are no content.
    """

    def __init__(
        self,
        family: Family,
        tools: Seq[Tool] = (),
        *,
        opened: bool = False,
        calls: bool = True,
        prefill: str = "",
        seed: str = "",
    ) -> None:
        self._family = family
        self._tools = tools
        self._seed = seed
        self._triggers = family.triggers if calls else ()
        self._first = family.first if calls else ()
        self._marks = (*self._triggers, *family.ends)
        self._found = one_of(*self._marks)
        self._text = prefill
        self._step = self._start if family.think else self._say
        if opened and family.think:
            self._step = self._think
        self._reader: CallReader | None = None
        self._calls: list[tuple[Call, str]] = []
        self._ids: set[str] = set()
        self._reasoning = _Part("reasoning", family.trim)
        self._content = _Part("content", BLANKS)
        self._out: list[Delta] = []
        self._finished = False

    def push(self, text: str) -> list[Delta]:
        self._text += text
        return self._read()

    def finish(self) -> list[Delta]:
        self._finished = True
        self._read()
        if self._step == self._say:
            self._out += [] if self._calls else self._content.end()
        deltas, self._out = self._out, []
        return deltas

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self._content.text}
        if reasoning := self._reasoning.text:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [told_call(call, id) for call, id in self._calls]
        return message

    def _read(self) -> list[Delta]:
        while self._step():
            pass
        if self._finished:
            return []
        deltas, self._out = self._out, []
        return deltas

    # Each step reads what it can of `_text`, and is True when another step may go on from there.

    def _start(self) -> bool:
        """Is there reasoning? Its mark comes at once or not at all."""
        assert self._family.think is not None
        begin = self._family.think[0]
        text = self._text.lstrip(BLANKS)
        n_blanks = len(self._text) - len(text)
        if n_blanks <= MOST_BLANKS and begin.startswith(text[: len(begin)]) and not self._finished:
            if len(text) < len(begin):
                return False
            self._text, self._step = text[len(begin) :], self._think
            return True
        self._step = self._say
        return True

    def _think(self) -> bool:
        assert self._family.think is not None
        end = self._family.think[1]
        before, mark, behind = self._text.partition(end)
        n_held = 0 if mark or self._finished else held(before, (end,))
        self._text = behind if mark else before[len(before) - n_held :]
        text = before[: len(before) - n_held]
        self._out += self._reasoning.add(text if self._reasoning.begun else text.lstrip(self._family.trim))
        if mark:
            self._step = self._gap if self._family.trim else self._say
        return bool(mark)

    def _gap(self) -> bool:
        """What separates reasoning from content."""
        self._text = self._text.lstrip(self._family.trim)
        if self._text or self._finished:
            self._step = self._say
        return bool(self._text)

    def _say(self) -> bool:
        if not self._text:
            return False
        if self._first:
            text = self._text.lstrip(BLANKS)
            if len(self._text) - len(text) > MOST_BLANKS:
                self._first = ()
            elif any(text.startswith(mark) for mark in self._first):
                self._first = ()
                return self._call(text)
            elif any(mark.startswith(text) for mark in self._first) and not self._finished:
                return False
            self._first = ()
        match = self._found.search(self._text)
        if match is None:
            n_held = 0 if self._finished else held(self._text, self._marks)
            text, self._text = self._text[: len(self._text) - n_held], self._text[len(self._text) - n_held :]
            self._content_came(text)
            return False
        self._content_came(self._text[: match.start()])
        if match.group() in self._triggers:
            return self._call(self._text[match.start() :])
        self._content.mark(match.group())
        self._text = self._text[match.end() :]
        return True

    def _call(self, text: str) -> bool:
        self._reader = self._family.reader(self._tools)
        self._text, self._step = text, self._read_calls
        return True

    def _read_calls(self) -> bool:
        reader = self._reader
        assert reader is not None
        deltas = reader.push(self._text)
        self._text = ""
        if self._finished and not reader.over:
            deltas += reader.finish()
        for delta in deltas:
            self._out.append(Delta(call=self._numbered(delta, reader)))
        if not reader.over:
            return False
        if reader.raw:
            self._out += self._content.add(reader.raw)
        self._text, self._step, self._reader = reader.rest, self._say, None
        return True

    def _numbered(self, delta: CallDelta, reader: CallReader) -> CallDelta:
        """The delta with its place among all calls of the answer."""
        if not delta.name:
            return replace(delta, index=len(self._calls) - 1)
        index = len(self._calls)
        id = delta.id
        if not id or id in self._ids:  # they tell results apart
            id = self._family.call_id(self._seed, index, delta.name)
        self._ids.add(id)
        self._calls.append((reader.calls[delta.index], id))
        return replace(delta, index=index, id=id)

    def _content_came(self, text: str) -> None:
        if self._calls and not self._content.begun:
            text = text.lstrip(BLANKS)
            self._content.drop()
        self._out += self._content.add(text)


class _Part:
    """Reasoning or content. Blanks at its end, and end-of-turn marks, are held until something follows."""

    def __init__(self, name: Literal["reasoning", "content"], blanks: str) -> None:
        self._name = name
        self._blanks = blanks
        self._pieces: list[str] = []
        self._held: list[str] = []
        self._before_mark: int | None = None
        """How many of the held pieces come before the first end-of-turn mark."""

    @property
    def begun(self) -> bool:
        return bool(self._pieces)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> list[Delta]:
        body = text.rstrip(self._blanks)
        if not body:
            if text:
                self._held.append(text)
            return []
        said = "".join(self._held) + body
        self._held, self._before_mark = [text[len(body) :]], None
        self._pieces.append(said)
        return [self._delta(said)]

    def mark(self, text: str) -> None:
        """An end-of-turn mark: content only if something follows."""
        if self._before_mark is None:
            self._before_mark = len(self._held)
        self._held.append(text)

    def drop(self) -> None:
        self._held, self._before_mark = [], None

    def end(self) -> list[Delta]:
        """Nothing follows: the blanks before any end-of-turn mark."""
        said = "".join(self._held[: self._before_mark])
        self.drop()
        if not said:
            return []
        self._pieces.append(said)
        return [self._delta(said)]

    def _delta(self, text: str) -> Delta:
        return Delta(reasoning=text) if self._name == "reasoning" else Delta(content=text)


def told_call(call: Call, id: str) -> dict[str, Any]:
    """The call as messages have it."""
    told: dict[str, Any] = {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    if not call.complete or not is_object(call.arguments):
        told["incomplete"] = True
    return told


def is_object(text: str) -> bool:
    """Is the text a JSON object? Deep nesting and numbers of thousands of digits are none that anybody could use."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def default_call_id(seed: str, index: int, name: str) -> str:
    """Differs between answers of a conversation, and is the same when one is generated anew."""
    return "call_" + hashlib.sha256(f"{seed}\0{index}\0{name}".encode("utf-8", "replace")).hexdigest()[:16]
