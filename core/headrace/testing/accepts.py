"""Does a grammar accept a text? Byte by byte, through the engine that would hold a model to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from headrace.contracts import ConstraintEngine, Tokenizer
from headrace.errors import RequestError
from headrace.types import Grammar

if TYPE_CHECKING:
    from headrace.catalog import Catalog

END = 256
NOTHING_MATCHES = "HR-CONSTRAINT-07"
"""Code of a grammar without texts: no model can be held to it."""


class ByteTokenizer(Tokenizer):
    """A token per byte, and an end token."""

    n_vocab = 257
    bos_id = None
    eos_ids = frozenset((END,))

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        return b"<|end|>" if token == END else bytes([token])

    def is_special(self, token: int) -> bool:
        return token == END


def constraint_accepts(
    kind: str,
    text: str,
    data: bytes,
    *,
    engine: str = "auto",
    draft: str | None = None,
    documents: Mapping[str, Any] | None = None,
    catalog: Catalog | None = None,
) -> bool:
    """Whether `data` is a complete text of the grammar (kind, text).

    engine: name of a constraint engine of a plugin. draft: of a JSON schema without `$schema`, such as "7" or
    "draft2020-12"; None: 2020-12. documents: other schemas by URI, for `$ref`; the network is never asked.
    A grammar that no text matches accepts none. Raises HeadraceError when the grammar is refused for another reason, or
    the engine is missing or has no such options.
    """
    options = {"draft": draft, "documents": dict(documents) if documents else None}
    given = {name: value for name, value in options.items() if value is not None}
    made = make_engine(engine, ByteTokenizer(), given, catalog)
    try:
        matcher = made.compile(Grammar(kind, text)).start()
        for byte in data:
            if matcher.done() or not matcher.accept(byte):
                return False
        return (matcher.done() or matcher.accept(END)) and matcher.verdict() is None
    except RequestError as error:
        if error.code == NOTHING_MATCHES:
            return False
        raise
    finally:
        made.close()


def make_engine(
    name: str, tokenizer: Tokenizer, options: Mapping[str, Any], catalog: Catalog | None = None
) -> ConstraintEngine:
    """A constraint engine by name, with options as Python values.

    PluginError: no plugin offers it, or its packages are missing. RequestError HR-CONSTRAINT-01: an option is not one
    of its options, or of the wrong type.
    """
    from pydantic import ValidationError

    from headrace.catalog import missing_packages, needs
    from headrace.hooks import ConstraintSpec

    catalog = catalog or _installed()
    entry = catalog.find(ConstraintSpec, name)
    if missing := missing_packages(entry.spec):
        raise needs(entry, missing)
    made = None
    if entry.spec.options is not None:
        model = catalog.load_object(entry.spec.options, entry)
        try:
            made = model.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise RequestError("HR-CONSTRAINT-01", f"option '{key}' of engine '{name}': {first['msg']}") from None
    elif options:
        raise RequestError("HR-CONSTRAINT-01", f"engine '{name}' has no options, '{next(iter(options))}' was given")
    factory = catalog.load_object(entry.spec.factory, entry)
    engine: ConstraintEngine = factory(made, tokenizer)
    return engine


@cache
def _installed() -> Catalog:
    """The catalog of this process: what is installed does not change."""
    from headrace.catalog import Catalog

    return Catalog.load()
