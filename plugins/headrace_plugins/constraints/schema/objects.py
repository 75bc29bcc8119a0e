"""Objects: what two shapes have in common, and what a shape leaves out.

Inside the algebra the classes of `others` are disjoint from each other, but may hold names of `properties`, which then
decide alone; `finished` takes these names out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace_plugins.constraints.automata import literal_text
from headrace_plugins.constraints.regex import ANY_TEXT, NOTHING, Regex, both, complement, either
from headrace_plugins.constraints.schema.expressions import ALL, ANY_OBJECT, NONE
from headrace_plugins.constraints.schema.nodes import Nodes
from headrace_plugins.constraints.schema.scalars import words
from headrace_plugins.constraints.schema.shapes import Node, Object, Property, Some

Others = tuple[tuple[Regex, Node], ...]


def class_of(others: Others, name: str, nodes: Nodes) -> Node:
    """What a member may be that `properties` does not name."""
    return next((node for names, node in others if nodes.languages.matches(names, name)), NONE)


def meet_objects(left: Object, right: Object, nodes: Nodes) -> list[Object]:
    """Several shapes where a member of `some` may be one of the properties."""
    on_right = {each.name: each for each in right.properties}
    properties = []
    for each in left.properties:
        same = on_right.pop(each.name, None)
        node = nodes.both(each.node, same.node if same else class_of(right.others, each.name, nodes))
        properties.append(Property(each.name, node, each.required or (same is not None and same.required)))
    for each in on_right.values():
        node = nodes.both(class_of(left.others, each.name, nodes), each.node)
        properties.append(Property(each.name, node, each.required))
    most = left.most if right.most is None else right.most if left.most is None else min(left.most, right.most)
    some = tuple(dict.fromkeys(left.some + right.some))
    others = _meet_classes(left.others, right.others, nodes)
    shape = Object(
        properties=tuple(properties), others=others, least=max(left.least, right.least), most=most, some=some
    )
    return tidy_object(shape, nodes)


def _meet_classes(left: Others, right: Others, nodes: Nodes) -> Others:
    if left == right:
        return left
    classes: dict[Node, Regex] = {}
    for names, node in left:
        for more_names, more_node in right:
            common = _both_names(names, more_names)
            both_nodes = nodes.both(node, more_node)
            if both_nodes != NONE and not nodes.languages.is_empty(common):
                classes[both_nodes] = either(classes.get(both_nodes, NOTHING), common)
                nodes.budget.split(len(classes))
    return tuple((names, node) for node, names in classes.items())


def _both_names(left: Regex, right: Regex) -> Regex:
    return left if left == right else both(left, right)


def split_classes(others: Others, names: Regex, node: Node, nodes: Nodes) -> Others:
    """Members with these names are also of `node`."""
    return _meet_classes(others, ((names, node), (complement(names), ALL)), nodes)


def tidy_object(shape: Object, nodes: Nodes) -> list[Object]:
    """The one way to write a shape, or shapes; empty: no object is of it."""
    settled = [shape] if not shape.some else list(_settled(shape, nodes))
    return [tidied for each in settled if (tidied := _tidy_counts(each, nodes)) is not None]


def _settled(shape: Object, nodes: Nodes) -> Iterator[Object]:
    """Shapes in which `some` speaks only of members that `properties` does not name."""
    waiting = [(replace(shape, some=()), shape.some)]
    while waiting:
        done, facts = waiting.pop(0)
        if not facts:
            yield done
            continue
        fact, facts = facts[0], facts[1:]
        if (name := literal_text(fact.names)) is not None and all(each.name != name for each in done.properties):
            named = Property(name, class_of(done.others, name, nodes), False)
            done = replace(done, properties=(*done.properties, named))
        named_here = [each for each in done.properties if nodes.languages.matches(fact.names, each.name)]
        if any(each.required and nodes.both(each.node, fact.node) == each.node for each in named_here):
            waiting.append((done, facts))  # it holds anyway
            continue
        for each in named_here:
            node = nodes.both(each.node, fact.node)
            if node != NONE:
                properties = tuple(
                    Property(each.name, node, True) if other is each else other for other in done.properties
                )
                waiting.append((replace(done, properties=properties), facts))
        names = both(fact.names, complement(words(each.name for each in named_here))) if named_here else fact.names
        possible = [
            class_names
            for class_names, node in done.others
            if nodes.both(node, fact.node) != NONE and not nodes.languages.is_empty(both(names, class_names))
        ]
        if not possible or nodes.languages.is_empty(names):
            continue
        if fact.node == ALL and not done.properties and names == ANY_TEXT:
            waiting.append((replace(done, least=max(done.least, 1)), facts))
        else:
            waiting.append((replace(done, some=(*done.some, Some(names, fact.node))), facts))


def _tidy_counts(shape: Object, nodes: Nodes) -> Object | None:
    others = shape.others
    if any(each.required and each.node == NONE for each in shape.properties):
        return None
    properties = [each for each in shape.properties if each.node != NONE or class_of(others, each.name, nodes) != NONE]
    needed = sum(each.required for each in properties)
    possible = sum(each.node != NONE for each in properties)
    least, most = shape.least, shape.most
    if not others:
        most = possible if most is None else min(most, possible)
        if shape.some:
            return None
    if most is not None and (most < max(least, needed) or (shape.some and most == needed)):
        return None
    if most == needed:
        # No room for what may be missing.
        others, least, most = (), 0, None
        properties = [each for each in properties if each.required]
    elif not others and least == possible:
        properties = [Property(each.name, each.node, True) for each in properties if each.node != NONE]
        least, most = 0, None
    else:
        least = 0 if least <= needed else least
        most = None if not others and most is not None and most >= possible else most
    return Object(properties=tuple(properties), others=others, least=least, most=most, some=shape.some)


def is_hollow_object(shape: Object, nodes: Nodes) -> bool:
    """Whether surely no object is of a shape, as far as its members tell."""
    return any(each.required and nodes.is_empty(each.node) for each in shape.properties)


def outside_object(shape: Object, nodes: Nodes) -> Iterator[Object]:
    """Shapes that together are the objects that are not of a shape."""
    anything = ANY_OBJECT
    for each in shape.properties:
        if each.required:
            yield replace(anything, properties=(Property(each.name, NONE, False),))
        if each.node != ALL:
            yield replace(anything, properties=(Property(each.name, nodes.outside(each.node), True),))
    unnamed = complement(words(each.name for each in shape.properties))
    classes = [(names, nodes.outside(node)) for names, node in shape.others]
    if not any(names == ANY_TEXT for names, _ in classes):
        classes.append((complement(either(*(names for names, _ in classes))), ALL))
    for names, node in classes:
        if node != NONE:
            yield replace(anything, some=(Some(both(names, unnamed), node),))
    if shape.least:
        yield replace(anything, most=shape.least - 1)
    if shape.most is not None:
        yield replace(anything, least=shape.most + 1)
    for fact in shape.some:
        yield replace(anything, others=split_classes(ANY_OBJECT.others, fact.names, nodes.outside(fact.node), nodes))


def finished(shape: Object, nodes: Nodes) -> Object:
    """With classes that hold no name of a property."""
    others = []
    for names, node in shape.others:
        named = [each.name for each in shape.properties if nodes.languages.matches(names, each.name)]
        rest = both(names, complement(words(named))) if named else names
        if not nodes.languages.is_empty(rest) and node != NONE:
            others.append((rest, node))
    return replace(shape, others=tuple(others))
