"""GGUF backend."""

from __future__ import annotations

headrace_api = 1
