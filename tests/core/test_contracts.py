"""Contracts refuse a class that core would never call right, when the class is defined."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from headrace.contracts import CONTRACTS, Contract, Drafter, Executor, KVSpace, Matcher, Observer, Store
from headrace.types import DraftView, Proposal


def test_misspelt_method_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"Mine\.propos is not part of Drafter.*did you mean 'propose'\?"):

        class Mine(Drafter):
            def propos(self, views: Seq[DraftView]) -> Seq[Proposal]:
                return []


def test_renamed_optional_method_is_refused() -> None:
    """The dangerous kind: the class would work, its method would silently never run."""
    with pytest.raises(TypeError, match="did you mean 'on_finish'"):

        class Mine(Observer):
            def on_finished(self, stats: Any) -> None: ...


def test_unknown_public_method_is_refused_without_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"frobnicate is not part of Store, core never calls it: Helpers start"):

        class Mine(Store):
            def frobnicate(self) -> None: ...


def test_missing_parameter_is_named_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"parameter 'accepted' is missing\. did you mean 'acepted'\?"):

        class Mine(Drafter):
            def observe(self, index: int, proposed: int, acepted: int) -> None: ...


def test_parameter_that_core_does_not_pass_is_refused() -> None:
    with pytest.raises(TypeError, match="parameter 'extra' has no default"):

        class Mine(Drafter):
            def forget(self, index: int, extra: int) -> None: ...


def test_swapped_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="another order"):

        class Mine(Drafter):
            def observe(self, index: int, accepted: int, proposed: int) -> None: ...


def test_a_default_that_core_relies_on_has_to_be_there() -> None:
    with pytest.raises(TypeError, match="parameter 'use_prefix' has no default"):

        class Mine(KVSpace):
            def admit(self, seq: Any, ops: Any, use_prefix: bool) -> bool:
                return True


def test_parameters_that_core_passes_by_position_may_not_be_keywords_only() -> None:
    with pytest.raises(TypeError, match="parameter 'accepted' is keyword-only"):

        class Mine(Drafter):
            def observe(self, index: int, proposed: int, *, accepted: int) -> None: ...


def test_message_names_the_class_and_both_signatures() -> None:
    with pytest.raises(TypeError) as caught:

        class Mine(Store):
            def put(self, items: Any) -> int:
                return 0

    text = str(caught.value)
    assert "Mine.put(self, items: 'Any') -> 'int'" in text
    assert "Store.put(self, items: 'Seq[tuple[bytes, bytes]]', ttl_s: 'float')" in text


def test_what_is_allowed() -> None:
    """Helpers, attributes, extra parameters with a default, *args/**kwargs, properties and static methods of core."""

    class Mine(Drafter):
        max_draft = 7
        rate = 0.5

        def propose(self, views: Seq[DraftView], verbose: bool = False) -> Seq[Proposal]:
            return [self._one(view) for view in views]

        def observe(self, *args: Any, **kwargs: Any) -> None: ...

        def _one(self, view: DraftView) -> Proposal:
            return Proposal()

    assert Mine().propose([DraftView(0, [1], 2)]) == [Proposal()]


def test_subclass_of_a_subclass_is_checked_against_the_contract() -> None:
    class Mine(Drafter):
        def propose(self, views: Seq[DraftView]) -> Seq[Proposal]:
            return []

    with pytest.raises(TypeError, match="is not part of Drafter"):

        class Finer(Mine):
            def forgett(self, index: int) -> None: ...


def test_missing_abstract_method_can_not_be_made() -> None:
    class Mine(Store):
        def close(self) -> None: ...

    with pytest.raises(TypeError, match=r"abstract.*(get|probe|put)"):
        Mine()  # type: ignore[abstract]


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_every_contract_documents_its_methods(name: str) -> None:
    contract = CONTRACTS[name]
    assert Contract in contract.__bases__
    for method, value in vars(contract).items():
        if inspect.isroutine(value) and not method.startswith("_") and contract not in (Executor, KVSpace):
            assert inspect.getdoc(value), f"{name}.{method} has no docstring"


class Script(Matcher):
    """Allows one token after the other of a script; `fill` writes the state, so that tests see which one it was."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.at = script, 0

    def fill(self, bits: Any) -> None:
        bits[:] = self.at

    def accept(self, token: int) -> bool:
        allowed = self.script[self.at] == token
        self.at += allowed
        return allowed

    def rollback(self, n: int) -> None:
        self.at -= n

    def done(self) -> bool:
        return self.at == len(self.script)


@pytest.mark.parametrize(
    ("drafts", "rows"),
    [([], 1), ([1], 2), ([1, 2], 3), ([1, 9, 3], 2), ([9], 1), ([1, 2, 3], 3), ([1, 2, 3, 4], 3)],
)
def test_default_fill_path(drafts: list[int], rows: int) -> None:
    """Stops after the first refused draft and where the grammar is complete; the state comes back."""
    matcher = Script([1, 2, 3])
    bits = np.full((1 + len(drafts), 2), -1, np.int32)
    assert matcher.fill_path(drafts, bits) == rows
    assert bits[:, 0].tolist() == [*range(rows), *[-1] * (1 + len(drafts) - rows)]
    assert matcher.at == 0
