"""Plugin modules written as text inside a test."""

from __future__ import annotations

from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

HEAD = "from headrace.hooks import *\nfrom headrace.hooks import hookimpl\nheadrace_api = 1\n"
"""What every plugin starts with; the star brings the records."""


class _Text(InspectLoader):
    def __init__(self, source: str) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        return self.source


def plugin_module(source: str, name: str = "fake") -> ModuleType:
    """A module from its source, not put into sys.modules."""
    loader = _Text(HEAD + source)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
