"""The constraint engines of this package: `auto`, or one of the libraries alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

from headrace.contracts import Compiled, ConstraintEngine, Tokenizer
from headrace.types import Grammar
from headrace_plugins.constraints.cache import CompileCache
from headrace_plugins.constraints.compiling import Compiler, Work
from headrace_plugins.constraints.engines import SERVES
from headrace_plugins.constraints.forcing import Forcing, Spelling
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.vocabulary import Vocabulary

KEY_BYTES = 600
"""What a cached grammar takes beside its text and its program."""


class Constraints(ConstraintEngine):
    """Compiles grammars with the first engine that enforces all of them, and keeps them.

    Nothing is imported, and no vocabulary read, before the first grammar comes.
    """

    def __init__(
        self, options: ConstraintOptions | None, tokenizer: Tokenizer, engines: Seq[str] = tuple(SERVES)
    ) -> None:
        self._options = options or ConstraintOptions()
        self._tokenizer, self._engines = tokenizer, engines
        self._cache: CompileCache[Grammar] = CompileCache(self._options.cache_memory)
        self._lock = threading.Lock()
        self._ready: tuple[Compiler, Spelling] | None = None

    def compile(self, grammar: Grammar, cancelled: Callable[[], bool] = lambda: False) -> Compiled:
        size = len(grammar.text) * 4 + KEY_BYTES
        return self._cache.get(grammar, size, lambda unwanted: self._make(grammar, unwanted), cancelled)

    def close(self) -> None:
        with self._lock:
            ready = self._ready
        if ready is not None:
            ready[0].close()
        self._cache.clear()

    def _make(self, grammar: Grammar, cancelled: Callable[[], bool]) -> Compiled:
        compiler, spelling = self._parts()
        made = compiler.compile(grammar, Work(cancelled, self._options.compile_timeout))
        return Forcing(made.program, spelling, self._options.jump_forward)

    def _parts(self) -> tuple[Compiler, Spelling]:
        with self._lock:
            if self._ready is None:
                vocabulary = Vocabulary(self._tokenizer)
                vocabulary.prepare()
                self._ready = Compiler(self._options, vocabulary, self._engines), Spelling(vocabulary)
            return self._ready


def auto(options: ConstraintOptions | None, tokenizer: Tokenizer) -> Constraints:
    """Whatever is installed: llguidance first, what it can't serve goes to xgrammar."""
    return Constraints(options, tokenizer)


def llguidance(options: ConstraintOptions | None, tokenizer: Tokenizer) -> Constraints:
    return Constraints(options, tokenizer, ("llguidance",))


def xgrammar(options: ConstraintOptions | None, tokenizer: Tokenizer) -> Constraints:
    return Constraints(options, tokenizer, ("xgrammar",))
