"""Free text with bodies in it that hold to a grammar, and reasoning before it; one program of other programs.

    reasoning -> (end mark) -> free text <-> body      start = "free": a body begins at a trigger, any number of times
    reasoning -> (end mark) -> body -> end             start = "body"

Marks are found in the bytes of the text, however tokens cut it, or are special tokens of their own. What follows a mark
within its token is held to what comes there: such a token is masked if the body refuses its rest. A body ends at the
end of a token. Where it could go on or be over (calls that may be followed by more), both are followed until the text
says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, RequestError
from headrace_plugins.constraints.marks import ROOT, Marks
from headrace_plugins.constraints.tagged_document import Tagged, read_tagged, read_trigger
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Forced, Program, Walk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEAD = -1
BLANKS = b" \t\r\n"


def compile_tagged(text: str, vocabulary: Vocabulary, compile_body: Callable[[Any], Program]) -> Program:
    """A grammar of kind "tagged". compile_body: makes a program of a body's expression, as JSON has it.

    Raises RequestError HR-CONSTRAINT-02 for a document that can't be read, and whatever compile_body raises."""
    tagged = read_tagged(text)
    body = None if tagged.body is None else compile_body(tagged.body)
    return TaggedProgram(tagged, body, vocabulary)


def compile_after(trigger: str, budget: int | None, body: Program, vocabulary: Vocabulary) -> Program:
    """A grammar that holds for what follows a trigger (`Grammar.trigger`). budget: most tokens before the trigger."""
    return TaggedProgram(Tagged(think=read_trigger(trigger, budget), start="body"), body, vocabulary)


@dataclass(frozen=True, slots=True)
class _State:
    """What may be going on after some tokens. In reasoning, `think` is a node; else any of `opening`, `free` and `body`
    that is alive explains the text, and what comes next must go on with one of them."""

    opening: int = DEAD
    """Bytes of the mark that begins the reasoning, of which this may be the beginning; 0: only blanks so far."""
    think: int = DEAD
    """Node in the end mark."""
    n_think: int = 0
    closing: int = DEAD
    """The budget is used up: bytes of the end mark that are there."""
    free: int = DEAD
    """Node in the triggers."""
    body: Walk | None = None
    n_bodies: int = 0
    """Bodies begun."""
    n_fed: int = 0
    """Tokens that the last one of ours was for `body`."""
    whole: bool = False
    """`body` may be over here, and free text begin."""
    ended: bool = False


class TaggedProgram(Program):
    """See the module. body: what begins with each of the triggers; None: there is free text only."""

    __slots__ = (
        "_begin_mark", "_begin_specials", "_body", "_end", "_end_id", "_first", "_masks", "_tagged", "_trigger_ids",
        "_triggers", "_vocabulary",
    )  # fmt: skip

    def __init__(self, tagged: Tagged, body: Program | None, vocabulary: Vocabulary) -> None:
        self._tagged, self._body, self._vocabulary = tagged, body, vocabulary
        think = tagged.think
        self._triggers = Marks([name.encode() for name in tagged.triggers], vocabulary) if tagged.triggers else None
        self._end = Marks([think.end.encode()], vocabulary) if think is not None else None
        self._begin_mark = (think.begin or "") if think is not None else ""
        self._begin_specials = {
            token: name.encode()
            for name, token in vocabulary.special.items()
            if name and name in self._begin_mark and token not in vocabulary.eos_ids
        }
        """Special tokens that the begin mark is made of, alone or with text between them."""
        self._end_id = vocabulary.special.get(think.end) if think is not None else None
        self._trigger_ids = {
            vocabulary.special[name]: i for i, name in enumerate(tagged.triggers) if name in vocabulary.special
        }
        self._masks: dict[tuple[Any, ...], NDArray[np.int32]] = {}
        self._check_triggers()
        self._first = self._begin()

    def start(self) -> Walk:
        first = self._first
        if first.body is not None and self._body is not None:
            first = replace(first, body=self._body.start())
        return TaggedWalk(self, first)

    def size_bytes(self) -> int:
        own = sum(words.nbytes for words in list(self._masks.values()))
        return own + (self._body.size_bytes() if self._body is not None else 0)

    def _check_triggers(self) -> None:
        for i, name in enumerate(self._tagged.triggers if self._tagged.most != 0 else ()):
            if self._triggered(i, b"", 0) is None:
                raise RequestError(
                    "HR-CONSTRAINT-02",
                    f"trigger {name!r} (at /triggers/{i}) is not how the body begins",
                    "let the body begin with every one of the triggers",
                )

    def _begin(self) -> _State:
        think = self._tagged.think
        if think is None:
            return self._answer()
        if think.begin is None:
            return self._thinking(ROOT, 0)
        return replace(self._answer(), opening=0)

    # --- what follows what -----------------------------------------------------------------------------------------

    def _answer(self) -> _State:
        """Behind the reasoning."""
        if self._tagged.start == "free":
            return _State(free=ROOT)
        assert self._body is not None
        return _State(body=self._body.start(), n_bodies=1)

    def _thinking(self, node: int, n_think: int) -> _State:
        assert self._end is not None
        assert self._tagged.think is not None
        closing = DEAD
        if n_think == self._tagged.think.budget:
            closing = 0 if self._end_id is not None else len(self._end.name[node])
        return _State(think=node, n_think=n_think, closing=closing)

    def after(self, state: _State, token: int) -> _State | None:
        """The state behind one more token, not EOS; None if it is not allowed. The state's body accepts it."""
        data = self._vocabulary.text[token]
        if state.think != DEAD:
            return self._after_thought(state, token, data)
        opening = DEAD
        if state.opening != DEAD:
            opening, rest = self._opened(state.opening, token, data)
            if rest is not None:
                return self._thought(rest)
        body, n_fed = state.body, 0
        if body is not None:
            if not body.done() and body.accept(token):
                n_fed = 1
            else:
                body = None
        following = _State(opening, body=body, n_bodies=state.n_bodies, n_fed=n_fed)
        if body is not None and self._tagged.start == "free" and body.complete():
            return replace(following, free=ROOT, whole=True)
        if state.free != DEAD:
            freely = self._freely(state.free, token, data, state.n_bodies)
            if body is not None:  # what the running body can go on with belongs to it
                free = DEAD if freely is None or freely.body is not None else freely.free
                return replace(following, free=free)
            if freely is not None:
                return replace(freely, opening=opening)
        return following if body is not None or opening != DEAD else None

    def _after_thought(self, state: _State, token: int, data: bytes) -> _State | None:
        assert self._end is not None
        if token == self._end_id:
            return self._answer()
        if state.closing == DEAD:
            node, found = self._end.read(state.think, data)
            if found is None:
                return self._thinking(node if data else ROOT, state.n_think + 1)
            return self._behind_thought(data[found.end :])
        missing = self._end.marks[0][state.closing :]
        if self._end_id is not None or not data:
            return None
        if data.startswith(missing):
            return self._behind_thought(data[len(missing) :])
        if missing.startswith(data):
            return replace(state, closing=state.closing + len(data))
        return None

    def _opened(self, opening: int, token: int, data: bytes) -> tuple[int, bytes | None]:
        """(bytes of the begin mark that are there, or DEAD; what follows it, once it is complete)."""
        if not data:
            data = self._begin_specials.get(token, b"")
            if not data:
                return DEAD, None
        elif opening == 0:
            data = data.lstrip(BLANKS)
        missing = self._begin_mark.encode()[opening:]
        if data.startswith(missing):
            return DEAD, data[len(missing) :]
        return opening + len(data) if missing.startswith(data) else DEAD, None

    def _thought(self, rest: bytes) -> _State | None:
        """Behind the mark that begins the reasoning, and what its token says after it."""
        assert self._end is not None
        node, found = self._end.read(ROOT, rest)
        return self._thinking(node, 1 if rest else 0) if found is None else self._behind_thought(rest[found.end :])

    def _behind_thought(self, rest: bytes) -> _State | None:
        answer = self._answer()
        if not rest:
            return answer
        if answer.body is None:
            return self._read_freely(ROOT, rest, 0)
        n_fed = self._feed(answer.body, rest)
        return None if n_fed is None else replace(answer, n_fed=n_fed)

    def _freely(self, node: int, token: int, data: bytes, n_bodies: int) -> _State | None:
        """The state behind a token of free text: free text or a body; None if it is not allowed there."""
        if data:
            return self._read_freely(node, data, n_bodies)
        trigger = self._trigger_ids.get(token)
        if trigger is None:
            return _State(free=ROOT, n_bodies=n_bodies)
        return self._triggered(trigger, b"", n_bodies)

    def _read_freely(self, node: int, data: bytes, n_bodies: int) -> _State | None:
        if self._triggers is None:
            return _State(free=ROOT, n_bodies=n_bodies)
        node, found = self._triggers.read(node, data)
        if found is None:
            return _State(free=node, n_bodies=n_bodies)
        if found.mark in self._trigger_ids.values():
            return None  # the name of a special token, spelt: to whoever reads the text it would look the same
        return self._triggered(found.mark, data[found.end :], n_bodies)

    def _triggered(self, trigger: int, rest: bytes, n_bodies: int) -> _State | None:
        """The state in a new body, behind its trigger and what the token says after it."""
        tagged = self._tagged
        if self._body is None or n_bodies == tagged.most:
            return None
        walk, name = self._body.start(), tagged.triggers[trigger]
        special = self._vocabulary.special.get(name)
        if special is None:
            n_fed = self._feed(walk, name.encode() + rest)
        else:
            n_fed = 1 if walk.accept(special) else None
        if n_fed is None:
            return None
        whole = walk.complete()
        return _State(free=ROOT if whole else DEAD, body=walk, n_bodies=n_bodies + 1, n_fed=n_fed, whole=whole)

    def _feed(self, walk: Walk, data: bytes) -> int | None:
        """Have the walk read these bytes; how many tokens that took, None if it refuses them."""
        tokens = self._spelt(data)
        for n, token in enumerate(tokens):
            if walk.done() or not walk.accept(token):
                walk.rollback(n)
                return None
        return len(tokens) if tokens else None

    def _spelt(self, data: bytes) -> list[int]:
        """Tokens of these bytes, one per byte where the vocabulary has such; none where they can't be spelt."""
        single = [self._vocabulary.byte_tokens[byte] for byte in data]
        found = [token for token in single if token is not None]
        if len(found) == len(data):
            return found
        return self._vocabulary.spell(data)

    # --- masks -----------------------------------------------------------------------------------------------------

    def fill(self, state: _State, bits: NDArray[np.int32]) -> None:
        """The mask of a state that has not ended."""
        n_words = self._vocabulary.n_words
        words = bits[:n_words]
        if state.think != DEAD:
            words[:] = self._thought_words(state)
            bits[n_words:] = 0
            return
        if state.body is None:
            bits[:] = 0
        elif state.body.done():
            words[:] = self._vocabulary.eos_words
            bits[n_words:] = 0
        else:
            state.body.fill(bits)
        if state.free != DEAD:
            words |= self._free_words(state.free, state.n_bodies)
        if state.opening != DEAD:
            allowed, refused = self._opening_words(state.opening)
            words |= allowed
            words &= ~refused

    def _thought_words(self, state: _State) -> NDArray[np.int32]:
        assert self._end is not None
        node, closing = state.think, state.closing
        key = ("think", node) if closing == DEAD else ("closing", closing)
        words = self._masks.get(key)
        if words is None:
            special = [self._end_id] if self._end_id is not None else []
            if closing == DEAD:
                tried = [*self._end.completing(node), *special]
                state = _State(think=node)
            else:
                missing = self._end.marks[0][closing:]
                tried = [*self._along(missing), *special]
            good = [token for token in tried if self._after_thought(state, token, self._vocabulary.text[token])]
            if closing == DEAD:
                words = self._vocabulary.mask(set(tried) - set(good) | self._vocabulary.eos_ids, negated=True)
            else:
                words = self._vocabulary.mask(good)
            self._masks[key] = words
        return words

    def _free_words(self, node: int, n_bodies: int) -> NDArray[np.int32]:
        key = ("free", node, n_bodies == self._tagged.most)
        words = self._masks.get(key)
        if words is None:
            tried = [*self._triggers.completing(node), *self._trigger_ids] if self._triggers is not None else []
            text = self._vocabulary.text
            refused = [token for token in tried if self._freely(node, token, text[token], n_bodies) is None]
            words = self._masks[key] = self._vocabulary.mask(refused, negated=True)
        return words

    def _opening_words(self, opening: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(tokens that may begin the reasoning, or go on with its beginning; tokens that begin it and then say what is
        not allowed)."""
        key = ("opening", opening)
        if key not in self._masks:
            tried = {*self._along(self._begin_mark.encode()[opening:]), *self._begin_specials}
            if opening == 0:
                tried.update(token for blank in BLANKS for token in self._vocabulary.with_prefix(bytes([blank])))
            good: list[int] = []
            bad: list[int] = []
            for token in tried:
                after, rest = self._opened(opening, token, self._vocabulary.text[token])
                if rest is not None:
                    (bad if self._thought(rest) is None else good).append(token)
                elif after != DEAD:
                    good.append(token)
            self._masks[*key, "refused"] = self._vocabulary.mask(bad)
            self._masks[key] = self._vocabulary.mask(good)
        return self._masks[key], self._masks[*key, "refused"]

    def _along(self, missing: bytes) -> list[int]:
        """Tokens that are a beginning of these bytes, or begin with all of them."""
        text = self._vocabulary.text
        found = [token for token in self._vocabulary.with_prefix(missing[:1]) if missing.startswith(text[token])]
        return sorted({*found, *self._vocabulary.with_prefix(missing)})

    def missing(self, state: _State) -> Forced:
        """What must come next."""
        if state.closing != DEAD and self._end is not None:
            return (self._end_id if self._end_id is not None else self._end.marks[0][state.closing :],)
        if state.think != DEAD or state.free != DEAD:
            return ()
        if state.body is None and state.opening > 0:
            return self._begin_missing(state.opening)
        return state.body.forced() if state.body is not None and state.opening == DEAD else ()

    def _begin_missing(self, opening: int) -> Forced:
        """The rest of the mark that begins the reasoning, special tokens in it by id."""
        left, items = self._begin_mark.encode()[opening:], list[bytes | int]()
        while left:
            found = [
                (left.find(name), -len(name), token) for token, name in self._begin_specials.items() if name in left
            ]
            if not found:
                return (*items, left)
            start, negative, token = min(found)
            items += [left[:start], token] if start else [token]
            left = left[start - negative :]
        return tuple(items)


class TaggedWalk(Walk):
    """Keeps every state, with the body that it is in; one body's tokens are taken back as ours are."""

    __slots__ = ("_program", "_states")

    def __init__(self, program: TaggedProgram, first: _State) -> None:
        self._program = program
        self._states = [first]

    def fill(self, bits: NDArray[np.int32]) -> None:
        self._program.fill(self._states[-1], bits)

    def accept(self, token: int) -> bool:
        program, state = self._program, self._states[-1]
        if state.ended or not 0 <= token < program._vocabulary.n_tokens:
            return False
        if token in program._vocabulary.eos_ids:
            if not self.complete():
                return False
            self._states.append(replace(state, n_fed=0, ended=True))
            return True
        following = program.after(state, token)
        if following is None:
            return False
        self._states.append(following)
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self._states), f"rollback of {n} tokens, {len(self._states) - 1} were accepted"
        for _ in range(n):
            state = self._states.pop()
            if state.body is not None and state.n_fed:
                state.body.rollback(state.n_fed)

    def done(self) -> bool:
        state = self._states[-1]
        if state.ended:
            return True
        alone = state.think == DEAD and state.opening == DEAD and state.free == DEAD
        return alone and state.body is not None and state.body.done()

    def complete(self) -> bool:
        state = self._states[-1]
        if state.think != DEAD:
            return False
        return state.ended or state.free != DEAD or (state.body is not None and state.body.complete())

    def forced(self) -> Forced:
        return () if self._states[-1].ended else self._program.missing(self._states[-1])

    def verdict(self) -> HeadraceError | None:
        """What is wrong with the first of its bodies that has something wrong. They are taken back to where they ended,
        so nothing can follow."""
        problem: HeadraceError | None = None
        last = self._states[-1] if self._program._tagged.start == "body" else None
        body: Walk | None = None
        asked, n_after = True, 0
        for state in reversed(self._states):
            if state.body is not body:
                body, asked, n_after = state.body, state.body is None, 0
            if body is not None and not asked and (state.whole or state is last):
                asked = True
                body.rollback(n_after)
                problem = body.verdict() or problem
            n_after += state.n_fed
        return problem
