"""GBNF and EBNF: what their documents say is allowed, and errors that say where."""

from __future__ import annotations

import pytest
from byte_engines import ENGINES, TOOL, engine

from headrace.errors import RequestError
from headrace_plugins.constraints.choice import read_choice
from headrace_plugins.constraints.gbnf import GrammarLimits, read_gbnf

CALCULATOR = """
# sums and products
root   ::= sum
sum    ::= term (ws [+-] ws term)*
term   ::= factor
         | term ws "*" ws factor   # on the left
factor ::= number | "(" ws sum ws ")" | call
call   ::= name "(" (sum ("," ws sum)*)? ")"
number ::= [0-9]+ ("." [0-9]{1,2})?
name   ::= [a-z] [a-z0-9_-]*
ws     ::= | " " ws
"""


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("dialect", ["gbnf", "ebnf"])
def test_a_whole_grammar(name: str, dialect: str) -> None:
    text = CALCULATOR if dialect == "gbnf" else CALCULATOR.replace('::= | " " ws', '::= "" | " " ws')
    accepts = engine(name, read_gbnf(text, "gbnf" if dialect == "gbnf" else "ebnf"))
    yes = ["1", "1+2*3", "( 1.25 - f-1(2, g()) )  * 4", "a()", "1 + 2", "(((1)))"]
    no = ["", "1+", "1.250", "()", "1 2", "A()", "1 +  ", "f(1 ,2)"]
    assert [text for text in yes if not accepts(text)] == []
    assert [text for text in no if accepts(text)] == []


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("dialect", "text", "yes", "no"),
    [
        ("gbnf", r'root ::= "\x41\u00e9\U0001F4A9\n\t\\\"\[\]"', ['A\u00e9\U0001f4a9\n\t\\"[]'], ["A"]),
        ("gbnf", r"root ::= [\]\[\\\-^a-c\x00-\x1f]+", ["][\\-^b\x00\x1f"], ["d", " "]),
        ("gbnf", r"root ::= [^\n]", ["a", "\U0001f4a9"], ["\n", ""]),
        ("gbnf", r"root ::= [a-]", ["a", "-"], ["b"]),
        ("gbnf", "root ::= .{2}", ["\u00e9\n"], ["a", "abc"]),
        ("gbnf", 'root ::= "a"{,2} "b"{2,} "c"{1}', ["bbc", "aabbbc"], ["aaabbc", "bc"]),
        ("gbnf", 'root ::= ("a"+)*', ["", "aaa"], ["b"]),
        ("gbnf", 'root ::= Ab | a-b | a_b\nAb ::= "1"\na-b ::= "2"\na_b ::= "3"', ["1", "2", "3"], ["4"]),
        ("gbnf", 'root ::= "a"\n  | "b"\n|\n"c"', ["a", "b", "c"], ["d"]),
        ("gbnf", "root ::= []  | [^]", ["a"], [""]),
        ("ebnf", r'root ::= "\x414\e\0"', ["\u0414\x1b\0"], ["A4"]),
        ("ebnf", 'root ::= a.b{0, -1} (="x")\na.b ::= "1" (=[ab] "c")', ["", "11"], ["1x"]),
        ("ebnf", 'root ::= Regex("^[0-9]{2,3}$") "x"', ["12x", "123x"], ["1x", "1234x"]),
        ("ebnf", 'root ::= TagDispatch(excludes=("</a>", "!")) "</a>"', ["</a>", "x</</a>"], ["</a></a>", "!</a>"]),
        ("ebnf", 'root ::= TagDispatch(("<t>", x), ("<u>", y))\nx ::= "1"\ny ::= "2"',
         ["", "a<t>1b<u>2", "<t", "<t>1<t>1"], ["<t>", "a<t>2", "<u>1"]),
        ("ebnf", 'root ::= TagDispatch(("<t>", x), loop_after_dispatch=false,)\nx ::= "1"', ["", "a<t>1"], ["a<t>1b"]),
    ],
)  # fmt: skip
def test_forms(name: str, dialect: str, text: str, yes: list[str], no: list[str]) -> None:
    accepts = engine(name, read_gbnf(text, "gbnf" if dialect == "gbnf" else "ebnf"))
    assert [text for text in yes if not accepts(text)] == []
    assert [text for text in no if accepts(text)] == []


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_by_name_and_by_number(name: str) -> None:
    accepts = engine(name, read_gbnf("root ::= <tool> <[257]> [a]", tokens={TOOL: "<tool>"}))
    assert accepts([TOOL, TOOL, ord("a")])
    assert not accepts([TOOL, ord("a")])
    accepts = engine(name, read_gbnf('root ::= Token(257) | "a"', "ebnf", tokens={TOOL: "<tool>"}))
    assert accepts([TOOL])


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("", "02", "line 1:1: no rules"),
        ("# nothing\n", "02", "no rules"),
        ('start ::= "a"', "02", "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "02", "line 2:1: rule 'root' is defined twice"),
        ("root ::= item\nitems ::= [a]", "02", "line 1:10: rule 'item' is not defined; did you mean 'items'?"),
        ('root ::= "a', "02", "line 1:10: a '\"'"),
        ("root ::= [a\n]", "02", "line 1:10: a '['"),
        ('root ::= ("a"', "02", "line 1:10: a '('"),
        ('root ::= "a")', "02", "line 1:13"),
        ("root = [a]", "02", "line 1:6: expected '::=', found '='"),
        ("root ::= [z-a]", "02", "line 1:10: a range"),
        (r'root ::= "\q"', "02", r"line 1:11: \q is no escape"),
        (r'root ::= "\u12"', "02", "line 1:11"),
        (r'root ::= "\ud800"', "02", "surrogate"),
        ('root ::= "a"{3,2}', "02", "line 1:13"),
        ('root ::= "a"{x}', "02", "line 1:14"),
        ("root ::= 'a'", "02", "line 1:10"),
        ("root ::= !<[5]>", "03", "line 1:10: any token but one"),
        ("root ::= <[5]>", "03", "line 1:10: token 5"),
        ('root ::= "a"{10001}', "04", "line 1:14: a repetition of 10001"),
        ("root ::= " + "(" * 50_000, "04", "line 1:70: groups nested"),
        ("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "04", "nested"),
    ],
)
def test_errors_say_where(text: str, code: str, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_gbnf(text)
    assert caught.value.code == f"HR-CONSTRAINT-{code}"
    assert where in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('root ::= Regex("a", json_string=true)', "options of Regex"),
        ('root ::= TagDispatch(("<t>", root), stop_eos=false)', "'stop_eos' of TagDispatch"),
        ("root ::= ExcludeToken(3)", "ExcludeToken"),
        (r'root ::= Regex("(a)\\1")', "line 1:10: pattern"),
    ],
)
def test_what_xgrammar_has_and_we_do_not_is_refused_by_name(text: str, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_gbnf(text, "ebnf")
    assert caught.value.code == "HR-CONSTRAINT-03"
    assert where in caught.value.message


def test_limits_are_the_callers() -> None:
    for limits in (GrammarLimits(length=10), GrammarLimits(rules=1), GrammarLimits(repetitions=1)):
        with pytest.raises(RequestError) as caught:
            read_gbnf('root ::= a{2}\na ::= "x"', limits=limits)
        assert caught.value.code == "HR-CONSTRAINT-04"


@pytest.mark.parametrize("text", ["", "{}", '["a", 1]', "[]", '"a"', '["\\ud800"]'])
def test_a_choice_that_is_none_is_a_typed_error(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_choice(text, 8)
    assert caught.value.code == "HR-CONSTRAINT-02"
