"""Where Headrace keeps files between runs. Nothing in there is precious: whoever reads it can make it again."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.textfile import expanded


def cache_home() -> Path:
    """`$HEADRACE_HOME`, else `headrace` in the user's cache folder. Absolute; perhaps not there yet.

    `scripts/setup_env.py` says the same rule again: it runs before there is a headrace to import.
    """
    if home := os.environ.get("HEADRACE_HOME"):
        return expanded(home).absolute()
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache").absolute() / "headrace"
