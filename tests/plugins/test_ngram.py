"""The n-gram drafter: what it finds, what it costs, and that it passes for a drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from pydantic import ValidationError

from headrace.contracts import Drafter
from headrace.testing.conformance import DrafterConformance
from headrace.testing.toy import ToyModel
from headrace.types import DraftView, ModelSpec
from headrace_plugins.ngram import NGram, NGramOptions


class TestNGram(DrafterConformance):
    def make(self, model: ModelSpec) -> Drafter:
        return NGram(NGramOptions(), model)


class TestNGramLong(DrafterConformance):
    def make(self, model: ModelSpec) -> Drafter:
        return NGram(NGramOptions(max_draft=16, min_match=1, max_match=8), model)


def draft(text: Seq[int], ask: int = 4, **options: int) -> list[int]:
    drafter = NGram(NGramOptions(**options), ToyModel().spec())
    return list(drafter.propose([DraftView(0, text, ask)])[0].tokens)


def test_copies_what_followed() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]


def test_nothing_to_copy() -> None:
    assert draft([1, 2, 3, 4, 5]) == []
    assert draft([1, 2, 3, 9, 3], min_match=2) == []


def test_longest_match_wins_over_a_later_short_one() -> None:
    text = [1, 2, 3, 4, 50, 60, 9, 3, 4, 70, 80, 1, 2, 3, 4]
    assert draft(text, 2, min_match=2, max_match=4) == [50, 60]
    assert draft(text, 2, min_match=2, max_match=2) == [70, 80]


def test_latest_of_equal_matches_wins() -> None:
    assert draft([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_periodic_text_is_continued_beyond_its_end() -> None:
    assert draft([1, 2, 1, 2, 1, 2], 5, max_draft=5) == [1, 2, 1, 2, 1]
    assert draft([7] * 6, 4) == [7] * 4


def test_min_match_one() -> None:
    assert draft([5, 6, 9, 5], 2, min_match=1) == [6, 9]


def test_never_finds_itself() -> None:
    """The suffix at the end of the text has no continuation yet."""
    assert draft([1, 2]) == []
    assert draft([1, 2, 1, 2], 2) == [1, 2]


def test_a_step_costs_as_many_lookups_as_it_has_new_tokens() -> None:
    """No scan of the text: the index grows by what is new, whatever the length of the sequence."""

    class Counting(list[int]):
        n_read = 0

        def __getitem__(self, item):  # type: ignore[no-untyped-def, override]
            got = super().__getitem__(item)
            Counting.n_read += len(got) if isinstance(item, slice) else 1
            return got

    drafter = NGram(NGramOptions(min_match=2, max_match=4), ToyModel().spec())
    text = Counting(i * 7919 % 1009 for i in range(5000))
    drafter.propose([DraftView(0, text, 4)])
    costs = []
    for token in range(20):
        Counting.n_read = 0
        text.append(token)
        drafter.propose([DraftView(0, text, 4)])
        costs.append(Counting.n_read)
    assert max(costs) < 60


def test_forget_drops_the_index() -> None:
    drafter = NGram(NGramOptions(), ToyModel().spec())
    drafter.propose([DraftView(3, [1, 2, 3], 4)])
    assert drafter._indices
    drafter.forget(3)
    assert not drafter._indices


def test_index_that_was_not_forgotten_does_not_leak_into_the_next_sequence() -> None:
    drafter = NGram(NGramOptions(), ToyModel().spec())
    drafter.propose([DraftView(0, [1, 2, 3, 4, 5, 6], 4)])
    text = [9, 8, 7, 1, 2, 3, 4, 9, 8]
    assert drafter.propose([DraftView(0, text, 2)])[0].tokens == (7, 1)


@pytest.mark.parametrize("options", [{"max_draft": 0}, {"min_match": 5, "max_match": 4}, {"min_match": 0}, {"n": 3}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        NGramOptions(**options)
