"""Shapes written as grammar: exactly the texts that stand for a value of the shapes, in one notation.

Members come in the order of `Object.properties`, others behind them; a name that is written twice counts with its last
value, as for `json.loads`, and never makes a value pass that is not of the shape. One rule per node; every value that
is no array or object is one terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.errors import RequestError
from headrace_plugins.constraints.automata import contains_operators, surely_empty
from headrace_plugins.constraints.characters import holds
from headrace_plugins.constraints.dfa import Dfa, rules_of
from headrace_plugins.constraints.grammar import Alt, Expr, Ref, Rules, Rx, Seq, Special
from headrace_plugins.constraints.regex import (
    ANY_TEXT,
    NOTHING,
    Regex,
    both,
    cat,
    complement,
    either,
    literal,
    repeat,
)
from headrace_plugins.constraints.schema import elements, members
from headrace_plugins.constraints.schema.limits import Refusal, SchemaLimits, exceeded
from headrace_plugins.constraints.schema.notation import IDENTIFIER, Notation, blanks_of, notation_of
from headrace_plugins.constraints.schema.numbers import number_language
from headrace_plugins.constraints.schema.quoting import Speller
from headrace_plugins.constraints.schema.shapes import (
    Array,
    Boolean,
    Node,
    Null,
    Number,
    Object,
    Shape,
    ShapeTable,
    String,
)

MAX_INLINE_VALUES = 16
"""Listed values of a node that is not given a rule of its own."""


def write_rules(
    table: ShapeTable,
    *,
    notation: str = "json",
    whitespace: str = "bounded",
    until: str | None = None,
    prefix: str = "",
    limits: SchemaLimits | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Rules:
    """The grammar of the texts of the values of a table's root.

    notation: see `notation.NOTATIONS`. whitespace: see `notation.Whitespace`. until: with notation "raw", what a string
    at the root can't hold because it follows. prefix: before the names of all rules.
    Raises RequestError: HR-CONSTRAINT-02 notation or whitespace is unknown, -03 something can't be written exactly,
    -04 a limit is exceeded, -06 cancelled.
    """
    named = notation_of(notation)
    writer = Writer(table, named, blanks_of(named, whitespace), prefix, limits or SchemaLimits(), cancelled)
    return writer.write(until)


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the members of an object, or around elements."""

    open: Expr
    close: Expr
    empty: Expr
    comma: Expr
    keywords: bool = False
    """Members are keyword arguments."""


class Writer:
    """Writes one table. `rules` grows; names are unique by prefix."""

    def __init__(
        self,
        table: ShapeTable,
        notation: Notation,
        blanks: Regex,
        prefix: str,
        limits: SchemaLimits,
        cancelled: Callable[[], bool],
    ) -> None:
        self.table = table
        self.rules: dict[str, Expr] = {}
        self.comma = Rx(cat(literal(","), blanks), sure=True)
        self.object = self._frame("{", "}", blanks)
        self.array = self._frame("[", "]", blanks)
        self.notation = notation
        self._prefix = prefix
        self._limits = limits
        self._cancelled = cancelled
        self._colon = cat(literal(":"), blanks)
        self._spellers = [Speller(each) for each in notation.quotings]
        self._values: dict[Node, Expr] = {}
        self._waiting: list[Node] = []
        self._machines: dict[Dfa, Expr] = {}
        self._names: dict[str, Expr] = {}
        self._never: str | None = None
        """What no string, and no name, may hold as it is written."""

    def _frame(self, open: str, close: str, blanks: Regex) -> Frame:
        whole = Rx(cat(literal(open), blanks, literal(close)), sure=True)
        begin, end = cat(literal(open), blanks), cat(blanks, literal(close))
        return Frame(Rx(begin, sure=True), Rx(end, sure=True), whole, self.comma)

    def write(self, until: str | None) -> Rules:
        root = self.table.root
        start = self.rule_name("root")
        match self.notation.root:
            case "value":
                body = self.value(root)
            case "keywords":
                body = self._keywords(root)
            case "raw":
                self._never = until
                body = self._raw(root, until)
        self.rules[start] = body
        while self._waiting:
            if self._cancelled():
                raise RequestError("HR-CONSTRAINT-06", "writing the grammar of the JSON schema was cancelled")
            node = self._waiting.pop()
            self.rules[self._node_name(node)] = self._alternatives(node, self.table.union(node))
        return Rules(start, self.rules)

    def rule_name(self, kind: str) -> str:
        """A name that no rule has yet."""
        return f"{self._prefix}{kind}" if kind == "root" else f"{self._prefix}{kind}{len(self.rules)}"

    def add(self, kind: str, body: Expr) -> Ref:
        """A rule of its own."""
        name = self.rule_name(kind)
        self.rules[name] = body
        return Ref(name)

    def refused(self, node: Node, keyword: str, why: str) -> RequestError:
        return Refusal(self.table.where(node), keyword, why)

    def _node_name(self, node: Node) -> str:
        return f"{self._prefix}n{node}"

    # values

    def value(self, node: Node) -> Expr:
        """The values of a node, as a reference or, where that is short, as they are."""
        known = self._values.get(node)
        if known is None:
            if len(self._values) >= self._limits.nodes:
                raise exceeded("speaks of too many sets of values", "nodes", self._limits.nodes)
            union = self.table.union(node)
            if all(map(_is_short, union)):
                known = self._alternatives(node, union)
            else:
                known = Ref(self._node_name(node))
                self._waiting.append(node)
            self._values[node] = known
        return known

    def is_empty(self, node: Node) -> bool:
        return not self.table.union(node)

    def _alternatives(self, node: Node, union: Iterable[Shape]) -> Expr:
        """In the order of the union; strings together, and numbers."""
        texts: list[String] = []
        numbers: list[Number] = []
        choices: list[Expr] = []
        places: dict[type, int] = {}
        for shape in union:
            match shape:
                case Null():
                    choices.append(self.word(None))
                case Boolean(values):
                    choices += map(self.word, values)
                case Number():
                    numbers.append(shape)
                case String():
                    texts.append(shape)
                case Array():
                    choices.append(elements.write_array(self, shape, node))
                case Object():
                    choices.append(members.write_object(self, shape, node, self.object))
            if isinstance(shape, Number | String) and type(shape) not in places:
                places[type(shape)] = len(choices)
                choices.append(Alt(()))
        if texts:
            choices[places[String]] = self._strings(texts, node)
        if numbers:
            choices[places[Number]] = self._numbers(numbers, node)
        return choices[0] if len(choices) == 1 else Alt(tuple(choices))

    def word(self, value: bool | None) -> Expr:
        words = {None: self.notation.null, True: self.notation.true, False: self.notation.false}
        return Rx(literal(words[value]), sure=True)

    def _numbers(self, shapes: list[Number], node: Node) -> Expr:
        languages = [number_language(shape, self.table.where(node)) for shape in shapes]
        plain = [language for language in languages if not isinstance(language, Dfa)]
        machines = [self._machine(language) for language in languages if isinstance(language, Dfa)]
        if not plain:
            return Alt(tuple(machines))
        together = either(*plain)
        written = Rx(together, sure=together != NOTHING and not contains_operators(together))
        return Alt((written, *machines)) if machines else written

    def _machine(self, machine: Dfa) -> Expr:
        known = self._machines.get(machine)
        if known is None:
            rules = rules_of(machine, f"{self.rule_name('d')}_")
            self.rules.update(rules.rules)
            known = self._machines[machine] = Ref(rules.start)
        return known

    def _strings(self, shapes: list[String], node: Node) -> Expr:
        mark = self.notation.mark
        shapes = [shape for shape in shapes if shape.values is not None or not surely_empty(shape.language)]
        if mark is not None:
            inside = both(_texts(shapes), without(mark))
            self._check_marks(shapes, mark, node)
            return Seq((Special(mark), Rx(inside), Special(mark)))
        written = [
            speller.quoted(shape.language) if shape.values is None else either(*map(speller.quoted_text, shape.values))
            for speller in self._spellers
            for shape in shapes
        ]
        return Rx(self._kept(either(*written)), sure=bool(written))

    def _kept(self, written: Regex) -> Regex:
        """Without the texts of which a reader would take a part for the end; every text has another spelling."""
        return both(written, without(self._never)) if self._never else written

    def text(self, text: str) -> Expr:
        """One string."""
        return self._strings([String(values=(text,))], self.table.root)

    def _check_marks(self, shapes: list[String], mark: str, node: Node) -> None:
        for shape in shapes:
            for value in shape.values or ():
                if mark in value:
                    raise self.refused(node, "enum", f"in the notation {self.notation.name} no string holds {mark!r}")

    # names of members

    def name(self, name: str, node: Node, frame: Frame) -> Expr:
        """One name of a member with what stands before its value."""
        known = self._names.get(name)
        if known is not None and not frame.keywords:
            return known
        if frame.keywords:
            if not name.isidentifier():
                raise self.refused(node, "properties", f"{name!r} can't be the name of a keyword argument")
            return Rx(literal(f"{name}="), sure=True)
        bare = self.notation.bare_names
        if bare is not None:
            if not name or not all(holds(bare, char) for char in name):
                raise self.refused(node, "properties", f"{name!r} can't be a name in notation {self.notation.name}")
            found = cat(literal(name), self._colon)
        else:
            found = either(*(cat(speller.quoted_text(name), self._colon) for speller in self._spellers))
            found = self._kept(found) if self._never and self._never in name else found
        self._names[name] = Rx(found, sure=True)
        return self._names[name]

    def any_name(self, names: Regex, frame: Frame) -> Expr:
        """The names of a class with what stands before their values."""
        if frame.keywords:
            return Rx(cat(both(names, IDENTIFIER), literal("=")), sure=True)
        bare = self.notation.bare_names
        if bare is not None:
            return Rx(cat(both(names, repeat(bare, 1)), self._colon), sure=True)
        found = either(*(cat(speller.quoted(names), self._colon) for speller in self._spellers))
        return Rx(self._kept(found), sure=True)

    # roots

    def _keywords(self, root: Node) -> Expr:
        """The objects of the root; what else it allows has no place in a call."""
        nothing = Seq(())
        frame = Frame(nothing, nothing, nothing, self.comma, keywords=True)
        objects = [shape for shape in self.table.union(root) if isinstance(shape, Object)]
        if not objects:
            raise self.refused(root, "type", "keyword arguments are an object, and none is allowed")
        return Alt(tuple(members.write_object(self, shape, root, frame) for shape in objects))

    def _raw(self, root: Node, until: str | None) -> Expr:
        union = self.table.union(root)
        texts = [shape for shape in union if isinstance(shape, String)]
        others = [shape for shape in union if not isinstance(shape, String)]
        if not texts:
            return self.value(root)
        written = _texts(texts)
        if until:
            for value in (value for shape in texts for value in shape.values or ()):
                if until in value:
                    raise self.refused(root, "enum", f"no string here holds {until!r}")
            written = both(written, before(until))
        return Alt((Rx(written), *([self._alternatives(root, others)] if others else [])))


def _is_short(shape: Shape) -> bool:
    match shape:
        case Array() | Object():
            return False
        case String(values=values) | Number(values=values):
            return values is None or len(values) <= MAX_INLINE_VALUES
        case _:
            return True


def _texts(shapes: list[String]) -> Regex:
    return either(
        *(either(*map(literal, shape.values)) if shape.values is not None else shape.language for shape in shapes)
    )


def without(text: str) -> Regex:
    """All texts that do not hold this one."""
    return complement(cat(ANY_TEXT, literal(text), ANY_TEXT)) if text else NOTHING


def before(text: str) -> Regex:
    """All texts behind which `text` is found first where they end."""
    periods = [size for size in range(1, len(text)) if text[size:] == text[: len(text) - size]]
    if not periods:
        return without(text)
    return both(without(text), complement(cat(ANY_TEXT, either(*(literal(text[:size]) for size in periods)))))
