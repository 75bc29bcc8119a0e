"""GBNF of llama.cpp and EBNF of xgrammar, read into rules.

Both are `name ::= alternatives` over texts, character classes, groups and repetitions. A rule ends where the next one
begins. Lookahead of xgrammar, `(= ...)`, is a hint to its cache and means nothing here.
Sources: llama.cpp grammars/README.md; xgrammar docs, "EBNF grammar" (0.2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import RequestError, did_you_mean
from headrace_plugins.constraints.characters import inverted
from headrace_plugins.constraints.folding import folded
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import (
    ANY_CHAR,
    ANY_TEXT,
    MAX_CODE_POINT,
    Regex,
    both,
    cat,
    chars,
    complement,
    either,
    literal,
)

Dialect = Literal["gbnf", "ebnf"]
_ROOT = "root"
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_MORE_ESCAPES = {"'": "'", "?": "?", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}
_HEX = "0123456789abcdefABCDEF"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """length in characters; nesting of groups; repetitions: the largest count; rules: how many of them."""

    length: int = 1_000_000
    nesting: int = 60
    repetitions: int = 10_000
    rules: int = 20_000


def read_gbnf(
    text: str,
    dialect: Dialect = "gbnf",
    *,
    tokens: Mapping[int, str] | None = None,
    limits: GrammarLimits | None = None,
) -> Rules:
    """Read a grammar.

    The text has to match the rule `root`. tokens: id -> name, for special tokens written by number.
    Raises RequestError with line and column: HR-CONSTRAINT-02 not a grammar, HR-CONSTRAINT-03 not supported,
    HR-CONSTRAINT-04 a limit is exceeded.
    """
    return folded(_Reader(text, dialect, tokens or {}, limits or GrammarLimits()).rules())


class _Reader:
    def __init__(self, text: str, dialect: Dialect, tokens: Mapping[int, str], limits: GrammarLimits) -> None:
        self.text = text
        self.dialect = dialect
        self.tokens = tokens
        self.limits = limits
        self.at = 0
        self.depth = 0
        self.known: dict[str, str] = {}
        """Name as written -> name of the rule."""
        self.uses: dict[str, int] = {}
        self._taken: set[str] = set()
        self._lines = [0]
        if len(text) > limits.length:
            raise self._error("04", f"a grammar of {len(text):,} characters; at most {limits.length:,} are read", None)
        self._lines += [i + 1 for i, char in enumerate(text) if char == "\n"]

    # errors

    def _error(self, code: str, what: str, at: int | None) -> RequestError:
        where = ""
        if at is not None:
            line = bisect_right(self._lines, at)
            where = f"line {line}:{at - self._lines[line - 1] + 1}: "
        return RequestError(
            f"HR-CONSTRAINT-{code}",
            f"{self.dialect} grammar, {where}{what}",
            'rules are written: name ::= "text" | other',
        )

    def wrong(self, what: str, at: int | None = None) -> RequestError:
        return self._error("02", what, self.at if at is None else at)

    def unsupported(self, what: str, at: int) -> RequestError:
        return self._error("03", what, at)

    # characters

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self, expected: str) -> bool:
        if self.text.startswith(expected, self.at):
            self.at += len(expected)
            return True
        return False

    def space(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r\n":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def expect(self, sign: str) -> None:
        self.space()
        if not self.take(sign):
            raise self.wrong(f"expected {sign!r}, found {self._found()}")

    def _found(self) -> str:
        return repr(self.peek()) if self.at < len(self.text) else "the end"

    # rules

    def rules(self) -> Rules:
        bodies: dict[str, Expr] = {}
        self.space()
        while self.at < len(self.text):
            start = self.at
            written = self._name()
            if not written:
                raise self.wrong(f"expected the name of a rule, found {self._found()}")
            name = self._rule_name(written)
            if name in bodies:
                raise self.wrong(f"rule {written!r} is defined twice", start)
            self.expect("::=")
            bodies[name] = self._alternatives()
            if len(bodies) > self.limits.rules:
                raise self._error("04", f"more than {self.limits.rules:,} rules", start)
            self.space()
        self._check(bodies)
        return Rules(self._rule_name(_ROOT), bodies)

    def _check(self, bodies: Mapping[str, Expr]) -> None:
        if _ROOT not in self.known or self.known[_ROOT] not in bodies:
            if not bodies:
                raise self.wrong("no rules", 0)
            raise self.wrong(f"no rule {_ROOT!r}", 0)
        for written, at in self.uses.items():
            if self.known[written] not in bodies:
                names = [each for each, name in self.known.items() if name in bodies]
                raise self.wrong(f"rule {written!r} is not defined; {did_you_mean(written, names)}".rstrip("; "), at)

    def _name(self) -> str:
        start = self.at
        extra = "_-" if self.dialect == "gbnf" else "_-."
        while self.at < len(self.text) and ((self.peek().isascii() and self.peek().isalnum()) or self.peek() in extra):
            self.at += 1
        return self.text[start : self.at]

    def _rule_name(self, written: str) -> str:
        name = self.known.get(written)
        if name is None:
            plain = "".join(char if char.isascii() and char.isalnum() else "_" for char in written.lower())
            plain = plain if plain[0].isalpha() else f"r{plain}"
            name = plain
            number = 2
            while name in self._taken:
                name = f"{plain}_{number}"
                number += 1
            self.known[written] = name
            self._taken.add(name)
        return name

    def _starts_rule(self) -> bool:
        """Whether `name ::=` is next."""
        at = self.at
        found = bool(self._name())
        if found:
            self.space()
            found = self.peek(3) == "::="
        self.at = at
        return found

    def _alternatives(self) -> Expr:
        choices = [self._series()]
        while self.take("|"):
            choices.append(self._series())
        return choices[0] if len(choices) == 1 else Alt(tuple(choices))

    def _series(self) -> Expr:
        parts: list[Expr] = []
        while True:
            self.space()
            if self.at >= len(self.text) or self.peek() in "|)" or (self.depth == 0 and self._starts_rule()):
                return parts[0] if len(parts) == 1 else Seq(tuple(parts))
            item = self._item()
            if item is None:
                continue
            self.space()
            while (counts := self._counts()) is not None:
                item = Rep(item, *counts)
                self.space()
            parts.append(item)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return counts
        start = self.at
        if not self.take("{"):
            return None
        least = self._integer()
        self.space()
        if self.take("}"):
            if least is None or least < 0:
                raise self.wrong("expected a count", start)
            return least, least
        self.expect(",")
        most = self._integer()
        self.expect("}")
        if (least is None and (self.dialect == "ebnf" or most is None)) or (least or 0) < 0:
            raise self.wrong("expected a count", start)
        if most is not None and most < 0:
            most = None
        if most is not None and most < (least or 0):
            raise self.wrong(f"{{{least or 0},{most}}} has its bounds in the wrong order", start)
        return least or 0, most

    def _integer(self) -> int | None:
        self.space()
        start = self.at
        self.take("-")
        while self.peek().isascii() and self.peek().isdigit():
            self.at += 1
        digits = self.text[start : self.at]
        if digits in ("", "-"):
            self.at = start
            return None
        limit = self.limits.repetitions
        if len(digits.lstrip("-0")) > len(str(limit)) or int(digits) > limit:
            raise self._error("04", f"a repetition of {digits[:20]}; at most {limit:,}", start)
        return int(digits)

    # items

    def _item(self) -> Expr | None:
        char, start = self.peek(), self.at
        if char == '"':
            return Lit(self._string())
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == "." and self.dialect == "gbnf":
            self.at += 1
            return Rx(ANY_CHAR)
        if char in "<!" and self.dialect == "gbnf":
            return self._token()
        name = self._name()
        if not name:
            raise self.wrong(f"expected a text, a class, a group or a name, found {self._found()}")
        if self.dialect == "ebnf" and self.peek() == "(":
            return self._call(name, start)
        self.uses.setdefault(name, start)
        return Ref(self._rule_name(name))

    def _group(self) -> Expr | None:
        start = self.at
        self.at += 1
        self.depth += 1
        if self.depth > self.limits.nesting:
            raise self._error("04", f"groups nested more than {self.limits.nesting} deep", start)
        hint = self.dialect == "ebnf" and self.take("=")
        body = self._alternatives()
        if not self.take(")"):
            raise self.wrong("a '(' without its ')'", start)
        self.depth -= 1
        return None if hint else body

    def _token(self) -> Expr:
        start = self.at
        negated = self.take("!")
        if not self.take("<"):
            raise self.wrong("'!' without a token behind it", start)
        end = self.text.find(">", self.at)
        name = self.text[self.at : end]
        if end < 0 or "\n" in name or not name:
            raise self.wrong("a '<' without its '>'", start)
        self.at = end + 1
        if negated:
            raise self.unsupported("any token but one; write the text that may stand there", start)
        if name.startswith("[") and name.endswith("]"):
            number = name[1:-1]
            if not (number.isascii() and number.isdigit()):
                raise self.wrong(f"{number!r} is not the number of a token", start)
            return Special(self._token_name(int(number[:12]), start))
        return Special(f"<{name}>")

    def _token_name(self, number: int, at: int) -> str:
        found = self.tokens.get(number)
        if found is None:
            raise self.unsupported(
                f"token {number}, which is not a special token of the vocabulary; write its text", at
            )
        return found

    def _string(self) -> str:
        start = self.at
        self.at += 1
        text: list[str] = []
        while not self.take('"'):
            if self.at >= len(self.text) or self.peek() == "\n":
                raise self.wrong("a '\"' without its end", start)
            point = self._character()
            if 0xD800 <= point < 0xE000:
                raise self.wrong("half of a surrogate pair", start)
            text.append(chr(point))
        return "".join(text)

    def _class(self) -> Expr:
        start = self.at
        self.at += 1
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.at >= len(self.text) or self.peek() == "\n":
                raise self.wrong("a '[' without its ']'", start)
            low = high = self._character()
            if self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.at += 1
                high = self._character()
                if low > high:
                    raise self.wrong("a range whose ends are in the wrong order", start)
            ranges.append((low, high))
        found = chars(ranges)
        return Rx(inverted(found) if negated else found)

    def _character(self) -> int:
        start, char = self.at, self.peek()
        self.at += 1
        if char != "\\":
            return ord(char)
        kind = self.peek()
        self.at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind in _MORE_ESCAPES and self.dialect == "ebnf":
            return ord(_MORE_ESCAPES[kind])
        lengths = {"x": 2, "u": 4, "U": 8}
        if kind not in lengths:
            raise self.wrong(f"\\{kind} is no escape", start)
        length = lengths[kind]
        if kind == "x" and self.dialect == "ebnf":  # takes every digit that follows
            length = 1
            while length < 8 and self.peek(length + 1)[length:] in _HEX and self.at + length < len(self.text):
                length += 1
        digits = self.peek(length)
        if len(digits) < length or not all(digit in _HEX for digit in digits):
            raise self.wrong(f"\\{kind} needs {length} hexadecimal digits", start)
        if int(digits, 16) > MAX_CODE_POINT:
            raise self.wrong("a code point above 10FFFF", start)
        self.at += length
        return int(digits, 16)

    # xgrammar's calls

    def _call(self, name: str, start: int) -> Expr:
        self.at += 1
        if name == "Token":
            choices: list[Expr] = []
            while not choices or self.take(","):
                number = self._integer()
                if number is None or number < 0:
                    raise self.wrong("expected the number of a token")
                choices.append(Special(self._token_name(number, start)))
                self.space()
            self.expect(")")
            return Alt(tuple(choices))
        if name == "Regex":
            return self._pattern(start)
        if name == "TagDispatch":
            return self._tag_dispatch(start)
        raise self.unsupported(f"{name}(...)", start)

    def _pattern(self, start: int) -> Expr:
        self.space()
        text = self._quoted()
        self.space()
        if self.peek() == ",":
            raise self.unsupported("options of Regex(...)", self.at)
        self.expect(")")
        try:
            return Rx(parse_pattern(text, search=False))
        except RequestError as error:
            raise self._error(error.code[-2:], error.message, start) from None

    def _tag_dispatch(self, start: int) -> Expr:
        """Free text; behind each tag its rule, then free text again unless loop_after_dispatch is false."""
        tags: list[tuple[str, Expr]] = []
        excludes: list[str] = []
        loop = True
        self.space()
        while not self.take(")"):
            if self.take("("):
                self.space()
                tag = self._quoted()
                self.expect(",")
                self.space()
                at, rule = self.at, self._name()
                if not rule:
                    raise self.wrong(f"expected the name of a rule, found {self._found()}")
                self.uses.setdefault(rule, at)
                tags.append((tag, Ref(self._rule_name(rule))))
                self.expect(")")
            else:
                at, key = self.at, self._name()
                self.expect("=")
                self.space()
                if key == "loop_after_dispatch":
                    loop = self._flag()
                elif key == "excludes":
                    excludes = self._texts()
                else:
                    raise self.unsupported(f"{key!r} of TagDispatch", at)
            self.space()
            if not self.take(","):
                self.expect(")")
                break
            self.space()
        if any(not tag for tag in [*excludes, *(tag for tag, _ in tags)]):
            raise self.wrong("an empty tag", start)
        return _dispatch(tags, excludes, loop=loop)

    def _quoted(self) -> str:
        if self.peek() != '"':
            raise self.wrong(f"expected a text, found {self._found()}")
        return self._string()

    def _flag(self) -> bool:
        at, word = self.at, self._name()
        if word not in ("true", "false"):
            raise self.wrong("expected true or false", at)
        return word == "true"

    def _texts(self) -> list[str]:
        self.expect("(")
        texts: list[str] = []
        self.space()
        while not self.take(")"):
            texts.append(self._quoted())
            self.space()
            if not self.take(","):
                self.expect(")")
                break
            self.space()
        return texts


def _dispatch(tags: list[tuple[str, Expr]], excludes: list[str], *, loop: bool) -> Expr:
    ends = [literal(tag) for tag in [*excludes, *dict.fromkeys(tag for tag, _ in tags)]]
    free = complement(cat(ANY_TEXT, either(*ends), ANY_TEXT)) if ends else ANY_TEXT
    if not tags:
        return Rx(free)
    steps = tuple(Seq((Rx(_up_to(tag, ends)), rule)) for tag, rule in tags)
    if loop:
        return Seq((Rep(Alt(steps)), Rx(free)))
    return Alt((*steps, Rx(free)))


def _up_to(tag: str, ends: list[Regex]) -> Regex:
    """Text that ends with the tag and has none of the ends before that."""
    return both(cat(ANY_TEXT, literal(tag)), complement(cat(ANY_TEXT, either(*ends), ANY_CHAR, ANY_TEXT)))
