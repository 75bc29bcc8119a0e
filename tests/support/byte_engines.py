"""llguidance and xgrammar over the 256 bytes, one special token and EOS: which texts a grammar allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from headrace_plugins.constraints.ebnf import print_ebnf
from headrace_plugins.constraints.grammar import Rules
from headrace_plugins.constraints.lark import print_lark

EOS = 256
TOOL = 257
SPECIAL = {"<tool>": TOOL}
Accepts = Callable[[str | bytes | list[int]], bool]


class _Bytes:
    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>", b"<tool>"]
        self.special_token_ids = [EOS, TOOL]
        self.eos_token_id = EOS
        self.bos_token_id = None
        self.unk_token_id = None
        self.vocab_size = len(self.tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _llguidance_tokenizer():
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


@cache
def _xgrammar_compiler():
    import xgrammar

    tokens = [*_Bytes().tokens[:EOS], b"\xff<eos>", b"\xff<tool>"]  # no text stands for special tokens
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=258, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _tokens(text: str | bytes | list[int]) -> list[int]:
    return text if isinstance(text, list) else list(text.encode() if isinstance(text, str) else text)


def of_lark(text: str) -> Accepts:
    """Raises ValueError with llguidance's message for a grammar that it can't read."""
    llguidance = pytest.importorskip("llguidance", reason="needs headrace[constraints]")
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    first = llguidance.LLMatcher(_llguidance_tokenizer(), grammar, log_level=0)
    if first.is_error():
        raise ValueError(first.get_error())

    def accepts(text: str | bytes | list[int]) -> bool:
        matcher = llguidance.LLMatcher(_llguidance_tokenizer(), grammar, log_level=0)
        tokens = _tokens(text)
        taken = matcher.try_consume_tokens(tokens)
        assert not matcher.is_error(), matcher.get_error()
        return taken == len(tokens) and matcher.is_accepting()

    return accepts


def of_ebnf(text: str) -> Accepts:
    xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar, which comes with torch")
    compiled = _xgrammar_compiler().compile_grammar(xgrammar.Grammar.from_ebnf(text))

    def accepts(text: str | bytes | list[int]) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(token) for token in _tokens(text)) and matcher.is_completed()

    return accepts


def engine(name: str, rules: Rules) -> Accepts:
    return of_lark(print_lark(rules, SPECIAL)) if name == "llguidance" else of_ebnf(print_ebnf(rules, SPECIAL))


ENGINES = ("llguidance", "xgrammar")
