"""What `headrace chat` draws on a terminal while an answer grows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.live import Live

from headrace_plugins.commands.chat import _Screen


@pytest.mark.parametrize(
    "text",
    ["word\n" * 400, "paragraph\n\n" * 60, "# head\n" * 23, "\u4e16\u754c" * 2000, "long " * 2000, "```\ncode\n"],
    ids=["lines", "paragraphs", "headings", "wide", "wrapped", "short"],
)
def test_end_and_speed_stay_on_the_screen(text: str) -> None:
    screen, out = _Screen(), io.StringIO()
    console = screen._console = Console(width=80, height=24, force_terminal=True, color_system=None, file=out)
    with Live(console=console, auto_refresh=False) as live:
        live.update(screen._running(text + "last", 5.0), refresh=True)
        drawn = out.getvalue()
    rows = drawn.splitlines()
    assert len(rows) <= 24
    assert "5.0 tok/s" in rows[-1]
    assert "last" in drawn
