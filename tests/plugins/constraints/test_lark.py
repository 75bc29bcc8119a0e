"""What is printed for llguidance: terminals shared and few, and nothing that its compiler can't take."""

from __future__ import annotations

import pytest
from byte_engines import of_lark

from headrace.errors import RequestError
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq
from headrace_plugins.constraints.lark import print_lark
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import Regex, cat, complement, either, literal, repeat


def _terminals(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("T")]


def test_equal_terminals_are_one() -> None:
    word = Rx(parse_pattern("[a-z]+", search=False))
    text = print_lark(Rules("s", {"s": Seq((word, Lit(" "), word, Lit("="), word))}), {})
    assert _terminals(text) == ["T0: /[a-z]+/"]


def test_terminals_that_lose_nothing_stay_whole() -> None:
    text = Rx(parse_pattern(r'"([^"\\]|\\.)*"', search=False))
    number = Rx(parse_pattern(r"-?\d+(\.\d+)?", search=False))
    rules = {
        "value": Alt((text, number, Ref("list"), Lit("true"), Lit("null"))),
        "list": Seq((Lit("["), Rep(Seq((Ref("value"), Lit(","))), 0, None), Ref("value"), Lit("]"))),
    }
    printed = print_lark(Rules("value", rules), {})
    assert len(_terminals(printed)) == 2
    assert '"true"' in printed


def test_a_cut_goes_no_further_than_it_must() -> None:
    name = parse_pattern("[a-z]+", search=False)
    called, assigned = Rx(cat(name, literal("("))), Rx(cat(name, literal(" = ")))
    rules = {"s": Alt((Seq((called, Lit(")"))), Seq((assigned, Ref("s"))), Seq((Rx(name), Lit(" "), Ref("s")))))}
    accepts = of_lark(printed := print_lark(Rules("s", rules), {}))
    assert accepts("ab cd = ef()")
    assert any(line.endswith(": /[a-z]+/") for line in _terminals(printed))
    assert "/[a-z]/" not in printed


def test_regexes_and_expressions_of_any_depth() -> None:
    regex: Regex = literal("x")
    body: Expr = Lit("x")
    for number in range(50):
        regex = repeat(either(cat(literal("a"), regex), literal("b")), 1, 2)
        body = Alt((Seq((Lit("a"), body)), Lit("c"))) if number % 2 else Rep(Seq((Lit("a"), body)), 1, 2)
    for part in (Rx(regex), Rx(cat(literal("-"), complement(regex))), body):
        of_lark(print_lark(Rules("s", {"s": part}), {}))
    deep = of_lark(print_lark(Rules("s", {"s": Rx(regex)}), {}))
    assert deep("aaab")
    assert not deep("aaac")


@pytest.mark.parametrize("back", [False, True])
def test_long_chains_of_rules_do_not_take_the_process_down(back: bool) -> None:
    rules: dict[str, Expr] = {"end": Lit("a")}
    for number in reversed(range(3_500)):
        parts = (
            Lit("x"),
            *((Rep(Ref("r0"), 0, 1),) if back else ()),
            Ref(f"r{number + 1}" if number < 3_499 else "end"),
        )
        rules[f"r{number}"] = Alt((Seq(parts), Lit("q")))
    accepts = of_lark(print_lark(Rules("r0", rules), {}))
    assert accepts("xxq")
    assert not accepts("xx")


def test_chains_that_no_order_can_shorten_are_a_typed_error() -> None:
    rules: dict[str, Expr] = {}
    for number in range(3_500):
        near = [Ref(f"r{other}") for other in (number - 1, number + 1) if 0 <= other < 3_500]
        rules[f"r{number}"] = Alt((Lit("a"), *(Seq((Lit("x"), each)) for each in near)))
    with pytest.raises(RequestError, match="lead to each other") as caught:
        print_lark(Rules("r0", rules), {})
    assert caught.value.code == "HR-CONSTRAINT-04"
