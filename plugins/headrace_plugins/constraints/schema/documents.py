"""Schema documents: their text checked and indexed, and references resolved, without the network.

A schema is walked once, keyword by keyword as its draft has them, so that ids, anchors and wrong values are found
wherever a schema may stand. Nothing here recurses: a hostile document costs no stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from headrace.errors import did_you_mean
from headrace_plugins.constraints.schema.drafts import Draft, check_form, draft_names, draft_of, with_vocabulary
from headrace_plugins.constraints.schema.limits import Budget, invalid

MAX_EXPONENT = 4_000
"""Of a number, in decimal digits: exact arithmetic must stay cheap."""


@dataclass(eq=False, slots=True)
class Resource:
    """A schema with its own URI: a document, or a part of one that has an id."""

    uri: str
    root: object
    draft: Draft
    pointer: str
    """Where it stands, for error texts."""
    anchors: dict[str, Place] = field(default_factory=dict)
    dynamic: dict[str, Place] = field(default_factory=dict)
    """By $dynamicAnchor; the name "" stands for $recursiveAnchor."""


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """A schema where it stands."""

    schema: dict[str, Any] | bool
    resource: Resource
    pointer: str


class Library:
    """A root schema with the documents that it may refer to. `documents`: URI -> schema."""

    def __init__(self, schema: object, draft: Draft, documents: Mapping[str, object], budget: Budget) -> None:
        self._default = draft
        self._budget = budget
        self._documents = {_bare(uri): document for uri, document in documents.items()}
        self._places: dict[int, Place] = {}
        self._resources: dict[str, Resource] = {}
        self._loading: set[str] = set()
        self._kept: list[object] = []
        self.root = self._load("", "#", schema)

    def place(self, schema: object, parent: Place, *keys: str | int) -> Place:
        """The place of a schema inside another, `keys` away."""
        if isinstance(schema, dict):
            return self._places[id(schema)]
        assert isinstance(schema, bool)
        return Place(schema, parent.resource, parent.pointer + steps(*keys))

    def resolve(self, reference: str, resource: Resource, pointer: str) -> tuple[Place, str | None]:
        """What a reference of `resource` points at, and the name of the anchor if it was one that is dynamic.

        Raises HR-CONSTRAINT-02 naming `pointer` when there is no such schema.
        """
        if reference.startswith("#"):
            uri, fragment = resource.uri, reference[1:]
        else:
            uri, fragment = _joined(resource.uri, reference, pointer)
        target = resource if uri == resource.uri else self._resource(uri)
        if target is None:
            known = [name for name in (*self._documents, *self._resources) if name]
            help = did_you_mean(uri, known) if known else ""
            help = help or f"pass the schema of {uri:.200} in documents; the network is never asked"
            raise invalid(pointer, f"{_shown(reference)} refers to the unknown document {uri:.200}", help)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = target.dynamic.get(fragment) or target.anchors.get(fragment)
            if found is None:
                raise invalid(pointer, f"{_shown(reference)} names an anchor that is not in {_shown(uri or '#')}")
            return found, fragment if fragment in target.dynamic else None
        return self._at(target, fragment, reference, pointer), None

    def _at(self, resource: Resource, fragment: str, reference: str, pointer: str) -> Place:
        value, where = resource.root, resource.pointer
        for part in fragment.split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and len(step) < 10 and int(step) < len(value):
                value = value[int(step)]
            else:
                raise invalid(pointer, f"{_shown(reference)} refers to nothing: there is no {_shown(step)} in {where}")
            where += "/" + part
            if id(value) in self._places:
                resource, where = self._places[id(value)].resource, self._places[id(value)].pointer
        if not isinstance(value, dict):
            if not isinstance(value, bool):
                raise invalid(pointer, f"{_shown(reference)} refers to something that is not a schema")
            return Place(value, resource, where)
        if id(value) not in self._places:
            self._index(value, resource, where)
        return self._places[id(value)]

    def _resource(self, uri: str) -> Resource | None:
        uri = _bare(uri)
        if uri not in self._resources:
            document = self._documents[uri] if uri in self._documents else _metaschema(uri)
            if document is None or uri in self._loading:
                return None
            self._load(uri, uri + "#", document)
        return self._resources[uri]

    def _load(self, uri: str, pointer: str, document: object) -> Place:
        self._loading.add(uri)
        copy = _copied(document, pointer, self._budget)
        self._kept.append(copy)  # places are found by the identity of these
        self._loading.discard(uri)
        resource = Resource(uri, copy, self._draft(copy, self._default, pointer), pointer)
        self._resources[uri] = resource
        if isinstance(copy, bool) and resource.draft.flags:
            return Place(copy, resource, pointer)
        return self._index(copy, resource, pointer)

    def _draft(self, schema: object, default: Draft, pointer: str) -> Draft:
        named = schema.get("$schema") if isinstance(schema, dict) else None
        if named is None:
            return default
        if not isinstance(named, str):
            raise invalid(f"{pointer}/$schema", f"{named!r} is not a string")
        if found := draft_of(named):
            return found
        uri = _bare(named)
        document = self._documents.get(uri)
        if not isinstance(document, dict) or uri in self._loading:
            help = f"drafts {draft_names()} are known; pass any other metaschema in documents"
            raise invalid(f"{pointer}/$schema", f"{named} is no known draft", help)
        self._loading.add(uri)
        draft = self._draft(document, default, uri + "#")
        self._loading.discard(uri)
        vocabulary = document.get("$vocabulary")
        return with_vocabulary(draft, vocabulary, f"{uri}#") if isinstance(vocabulary, dict) else draft

    def _index(self, schema: object, resource: Resource, pointer: str) -> Place:
        """Walk every schema inside `schema`; the place of `schema` itself."""
        stack: list[tuple[object, Resource, str]] = [(schema, resource, pointer)]
        while stack:
            schema_here, resource, pointer = stack.pop()
            if not isinstance(schema_here, dict):
                if isinstance(schema_here, bool) and resource.draft.flags:
                    continue
                wanted = "an object or a boolean" if resource.draft.flags else "an object"
                raise invalid(pointer, f"a schema is {wanted}, not {_shown(schema_here)}")
            if id(schema_here) in self._places:
                continue
            resource = self._entered(schema_here, resource, pointer)
            self._places[id(schema_here)] = place = Place(schema_here, resource, pointer)
            self._name_anchors(place)
            for keyword, value in schema_here.items():
                form = resource.draft.forms.get(keyword)
                if form is not None:
                    check_form(form, value, f"{pointer}{steps(keyword)}")
                    stack += [
                        (inner, resource, pointer + steps(keyword, *keys)) for inner, keys in subschemas(form, value)
                    ]
        assert isinstance(schema, dict)
        return self._places[id(schema)]

    def _entered(self, schema: dict[str, Any], resource: Resource, pointer: str) -> Resource:
        """The resource that a schema belongs to: a new one where it has an id."""
        is_root = schema is resource.root
        draft = self._draft(schema, resource.draft, pointer) if "$schema" in schema else resource.draft
        name = schema.get(draft.id_keyword)
        if not isinstance(name, str) or (draft.ref_alone and "$ref" in schema):
            return resource
        here = f"{pointer}/{draft.id_keyword}"
        base, fragment = urldefrag(resource.uri + name) if name[:1] == "#" else _joined(resource.uri, name, here)
        if fragment and not draft.id_anchors:
            raise invalid(here, f"{_shown(name)} has a fragment")
        if name.startswith("#"):
            return resource
        if is_root:
            resource.uri = base
        else:
            resource = Resource(base, schema, draft, pointer)
        self._resources.setdefault(_bare(base), resource)
        return resource

    def _name_anchors(self, place: Place) -> None:
        schema, resource = place.schema, place.resource
        assert isinstance(schema, dict)
        draft = resource.draft
        name = schema.get(draft.id_keyword)
        if draft.id_anchors and isinstance(name, str) and not (draft.ref_alone and "$ref" in schema):
            fragment = urldefrag(name)[1]
            if fragment:
                resource.anchors[fragment] = place
        if isinstance(anchor := schema.get("$anchor"), str) and "$anchor" in draft.forms:
            resource.anchors[anchor] = place
        if isinstance(anchor := schema.get("$dynamicAnchor"), str) and "$dynamicAnchor" in draft.forms:
            resource.dynamic[anchor] = place
        if schema.get("$recursiveAnchor") is True and "$recursiveAnchor" in draft.forms and schema is resource.root:
            resource.dynamic[""] = place


def subschemas(form: str, value: Any) -> Iterator[tuple[object, tuple[str | int, ...]]]:
    """The schemas that a keyword's value holds, with the keys that lead to them."""
    if form == "items":
        form = "schemas" if isinstance(value, list) else "schema"
    if form == "schema" or (form == "schema_or_flag" and not isinstance(value, bool)):
        yield value, ()
    elif form == "schemas":
        for i, inner in enumerate(value):
            yield inner, (i,)
    elif form in ("schema_map", "dependencies"):
        for name, inner in value.items():
            if form == "schema_map" or not isinstance(inner, list):
                yield inner, (name,)


def steps(*keys: str | int) -> str:
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def _joined(base: str, reference: str, pointer: str) -> tuple[str, str]:
    """(URI, fragment) of a reference."""
    try:
        uri, fragment = urldefrag(urljoin(base, reference))
    except ValueError as error:  # brackets that are no IPv6 address, a netloc that Unicode normalises to another one
        raise invalid(pointer, f"{_shown(reference)} is no URI reference: {error}") from None
    return uri, fragment


def _bare(uri: str) -> str:
    return uri.rstrip("#")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _metaschema(uri: str) -> object | None:
    """One of the standard's own documents."""
    if not uri.startswith(("http://json-schema.org/", "https://json-schema.org/")):
        return None
    from jsonschema_specifications import REGISTRY

    found = REGISTRY.get(uri)
    return None if found is None else found.contents


def _copied(document: object, pointer: str, budget: Budget) -> Any:
    """A private copy, of JSON values only, counted by `budget`; every object in it stands in one place."""
    top: list[Any] = [None]
    stack: list[tuple[object, Any, Any, int]] = [(document, top, 0, 0)]
    while stack:
        value, holder, key, depth = stack.pop()
        budget.hold(depth)
        if isinstance(value, Mapping):
            # The keys are set here, so that they keep their order while the values are filled in backwards.
            holder[key] = inner = dict.fromkeys(value)
            for name, part in value.items():
                if not isinstance(name, str):
                    raise invalid(pointer, f"the key {name!r} is not a string")
                stack.append((part, inner, name, depth + 1))
        elif isinstance(value, (list, tuple)):
            holder[key] = items = [None] * len(value)
            stack += [(part, items, i, depth + 1) for i, part in enumerate(value)]
        else:
            holder[key] = _scalar(value, pointer)
    return top[0]


def _scalar(value: object, pointer: str) -> object:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_EXPONENT * 10 // 3:
            raise invalid(pointer, f"a number of more than {MAX_EXPONENT} digits")
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        if abs(value.adjusted()) > MAX_EXPONENT or len(value.as_tuple().digits) > MAX_EXPONENT:
            raise invalid(pointer, f"the number {str(value)[:40]} has more than {MAX_EXPONENT} digits")
        return value
    raise invalid(pointer, f"{_shown(value)} is no JSON value")
