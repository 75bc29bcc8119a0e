"""Formats that can be asserted, as regular languages. Everything else is refused by name.

None accepts a text that is not of its format. Some leave out texts that are: a leap second only stands in UTC, labels
of host names with hyphens in the third and fourth place (`xn--...`) are not written, because Punycode is not regular.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import ANY_CHAR, ANY_TEXT, Regex, both, cat, complement, either, literal, repeat

# RFC 3339 §5.6; a year of 29 days in February divides by 4, but not by 100 unless by 400.
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_FOURTH}|(?:00|{_FOURTH})00)-02-29)"
)
_HOUR, _MINUTE, _PART = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
_TIME = (
    f"(?:{_HOUR}:{_MINUTE}:{_MINUTE}{_PART}(?:[Zz]|[+-]{_HOUR}:{_MINUTE})|23:59:60{_PART}(?:[Zz]|[+-]00:00))"
)  # fmt: skip
# RFC 3339, appendix A.
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:[0-9]+W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"
# RFC 3986 §3.2.2.
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [f"(?:{_GROUP}:){{6}}{_LAST}", f"::(?:{_GROUP}:){{5}}{_LAST}"]
    + [f"(?:(?:{_GROUP}:){{0,{6 - n - 2}}}{_GROUP})?::(?:{_GROUP}:){{{n}}}{_LAST}" for n in (4, 3, 2, 1, 0)]
    + [f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}", f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::"]
) + ")"  # fmt: skip
# RFC 3986, appendix A.
_HEX = "%[0-9A-Fa-f]{2}"
_PLAIN = r"A-Za-z0-9\-._~!$&'()*+,;="
_PCHAR = f"(?:[{_PLAIN}:@]|{_HEX})"
_LITERAL = rf"\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[{_PLAIN}:]+)\]"
_AUTHORITY = f"(?:(?:[{_PLAIN}:]|{_HEX})*@)?(?:{_LITERAL}|(?:[{_PLAIN}]|{_HEX})*)(?::[0-9]*)?"
_HIER = f"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.\\-]*:{_HIER}{_TAIL}"
# The first segment of a relative path has no colon, or it would be a scheme.
_SEGMENT = f"(?:[{_PLAIN}@]|{_HEX})+"
_RELATIVE = (
    f"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_SEGMENT}(?:/{_PCHAR}*)*)?{_TAIL}"
)  # fmt: skip
# RFC 5321 §4.1.2.
_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LOCAL = rf'(?:{_ATOM}(?:\.{_ATOM})*|"(?:[ !#-\[\]-~]|\\[ -~])*")'
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"


def _pattern(text: str) -> Callable[[], Regex]:
    return lambda: parse_pattern(text, search=False, dialect="ecma")


def _host() -> Regex:
    label = both(_pattern(_LABEL)(), complement(cat(repeat(ANY_CHAR, 2, 2), literal("--"), ANY_TEXT)))
    return both(repeat(ANY_CHAR, 1, 253), cat(label, repeat(cat(literal("."), label))))


def _email() -> Regex:
    address = _pattern(rf"@\[(?:{_IPV4}|IPv6:{_IPV6})\]")()
    local = both(repeat(ANY_CHAR, 1, 64), _pattern(_LOCAL)())
    plain = _pattern(rf"@{_LABEL}(?:\.{_LABEL})*")()
    return cat(local, either(address, plain))


_FORMATS: Mapping[str, Callable[[], Regex]] = {
    "date": _pattern(_DATE),
    "time": _pattern(_TIME),
    "date-time": _pattern(f"{_DATE}[Tt]{_TIME}"),
    "duration": _pattern(_DURATION),
    "email": _email,
    "hostname": _host,
    "ipv4": _pattern(_IPV4),
    "ipv6": _pattern(_IPV6),
    "uri": _pattern(_URI),
    "uri-reference": _pattern(f"(?:{_URI}|{_RELATIVE})"),
    "uuid": _pattern("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    "json-pointer": _pattern("(?:/(?:[^~/]|~[01])*)*"),
}
NARROW = frozenset({"time", "date-time", "hostname", "email"})
"""Formats of which some texts are left out, so that what is not of them can't be said."""
FORMATS = tuple(_FORMATS)
"""The names that can be asserted."""


def format_of(name: str) -> Regex | None:
    """The language of a format; None: it can't be asserted."""
    make = _FORMATS.get(name)
    return None if make is None else make()
