"""The GGUF backend under the same conformance classes as any other: tiny random models of four kinds of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.contracts import Executor, Tokenizer
from headrace.testing.conformance import ExecutorConformance, PluginConformance, TokenizerConformance
from headrace.testing.conformance.plugin import HEAVY

pytest.importorskip("headrace_gguf", reason="headrace-gguf is not installed")


class TestPlugin(PluginConformance):
    module = "headrace_gguf"
    heavy = (*HEAVY, "numpy", "pydantic", "gguf")


class Tiny(ExecutorConformance):
    arch = "llama"
    compare_tokens = True  # random weights leave no near ties between these prompts

    @pytest.fixture(autouse=True)
    def _model(self, tiny: Callable[..., str]) -> None:
        self.path = tiny(self.arch)

    def make(self) -> Executor:
        from gguf_driver import new_executor

        return new_executor(self.path)

    def break_next(self, executor: Executor) -> bool:
        """The library's decode reports a failure once, after it did its work."""
        context: Any = executor._context  # type: ignore[attr-defined]
        decode = context.decode

        def failing(*args: Any, **kwargs: Any) -> Any:
            context.decode = decode
            decode(*args, **kwargs)
            return 1

        context.decode = failing
        return True


@pytest.mark.gguf
class TestLlama(Tiny):
    pass


@pytest.mark.gguf
class TestMamba(Tiny):
    arch = "mamba"


@pytest.mark.gguf
class TestHybrid(Tiny):
    arch = "lfm2"


@pytest.mark.gguf
class TestSlidingWindow(Tiny):
    arch = "gemma3"


@pytest.mark.gguf
class TestTokenizer(TokenizerConformance):
    @pytest.fixture
    def tokenizer(self, tiny: Callable[..., str], opened: Callable[..., Any]) -> Tokenizer:
        return opened(tiny("llama")).tokenizer
