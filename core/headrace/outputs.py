"""Tokens to text: incremental UTF-8 and stop strings, with nothing shown that a stop string may still take back."""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.contracts import Tokenizer


class TextStream:
    """The text of one sequence while it grows. Owned by the engine thread; readers follow `pieces` by a cursor.

    The bytes of all tokens are decoded as one stream: the text is what `bytes.decode("utf-8", "replace")` of the whole
    gives, however the tokens cut it. An incomplete character waits for its rest.

    Stop strings are met as if the text were read character by character: the match that ends first wins, of several
    that end there the longest, and the text ends before it. So the text doesn't depend on the cuts here either. Held
    back is the longest end of the text that is a proper beginning of some stop string, and nothing more.
    """

    __slots__ = (
        "_held", "_is_special", "_pending", "_shown", "_skip_special", "_state", "_stops", "_token_bytes", "pieces",
        "stopped",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """skip_special: control tokens but those `shown` add nothing to the text (and can't complete a stop string)."""
        self._token_bytes = tokenizer.token_bytes
        self._is_special = tokenizer.is_special
        self._skip_special = skip_special
        self._shown = shown
        self._stops = _StopAutomaton(stop) if stop else None
        self._state = 0
        self._held = ""
        self._pending = b""
        self.pieces: list[str] = []
        """Non-empty deltas in order, append-only; joined they are the text."""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token: int) -> bool:
        """Add a token. True: a stop string ended the text, now or before; the token's later characters are dropped."""
        if self.stopped is not None:
            return True
        if self._skip_special and self._is_special(token) and token not in self._shown:
            return False
        data = self._token_bytes(token)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if not text:
            return False
        if self._stops is None:
            self.pieces.append(text)
            return False
        return self._show(self._stops, text)

    def finish(self) -> None:
        """No token follows: show what was held back; an incomplete character becomes one U+FFFD. Safe to call twice."""
        if self.stopped is not None:
            return
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        if self._stops is not None and self._show(self._stops, text):
            return
        rest = self._held if self._stops is not None else text
        self._held, self._state = "", 0
        if rest:
            self.pieces.append(rest)

    def _show(self, stops: _StopAutomaton, new: str) -> bool:
        """Append what can be shown of the held text and `new`; True if a stop string completed."""
        state, match = self._state, stops.match
        for i, char in enumerate(new):
            state = stops.after(state, char) if state or char in stops.first else 0
            stop = match[state]
            if stop is not None:
                text = self._held + new[: i + 1]
                self._keep(text, len(text) - len(stop))
                self.stopped = stop
                return True
        text = self._held + new
        self._state = state
        self._held = self._keep(text, len(text) - stops.depth[state])
        return False

    def _keep(self, text: str, shown: int) -> str:
        if shown:
            self.pieces.append(text[:shown])
        return text[shown:]


class _StopAutomaton:
    """Aho-Corasick over the stop strings (CACM 18(6), 1975). A state is the longest end of the text that begins a stop
    string: `depth` is its length, `match` the longest stop string that ends there. Frozen once built."""

    __slots__ = ("_fail", "_next", "depth", "first", "match")

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(None)
                state = self._next[state][char]
            self.match[state] = stop
        self.first = frozenset(self._next[0])
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fallback = self.after(self._fail[state], char)
                self._fail[child] = fallback
                if self.match[child] is None:
                    self.match[child] = self.match[fallback]
                queue.append(child)

    def after(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]
