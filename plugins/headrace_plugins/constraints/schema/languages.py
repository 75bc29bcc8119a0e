"""Questions about regular languages, remembered while one schema is read."""

from __future__ import annotations

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import Language
from headrace_plugins.constraints.automata import is_empty as find_empty
from headrace_plugins.constraints.regex import ANY_TEXT, NOTHING, And, Not, Regex

MAX_STATES = 2_000
"""Above this many a language is taken to hold something: shapes stay exact, some of them match nothing."""


class Languages:
    def __init__(self) -> None:
        self._languages: dict[Regex, Language] = {}
        self._empty: dict[Regex, bool] = {}
        self._matches: dict[tuple[Regex, str], bool] = {}

    def matches(self, regex: Regex, text: str) -> bool:
        if regex == ANY_TEXT:
            return True
        key = (regex, text)
        known = self._matches.get(key)
        if known is None:
            language = self._languages.get(regex)
            if language is None:
                language = self._languages[regex] = Language(regex)
            known = self._matches[key] = language.matches(text)
        return known

    def is_empty(self, regex: Regex) -> bool:
        """Whether surely no text matches."""
        if not isinstance(regex, And | Not):
            return regex == NOTHING
        known = self._empty.get(regex)
        if known is None:
            try:
                known = find_empty(regex, MAX_STATES)
            except RequestError:
                known = False
            self._empty[regex] = known
        return known
