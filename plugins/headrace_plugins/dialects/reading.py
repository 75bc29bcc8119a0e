"""Reading tool calls while they come: a cursor over text that is not all there yet, and readers written as scripts.

A script is a generator: it asks the cursor for what the format says comes next, and sleeps (yields) where the text so
far does not tell. So a format is written down once, in its own order, and how the text was cut can't matter. Time is
linear in the text, whatever it is.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.dialogue import CallDelta

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A script that gives a T at its end; it yields whenever it needs more text."""
Sink = Callable[[str], None]

BLANKS = " \t\r\n"
NAME_CHARS = 256
"""Longest name of a tool: bounds what is held back before a call is known to be one."""


class Ended(Exception):
    """The answer is over before the format is."""


class Broken(Exception):
    """The text is not of the format."""


class Cursor:
    """The text of a block of calls, read from the front."""

    def __init__(self) -> None:
        self.closed = False
        """No more text will come."""
        self._text = ""
        self._at = 0
        self._past: list[str] | None = []

    @property
    def rest(self) -> str:
        """What is not read yet."""
        return self._text[self._at :]

    @property
    def past(self) -> str:
        """What was read since `forget`, unless `recall` is off."""
        return "".join(self._past or ())

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def forget(self, *, recall: bool) -> None:
        """What was read until here is used up. recall: remember what is read from here on."""
        self._past = [] if recall else None

    def more(self) -> Steps[None]:
        """Wait for text. Raises Ended when none will come."""
        if self.closed:
            raise Ended
        yield

    def peek(self) -> Steps[str]:
        """The next character, which stays unread."""
        while self._at == len(self._text):
            yield from self.more()
        return self._text[self._at]

    def blanks(self, chars: str = BLANKS) -> Steps[str]:
        """Skip blanks, and give the character behind them."""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in chars:
                end += 1
            self._read(end)
            if end < len(self._text):
                return self._text[end]
            yield from self.more()

    def take(self, *texts: str) -> Steps[str]:
        """The longest of the texts that comes next, read; "" if none does."""
        while True:
            found = max((text for text in texts if self._text.startswith(text, self._at)), key=len, default="")
            n_left = len(self._text) - self._at
            longer = (text for text in texts if len(text) > n_left and len(text) > len(found))
            if self.closed or not any(text.startswith(self.rest) for text in longer):
                self._read(self._at + len(found))
                return found
            yield

    def expect(self, *texts: str) -> Steps[str]:
        """One of the texts, which comes next. Raises Broken if none does."""
        found = yield from self.take(*texts)
        if not found:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            raise Ended if self.closed and any(text.startswith(rest) for text in texts) else Broken
        return found

    def flow(self, sink: Sink, *marks: str) -> Steps[str]:
        """Pass text on to `sink` up to the first of the marks, which is read and given. What may become a mark is held
        back; at the end of the answer it is passed on too."""
        pattern = one_of(*marks)
        while True:
            if match := pattern.search(self._text, self._at):
                self._pass(sink, match.start())
                self._read(match.end())
                return match.group()
            if self.closed:
                self._pass(sink, len(self._text))
                raise Ended
            self._pass(sink, len(self._text) - held(self._text, marks, self._at))
            yield

    def until(self, *marks: str, most: int | None = None) -> Steps[tuple[str, str]]:
        """(text before the first of the marks, that mark), both read. Raises Broken beyond `most` characters, which are
        left unread."""
        if most is None:
            pieces: list[str] = []
            mark = yield from self.flow(pieces.append, *marks)
            return "".join(pieces), mark
        pattern, reach = one_of(*marks), most + max(map(len, marks))
        while True:
            if match := pattern.search(self._text, self._at, self._at + reach):
                text = self._text[self._at : match.start()]
                self._read(match.end())
                return text, match.group()
            if len(self._text) - self._at >= reach:
                raise Broken
            yield from self.more()

    def name(self, *marks: str) -> Steps[tuple[str, str]]:
        """(name of a tool or of an argument without blanks around it, the mark behind it), both read. Raises Broken for
        what can't be a name."""
        name, mark = yield from self.until(*marks, most=NAME_CHARS)
        if not _NAME.fullmatch(name):
            raise Broken
        return name.strip(), mark

    def json(self, sink: Sink) -> Steps[None]:
        """Pass one JSON value on to `sink`, blanks before it left out. Raises Broken at what can't be JSON. Line breaks
        in strings, which models like to leave unescaped, are escaped."""
        first = yield from self.blanks()
        if first == '"':
            yield from self._json_string(sink)
            return
        if first not in "{[":
            yield from self._json_scalar(sink)
            return
        open_brackets: list[str] = []
        while True:
            yield from self.peek()
            if match := _OUTSIDE.search(self._text, self._at):
                mark = match.group()
                if mark == '"':
                    self._pass(sink, match.start())
                    yield from self._json_string(sink)
                    continue
                if mark in "{[":
                    open_brackets.append(mark)
                elif mark not in _CLOSING or not open_brackets or open_brackets.pop() != _CLOSING[mark]:
                    self._pass(sink, match.start())
                    raise Broken
                self._pass(sink, match.end())
                if not open_brackets:
                    return
            else:
                self._pass(sink, len(self._text))

    def json_text(self) -> Steps[str]:
        """One JSON value as its text."""
        pieces: list[str] = []
        yield from self.json(pieces.append)
        return "".join(pieces)

    def _json_string(self, sink: Sink) -> Steps[None]:
        sink('"')
        self._read(self._at + 1)
        while True:
            yield from self.peek()
            match = _INSIDE.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if end > self._at:
                sink(_escape_controls(self._text[self._at : end]))
                self._read(end)
            if match and match.group() == '"':
                sink('"')
                self._read(end + 1)
                return
            if match:
                while len(self._text) - self._at < 2:
                    yield from self.more()
                self._pass(sink, self._at + 2)

    def _json_scalar(self, sink: Sink) -> Steps[None]:
        n_chars = 0
        while True:
            match = _SCALAR.match(self._text, self._at)
            end = match.end() if match else self._at
            n_chars += end - self._at
            self._pass(sink, end)
            if end < len(self._text) or self.closed:
                break
            yield
        if not n_chars:
            raise Broken

    def _pass(self, sink: Sink, end: int) -> None:
        if end > self._at:
            text = self._text[self._at : end]
            self._read(end)
            sink(text)

    def _read(self, end: int) -> None:
        if self._past is not None and end > self._at:
            self._past.append(self._text[self._at : end])
        self._at = end


_NAME = re.compile(r"\s*[^\s<>{}\"\x00-\x1f](?:[^<>{}\"\x00-\x1f]*[^\s<>{}\"\x00-\x1f])?\s*")
_OUTSIDE = re.compile(r"[^\s,:0-9A-Za-z+\-.]")
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSING = {"}": "{", "]": "["}
_CONTROLS = re.compile(r"[\x00-\x1f]")


def is_name(text: str) -> bool:
    """Would `Cursor.name` read this name as it is?"""
    return len(text) <= NAME_CHARS and text == text.strip() and _NAME.fullmatch(text) is not None


def _escape_controls(text: str) -> str:
    return _CONTROLS.sub(lambda match: json.dumps(match.group())[1:-1], text)


def one_of(*marks: str) -> re.Pattern[str]:
    """Finds the first of the marks, the longest where two begin at once."""
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or r"(?!)")


def held(text: str, marks: tuple[str, ...], start: int = 0) -> int:
    """How many characters at the end of text, from start on, may be the beginning of a mark."""
    longest = max(map(len, marks), default=0) - 1
    for n_chars in range(min(longest, len(text) - start), 0, -1):
        tail = text[-n_chars:]
        if any(mark.startswith(tail) and len(mark) > n_chars for mark in marks):
            return n_chars
    return 0


def quoted(piece: str) -> str:
    """A piece of a JSON string: escaped, without the quotes around the whole."""
    return json.dumps(piece, ensure_ascii=False)[1:-1]


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """A call as it was read so far."""

    name: str
    id: str = ""
    """Where the format has one of its own."""
    pieces: list[str] = field(default_factory=list)
    complete: bool = False
    """The format says that the call is over; its arguments may still be no JSON object."""

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class CallReader(ABC):
    """Reads a block of calls from its trigger on. A subclass writes the format down in `read`.

    Nothing raises, whatever the text is. A block without a call leaves all it read in `raw`.
    """

    end: tuple[str, ...] = ()
    """Marks of the format at which reading may go on after a call that broke off in its arguments."""

    def __init__(self) -> None:
        self.over = False
        """The block ended; `raw` and `rest` are known."""
        self.calls: list[Call] = []
        self.raw = ""
        """Text that was read and belongs to no call: it is content."""
        self.rest = ""
        """Text behind the block."""
        self.cursor = Cursor()
        self._deltas: list[CallDelta] = []
        self._open: Call | None = None
        self._script = self._whole()

    @abstractmethod
    def read(self) -> Steps[None]:
        """Reads the block: `call`, `write`, `close` for each call; returns at its end. May raise Broken and Ended."""

    def push(self, text: str) -> list[CallDelta]:
        self.cursor.add(text)
        return self._advance()

    def finish(self) -> list[CallDelta]:
        """The answer is over."""
        self.cursor.closed = True
        return self._advance()

    # for `read`

    def call(self, name: str, id: str = "") -> None:
        """A call begins."""
        self._open = Call(name, id)
        self.calls.append(self._open)
        self._deltas.append(CallDelta(len(self.calls) - 1, name=name, id=id))
        self.cursor.forget(recall=False)

    def write(self, arguments: str) -> None:
        """A piece of its arguments, as JSON."""
        if arguments and self._open is not None:
            self._open.pieces.append(arguments)
            self._deltas.append(CallDelta(len(self.calls) - 1, arguments=arguments))

    def close(self) -> None:
        """The call is complete."""
        if self._open is not None:
            if not self._open.pieces:
                self.write("{}")
            self._open.complete = True
        self._open = None
        self.cursor.forget(recall=True)

    def _advance(self) -> list[CallDelta]:
        if not self.over:
            try:
                next(self._script)
            except StopIteration:
                self.over = True
        deltas, self._deltas = self._deltas, []
        return deltas

    def _whole(self) -> Steps[None]:
        cursor = self.cursor
        try:
            yield from self.read()
            self.raw, self.rest = "" if self.calls else cursor.past, cursor.rest
        except Broken:
            if self._open is not None and self.end:
                yield from self._skip()
            self.raw, self.rest = cursor.past, cursor.rest
        except Ended:
            unread = cursor.past + cursor.rest
            if self._open is None and not (self.calls and any(mark.startswith(unread.strip()) for mark in self.end)):
                self.raw, self.rest = cursor.past, cursor.rest

    def _skip(self) -> Steps[None]:
        with contextlib.suppress(Ended):
            yield from self.cursor.flow(lambda _: None, *self.end)


_ARGUMENTS = ("arguments", "parameters")


def read_json_call(reader: CallReader) -> Steps[None]:
    """A call written as one JSON object with a name and arguments, in any order, e.g. {"name": "f", "arguments": {}}.

    Arguments may also be a JSON string that holds the object. The call is closed when both are there; members that
    nobody knows are skipped."""
    cursor = reader.cursor
    yield from cursor.expect("{")
    name: str | None = None
    early: str | None = None
    written = False
    separator = yield from cursor.blanks()
    while separator != "}":
        yield from cursor.blanks()
        key = _text_of((yield from cursor.json_text()))
        yield from cursor.blanks()
        yield from cursor.expect(":")
        if key == "name" and name is None:
            name = _text_of((yield from cursor.json_text()))
            if not name:
                raise Broken
            reader.call(name)
            if early is not None:
                reader.write(early)
                written = True
        elif key in _ARGUMENTS and name is not None and not written:
            written = True
            yield from _json_arguments(reader)
        elif key in _ARGUMENTS and early is None:
            early = _unwrapped((yield from cursor.json_text()))
        else:
            yield from cursor.json(lambda _: None)
        yield from cursor.blanks()
        separator = yield from cursor.expect(",", "}")
    if name is None:
        raise Broken
    reader.close()


def _json_arguments(reader: CallReader) -> Steps[None]:
    first = yield from reader.cursor.blanks()
    if first == '"':
        reader.write(_unwrapped((yield from reader.cursor.json_text())))
    else:
        yield from reader.cursor.json(reader.write)


def _unwrapped(text: str) -> str:
    """Arguments that are a string: the text in it."""
    return _text_of(text) or "{}" if text.startswith('"') else text


def _text_of(text: str) -> str:
    """The value of a JSON string; "" where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
