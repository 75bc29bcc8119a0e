"""Sets of characters that patterns name: classes, general categories, scripts, letters of either case."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import Literal

from headrace_plugins.constraints.regex import ANY_CHAR, Chars, Ranges, chars
from headrace_plugins.constraints.scripts import CODES, SCRIPTS

Dialect = Literal["ecma", "python"]

WORD = chars([(48, 57), (65, 90), (95, 95), (97, 122)])
DIGIT = chars([(48, 57)])
LINE_ENDS = chars([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
_SPACES = ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
ASCII_SPACE = chars([(0x09, 0x0D), (0x20, 0x20)])
ECMA_SPACE = chars([*_SPACES, (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
"""WhiteSpace and LineTerminator of ECMA-262 (12.2, 12.3)."""

_MAJOR = {"L": "Letter", "M": "Mark", "N": "Number", "P": "Punctuation", "S": "Symbol", "Z": "Separator", "C": "Other"}
_CATEGORIES = {
    "Lu": "Uppercase_Letter",
    "Ll": "Lowercase_Letter",
    "Lt": "Titlecase_Letter",
    "Lm": "Modifier_Letter",
    "Lo": "Other_Letter",
    "Mn": "Nonspacing_Mark",
    "Mc": "Spacing_Mark",
    "Me": "Enclosing_Mark",
    "Nd": "Decimal_Number",
    "Nl": "Letter_Number",
    "No": "Other_Number",
    "Pc": "Connector_Punctuation",
    "Pd": "Dash_Punctuation",
    "Ps": "Open_Punctuation",
    "Pe": "Close_Punctuation",
    "Pi": "Initial_Punctuation",
    "Pf": "Final_Punctuation",
    "Po": "Other_Punctuation",
    "Sm": "Math_Symbol",
    "Sc": "Currency_Symbol",
    "Sk": "Modifier_Symbol",
    "So": "Other_Symbol",
    "Zs": "Space_Separator",
    "Zl": "Line_Separator",
    "Zp": "Paragraph_Separator",
    "Cc": "Control",
    "Cf": "Format",
    "Cs": "Surrogate",
    "Co": "Private_Use",
    "Cn": "Unassigned",
}
_ALIASES = {"digit": "Nd", "punct": "P", "cntrl": "Cc", "Combining_Mark": "M", "LC": "LC", "Cased_Letter": "LC"}


def inverted(of: Chars) -> Chars:
    """Every other character."""
    ranges: list[tuple[int, int]] = []
    at = 0
    for low, high in of.ranges:
        ranges.append((at, low - 1))
        at = high + 1
    return chars([*ranges, (at, sys.maxunicode)])


def joined(sets: Iterable[Chars]) -> Chars:
    return chars(pair for each in sets for pair in each.ranges)


def common(a: Chars, b: Chars) -> Chars:
    return inverted(joined((inverted(a), inverted(b))))


def holds(of: Chars, char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in of.ranges)


def class_of(letter: str, dialect: Dialect) -> Chars:
    r"""The set of \d, \w, \s and, in upper case, of what they leave out. In the Python dialect they are those of
    re.ASCII: who asks for \d to be written wants 0 to 9."""
    found = {"d": DIGIT, "w": WORD, "s": ECMA_SPACE if dialect == "ecma" else ASCII_SPACE}[letter.lower()]
    return inverted(found) if letter.isupper() else found


def dot(dialect: Dialect) -> Chars:
    """What `.` stands for: no ends of lines."""
    return inverted(LINE_ENDS if dialect == "ecma" else chars([(0x0A, 0x0A)]))


def property_of(name: str) -> Chars | None:
    r"""The set of `\p{name}`; None for a name that is not known here. Case counts, as in ECMA-262."""
    key, equals, value = name.partition("=")
    if equals:
        if key in ("Script", "sc"):
            return _script(value)
        if key not in ("General_Category", "gc"):
            return None
        return _category(value)
    if name in ("Any", "ASCII", "Assigned"):
        return {"Any": ANY_CHAR, "ASCII": chars([(0, 127)])}.get(name) or inverted(_by_category()["Cn"])
    return _category(name)


def either_case(of: Chars) -> Chars:
    """With the letters that differ from one of the set in case alone."""
    variants = _case_variants()
    points = (point for low, high in of.ranges for point in _within(variants, low, high))
    added = [(other, other) for point in points for other in variants.get(point, ())]
    return chars([*of.ranges, *added])


def _within(variants: dict[int, tuple[int, ...]], low: int, high: int) -> Iterable[int]:
    return range(low, high + 1) if high - low < 100 else [point for point in variants if low <= point <= high]


def _script(name: str) -> Chars | None:
    spans = [span.partition("-") for span in SCRIPTS.get(CODES.get(name, name), "").split()]
    return chars((int(low, 16), int(high or low, 16)) for low, _, high in spans) if spans else None


def _category(name: str) -> Chars | None:
    long = {word: short for short, word in (_CATEGORIES | _MAJOR).items()}
    short = _ALIASES.get(name) or long.get(name, name)
    if short == "LC":
        return joined(_by_category()[each] for each in ("Lu", "Ll", "Lt"))
    if short in _MAJOR:
        return joined(each for category, each in _by_category().items() if category[0] == short)
    return _by_category().get(short, chars(())) if short in _CATEGORIES else None


def _runs(flags: Iterable[bool]) -> Ranges:
    runs: list[tuple[int, int]] = []
    start: int | None = None
    point = -1
    for point, flag in enumerate(flags):
        if flag and start is None:
            start = point
        elif not flag and start is not None:
            runs.append((start, point - 1))
            start = None
    if start is not None:
        runs.append((start, point))
    return tuple(runs)


@cache
def _by_category() -> dict[str, Chars]:
    """Of the Unicode version of this Python."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    start, current = 0, unicodedata.category("\0")
    for point in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(point)) if point <= sys.maxunicode else ""
        if category != current:
            ranges.setdefault(current, []).append((start, point - 1))
            start, current = point, category
    return {category: chars(pairs) for category, pairs in ranges.items()}


@cache
def _case_variants() -> dict[int, tuple[int, ...]]:
    """Code point -> the others that differ in case alone (simple mappings)."""
    groups: dict[str, set[int]] = {}
    for point in range(sys.maxunicode + 1):
        char = chr(point)
        forms = {form for form in (char.lower(), char.upper(), char.title()) if len(form) == 1 and form != char}
        if forms:
            folded = char.upper() if len(char.upper()) == 1 else char
            groups.setdefault(folded, set()).update([point, *map(ord, forms)])
    variants: dict[int, set[int]] = {}
    for group in groups.values():
        for point in group:
            variants.setdefault(point, set()).update(group - {point})
    return {point: tuple(sorted(others)) for point, others in variants.items()}
