"""Patterns of JSON Schema (ECMA-262 with the u flag) and of Python's re, read into regular languages.

What is regular is read exactly, assertions included where `assertions.py` can resolve them; what is not is refused by
name. Escapes of punctuation that the u flag forbids are read as the character, because schemas contain them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import RequestError
from headrace_plugins.constraints.assertions import Ahead, Choice, Edge, Node, Series, Times, resolve
from headrace_plugins.constraints.characters import (
    Dialect,
    class_of,
    dot,
    either_case,
    inverted,
    joined,
    property_of,
)
from headrace_plugins.constraints.regex import ANY_CHAR, MAX_CODE_POINT, Chars, Regex, chars, repeat

HELP = "patterns are regular expressions of ECMA-262 (u flag), without lookbehind and backreferences"
_CONTROL = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternLimits:
    """length in characters; nesting of groups; repetitions: the largest count of a quantifier."""

    length: int = 65_536
    nesting: int = 60
    repetitions: int = 10_000


def parse_pattern(text: str, *, search: bool, dialect: Dialect = "ecma", limits: PatternLimits | None = None) -> Regex:
    """Read a pattern.

    search: True for texts in which the pattern is found somewhere (`^` and `$` anchor it), as `pattern` of JSON Schema
    means; False for texts that it matches as a whole.
    Raises RequestError with the index of the character: HR-CONSTRAINT-02 not a pattern, HR-CONSTRAINT-03 not regular or
    not supported, HR-CONSTRAINT-04 a limit is exceeded.
    """
    reader = _Reader(text, dialect, limits or PatternLimits())
    node = reader.pattern()
    return resolve(node, search=search, word=class_of("w", dialect), refuse=reader.unsupported)


class _Reader:
    def __init__(self, text: str, dialect: Dialect, limits: PatternLimits) -> None:
        self.text = text
        self.dialect = dialect
        self.limits = limits
        self.at = 0
        self.depth = 0
        self.any_case = False
        self.dot_all = False
        if len(text) > limits.length:
            raise RequestError(
                "HR-CONSTRAINT-04", f"a pattern of {len(text):,} characters; at most {limits.length:,} are read", HELP
            )

    # errors

    def _shown(self) -> str:
        return self.text if len(self.text) <= 60 else self.text[:60] + "..."

    def wrong(self, what: str, at: int | None = None) -> RequestError:
        at = self.at if at is None else at
        return RequestError("HR-CONSTRAINT-02", f"pattern {self._shown()!r}, character {at}: {what}", HELP)

    def unsupported(self, what: str, at: int | None = None) -> RequestError:
        where = "" if at is None else f", character {at}"
        return RequestError("HR-CONSTRAINT-03", f"pattern {self._shown()!r}{where}: {what}", HELP)

    def over(self, what: str) -> RequestError:
        return RequestError("HR-CONSTRAINT-04", f"pattern {self._shown()!r}, character {self.at}: {what}", HELP)

    # characters

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self, expected: str) -> bool:
        if self.text.startswith(expected, self.at):
            self.at += len(expected)
            return True
        return False

    # structure

    def pattern(self) -> Node:
        if self.dialect == "python":
            self._leading_flags()
        node = self._choice()
        if self.at < len(self.text):
            raise self.wrong("a ')' without its '('")
        return node

    def _choice(self) -> Node:
        choices = [self._series()]
        while self.take("|"):
            choices.append(self._series())
        return Choice.of(choices)

    def _series(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.peek() not in ("|", ")"):
            start = self.at
            atom = self._atom()
            if atom is not None:
                parts.append(self._quantified(atom, start))
        return Series.of(parts)

    def _quantified(self, atom: Node, start: int) -> Node:
        at = self.at
        counts = self._quantifier()
        if counts is None:
            return atom
        ahead = self.dialect == "ecma" and self.text.startswith(("(?=", "(?!"), start)
        if ahead or (isinstance(atom, Edge) and self.text[start] != "("):
            raise self.wrong("a quantifier behind an assertion", at)
        if self.dialect == "python" and self.peek() == "+":
            raise self.unsupported("a possessive quantifier", self.at)
        self.take("?")  # lazy: another way to the same texts
        if self._is_quantifier():
            raise self.wrong("a quantifier behind a quantifier")
        least, most = counts
        return Times(atom, least, most, start) if not isinstance(atom, Regex) else repeat(atom, least, most)

    def _is_quantifier(self) -> bool:
        at = self.at
        found = self._quantifier() is not None
        self.at = at
        return found

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return counts
        if self.peek() != "{":
            return None
        end = self.text.find("}", self.at)
        first, comma, second = self.text[self.at + 1 : max(end, 0)].partition(",")
        numbers = [first, second] if comma else [first]
        if end < 0 or not all(_is_number(each) or (comma and not each) for each in numbers):
            return None
        if not first and not (self.dialect == "python" and second):
            return None
        low = self._count(first or "0")
        high = low if not comma else self._count(second) if second else None
        if high is not None and low > high:
            raise self.wrong(f"{{{first},{second}}} has its bounds in the wrong order")
        self.at = end + 1
        return low, high

    def _count(self, digits: str) -> int:
        limit = self.limits.repetitions
        if len(digits.lstrip("0")) > len(str(limit)) or int(digits) > limit:
            raise self.over(f"a repetition of {digits[:20]}; at most {limit:,}")
        return int(digits)

    # atoms

    def _atom(self) -> Node | None:
        char, start = self.peek(), self.at
        if char == "(":
            return self._group()
        if char == "[":
            return self._cased(self._class())
        if char in "*+?" or (char == "{" and self._is_quantifier()):
            raise self.wrong(f"nothing to repeat before {char!r}")
        self.at += 1
        if char == "^":
            return Edge("start", start)
        if char == "$":
            return Edge("end" if self.dialect == "ecma" else "last line", start)
        if char == ".":
            return ANY_CHAR if self.dot_all else dot(self.dialect)
        if char == "\\":
            return self._escape(start)
        return self._cased(_one(self._joined_surrogate(ord(char))))

    def _cased(self, of: Chars) -> Chars:
        return either_case(of) if self.any_case else of

    def _joined_surrogate(self, point: int) -> int:
        """A pair that a JSON reader left apart is one character."""
        following = ord(self.peek() or "\0")
        if 0xD800 <= point < 0xDC00 <= following <= 0xDFFF:
            self.at += 1
            return 0x10000 + ((point - 0xD800) << 10) + following - 0xDC00
        return point

    def _group(self) -> Node | None:
        start = self.at
        self.depth += 1
        if self.depth > self.limits.nesting:
            raise self.over(f"groups nested more than {self.limits.nesting} deep")
        self.at += 1
        flags = (self.any_case, self.dot_all)
        ahead: bool | None = None
        if self.take("?"):
            ahead = self._group_kind(start)
        node = self._choice()
        if not self.take(")"):
            raise self.wrong("a '(' without its ')'", start)
        self.depth -= 1
        self.any_case, self.dot_all = flags
        return node if ahead is None else Ahead(node, negative=not ahead, at=start)

    def _group_kind(self, start: int) -> bool | None:
        """None: a group; True, False: a lookahead, a negative one."""
        for sign, kind in ((":", None), ("=", True), ("!", False)):
            if self.take(sign):
                return kind
        if self.take("<=") or self.take("<!"):
            raise self.unsupported("lookbehind", start)
        if self.dialect == "python":
            if self.take("P="):
                raise self.unsupported("a backreference", start)
            if self.peek() == ">":
                raise self.unsupported("an atomic group", start)
            if self.peek() == "(":
                raise self.unsupported("a group that depends on another", start)
            self.take("P")
        if self.take("<"):
            name = self._until(">", "group name")
            if not name.isidentifier() and not name.replace("$", "_").isidentifier():
                raise self.wrong(f"{name!r} is not a name for a group", start)
            return None
        self._flags(":")
        return None

    def _flags(self, end: str) -> None:
        start = self.at
        on = True
        while not self.take(end):
            flag = self.peek()
            self.at += 1
            if flag == "-":
                on = False
            elif flag == "i":
                self.any_case = on
            elif flag == "s":
                self.dot_all = on
            elif flag in ("m", "x", "a", "u", "L"):
                raise self.unsupported(f"flag {flag!r}", start)
            else:
                raise self.wrong("not a group", start)

    def _leading_flags(self) -> None:
        while self.peek(2) == "(?" and self.peek(3)[2:] in ("i", "s", "m", "x", "a", "u", "L"):
            end = self.text.find(")", self.at)
            if end < 0 or not self.text[self.at + 2 : end].isalpha():
                return
            self.at += 2
            self._flags(")")

    def _until(self, end: str, what: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise self.wrong(f"a {what} without its {end!r}")
        found = self.text[self.at : stop]
        self.at = stop + len(end)
        return found

    # escapes

    def _escape(self, start: int) -> Node:
        char = self.peek()
        if char == "b" or char == "B":
            self.at += 1
            return Edge("word" if char == "b" else "no word", start)
        if self.dialect == "python" and char in ("A", "Z"):
            self.at += 1
            return Edge("start" if char == "A" else "end", start)
        if char.isdigit() and char != "0":
            raise self.unsupported("a backreference", start)
        if char == "k" and self.dialect == "ecma":
            raise self.unsupported("a backreference", start)
        found = self._class_escape(start)
        return self._cased(found if isinstance(found, Chars) else _one(found))

    def _class_escape(self, start: int) -> int | Chars:
        """What may stand behind a backslash in a class too: a code point or a set."""
        char = self.peek()
        if not char:
            raise self.wrong("a backslash at the end", start)
        self.at += 1
        if char in "dDwWsS":
            return class_of(char, self.dialect)
        if char in "pP":
            return self._property(negated=char == "P", start=start)
        if char in _CONTROL:
            return ord(_CONTROL[char])
        if char == "a" and self.dialect == "python":
            return 7
        if char == "0":
            return self._zero(start)
        if char == "c" and self.dialect == "ecma":
            letter = self.peek()
            if not (letter.isascii() and letter.isalpha()):
                raise self.wrong("\\c without a letter", start)
            self.at += 1
            return ord(letter) % 32
        if char == "x":
            return self._hex(2, start)
        if char == "u":
            return self._unicode(start)
        if char == "U" and self.dialect == "python":
            return self._hex(8, start)
        if char.isascii() and char.isalnum():
            raise self.wrong(f"\\{char} is no escape", start)
        return ord(char)

    def _zero(self, start: int) -> int:
        digits = "0"
        while self.dialect == "python" and len(digits) < 3 and self.peek() and self.peek() in "01234567":
            digits += self.peek()
            self.at += 1
        if self.peek().isdigit() and self.dialect == "ecma":
            raise self.wrong("\\0 followed by a digit", start)
        return int(digits, 8)

    def _hex(self, length: int, start: int) -> int:
        digits = self.peek(length)
        if len(digits) < length or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise self.wrong(f"an escape that needs {length} hexadecimal digits", start)
        if int(digits, 16) > MAX_CODE_POINT:
            raise self.wrong("a code point above 10FFFF", start)
        self.at += length
        return int(digits, 16)

    def _unicode(self, start: int) -> int:
        if self.dialect == "ecma" and self.take("{"):
            digits = self._until("}", "code point")
            if not digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise self.wrong("a code point that is not hexadecimal", start)
            if len(digits.lstrip("0")) > 6 or int(digits, 16) > MAX_CODE_POINT:
                raise self.wrong("a code point above 10FFFF", start)
            return int(digits, 16)
        point = self._hex(4, start)
        if 0xD800 <= point < 0xDC00 and self.peek(2) == "\\u":
            at = self.at
            self.at += 2
            following = self._hex(4, at) if self.peek() != "{" else 0
            if 0xDC00 <= following <= 0xDFFF:
                return 0x10000 + ((point - 0xD800) << 10) + following - 0xDC00
            self.at = at
        return point

    def _property(self, *, negated: bool, start: int) -> Chars:
        name = self._until("}", "property name") if self.take("{") else ""
        if not name:
            raise self.wrong("\\p without {a property}", start)
        found = property_of(name)
        if found is None:
            raise self.unsupported(f"the property {name!r}; general categories and common scripts are known", start)
        return inverted(found) if negated else found

    # classes

    def _class(self) -> Chars:
        start = self.at
        self.at += 1
        negated = self.take("^")
        sets: list[Chars] = []
        first = True
        while not (self.peek() == "]" and not (first and self.dialect == "python")):
            if self.at >= len(self.text):
                raise self.wrong("a '[' without its ']'", start)
            first = False
            low = self._class_atom()
            if self.peek() == "-" and self.peek(2) not in ("-", "-]"):
                self.at += 1
                high = self._class_atom()
                if isinstance(low, Chars) or isinstance(high, Chars):
                    raise self.wrong("a range from or to a set of characters", start)
                if low > high:
                    raise self.wrong("a range whose ends are in the wrong order", start)
                sets.append(chars([(low, high)]))
            else:
                sets.append(low if isinstance(low, Chars) else _one(low))
        self.at += 1
        found = joined(sets)
        if self.any_case and negated:
            found = either_case(found)
        return inverted(found) if negated else found

    def _class_atom(self) -> int | Chars:
        start, char = self.at, self.peek()
        self.at += 1
        if char != "\\":
            return self._joined_surrogate(ord(char))
        if self.take("b"):
            return 8
        if self.take("-"):
            return ord("-")
        if self.peek().isdigit() and self.peek() != "0":
            raise self.wrong(f"\\{self.peek()} is no escape", start)
        return self._class_escape(start)


def _one(point: int) -> Chars:
    return chars([(point, point)])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
