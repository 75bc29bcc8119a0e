"""Free text, reasoning and bodies in one grammar, over programs that list their texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toy_programs import Words

from headrace.contracts import Compiled, ConstraintEngine, Matcher, Tokenizer
from headrace.errors import HeadraceError, RequestError
from headrace.testing.conformance import ConstraintConformance
from headrace.testing.conformance.constraint import allowed, mask
from headrace.testing.toy import ToyTokenizer
from headrace.types import Grammar
from headrace_plugins.constraints.forcing import Forcing, Spelling
from headrace_plugins.constraints.marks import Marks
from headrace_plugins.constraints.tagged import compile_after, compile_tagged
from headrace_plugins.constraints.vocabulary import Vocabulary

THINK = {"begin": None, "end": "</think>", "budget": None}
OPTIONAL = {**THINK, "begin": "<think>"}
CALLS = ["<tool>a</tool>", "<tool>bb</tool>", "<tool>a</tool>\n<tool>bb</tool>"]
MARKED = [[["<|im_start|>"], text] for text in ("call a;", "call bb;")]
"""Begins with a special token."""
EOS = 256
START = 258
"""<|im_start|>"""


class Pieces(ToyTokenizer):
    """The toy's, with tokens that lie across marks."""

    PIECES = (
        b"</", b"</thi", b"nk>", b"</think>", b"nk>{", b"k>\n", b"<to", b"ol>", b"ol>a", b"ol>x", b"x<tool>b",
        b" <tool>", b"</tool>", b"</tool>\n", b"\n<tool>", b"<think>", b" <thi", b"think>so", b"yes", b'"yes"',
        b"</think>\n\n{", b"<|im_", b"start|>", b"ink", b"<t", b"<think></think>n",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__(272 + len(self.PIECES))
        self._bytes[272:] = self.PIECES
        self._pieces = sorted(
            ((piece, token) for token, piece in enumerate(self._bytes) if token >= 260), key=lambda item: -len(item[0])
        )


class Engine(ConstraintEngine):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._spelling = Spelling(self._vocabulary)

    def compile(self, grammar: Grammar, cancelled: Callable[[], bool] = lambda: False) -> Compiled:
        def words(texts: Any) -> Words:
            return Words(texts, self._vocabulary)

        if grammar.kind == "words":
            assert grammar.trigger is not None
            body = words(json.loads(grammar.text))
            program = compile_after(grammar.trigger, grammar.trigger_budget, body, self._vocabulary)
        elif grammar.kind == "tagged":
            program = compile_tagged(grammar.text, self._vocabulary, words)
        else:
            raise RequestError("HR-CONSTRAINT-01", grammar.kind)
        return Forcing(program, self._spelling)


def tagged(**document: Any) -> Grammar:
    return Grammar("tagged", json.dumps(document))


def start(grammar: Grammar, tokenizer: Tokenizer | None = None) -> Matcher:
    return Engine(tokenizer or Pieces()).compile(grammar).start()


def ids(text: str) -> list[int]:
    """The fewest tokens, special ones by name."""
    return Pieces().encode(text, parse_special=True)


def takes(matcher: Matcher, tokens: list[int]) -> int:
    """How many of the tokens it accepts; mask and accept agree on each."""
    tokenizer = Pieces()
    for n, token in enumerate(tokens):
        if matcher.done():
            return n
        permitted = token in allowed(matcher, tokenizer)
        assert matcher.accept(token) == permitted
        if not permitted:
            return n
    return len(tokens)


def goes_on(matcher: Matcher, text: bytes) -> bool:
    """Nothing but this text may follow, in some tokens, the last of which may go on behind it."""
    pieces = [Pieces().token_bytes(token) for token in allowed(matcher, Pieces())]
    return bool(pieces) and all(text.startswith(piece) or piece.startswith(text) for piece in pieces)


def passes(grammar: Grammar, text: str | list[int]) -> bool:
    """May the answer be this text, byte by byte? Forced tokens are taken where they are part of it."""
    tokenizer, matcher = Pieces(), start(grammar)
    tokens = list(text) if isinstance(text, list) else list(text.encode())
    while tokens and not matcher.done():
        forced = matcher.forced()
        token = forced[0] if forced else tokens[0]
        data = [token] if token == tokens[0] else list(tokenizer.token_bytes(token))
        if tokens[: len(data)] != data or not matcher.accept(token):
            return False
        tokens = tokens[len(data) :]
    return not tokens and (matcher.done() or EOS in allowed(matcher, tokenizer))


FREE = tagged(triggers=["<tool>"], body=CALLS)
SPECIAL = tagged(triggers=["<|im_start|>"], body=MARKED)
THOUGHT = tagged(think=THINK, start="body", body=['{"a":1}', '"yes"', '"no"'])
GRAMMARS = {
    "free": FREE,
    "special": SPECIAL,
    "one call": tagged(triggers=["<tool>"], most=1, body=CALLS),
    "no call": tagged(triggers=["<tool>", "<|im_start|>"], most=0),
    "two triggers": tagged(triggers=["<tool>", "<|im_start|>"], body=[*CALLS, *MARKED]),
    "body": tagged(start="body", body=CALLS),
    "thought, body": THOUGHT,
    "thought, free": tagged(think=THINK, triggers=["<tool>"], body=CALLS),
    "thought, budget": tagged(think={**THINK, "budget": 3}, triggers=["<tool>"], body=CALLS),
    "no thought": tagged(think={**THINK, "budget": 0}, start="body", body=["yes", "no"]),
    "may think, free": tagged(think=OPTIONAL, triggers=["<tool>"], body=CALLS),
    "may think, body": tagged(think={**OPTIONAL, "budget": 4}, start="body", body=["yes", "<try", "  no"]),
    "body like a thought": tagged(think=OPTIONAL, start="body", body=["<think></think>no", "yes"]),
    "special end": tagged(think={"begin": "<|bos|>", "end": "<|im_start|>", "budget": 5}, start="body", body=["yes"]),
    "after a trigger": Grammar("words", '["yes", "no"]', trigger="</think>"),
    "thought alone": tagged(think={**OPTIONAL, "budget": 2}),
}


class TestConformance(ConstraintConformance):
    def make(self, tokenizer: Tokenizer) -> ConstraintEngine:
        return Engine(tokenizer)

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return Pieces()

    def cases(self) -> list[tuple[Grammar, list[str], list[str]]]:
        call, end = CALLS[0], "</think>"
        texts: dict[str, tuple[list[str], list[str]]] = {
            "free": (
                ["hi", call, f"x{call}y{CALLS[1]}", f"{call}\nand more", CALLS[2]],
                ["<tool>", "x<tool>c", "a<tool>a"],
            ),
            "special": (["<|im_start", "hi"], ["<|im_start|>"]),
            "one call": ([call, f"{call} done", CALLS[2]], [f"{call}, {call}"]),
            "no call": (["hi <tool", "<|im_start"], ["<tool>", "x<tool>a</tool>", "<|im_start|>"]),
            "two triggers": (["hi", f"x{call}y"], ["<|im_start|>", "<tool>c"]),
            "body": ([call, CALLS[2]], ["", "hi", f" {call}", f"{call}x"]),
            "thought, body": (
                [f'hm{end}"yes"', f'{end}{{"a":1}}'],
                ['"yes"', f"hm{end}", f'hm{end}"yes"x', f'{end} "no"'],
            ),
            "thought, free": ([f"so <tool>x{end}then", f"{end}{call}"], ["so", "<tool>", f"{end}<tool>x"]),
            "thought, budget": ([f"abc{end}hi", f"a{end}", f"ab{end}{call}"], ["abcd", f"abcd{end}"]),
            "no thought": ([f"{end}yes"], ["yes", f"a{end}yes"]),
            "may think, free": (["hi", f" <think>a{end}b", f"<think>{end}{call}", call], ["<think>", f"<think>{call}"]),
            "may think, body": (
                ["yes", "<try", "  no", f"  <think>a{end}yes"],
                ["", " ", " yes", f"<think>abcde{end}yes"],
            ),
            "body like a thought": (["yes", f"<think>{end}yes"], ["no", f"<think>{end}no"]),
            "special end": (["yes"], ["<|im_start|>yes", "no"]),
            "after a trigger": ([f"what{end}no"], ["no", f"what{end}", f"{end} no"]),
            "thought alone": (["hi", f"<think>ab{end}hi"], ["<think>", "<think>a", f"<think>abc{end}"]),
        }
        return [(GRAMMARS[name], good, bad) for name, (good, bad) in texts.items()]

    def bad_grammars(self) -> list[Grammar]:
        return [
            Grammar("no-such-kind", "x"),
            Grammar("tagged", ""),
            Grammar("tagged", "[]"),
            Grammar("tagged", "[" * 100_000),
            tagged(start="body"),
            tagged(start="later", body=["x"]),
            tagged(triggers=["a"]),
            tagged(triggers="a", body=["a"]),
            tagged(triggers=["a", "a"], body=["a"]),
            tagged(triggers=[""], body=["a"]),
            tagged(triggers=["\ud800"], body=["a"]),
            tagged(triggers=["b"], body=["a"]),
            tagged(body=["a"]),
            tagged(think={"begin": None}),
            tagged(think={"end": "x", "budget": -1}),
            tagged(think={"end": "x", "budget": True}),
            tagged(think=[]),
            tagged(most=1.5),
            tagged(trigers=["a"]),
        ]


def test_what_is_wrong_is_named_with_its_place() -> None:
    for grammar, wanted in (
        (tagged(trigers=["a"]), "at /trigers): there is no such key. did you mean 'triggers'?"),
        (tagged(think={"end": ""}), "at /think/end"),
        (tagged(triggers=["<tool>", "b"], body=CALLS), "trigger 'b' (at /triggers/1)"),
    ):
        with pytest.raises(HeadraceError, match="HR-CONSTRAINT-02") as caught:
            start(grammar)
        assert wanted in str(caught.value)


# --- triggers --------------------------------------------------------------------------------------------------------


def test_a_trigger_in_any_cut() -> None:
    """However tokens cut it, the body behind it is held to its grammar."""
    for tokens in (
        [*ids("x"), *b"<tool>"],
        ids("x<to") + ids("ol>"),
        ids("x <tool>"),
        [*ids("x<"), *b"tool>"],
    ):
        matcher = start(FREE)
        assert takes(matcher, tokens) == len(tokens)
        assert allowed(matcher, Pieces()) == {ord("a"), ord("b")}


def test_a_trigger_and_more_in_one_token() -> None:
    matcher, (good,), (bad,) = start(FREE), ids("ol>a"), ids("ol>x")
    assert takes(matcher, ids("<to")) == 1
    assert {good, bad} & allowed(matcher, Pieces()) == {good}, "the body refuses the rest of one"
    assert matcher.accept(good)
    assert goes_on(matcher, b"</tool>"), "then the body goes on behind the rest"
    (across,) = ids("x<tool>b")
    matcher = start(FREE)
    matcher.accept(across)
    assert matcher.forced()[0] == ord("b")


def test_a_special_trigger_is_its_token_and_can_not_be_spelt() -> None:
    matcher = start(SPECIAL)
    assert takes(matcher, [*ids("so "), START]) == 4
    assert list(matcher.forced()) == ids("call"), "what follows might begin with a blank"
    assert not passes(SPECIAL, "so <|im_start|>")
    assert passes(SPECIAL, [*b"so ", START, *b"call a;", *b" ok"])
    begun = start(SPECIAL)
    assert takes(begun, ids("<|im_")) == 1
    assert ids("start|>")[0] not in allowed(begun, Pieces())


def test_no_trigger_behind_the_last_body() -> None:
    once = tagged(triggers=["<|im_start|>"], most=1, body=MARKED)
    call = [START, *b"call a;"]
    assert passes(once, [*call, *b" and"])
    assert not passes(once, [*call, *call])
    assert passes(SPECIAL, [*call, *call])
    assert passes(tagged(triggers=["<tool>"], most=2, body=CALLS[:2]), f"{CALLS[0]}{CALLS[1]}!")
    assert not passes(tagged(triggers=["<tool>"], most=2, body=CALLS[:2]), f"{CALLS[0]}{CALLS[1]}{CALLS[0]}")


def test_a_body_that_may_go_on_or_be_over() -> None:
    """Behind the first call the text may go on with another one of the same body, or with free text."""
    for text in (CALLS[2], f"{CALLS[0]}\nmore", f"{CALLS[0]}\n<to", f"{CALLS[0]}\n{CALLS[0]}"):
        assert passes(FREE, text) == (text != f"{CALLS[0]}\n{CALLS[0]}"), text
    matcher = start(FREE)
    assert takes(matcher, [*CALLS[0].encode()[:-7], *ids("</tool>"), *ids("\n<tool>")]) == len(CALLS[0]) - 7 + 2
    assert matcher.forced()[0] == ord("b")


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(4))
def test_any_text_that_is_allowed_is_right(name: str, seed: int) -> None:
    """Random walks to the end; then the text is judged as a whole, by regular expressions."""
    rng, tokenizer = random.Random(seed), Pieces()
    matcher, text = start(GRAMMARS[name]), b""
    while not matcher.done() and len(text) < 400:
        choices = sorted(allowed(matcher, tokenizer))
        marked = [t for t in choices if re.search(rb"[<>t]", tokenizer.token_bytes(t))]
        may_end = EOS in choices and rng.random() < 0.05
        token = EOS if may_end else rng.choice(marked if marked and rng.random() < 0.8 else choices)
        assert matcher.accept(token)
        if token not in tokenizer.eos_ids:
            text += tokenizer.token_bytes(token)
    if matcher.done():
        assert judged(name, text), text
        assert matcher.verdict() is None


def judged(name: str, text: bytes) -> bool:
    calls = rb"(?:<tool>a</tool>\n<tool>bb</tool>|<tool>a</tool>|<tool>bb</tool>)"
    free = rb"(?:(?!<tool>)[\s\S])*"
    marked = rb"<\|im_start\|>call (?:a|bb);"
    unmarked = rb"(?:(?!<\|im_start\|>)[\s\S])*"
    neither = rb"(?:(?!<tool>|<\|im_start\|>)[\s\S])*"
    think = rb"(?:(?!</think>)[\s\S])*</think>"
    answers = rb"%s(?:%s%s)*" % (free, calls, free)
    forms = {
        "free": answers,
        "special": rb"%s(?:%s%s)*" % (unmarked, marked, unmarked),
        "one call": rb"%s(?:%s%s)?" % (free, calls, free),
        "no call": neither,
        "two triggers": rb"%s(?:(?:%s|%s)%s)*" % (neither, calls, marked, neither),
        "body": calls,
        "thought, body": think + rb'(?:\{"a":1\}|"yes"|"no")',
        "thought, free": think + answers,
        "thought, budget": think + answers,
        "no thought": rb"</think>(?:yes|no)",
        "may think, free": rb"(?:\s*<think>%s%s|(?!\s*<think>)%s)" % (think, answers, answers),
        "may think, body": rb"(?:\s*<think>%s)?(?:yes|<try|  no)" % think,
        "body like a thought": rb"(?:\s*<think>%s)?(?:yes|<think></think>no)" % think,
        "special end": rb"(?:\s*<\|bos\|>(?:(?!<\|im_start\|>)[\s\S])*<\|im_start\|>)?yes",
        "after a trigger": think + rb"(?:yes|no)",
        "thought alone": rb"(?:\s*<think>%s)?(?!\s*<think>)[\s\S]*" % think,
    }
    return re.fullmatch(forms[name], text) is not None


# --- reasoning -------------------------------------------------------------------------------------------------------


def test_triggers_in_reasoning_are_none() -> None:
    grammar = tagged(think=THINK, triggers=["<tool>", "<|im_start|>"], body=[*CALLS, *MARKED])
    assert passes(grammar, [*b"I could <tool>nonsense", START, *b"</think>", *CALLS[0].encode()])
    assert not passes(grammar, "</think><tool>nonsense")


def test_the_end_in_any_cut() -> None:
    for end in (
        ids("</think>"),
        [*ids("</thi"), *ids("nk>")],
        list(b"</think>"),
        [*ids("</"), *b"th", *ids("ink"), ord(">")],
    ):
        matcher = start(THOUGHT)
        tokens = [*ids("hm"), *end]
        assert takes(matcher, tokens) == len(tokens)
        assert allowed(matcher, Pieces()) & set(range(128)) == {ord("{"), ord('"')}
    matcher = start(THOUGHT)
    assert takes(matcher, [*ids("</thi"), *ids("nk>{")]) == 2
    assert matcher.forced()[0] == ord('"')
    matcher = start(THOUGHT)
    assert takes(matcher, [*ids("</thin"), *ids("k>\n")]) == len(ids("</thin")), "the body takes no newline first"


def test_a_special_token_parts_the_bytes_beside_it() -> None:
    matcher = start(GRAMMARS["thought, free"])
    assert takes(matcher, [*ids("</thi"), 257, *ids("nk>")]) == 3
    assert EOS not in allowed(matcher, Pieces())
    matcher = start(FREE)
    assert takes(matcher, [*ids("<to"), 257, *ids("ol>x")]) == 3


@pytest.mark.parametrize("budget", range(6))
def test_a_budget_forces_the_end(budget: int) -> None:
    grammar = tagged(think={**THINK, "budget": budget}, start="body", body=["yes", "no"])
    matcher = start(grammar)
    assert takes(matcher, [ord("z")] * 9) == budget
    assert not {256, 259} & allowed(matcher, Pieces()), "no end of the answer in the reasoning"
    end = b"</think>"
    while end:
        assert goes_on(matcher, end)
        token = (matcher.forced() or end)[0]
        assert matcher.accept(token)
        end = end[len(Pieces().token_bytes(token)) :]
    assert takes(matcher, [ord("n")]) == 1


def test_a_budget_that_ends_within_the_end_mark() -> None:
    grammar = tagged(think={**THINK, "budget": 2}, start="body", body=["yes", "no"])
    matcher = start(grammar)
    assert takes(matcher, [ord("z"), *ids("</thi")]) == 2
    assert goes_on(matcher, b"nk>")
    assert takes(matcher, [*ids("nk>"), ord("n")]) == 2


def test_a_special_mark_at_the_end_of_the_budget() -> None:
    matcher = start(GRAMMARS["special end"])
    assert takes(matcher, [257, *b"abcdef"]) == 6
    assert matcher.forced()[0] == START
    assert allowed(matcher, Pieces()) == {START}
    assert takes(matcher, [START, *ids("yes")]) == 2
    assert matcher.done()


@pytest.mark.parametrize("begin", ["<|im_start|>thought\n", "a<|im_start|>b<|bos|>"])
def test_a_mark_of_special_tokens_and_text_begins_reasoning(begin: str) -> None:
    grammar = tagged(think={**THINK, "begin": begin, "budget": 3}, start="body", body=["yes", "no"])
    whole = [*ids(begin), ord("x"), *ids("</think>yes")]
    assert takes(start(grammar), whole) == len(whole)
    assert takes(start(grammar), ids("yes")) == len(ids("yes"))
    for n in range(1, len(ids(begin)) + 2):
        matcher = start(grammar)
        assert takes(matcher, whole[:n]) == n
        assert not Pieces().eos_ids & allowed(matcher, Pieces())
        forced = matcher.forced() if n < len(ids(begin)) else ()
        assert list(forced[:1]) in ([], ids(begin)[n : n + 1])


def test_the_end_is_masked_where_more_must_come() -> None:
    ends = Pieces().eos_ids
    for name, text, may_end in (
        ("thought, free", "", False),
        ("thought, free", "a</think>", True),
        ("thought, body", "a</think>", False),
        ("free", "", True),
        ("free", "a<tool>", False),
        ("free", "a<tool>a</tool>", True),
        ("may think, body", " ", False),
        ("may think, free", " <thi", True),
        ("may think, free", "<think>", False),
        ("body", "", False),
    ):
        matcher = start(GRAMMARS[name])
        rest = text.encode()
        while rest:
            token = (list(matcher.forced()) or [rest[0]])[0]
            assert matcher.accept(token), (name, text)
            rest = rest[len(Pieces().token_bytes(token)) :]
        assert (ends <= allowed(matcher, Pieces())) == may_end, (name, text)
        for eos in ends:
            assert matcher.accept(eos) == may_end
            if may_end:
                assert matcher.done()
                assert not matcher.accept(ord("x"))
                matcher.rollback(1)


def test_cut_in_the_reasoning() -> None:
    """max_tokens may end it anywhere: then it is neither complete nor done."""
    matcher = start(THOUGHT)
    assert takes(matcher, ids("let me see </thi")) == len(ids("let me see </thi"))
    assert not matcher.done()
    assert EOS not in allowed(matcher, Pieces())


# --- drafts and rollbacks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", range(1, 6))
@pytest.mark.parametrize("name", ["free", "special", "thought, body", "may think, free", "thought, budget"])
def test_marks_inside_a_draft_window(name: str, gamma: int) -> None:
    """Masks of a window are those of one token after the other, wherever the window begins; then the state is back."""
    tokens = {
        "free": [*ids("so <to"), *ids("ol>a"), *ids("</tool>"), *ids("\n"), *ids("<tool>bb"), *b"</"],
        "special": [*ids("a "), START, *ids("call bb;"), *ids(" ok"), START],
        "thought, body": [*ids("x</thi"), *ids("nk>{"), *b'"a":1}'],
        "may think, free": [*ids(" <thi"), *ids("nk>"), *ids("a</think>"), *ids("<tool>a")],
        "thought, budget": [*b"ab", *ids("</"), *b"think>", *ids("<tool>a")],
    }[name]
    tokenizer = Pieces()
    for at in range(len(tokens)):
        matcher, manual = start(GRAMMARS[name]), start(GRAMMARS[name])
        drafts = tokens[at : at + gamma]
        if takes(matcher, tokens[:at]) < at:
            break
        takes(manual, tokens[:at])
        bits = np.zeros((1 + len(drafts), -(-tokenizer.n_vocab // 32)), np.int32)
        before = mask(matcher, tokenizer)
        n = matcher.fill_path(drafts, bits)
        wanted = []
        for j in range(len(drafts) + 1):
            if manual.done():
                break
            wanted.append(mask(manual, tokenizer))
            if j == len(drafts) or not manual.accept(drafts[j]):
                break
        assert n == len(wanted)
        assert all(np.array_equal(a, b) for a, b in zip(bits, wanted, strict=False))
        assert np.array_equal(mask(matcher, tokenizer), before)


@pytest.mark.parametrize("name", GRAMMARS)
def test_rollback_over_changes_of_phase(name: str) -> None:
    """Forward and back at random; masks are those of a matcher that only went forward."""
    tokenizer, rng = Pieces(), random.Random(3)
    engine = Engine(tokenizer)
    compiled = engine.compile(GRAMMARS[name])
    matcher, path = compiled.start(), list[int]()
    for _ in range(150):
        if path and (matcher.done() or rng.random() < 0.3):
            n = rng.randint(1, min(6, len(path)))
            matcher.rollback(n)
            del path[-n:]
            fresh = compiled.start()
            assert all(fresh.accept(token) for token in path)
            assert fresh.done() == matcher.done()
            assert list(fresh.forced()) == list(matcher.forced())
            assert np.array_equal(mask(matcher, tokenizer), mask(fresh, tokenizer))
            continue
        choices = sorted(allowed(matcher, tokenizer))
        marked = [t for t in choices if re.search(rb"[<>t]", tokenizer.token_bytes(t))]
        path.append(rng.choice(marked if marked and rng.random() < 0.8 else choices))
        assert matcher.accept(path[-1])


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "text", "wrong"),
    [
        ({"triggers": ["<tool>"], "body": CALLS}, f"hi {CALLS[0]} and {CALLS[1]}", CALLS[0]),
        ({"triggers": ["<tool>"], "body": CALLS}, f"{CALLS[0]}\nand", CALLS[0]),
        ({"triggers": ["<tool>"], "body": CALLS}, CALLS[2], CALLS[2]),
        ({"start": "body", "body": CALLS}, CALLS[1], CALLS[1]),
        ({"triggers": ["<tool>"], "body": CALLS}, "hi", None),
    ],
)
def test_verdicts_of_bodies(document: dict[str, Any], text: str, wrong: str | None) -> None:
    """Each is asked about the text that it ended with; the first one with something wrong is reported."""
    vocabulary = Vocabulary(Pieces())
    problem = RequestError("HR-CONSTRAINT-09", "wrong")
    program = compile_tagged(json.dumps(document), vocabulary, lambda texts: Words(texts, vocabulary, problem))
    walk = program.start()
    for token in text.encode():
        assert walk.accept(token)
    assert walk.done() or walk.accept(EOS)
    found = walk.verdict()
    assert (found and found.message) == wrong


# --- marks -----------------------------------------------------------------------------------------------------------


def test_marks_in_any_cut() -> None:
    """Against bytes.find, for marks that overlap; the tokens that complete one are all of them."""
    vocabulary = Vocabulary(Pieces())
    marks = Marks([b"<to", b"nk>", b"<t</", b"tool>", b"\n<t"], vocabulary)
    rng = random.Random(5)
    for _ in range(300):
        data = bytes(rng.choice(b"<t</tool>nk\n") for _ in range(12))
        node, found = marks.read(0, data)
        ends = [data.find(mark) + len(mark) for mark in marks.marks if mark in data]
        assert (found.end if found else None) == (min(ends) if ends else None)
        if found is None:
            longest = max(
                (mark[:k] for mark in marks.marks for k in range(len(mark)) if data.endswith(mark[:k])), key=len
            )
            assert marks.name[node] == longest
            wanted = [t for t, piece in enumerate(vocabulary.text) if marks.read(node, piece)[1]]
            assert list(marks.completing(node)) == wanted
    data = b"x\n<n<t</y"
    node, found = marks.read(0, data)
    assert found is not None
    for cut in range(found.end):
        at, nothing = marks.read(0, data[:cut])
        assert nothing is None
        assert marks.read(at, data[cut:]) == (node, found._replace(end=found.end - cut))
