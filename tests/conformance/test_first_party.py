"""Our own plugin module is held to the same class as any other, and must be even lighter."""

from __future__ import annotations

from headrace.testing.conformance import PluginConformance
from headrace.testing.conformance.plugin import HEAVY


class TestBuiltin(PluginConformance):
    module = "headrace_plugins"
    heavy = (*HEAVY, "numpy", "pydantic", "asyncio", "jinja2", "rich", "huggingface_hub")
