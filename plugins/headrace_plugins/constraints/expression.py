"""Grammars put together from texts, special tokens, regexes and schemas: a small language in JSON.

    E = "text"                                        this text
      | {"special": NAME}                             the special token of this name, else the name as text
      | {"regex": R}                                  text that matches as a whole
      | {"schema": S, "notation": N?, "until": T?}    a value of a JSON schema; notation "json" unless another is
                                                      named. until, with notation "raw": the text that follows, which
                                                      a string can't hold
      | {"until": T}                                  any text without T, which has to follow
      | {"seq": [E, ...]} | {"any": [E, ...]} | {"opt": E}
      | {"many": E, "between": E?, "min": 0, "max": null}

Dialects write their tool calls in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from headrace.errors import RequestError, did_you_mean
from headrace_plugins.constraints.automata import EMPTINESS_STATES, is_empty
from headrace_plugins.constraints.grammar import Alt, Expr, Lit, Ref, Rep, Rules, Rx, Seq, Special
from headrace_plugins.constraints.patterns import parse_pattern
from headrace_plugins.constraints.regex import Regex, cat, literal
from headrace_plugins.constraints.schema.limits import SchemaLimits
from headrace_plugins.constraints.schema.reading import read_schema as read_json_schema
from headrace_plugins.constraints.schema.shapes import ShapeTable
from headrace_plugins.constraints.schema.writing import before, write_rules

MAX_DEPTH = 64
"""Expressions inside each other."""
MARK_CHARACTERS = 256
"""Of a text that ends another: the automaton that finds it grows with the square."""
_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "special": (),
        "regex": (),
        "schema": ("notation", "until"),
        "until": (),
        "seq": (),
        "any": (),
        "opt": (),
        "many": ("between", "min", "max"),
    }
)


def read_expression(
    document: object,
    *,
    read_schema: Callable[[object], ShapeTable] = read_json_schema,
    whitespace: str = "bounded",
    limits: SchemaLimits | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Rules:
    """The grammar of an expression.

    document: parsed JSON. read_schema: reads the schemas in it. whitespace: of values, see `schema.notation`.
    Raises RequestError: HR-CONSTRAINT-02 with the path of the part that is wrong, and what reading and writing schemas
    raise, with the path of the schema in front.
    """
    reader = _Reader(read_schema, whitespace, limits, cancelled)
    body = reader.read(document, "#", 0)
    return Rules("start", {"start": body, **reader.rules})


class _Reader:
    def __init__(
        self,
        read_schema: Callable[[object], ShapeTable],
        whitespace: str,
        limits: SchemaLimits | None,
        cancelled: Callable[[], bool],
    ) -> None:
        self.rules: dict[str, Expr] = {}
        self._read_schema = read_schema
        self._whitespace = whitespace
        self._limits = limits
        self._cancelled = cancelled
        self._schemas: dict[str, Ref] = {}

    def read(self, document: object, path: str, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise RequestError(
                "HR-CONSTRAINT-04", f"the grammar nests more than {MAX_DEPTH} deep at {path}", "write it flatter"
            )
        if isinstance(document, str):
            return Lit(_text(document, path))
        kind, fields = _checked(document, path)
        value, at = fields[kind], f"{path}/{kind}"
        match kind:
            case "special":
                return Special(_filled(value, at))
            case "regex":
                return self._regex(_text(value, at), at)
            case "until":
                return Rx(before(_mark(value, at)))
            case "schema":
                return self._schema(value, fields, path)
            case "seq":
                return self._series(_flat(value, at), depth)
            case "any":
                choices = tuple(self._all(value, at, depth))
                if not choices:
                    raise _wrong(at, "there is nothing to choose from")
                return Alt(choices)
            case "opt":
                return Rep(self.read(value, at, depth + 1), 0, 1)
            case _:
                return self._many(fields, path, depth)

    def _series(self, parts: list[tuple[object, str]], depth: int) -> Expr:
        """One after the other. Texts that follow each other are one, and so are a text up to a mark and that mark:
        engines look for terminals at which texts are lost, and of such there are none."""
        read: list[Expr] = []
        for i, (part, path) in enumerate(parts):
            behind = parts[i + 1][0] if i + 1 < len(parts) else None
            end = part.get("until") if isinstance(part, dict) else None
            if isinstance(end, str) and end and isinstance(behind, str) and behind.startswith(end):
                read.append(self._marked(part, _text(behind, parts[i + 1][1]), path, depth))
                parts[i + 1] = ("", path)
            else:
                read.append(self.read(part, path, depth + 1))
        return Seq(tuple(read))

    def _marked(self, part: object, behind: str, path: str, depth: int) -> Expr:
        """A text up to a mark together with the text behind it, which begins with the mark."""
        fields = _checked(part, path)[1]
        if "schema" not in fields:
            return Rx(cat(before(_mark(fields["until"], f"{path}/until")), literal(behind)), sure=True)
        ref = self._schema(fields["schema"], fields, path)
        match self.rules.get(ref.name):
            case Alt((Rx(regex),)) if not _matches_nothing(regex):
                return Rx(cat(regex, literal(behind)), sure=True)
        return Seq((ref, Lit(behind)))

    def _all(self, parts: object, path: str, depth: int) -> Iterable[Expr]:
        if not isinstance(parts, list):
            raise _wrong(path, f"{_shown(parts)} is no array")
        return [self.read(part, f"{path}/{i}", depth + 1) for i, part in enumerate(parts)]

    def _many(self, fields: Mapping[str, object], path: str, depth: int) -> Expr:
        least, most = _count(fields, "min", path) or 0, _count(fields, "max", path)
        if most is not None and least > most:
            raise _wrong(path, f"min {least} is more than max {most}")
        body = self.read(fields["many"], f"{path}/many", depth + 1)
        if fields.get("between") is None:
            return Rep(body, least, most)
        if most == 0:
            return Seq(())
        between = self.read(fields["between"], f"{path}/between", depth + 1)
        some = Seq((body, Rep(Seq((between, body)), max(least - 1, 0), None if most is None else most - 1)))
        return some if least else Rep(some, 0, 1)

    def _regex(self, pattern: str, path: str) -> Expr:
        try:
            return Rx(parse_pattern(pattern, search=False, dialect="python"))
        except RequestError as error:
            raise _at(error, path) from None

    def _schema(self, schema: object, fields: Mapping[str, object], path: str) -> Ref:
        notation = _text(fields.get("notation", "json"), f"{path}/notation")
        until = fields.get("until")
        if until is not None:
            until = _mark(until, f"{path}/until")
            if notation != "raw":
                raise _wrong(f"{path}/until", 'only strings of notation "raw" end where a text follows')
        key = json.dumps([schema, notation, until], default=str)
        known = self._schemas.get(key)
        if known is None:
            try:
                table = self._read_schema(schema)
                rules = write_rules(
                    table,
                    notation=notation,
                    whitespace=self._whitespace,
                    until=until,
                    prefix=f"s{len(self._schemas)}_",
                    limits=self._limits,
                    cancelled=self._cancelled,
                )
            except RequestError as error:
                raise _at(error, path) from None
            self.rules.update(rules.rules)
            known = self._schemas[key] = Ref(rules.start)
        return known


def _matches_nothing(regex: Regex) -> bool:
    """True too where that is hard to tell."""
    try:
        return is_empty(regex, EMPTINESS_STATES)
    except RequestError:
        return True


def _flat(parts: object, path: str) -> list[tuple[object, str]]:
    """The parts of a series with their places: series in it laid out, and texts that follow each other as one."""
    if not isinstance(parts, list):
        raise _wrong(path, f"{_shown(parts)} is no array")
    flat: list[tuple[object, str]] = []
    waiting = [(part, f"{path}/{i}", 0) for i, part in reversed(list(enumerate(parts)))]
    while waiting:
        part, at, depth = waiting.pop()
        if isinstance(part, dict) and list(part) == ["seq"] and isinstance(part["seq"], list) and depth < MAX_DEPTH:
            inner = reversed(list(enumerate(part["seq"])))
            waiting += [(each, f"{at}/seq/{i}", depth + 1) for i, each in inner]
        elif isinstance(part, str) and flat and isinstance(last := flat[-1][0], str):
            flat[-1] = (last + part, flat[-1][1])
        else:
            flat.append((part, at))
    return flat


def _checked(document: object, path: str) -> tuple[str, dict[str, object]]:
    """The kind of an expression and its fields."""
    if not isinstance(document, dict):
        raise _wrong(path, f"{_shown(document)} is neither a text nor an object")
    # "until" is a kind of its own and a field of "schema".
    kind = next((key for key in _KEYS if key in document), None)
    if kind is None:
        unknown = next(iter(document), "")
        raise _wrong(path, f"an object needs one of {', '.join(_KEYS)}", did_you_mean(str(unknown), _KEYS))
    for key in document:
        if key != kind and key not in _KEYS[kind]:
            raise _wrong(path, f"{key!r} does not go with {kind!r}", did_you_mean(str(key), _KEYS[kind]))
    return kind, document


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _wrong(path, f"{_shown(value)} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(path, f"{value!r} holds half of a surrogate pair, which is no text") from None
    return value


def _filled(value: object, path: str) -> str:
    text = _text(value, path)
    if not text:
        raise _wrong(path, "the text is empty")
    return text


def _mark(value: object, path: str) -> str:
    mark = _filled(value, path)
    if len(mark) > MARK_CHARACTERS:
        raise RequestError(
            "HR-CONSTRAINT-04",
            f"the mark at {path} has {len(mark):,} characters, at most {MARK_CHARACTERS} are looked for",
            "end the text at a shorter one",
        )
    return mark


def _count(fields: Mapping[str, object], key: str, path: str) -> int | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise _wrong(f"{path}/{key}", f"{_shown(value)} is no whole number >= 0")
    return value


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _wrong(path: str, why: str, help: str = "") -> RequestError:
    return RequestError("HR-CONSTRAINT-02", f"the grammar is invalid at {path}: {why}", help)


def _at(error: RequestError, path: str) -> RequestError:
    """The error of a part, which does not know where the part stands."""
    return RequestError(error.code, f"{error.message} (in the grammar at {path})", error.help)
