"""First-party plugins of Headrace, registered through the same entry point group as any other."""

from __future__ import annotations

headrace_api = 1
