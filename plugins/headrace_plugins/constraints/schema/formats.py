"""Formats that can be asserted, as patterns. Everything else is refused by name."""

from __future__ import annotations

from headrace_plugins.constraints.regex import Regex


def format_of(name: str) -> Regex | None:
    """The language of a format; None: it can't be asserted."""
    return None
