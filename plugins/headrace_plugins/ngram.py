"""Prompt lookup: draft what followed the last time that the current n-gram occurred.

Saxena, "Prompt Lookup Decoding" (2023), github.com/apoorvumang/prompt-lookup-decoding, with an index instead of a
scan: each sequence keeps, for every n, a map from n-gram to where it last ended, extended by the new tokens of each
step. A step costs O(n_max) dictionary look-ups per new token, whatever the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pydantic import Field, model_validator

from headrace.contracts import Drafter
from headrace.options import Options
from headrace.types import DraftView, ModelSpec, Proposal

NOTHING = Proposal()


class NGramOptions(Options):
    max_draft: int = Field(4, ge=1, le=64)
    """Most tokens drafted per step."""
    min_match: int = Field(2, ge=1, le=16)
    """Shortest suffix that may be looked up, in tokens."""
    max_match: int = Field(4, ge=1, le=16)
    """Longest suffix that is looked up; longer ones are tried first."""

    @model_validator(mode="after")
    def _ordered(self) -> NGramOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match = {self.min_match} is above max_match = {self.max_match}")
        return self


class _Index:
    """n-grams of one sequence. ends[n][gram] = position after its latest occurrence that has a continuation."""

    __slots__ = ("ends", "n_seen", "tail")

    def __init__(self, lengths: range) -> None:
        self.ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self.n_seen = 0
        self.tail: tuple[int, ...] = ()
        """The last tokens seen, to notice that the index belongs to another sequence now."""


class NGram(Drafter):
    """Longest suffix first; the most recent earlier occurrence wins."""

    def __init__(self, options: NGramOptions, model: ModelSpec) -> None:
        self.max_draft = options.max_draft
        self._lengths = range(options.min_match, options.max_match + 1)
        self._indices: dict[int, _Index] = {}

    def propose(self, views: Seq[DraftView]) -> Seq[Proposal]:
        return [self._propose(view) for view in views]

    def forget(self, index: int) -> None:
        self._indices.pop(index, None)

    def _propose(self, view: DraftView) -> Proposal:
        index = self._indices.get(view.index)
        tokens, n_tokens = view.tokens, len(view.tokens)
        if index is None or not self._continues(index, tokens):
            index = self._indices[view.index] = _Index(self._lengths)
        self._extend(index, tokens)
        n_draft = min(view.max_draft, self.max_draft)
        if n_draft <= 0:
            return NOTHING
        for n in reversed(self._lengths):
            if n < n_tokens:
                end = index.ends[n].get(tuple(tokens[n_tokens - n :]))
                if end is not None:
                    draft = list(tokens[end : end + n_draft])
                    while len(draft) < n_draft:  # the match reaches the end: the text is periodic, so is the draft
                        draft += draft[: n_draft - len(draft)]
                    return Proposal(tuple(draft))
        return NOTHING

    def _continues(self, index: _Index, tokens: Seq[int]) -> bool:
        low = index.n_seen - len(index.tail)
        return len(tokens) >= index.n_seen and tuple(tokens[low : index.n_seen]) == index.tail

    def _extend(self, index: _Index, tokens: Seq[int]) -> None:
        """Index every n-gram that a token now follows: those that end in [n_seen, len(tokens))."""
        n_tokens = len(tokens)
        for n, ends in index.ends.items():
            for end in range(max(n, index.n_seen), n_tokens):
                ends[tuple(tokens[end - n : end])] = end
        index.n_seen = n_tokens
        index.tail = tuple(tokens[max(0, n_tokens - self._lengths[-1]) :])
