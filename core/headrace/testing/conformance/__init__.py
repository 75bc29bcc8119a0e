"""One class per contract. Subclass it in your tests and say how to make yours:

    from headrace.testing.conformance import StoreConformance

    class TestRedisStore(StoreConformance):
        def make(self):
            return RedisStore(Options(url="redis://localhost"))

Needs pytest. Headrace's own plugins are held to the same classes.
"""

from __future__ import annotations

from headrace.testing.conformance.constraint import ConstraintConformance
from headrace.testing.conformance.drafter import DrafterConformance
from headrace.testing.conformance.executor import ExecutorConformance
from headrace.testing.conformance.kernel import KernelConformance
from headrace.testing.conformance.kvspace import KVSpaceConformance
from headrace.testing.conformance.observer import ObserverConformance
from headrace.testing.conformance.plugin import PluginConformance
from headrace.testing.conformance.store import StoreConformance
from headrace.testing.conformance.strategy import StrategyConformance
from headrace.testing.conformance.tokenizer import TokenizerConformance

__all__ = [
    "ConstraintConformance",
    "DrafterConformance",
    "ExecutorConformance",
    "KVSpaceConformance",
    "KernelConformance",
    "ObserverConformance",
    "PluginConformance",
    "StoreConformance",
    "StrategyConformance",
    "TokenizerConformance",
]
