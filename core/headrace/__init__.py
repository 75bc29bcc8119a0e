"""Headrace: a plugin-based inference framework for language models. Importing it loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "LLM": "headrace.llm",
    "Chat": "headrace.chat",
    "SamplingParams": "headrace.types",
    "Grammar": "headrace.types",
    "Output": "headrace.types",
    "HeadraceError": "headrace.errors",
    "Tool": "headrace.tools",
    "tool": "headrace.tools",
    "Pipeline": "headrace.pipeline",
    "hookimpl": "headrace.hooks",
}

__all__ = [
    "LLM", "Chat", "Grammar", "HeadraceError", "Output", "Pipeline", "SamplingParams", "Tool", "__version__",
    "hookimpl", "tool",
]  # fmt: skip

if TYPE_CHECKING:
    from headrace.chat import Chat
    from headrace.errors import HeadraceError
    from headrace.hooks import hookimpl
    from headrace.llm import LLM
    from headrace.pipeline import Pipeline
    from headrace.tools import Tool, tool
    from headrace.types import Grammar, Output, SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
