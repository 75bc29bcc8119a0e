"""Grammars of kind `choice`: a JSON list of texts, one of which is the answer."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Rules, Rx
from headrace_plugins.constraints.regex import NOTHING, Cat, Or, either, literal
from headrace_plugins.constraints.texts import read_json

MAX_CHOICES = 100_000
_HELP = 'write a JSON list of texts: ["yes", "no"]'


def read_choice(text: str, max_nesting: int) -> Rules:
    """Raises RequestError HR-CONSTRAINT-02 for what is not a list of texts, HR-CONSTRAINT-04 for too many of them."""
    found = read_json("choice", text, max_nesting)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise RequestError("HR-CONSTRAINT-02", f"choice is not a list of texts: {text[:60]}", _HELP)
    return choice(found)


def choice(texts: Sequence[str]) -> Rules:
    """One of the texts."""
    if not texts:
        raise RequestError("HR-CONSTRAINT-02", "choice has no texts to choose from", _HELP)
    if len(texts) > MAX_CHOICES:
        raise RequestError("HR-CONSTRAINT-04", f"choice has {len(texts):,} texts; at most {MAX_CHOICES:,}", _HELP)
    for index, each in enumerate(texts):
        if any("\ud800" <= char <= "\udfff" for char in each):
            raise RequestError("HR-CONSTRAINT-02", f"choice /{index}: half of a surrogate pair", _HELP)
    known = {char: literal(char) for char in set().union(*texts)}
    short = either(*(literal(each) for each in texts if len(each) < 2))
    long = [Cat(tuple(map(known.__getitem__, each))) for each in dict.fromkeys(texts) if len(each) > 1]
    # not by `either`: it takes the hash of each, seconds for the most that are allowed
    choices = (*([short] if short != NOTHING else []), *long)
    return Rules("choice", {"choice": Rx(choices[0] if len(choices) == 1 else Or(choices))})
