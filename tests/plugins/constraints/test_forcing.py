"""Forced tokens spell what the grammar demands, as the model's tokenizer does, and stop before what is not certain."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest

from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints.engines import SERVES
from headrace_plugins.constraints.forcing import Spelling
from headrace_plugins.constraints.router import Constraints
from headrace_plugins.constraints.vocabulary import Vocabulary


class Blank(ToyTokenizer):
    """Puts a blank in front of what it encodes, unless that begins with a line break."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return super().encode(text if text.startswith("\n") else " " + text, add_bos=add_bos)


class Lower(ToyTokenizer):
    """Changes text."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return super().encode(text.lower(), add_bos=add_bos)


class NoBytes(ToyTokenizer):
    """Lacks the tokens of bytes 0xC3 and 0xE7."""

    def token_bytes(self, token: int) -> bytes:
        return b"?" if token in (0xC3, 0xE7) else super().token_bytes(token)


class Contextual(ToyTokenizer):
    """Spells text that begins with "x" byte by byte."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode()) if text.startswith("x") else super().encode(text, add_bos=add_bos)


def ids(text: str) -> list[int]:
    return ToyTokenizer().encode(text, add_bos=False)


def test_text_is_spelt_as_the_tokenizer_does() -> None:
    for tokenizer in (ToyTokenizer(), Blank(), Lower()):
        assert Vocabulary(tokenizer).spell(b"at the end") == ids("at the end")
    assert Vocabulary(Lower()).spell(b"At THE end") == ids("At THE end"), "where it changes the text, longest first"
    assert Vocabulary(ToyTokenizer()).spell(b"\xf0\x9f\x98") == [264, 0x98], "no text, longest first"
    assert Vocabulary(NoBytes()).spell("ê".encode()) == [], "can't be spelt"
    assert Vocabulary(NoBytes()).spell("é".encode()) == [260]


def test_a_prepared_vocabulary_works_nothing_out_later() -> None:
    from functools import cached_property

    vocabulary = Vocabulary(ToyTokenizer())
    vocabulary.prepare()
    kept = {name for name, value in vars(Vocabulary).items() if isinstance(value, cached_property)}
    assert kept <= set(vars(vocabulary))


def test_vocabulary_by_bytes() -> None:
    vocabulary = Vocabulary(ToyTokenizer(272))
    text = vocabulary.text
    for prefix in (b"", b" ", b" a", b"\xf0", b"\xff", b"e", b"end", b"zz", "日".encode()):
        found = sorted(token for token, data in enumerate(text) if data and data.startswith(prefix))
        assert sorted(vocabulary.with_prefix(prefix)) == found
        longer = [token for token in found if len(text[token]) > len(prefix)]
        assert sorted(vocabulary.longer_than(prefix)) == longer
        assert vocabulary.has_longer(prefix) == bool(longer)
    assert vocabulary.special == {"<|eos|>": 256, "<|bos|>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
    assert [vocabulary.byte_tokens[byte] for byte in (0, 97, 255)] == [0, 97, 255]
    assert set(vocabulary.eos_words.tolist()[:9]) == {0, 1 + 8}
    assert {text[token] for token in vocabulary.special_ids} == {b""}


@pytest.mark.parametrize(
    ("forced", "ends", "tokens"),
    [
        ([b"at x"], False, ids("at x")),
        ([b"at th"], False, ids("at")),  # " the" would take the rest
        ([b"at th"], True, ids("at th")),
        ([b"at th", 258, b"x"], False, [*ids("at th"), 258, *ids("x")]),
        ([258], False, [258]),
        ([b"at the"], False, ids("at the")),
        ([b"\n"], False, []),
        ([b"x\xc3"], False, ids("x")),  # the character's end is not forced
        ([b"\xa9x"], False, []),  # it begins within a character
        ([b"en", 258], False, [*ids("en"), 258]),
        ([b"x\xc3", 258], False, ids("x")),
    ],
)
def test_tokens_that_are_certain(forced: Seq[bytes | int], ends: bool, tokens: list[int]) -> None:
    spelling = Spelling(Vocabulary(ToyTokenizer()))
    assert list(spelling.tokens(forced, ends)) == tokens
    assert list(spelling.tokens(forced, ends)) == tokens, "the second time they are looked up"


@pytest.mark.parametrize("name", SERVES)
def test_forced_text_is_what_the_grammar_demands(name: str) -> None:
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    tokenizer = ToyTokenizer()
    engine = Constraints(None, tokenizer, (name,))
    matcher = engine.compile(Grammar("regex", "at the end( of| and)[0-9]{2} the end")).start()
    said: list[int] = []
    wanted = iter(b" o42")
    while not matcher.done():
        forced = list(matcher.forced())
        for token in forced or [next(wanted)]:
            assert matcher.accept(token)
            said.append(token)
    # " and" is one token, so " " of " of" is not certain, and what follows is spelt from there on
    assert b"".join(map(tokenizer.token_bytes, said)) == b"at the end of42 the end"
    assert 266 in said
    assert next(wanted, None) is None


@pytest.mark.parametrize("name", SERVES)
def test_the_queue_is_restored_by_rollback(name: str) -> None:
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    engine = Constraints(None, ToyTokenizer(), (name,))
    matcher = engine.compile(Grammar("regex", "the end and[ab] the end")).start()
    queue = list(matcher.forced())
    assert len(queue) >= 3
    for n in range(len(queue)):
        assert list(matcher.forced()) == queue[n:]
        assert not matcher.accept(ord("#")), "nothing else is accepted"
        assert matcher.accept(queue[n])
    matcher.rollback(len(queue) - 1)
    assert list(matcher.forced()) == queue[1:]
    for token in queue[1:]:
        assert matcher.accept(token)
    assert list(matcher.forced()) == []
    assert matcher.accept(ord("a"))
    assert matcher.forced()


@pytest.mark.parametrize("name", SERVES)
def test_the_queue_is_kept_to(name: str) -> None:
    """Spelt anew behind its first token, the text would have other tokens."""
    pytest.importorskip(SERVES[name].package, reason=f"the engine {name} is not installed")
    matcher = Constraints(None, Contextual(), (name,)).compile(Grammar("regex", "x the end[ab]!")).start()
    queue = list(matcher.forced())
    assert queue == list(b"x the end")[: len(queue)]
    assert len(queue) > 5
    for n, token in enumerate(queue):
        assert list(matcher.forced()) == queue[n:]
        assert matcher.accept(token)


@pytest.mark.parametrize("ending", ["\u00ea\u00eb", "\u00ea\u7530"])
def test_rollback_leaves_a_dead_end(ending: str) -> None:
    """Of the first two characters the first byte is forced. llguidance never leaves an error state; its walk does."""
    pytest.importorskip("llguidance", reason="the engine llguidance is not installed")
    from headrace_plugins.constraints.llguidance_engine import LLGuidance

    vocabulary = Vocabulary(NoBytes())
    walk = LLGuidance(vocabulary).compile_text(f'start: "a" ("b" | "x" /[{ending}]/)').start()
    bits = np.zeros(vocabulary.n_words + 1, np.int32)
    assert walk.accept(ord("a"))
    walk.fill(bits)
    before = bits.copy()
    assert before.any()
    assert walk.accept(ord("x"))
    bits[:] = -1
    walk.fill(bits)
    assert not bits.any(), "no token of the vocabulary goes on"
    assert not walk.done()
    assert not walk.complete()
    walk.rollback(1)
    walk.fill(bits)
    assert (bits == before).all()
    assert walk.accept(ord("b"))
    assert walk.done()
