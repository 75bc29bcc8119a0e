"""Questions about regular languages, remembered while one schema is read."""

from __future__ import annotations

from headrace_plugins.constraints.automata import Language, surely_empty
from headrace_plugins.constraints.regex import ANY_TEXT, NOTHING, And, Not, Regex


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
        """Whether surely no text matches; shapes stay exact where that is hard to tell, some of them match nothing."""
        if not isinstance(regex, And | Not):
            return regex == NOTHING
        known = self._empty.get(regex)
        if known is None:
            known = self._empty[regex] = surely_empty(regex)
        return known
