"""Tool grammars of a family, compiled, and walked with texts in which special tokens may occur."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.contracts import Tokenizer
from headrace.dialogue import Tool, ToolChoice
from headrace.types import Grammar
from headrace_plugins.constraints.compiling import Compiler, Work
from headrace_plugins.constraints.options import ConstraintOptions
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Program
from headrace_plugins.dialects.family import Family

EOS = 256


class Bytes(Tokenizer):
    """A token for every byte, EOS, and these special tokens."""

    def __init__(self, specials: Seq[str] = ()) -> None:
        self.n_vocab = EOS + 1 + len(specials)
        self.bos_id = None
        self.eos_ids = frozenset({EOS})
        self._names = [b"<eos>", *(name.encode() for name in specials)]
        names = sorted(specials, key=len, reverse=True)
        self._found = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        pieces = self._found.split(text) if self._found and parse_special else [text]
        ids: list[int] = []
        for piece in pieces:
            name = piece.encode()
            ids += [EOS + self._names.index(name)] if parse_special and name in self._names else list(name)
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else self._names[token - EOS]

    def is_special(self, token: int) -> bool:
        return token >= EOS


class ToolGrammar:
    """What a family lets its models say where calls are required; specials: marks that are tokens of their own."""

    def __init__(
        self, family: Family, tools: Seq[Tool], choice: ToolChoice | None = None, specials: Seq[str] = ()
    ) -> None:
        choice = choice or ToolChoice("required")
        body = family.only_calls(tools, choice)
        self._tokenizer = Bytes(specials)
        self._program = compiled({"start": "body", "body": body}, self._tokenizer)

    def accepts(self, text: str) -> bool:
        return walked(self._program, self._tokenizer.encode(text, parse_special=True))


def compiled(document: Mapping[str, Any], tokenizer: Tokenizer) -> Program:
    compiler = Compiler(ConstraintOptions(), Vocabulary(tokenizer), ("llguidance",))
    return compiler.compile(Grammar("tagged", json.dumps(document)), Work(lambda: False, 60)).program


def walked(program: Program, ids: Seq[int]) -> bool:
    """Are these tokens, and then the end, allowed?"""
    walk = program.start()
    return all(walk.accept(token) for token in ids) and walk.complete()
