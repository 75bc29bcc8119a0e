"""What every drafter must do. Drafters may guess badly; they may not break the engine's bookkeeping."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from headrace.contracts import Drafter
from headrace.testing.toy import ToyModel
from headrace.types import DraftView, ModelSpec, Proposal


class DrafterConformance:
    """Subclass and return a new drafter for `model` from `make()`."""

    deterministic = True
    """The same calls give the same proposals."""
    learns = False
    """Proposals may depend on other sequences (a shared n-gram cache): checks of independence are skipped."""

    def make(self, model: ModelSpec) -> Drafter:
        raise NotImplementedError("return your drafter from make()")

    def texts(self) -> list[list[int]]:
        """Token ids in which a drafter of your kind should find something to propose."""
        return [list(b"one two three, one two three, one two"), [1, 2, 3] * 12, [7] * 20]

    @pytest.fixture
    def model(self) -> ModelSpec:
        return ToyModel(vocab=320).spec()

    @pytest.fixture
    def drafter(self, model: ModelSpec) -> Drafter:
        return self.make(model)

    def test_max_draft_is_positive(self, drafter: Drafter) -> None:
        assert isinstance(drafter.max_draft, int)
        assert drafter.max_draft >= 1

    def test_no_views_no_proposals(self, drafter: Drafter) -> None:
        assert list(drafter.propose([])) == []

    def test_one_proposal_per_view_in_order(self, drafter: Drafter) -> None:
        views = [DraftView(i, text, 3) for i, text in enumerate(self.texts())]
        proposals = drafter.propose(views)
        assert len(proposals) == len(views)
        assert all(isinstance(proposal, Proposal) for proposal in proposals)

    def test_proposes_something_where_it_should(self, drafter: Drafter) -> None:
        views = [DraftView(i, text, drafter.max_draft) for i, text in enumerate(self.texts())]
        assert any(proposal.tokens for proposal in drafter.propose(views))

    @pytest.mark.parametrize("max_draft", [1, 2, 7])
    def test_length_is_within_what_is_asked(self, drafter: Drafter, max_draft: int) -> None:
        for i, text in enumerate(self.texts()):
            (proposal,) = drafter.propose([DraftView(i, text, max_draft)])
            assert len(proposal.tokens) <= max_draft

    def test_tokens_are_of_the_vocabulary(self, drafter: Drafter, model: ModelSpec) -> None:
        for i, text in enumerate(self.texts()):
            (proposal,) = drafter.propose([DraftView(i, text, drafter.max_draft)])
            assert all(isinstance(token, int) and 0 <= token < model.vocab_size for token in proposal.tokens)

    def test_confidence_belongs_to_tokens(self, drafter: Drafter) -> None:
        for i, text in enumerate(self.texts()):
            (proposal,) = drafter.propose([DraftView(i, text, drafter.max_draft)])
            assert len(proposal.confidence) in (0, len(proposal.tokens))
            assert all(0.0 <= value <= 1.0 for value in proposal.confidence)

    @pytest.mark.parametrize("text", [[5], [5, 6]], ids=["one", "two"])
    def test_very_short_texts(self, drafter: Drafter, text: list[int]) -> None:
        (proposal,) = drafter.propose([DraftView(0, text, 4)])
        assert len(proposal.tokens) <= 4

    def test_does_not_change_the_tokens(self, drafter: Drafter) -> None:
        for i, text in enumerate(self.texts()):
            before = list(text)
            drafter.propose([DraftView(i, text, 4)])
            assert text == before

    def test_does_not_keep_the_tokens(self, drafter: Drafter) -> None:
        """The list belongs to the engine, which goes on changing it."""
        text = self.texts()[0]
        (first,) = drafter.propose([DraftView(0, text, 4)])
        copy = Proposal(tuple(first.tokens), tuple(first.confidence))
        text.clear()
        assert first == copy
        drafter.propose([DraftView(0, [9, 9, 9], 4)])

    def test_observe_and_forget_take_any_order(self, drafter: Drafter) -> None:
        drafter.forget(3)
        (proposal,) = drafter.propose([DraftView(0, self.texts()[0], 4)])
        drafter.observe(0, len(proposal.tokens), 0)
        drafter.observe(0, 0, 0)
        drafter.forget(0)
        drafter.forget(0)

    def test_index_used_again_starts_afresh(self, drafter: Drafter, model: ModelSpec) -> None:
        if self.learns:
            pytest.skip("learns from other sequences")
        one, two, *_ = self.texts()
        grow(drafter, 0, one)
        drafter.forget(0)
        assert grow(drafter, 0, two) == grow(self.make(model), 0, two)

    def test_sequences_do_not_mix(self, drafter: Drafter, model: ModelSpec) -> None:
        if self.learns:
            pytest.skip("learns from other sequences")
        texts = self.texts()
        alone = [grow(self.make(model), i, text) for i, text in enumerate(texts)]
        together: list[list[Proposal]] = [[] for _ in texts]
        for n in range(1, max(map(len, texts)) + 1):
            views = [DraftView(i, text[:n], 4) for i, text in enumerate(texts) if n <= len(text)]
            for view, proposal in zip(views, drafter.propose(views), strict=True):
                together[view.index].append(proposal)
        assert together == alone

    def test_one_by_one_equals_all_at_once(self, drafter: Drafter, model: ModelSpec) -> None:
        """A prompt arrives whole, generated text token by token, and after a preemption whole again."""
        if self.learns or not self.deterministic:
            pytest.skip("proposals depend on more than the tokens")
        for text in self.texts():
            assert grow(drafter, 0, text)[-1] == self.make(model).propose([DraftView(0, text, 4)])[0]
            drafter.forget(0)

    def test_same_calls_same_proposals(self, drafter: Drafter, model: ModelSpec) -> None:
        if not self.deterministic:
            pytest.skip("deterministic is False")
        for i, text in enumerate(self.texts()):
            assert grow(drafter, i, text) == grow(self.make(model), i, text)

    def test_random_traffic(self, drafter: Drafter, model: ModelSpec) -> None:
        rng = random.Random(0)
        live: dict[int, list[int]] = {}
        for _ in range(200):
            index = rng.randrange(4)
            if index in live and rng.random() < 0.1:
                drafter.forget(index)
                del live[index]
                continue
            text = live.setdefault(index, [rng.randrange(5) for _ in range(rng.randint(1, 20))])
            (proposal,) = drafter.propose([DraftView(index, text, rng.randint(0, 5))])
            n_accepted = rng.randint(0, len(proposal.tokens))
            drafter.observe(index, len(proposal.tokens), n_accepted)
            text += [*proposal.tokens[:n_accepted], rng.randrange(5)]
            assert all(0 <= token < model.vocab_size for token in proposal.tokens)


def grow(drafter: Drafter, index: int, text: Seq[int]) -> list[Proposal]:
    """Proposals as the text grows by one token per step; the list is the same object, as in the engine."""
    tokens: list[int] = []
    proposals: list[Proposal] = []
    for token in text:
        tokens.append(token)
        proposals += drafter.propose([DraftView(index, tokens, 4)])
    return proposals
