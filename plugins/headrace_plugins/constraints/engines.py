"""The engines, and what each can serve.

`SERVES` is what the tests of `tests/plugins/constraints/test_engines.py` found, not what the engines' documents say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Rules
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Program


class Engine(Protocol):
    """One library, for one vocabulary. Any thread."""

    name: str

    def print(self, rules: Rules) -> str:
        """The grammar as the library reads it. Raises RequestError for what it can't say (HR-CONSTRAINT-03 and -04), or
        where nothing matches (-07)."""
        ...

    def compile_text(self, text: str) -> Program:
        """Raises RequestError: HR-CONSTRAINT-02 for what can't be read, -04 beyond the library's limits, -07 where
        nothing matches."""
        ...


_READ = ("json_schema", "json_object", "regex", "ebnf", "gbnf", "choice", "tagged")
"""Kinds that become `Rules`, which every engine prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    kinds: tuple[str, ...]
    package: str
    install: str
    complements: bool
    """And, Not and large counts inside a regex are the library's own work. Else they become automata, and those that
    need too many states are refused with HR-CONSTRAINT-04."""


SERVES: Mapping[str, Serves] = {
    "llguidance": Serves(
        kinds=(*_READ, "lark"), package="llguidance", install="pip install 'headrace[constraints]'", complements=True
    ),
    "xgrammar": Serves(kinds=_READ, package="xgrammar", install="pip install 'headrace[xgrammar]'", complements=False),
}
"""In the order in which "auto" asks them."""


def installed(name: str) -> bool:
    return find_spec(SERVES[name].package) is not None


def load_engine(name: str, vocabulary: Vocabulary) -> Engine:
    """Import an engine and give it the vocabulary. Raises RequestError HR-CONSTRAINT-01 when that fails."""
    try:
        if name == "llguidance":
            from headrace_plugins.constraints.llguidance_engine import LLGuidance

            return LLGuidance(vocabulary)
        from headrace_plugins.constraints.xgrammar_engine import XGrammar

        return XGrammar(vocabulary)
    except ImportError as error:
        raise RequestError(
            "HR-CONSTRAINT-01", f"the constraint engine '{name}' can't be imported: {error}", SERVES[name].install
        ) from error
