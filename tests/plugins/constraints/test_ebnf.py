"""A grammar allows the same texts on both engines, whatever its terminals are."""

from __future__ import annotations

import pytest
from byte_engines import ENGINES, TOOL, engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace_plugins.constraints.choice import choice
from headrace_plugins.constraints.ebnf import print_ebnf
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import ANY_TEXT, both, cat, complement, either, literal, repeat


def _whole(pattern: str) -> Rx:
    return Rx(parse_pattern(pattern, search=False))


WITHOUT_END = complement(cat(ANY_TEXT, literal("</p>"), ANY_TEXT))
CASES: list[tuple[str, dict[str, Expr], list[str], list[str | bytes]]] = [
    (
        "texts that need an escape",
        {"s": Lit("\"\\/'\n\x7f\u00e9\U0001f4a9`")},
        ["\"\\/'\n\x7f\u00e9\U0001f4a9`"],
        ["", "x"],
    ),
    ("classes", {"s": _whole(r"[\]\[\\^/\-\u00e9-\u{1F4A9}\x00]+")}, ["]/[\\^-\0", "\u4e00\U0001f4a8"], ["a", b"\xff"]),
    ("the empty text", {"s": Seq(())}, [""], ["a"]),
    (
        "empty alternatives",
        {"s": Alt((Seq(()), Lit("a"), Seq((Lit("b"), Alt((Seq(()), Lit("c")))))))},
        ["", "a", "b", "bc"],
        ["c"],
    ),
    ("terminals that may be empty", {"s": Seq((Lit("<"), _whole("a*b*"), Lit(">")))}, ["<>", "<ab>", "<b>"], ["<ba>"]),
    (
        "counts",
        {"s": Seq((Rep(Lit("ab"), 2, 3), Rep(Alt((Lit("x"), Lit("yz"))), 0, 1), Rep(Lit("."), 2, None)))},
        ["abab..", "abababyz...."],
        ["ab..", "abab.", "abababab..", "ababxx.."],
    ),
    ("repeated nothing", {"s": Rep(Rep(Lit("x"), 0, None), 0, None)}, ["", "xx"], ["xy"]),
    (
        "a complement stays UTF-8",
        {"s": Rx(complement(literal("ab")))},
        ["", "a", "abc", "\u00e9"],
        ["ab", b"\xff", b"\xc3"],
    ),
    (
        "two complements",
        {"s": Rx(both(complement(literal("ab")), complement(literal("c"))))},
        ["a", "abc"],
        ["ab", "c"],
    ),
    (
        "And inside of a series",
        {"s": Rx(cat(either(literal(""), complement(literal("a"))), literal("x")))},
        ["x", "bx"],
        ["ax"],
    ),
    (
        "recursion on either side",
        {"s": Alt((Seq((Ref("s"), Lit("+"), Ref("t"))), Ref("t"))), "t": Alt((Seq((Lit("-"), Ref("t"))), Lit("1")))},
        ["1", "1+--1+1"],
        ["+1", "1+"],
    ),
    ("recursion in the middle", {"s": Seq((Lit("("), Rep(Ref("s")), Lit(")")))}, ["()", "(()(()))"], ["(", "())"]),
    (
        "a rule that never ends is no choice",
        {"s": Alt((Ref("t"), Lit("a"))), "t": Seq((Lit("b"), Ref("t")))},
        ["a"],
        ["b", "ba"],
    ),
    (
        "rules of nothing but the empty text",
        {"s": Alt((Rep(Ref("t"), 2), Seq((Ref("t"), Lit("a"))))), "t": Rep(Ref("t"), 0, 2)},
        ["", "a"],
        ["aa"],
    ),
    ("only the empty text", {"s": Rep(Ref("s"), 0, 2)}, [""], ["a"]),
    (
        "names that engines keep for themselves",
        {"root": Ref("start"), "start": Ref("t0"), "t0": Ref("first"), "first": Lit("a")},
        ["a"],
        ["b"],
    ),
    # the longest match would lose these
    (
        "a text that begins another",
        {"s": Alt((Seq((Lit("a"), Lit("ab"), Ref("s"))), Seq((Lit("aa"), Lit("c")))))},
        ["aac", "aabaac"],
        ["aab"],
    ),
    (
        "text until a mark",
        {"s": Seq((Rx(WITHOUT_END), Lit("</p>"), Ref("t"))), "t": _whole("[a-z]*")},
        ["x</p</p>ab", "</p>"],
        ["</p>a</p>"],
    ),
    (
        "neighbours that overlap",
        {"s": Seq((_whole("[a-z]+"), _whole("[a-c]+"), Ref("t"))), "t": _whole("c{2}")},
        ["zacc", "abccc"],
        ["acc", "zzcc"],
    ),
    (
        "a word or a name",
        {"s": Alt((Seq((Lit("let "), _whole("[a-z]+"))), Seq((_whole("[a-z]+"), _whole(" ?"), Lit("=")))))},
        ["let x", "let =", "lets=", "a ="],
        ["let", "let  ="],
    ),
    (
        "characters that share a first byte",
        {"s": Seq((Lit("\u00e9"), Ref("t"))), "t": Alt((_whole("\u00e9\u00fc+"), _whole("\u00e9|")))},
        ["\u00e9\u00e9\u00fc", "\u00e9\u00e9", "\u00e9"],
        ["\u00fc"],
    ),
    (
        "complement behind and before the same",
        {"s": Seq((Rx(complement(literal("a"))), Ref("t"))), "t": Rx(complement(literal("b")))},
        ["", "ab", "a", "b"],
        [],
    ),
]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("rules", "yes", "no"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_allows_what_the_rules_say(name: str, rules: dict[str, Expr], yes: list[str], no: list[str | bytes]) -> None:
    accepts = engine(name, Rules(next(iter(rules)), rules))
    assert [text for text in yes if not accepts(text)] == []
    assert [text for text in no if accepts(text)] == []


@pytest.mark.parametrize("name", ENGINES)
def test_special_tokens(name: str) -> None:
    accepts = engine(name, Rules("s", {"s": Seq((Special("<tool>"), Rep(Lit("x")), Special("<none>")))}))
    assert accepts([TOOL, *b"xx<none>"])
    assert not accepts("<tool>xx<none>")
    literal_tool = engine(name, Rules("s", {"s": Lit("<tool>")}))
    assert literal_tool("<tool>")
    assert not literal_tool([TOOL])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("body", [Alt(()), Ref("s"), Seq((Lit("a"), Ref("s"))), Rx(both(literal("a"), literal("b")))])
def test_nothing_can_match(name: str, body: Expr) -> None:
    with pytest.raises(RequestError) as caught:
        engine(name, Rules("s", {"s": body}))
    assert caught.value.code == "HR-CONSTRAINT-07"


@pytest.mark.parametrize("name", ENGINES)
def test_choice(name: str) -> None:
    texts = ["", "yes", "yes, sir", 'say "no"', "\u00fcber"] + [f"n{number}" for number in range(2_000)]
    accepts = engine(name, choice(texts))
    assert all(accepts(text) for text in [*texts[:20], texts[-1]])
    assert not any(accepts(text) for text in ("ye", "yes,", "n2000", "n"))


def test_an_automaton_that_is_too_big_is_a_typed_error() -> None:
    regex = complement(parse_pattern("(a|b)*a(a|b){20}", search=False))
    with pytest.raises(RequestError) as caught:
        print_ebnf(Rules("s", {"s": Rx(regex)}), {}, max_states=1_000)
    assert caught.value.code == "HR-CONSTRAINT-04"


_leaves = st.sampled_from(
    [
        Lit("a"),
        Lit("ab"),
        Lit("b"),
        Lit("ba"),
        _whole("a+"),
        _whole("[ab]*b"),
        _whole("a?b?"),
        _whole("b|bb|a"),
        Rx(repeat(literal("ab"), 0, 2)),
        Rx(complement(literal("a"))),
        Ref("s"),
        Seq(()),
    ]
)


def _exprs() -> st.SearchStrategy[Expr]:
    return st.recursive(
        _leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: Seq(tuple(parts))),
            st.lists(inner, min_size=1, max_size=3).map(lambda choices: Alt(tuple(choices))),
            st.tuples(inner, st.sampled_from([(0, None), (1, 2), (2, 2), (0, 1)])).map(
                lambda pair: Rep(pair[0], *pair[1])
            ),
        ),
        max_leaves=6,
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_exprs(), st.lists(st.text("ab", max_size=6), min_size=4, max_size=16))
def test_both_engines_agree_on_any_grammar(body: Expr, texts: list[str]) -> None:
    rules = Rules("s", {"s": Alt((body, Lit("b")))})
    first, second = (engine(name, rules) for name in ENGINES)
    for text in ["", "a", "b", "ab", "ba", "aab", *texts]:
        assert first(text) == second(text), (rules, text)
