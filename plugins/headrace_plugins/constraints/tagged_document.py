"""The document of a grammar of kind "tagged": where free text, reasoning and bodies begin and end.

    {"think": {"begin": "<think>" | null, "end": "</think>", "budget": 512 | null},
     "start": "free" | "body", "triggers": ["<tool_call>"], "most": 1 | null, "body": EXPRESSION}

think: the answer begins with reasoning. begin null: it is in it from the start; else the block is optional, at the
very start, after blanks. budget: most tokens of it. start "free": free text with bodies in it, at most `most`, each
from a trigger on, which is part of the body; "body": the body at once, and then the end. Triggers and marks are names
of special tokens, or texts. Behind the last body, and with most 0, no trigger may come at all: whoever reads the text
would take it for one. The expression of a body is read by `expression.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import RequestError, did_you_mean

MOST_TRIGGERS = 64
MARK_BYTES = 256
"""Most triggers, and bytes of one mark: what is kept for each grows with the square of the bytes."""


@dataclass(frozen=True, slots=True)
class Think:
    begin: str | None
    """None: the text starts inside the reasoning."""
    end: str
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    think: Think | None = None
    start: Literal["free", "body"] = "free"
    triggers: tuple[str, ...] = ()
    most: int | None = None
    body: Any = None
    """As JSON has it; None: there is none."""


def read_tagged(text: str) -> Tagged:
    """Raises RequestError HR-CONSTRAINT-02 that names the place."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("", f"this is not JSON: {error}") from None
    _keys(document, "", ("think", "start", "triggers", "most", "body"))
    start = document.get("start", "free")
    if start not in ("free", "body"):
        raise _wrong("/start", f"{start!r} is neither 'free' nor 'body'")
    triggers = document.get("triggers") or []
    if not isinstance(triggers, list):
        raise _wrong("/triggers", f"{triggers!r} is no list of texts")
    if len(triggers) > MOST_TRIGGERS:
        raise _exceeded("/triggers", f"{len(triggers):,} triggers, at most {MOST_TRIGGERS}")
    for i, trigger in enumerate(triggers):
        _mark(trigger, f"/triggers/{i}")
        if trigger in triggers[:i]:
            raise _wrong(f"/triggers/{i}", f"{trigger!r} is there twice")
    body = document.get("body")
    most = _count(document.get("most"), "/most")
    if body is None and (start == "body" or (triggers and most != 0)):
        raise _wrong("/body", "it is missing")
    if body is not None and start == "free" and not triggers:
        raise _wrong("/triggers", "without one, the body can't begin")
    return Tagged(
        think=_think(document.get("think")),
        start=start,
        triggers=tuple(triggers),
        most=most,
        body=body,
    )


def _think(document: Any) -> Think | None:
    if document is None:
        return None
    _keys(document, "/think", ("begin", "end", "budget"))
    begin = document.get("begin")
    return Think(
        begin=None if begin is None else _mark(begin, "/think/begin"),
        end=_mark(document.get("end"), "/think/end"),
        budget=_count(document.get("budget"), "/think/budget"),
    )


def _keys(document: Any, place: str, known: tuple[str, ...]) -> None:
    if not isinstance(document, dict):
        raise _wrong(place, f"{document!r:.60} is no object")
    for key in document:
        if key not in known:
            raise _wrong(f"{place}/{key}", f"there is no such key. {did_you_mean(key, known)}Known: {', '.join(known)}")


def _mark(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(place, f"{value!r:.60} is no text of at least one character")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise _wrong(place, f"{value!r:.60} has half of a surrogate pair") from None
    if n_bytes > MARK_BYTES:
        raise _exceeded(place, f"{value!r:.60} ... has {n_bytes:,} bytes, a mark has at most {MARK_BYTES}")
    return value


def _count(value: Any, place: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(place, f"{value!r:.60} is neither null nor a whole number from 0 on")
    return value


def read_trigger(trigger: str, budget: int | None) -> Think:
    """`Grammar.trigger` and `Grammar.trigger_budget`. Raises as `read_tagged` does."""
    return Think(None, _mark(trigger, "Grammar.trigger"), _count(budget, "Grammar.trigger_budget"))


def _exceeded(place: str, problem: str) -> RequestError:
    return RequestError(
        "HR-CONSTRAINT-04", f"the tagged grammar (at {place}): {problem}", "use shorter marks, and fewer"
    )


def _wrong(place: str, problem: str) -> RequestError:
    where = f" (at {place})" if place else ""
    return RequestError(
        "HR-CONSTRAINT-02", f"the tagged grammar can't be read{where}: {problem}", "see docs/constraints.md"
    )
