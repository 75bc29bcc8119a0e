"""Toy implementations of the smaller contracts: a lying oracle drafter, a DFA constraint, a store, a strategy, a tally.

They are correct, small and slow. Tests use them as fakes; plugin authors read them as examples.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.contracts import Compiled, ConstraintEngine, Drafter, Matcher, Observer, Store, Strategy, Tokenizer
from headrace.errors import RequestError
from headrace.types import DeviceInfo, DraftView, Grammar, Proposal, RequestStats, StepPlan, StepStats

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ToyOracle(Drafter):
    """Knows what comes next, and lies with probability 1 - p.

    continuation(tokens, n) returns up to n tokens that follow `tokens` (e.g. `ToyModel.generate`). Lies are drawn from
    a hash of (seed, position), so that a run repeats.
    """

    def __init__(
        self,
        continuation: Callable[[Seq[int], int], Seq[int]],
        *,
        p: float = 0.7,
        seed: int = 0,
        max_draft: int = 4,
        n_vocab: int = 256,
    ) -> None:
        self.continuation, self.p, self.seed, self.max_draft, self.n_vocab = continuation, p, seed, max_draft, n_vocab
        self.observed: list[tuple[int, int, int]] = []
        """(index, proposed, accepted) of every observe call."""
        self.forgotten: list[int] = []

    def propose(self, views: Seq[DraftView]) -> Seq[Proposal]:
        return [Proposal(tuple(self._draft(view))) for view in views]

    def observe(self, index: int, proposed: int, accepted: int) -> None:
        self.observed.append((index, proposed, accepted))

    def forget(self, index: int) -> None:
        self.forgotten.append(index)

    def _draft(self, view: DraftView) -> list[int]:
        n = min(view.max_draft, self.max_draft)
        draft = [int(token) for token in self.continuation(list(view.tokens), n)] if n > 0 else []
        for j, token in enumerate(draft):
            digest = hashlib.blake2b(f"{self.seed} {len(view.tokens) + j}".encode(), digest_size=8).digest()
            if int.from_bytes(digest[:4], "little") >= self.p * 2**32:
                draft[j] = (token + 1 + digest[4]) % self.n_vocab
        return draft


# --- constraints -----------------------------------------------------------------------------------------------------


class ToyConstraint(ConstraintEngine):
    """Kinds: `choice` (a JSON list of strings) and `charset` (characters, then `{low,high}`: how many, in characters;
    e.g. "abc{2,5}"). Both become a tree or a counter over bytes; tokens are checked byte by byte.

    forces: where only one text can follow, its own tokens must spell it (`Matcher.forced`)."""

    def __init__(self, tokenizer: Tokenizer, *, forces: bool = True) -> None:
        self._tokenizer = tokenizer
        self._forces = forces
        self._bytes = [
            b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)
        ]

    def compile(self, grammar: Grammar, cancelled: Callable[[], bool] = lambda: False) -> Compiled:
        if grammar.kind == "choice":
            return self._compiled(_choices(grammar.text))
        if grammar.kind == "charset":
            return self._compiled(_charset(grammar.text))
        raise RequestError(
            "HR-CONSTRAINT-01",
            f"constraint kind {grammar.kind!r} is unknown to the toy engine",
            "use kind 'choice' or 'charset'",
        )

    def _compiled(self, automaton: Automaton) -> Compiled:
        return _ToyCompiled(
            self._bytes, self._tokenizer.eos_ids, automaton, self._tokenizer.encode if self._forces else None
        )


State = Any
Automaton = tuple[State, Callable[[State, int], State | None], Callable[[State], bool], Callable[[State], bool]]
"""(start, step(state, byte) -> state or None, is the text complete?, can it go on?)"""


def _choices(text: str) -> Automaton:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise RequestError("HR-CONSTRAINT-02", f"choice {text!r} is not JSON: {error}", 'write ["yes", "no"]') from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError("HR-CONSTRAINT-02", f"choice {text!r} is no list of strings", 'write ["yes", "no"]')
    words = sorted({choice.encode() for choice in choices})
    prefixes = {word[:i] for word in words for i in range(len(word) + 1)}
    longer = {word[:i] for word in words for i in range(len(word))}

    def step(state: bytes, byte: int) -> bytes | None:
        following = state + bytes([byte])
        return following if following in prefixes else None

    return b"", step, lambda state: state in set(words), lambda state: state in longer


def _charset(text: str) -> Automaton:
    chars, brace, rest = text.rpartition("{")
    try:
        low, high = (int(number) for number in rest.rstrip("}").split(","))
    except ValueError:
        low, high = -1, -1
    if not brace or not chars or not chars.isascii() or not 0 <= low <= high or high == 0:
        raise RequestError("HR-CONSTRAINT-02", f"charset {text!r} can't be read", "write ASCII characters, then {2,5}")
    allowed = frozenset(chars.encode())

    def step(state: int, byte: int) -> int | None:
        return state + 1 if byte in allowed and state < high else None

    return 0, step, lambda state: state >= low, lambda state: state < high


class _ToyCompiled(Compiled):
    def __init__(
        self,
        token_bytes: Seq[bytes],
        eos_ids: frozenset[int],
        automaton: Automaton,
        encode: Callable[..., list[int]] | None,
    ) -> None:
        self.token_bytes, self.eos_ids, self.automaton, self.encode = token_bytes, eos_ids, automaton, encode
        self._forced: dict[State, tuple[int, ...]] = {}

    def start(self) -> Matcher:
        return _ToyMatcher(self)

    def size_bytes(self) -> int:
        return sum(map(len, self.token_bytes))

    def _forced_at(self, state: State) -> tuple[int, ...]:
        """Tokens of the only text that can follow a state."""
        if self.encode is None:
            return ()
        if state not in self._forced:
            self._forced[state] = self._spell(*self._only(state))
        return self._forced[state]

    def _only(self, state: State) -> tuple[bytes, bool]:
        """(the bytes that must follow, whether nothing follows them)."""
        _, step, complete, goes_on = self.automaton
        found = bytearray()
        while not complete(state):
            following = [(byte, after) for byte in range(256) if (after := step(state, byte)) is not None]
            if len(following) != 1:
                break
            found.append(following[0][0])
            state = following[0][1]
        return bytes(found), not goes_on(state)

    def _spell(self, text: bytes, ends: bool) -> tuple[int, ...]:
        """The text's own tokens, without those at its end that a longer token might begin with."""
        assert self.encode is not None
        try:
            tokens = self.encode(text.decode(), add_bos=False)
        except UnicodeDecodeError:  # it ends within a character
            return ()
        start = 0
        for i, token in enumerate(tokens):
            rest = text[start:]
            if not ends and any(len(piece) > len(rest) and piece.startswith(rest) for piece in self.token_bytes):
                return tuple(tokens[:i])
            start += len(self.token_bytes[token])
        return tuple(tokens)


class _ToyMatcher(Matcher):
    """Keeps every state that it went through, so rollback is a slice. A state is the automaton's and the tokens that
    are forced from there on."""

    def __init__(self, compiled: _ToyCompiled) -> None:
        self._compiled = compiled
        start, self._byte, self._complete, self._open = compiled.automaton
        self._states: list[tuple[State, tuple[int, ...]]] = [(start, compiled._forced_at(start))]
        self._ended = False

    def fill(self, bits: NDArray[np.int32]) -> None:
        allowed = np.zeros(32 * len(bits), np.uint8)
        state, forced = self._states[-1]
        if forced:
            allowed[forced[0]] = 1
        else:
            for token in range(len(self._compiled.token_bytes)):
                allowed[token] = self._next(token) is not None
            if self._complete(state):
                allowed[list(self._compiled.eos_ids)] = 1
        bits[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        state, forced = self._states[-1]
        if self._ended or (forced and token != forced[0]):
            return False
        if token in self._compiled.eos_ids:
            if not self._complete(state):
                return False
            self._states.append((state, ()))
            self._ended = True
            return True
        following = self._next(token)
        if following is None:
            return False
        self._states.append((following, forced[1:] or self._compiled._forced_at(following)))
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self._states), f"rollback of {n} tokens, {len(self._states) - 1} were accepted"
        if n:
            self._ended = False
            del self._states[-n:]

    def done(self) -> bool:
        return self._ended or not self._open(self._states[-1][0])

    def forced(self) -> Seq[int]:
        return () if self._ended else self._states[-1][1]

    def _next(self, token: int) -> State | None:
        if not 0 <= token < len(self._compiled.token_bytes) or not self._compiled.token_bytes[token]:
            return None
        state, _ = self._states[-1]
        for byte in self._compiled.token_bytes[token]:
            state = self._byte(state, byte)
            if state is None:
                return None
        return state


# --- store, strategy, observer ---------------------------------------------------------------------------------------


class ToyStore(Store):
    """A dict with deadlines. clock: seconds, injected by tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._items: dict[bytes, tuple[float, bytes]] = {}
        self.closed = False

    def probe(self, keys: Seq[bytes]) -> int:
        for n, value in enumerate(self.get(keys)):
            if value is None:
                return n
        return len(keys)

    def get(self, keys: Seq[bytes]) -> Seq[bytes | None]:
        now = self._clock()
        found = (self._items.get(key) for key in keys)
        return [None if item is None or item[0] <= now else item[1] for item in found]

    def put(self, items: Seq[tuple[bytes, bytes]], ttl_s: float) -> int:
        if self.closed or ttl_s <= 0:
            return 0
        until = self._clock() + ttl_s
        for key, value in items:
            self._items[bytes(key)] = (until, bytes(value))
        return len(items)

    def close(self) -> None:
        self._items.clear()
        self.closed = True


class ToyStrategy(Strategy):
    """Data parallel over `size` ranks: a sequence stays on the rank of its slot."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def mesh(self, devices: Seq[DeviceInfo]) -> Seq[Seq[int]]:
        if len(devices) % self.size:
            raise ValueError(f"{len(devices)} devices can't be split in groups of {self.size}")
        indices = [device.index for device in devices]
        return [indices[i : i + self.size] for i in range(0, len(indices), self.size)]

    def split(self, plan: StepPlan) -> Seq[NDArray[np.int32]]:
        rank = plan.slot % self.size
        return [np.flatnonzero(rank == r).astype(np.int32) for r in range(self.size)]


class ToyObserver(Observer):
    """Keeps what it saw."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.finished: list[RequestStats] = []
        self.closed = False

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_finish(self, stats: RequestStats) -> None:
        self.finished.append(stats)

    def close(self) -> None:
        self.closed = True
