"""What masks can't enforce of a JSON schema is checked when the text is finished, by `jsonschema`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, RequestError
from headrace_plugins.constraints.schema.documents import steps
from headrace_plugins.constraints.vocabulary import Vocabulary
from headrace_plugins.constraints.walks import Forced, Program, Walk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CLASSES = {
    "4": "Draft4Validator",
    "6": "Draft6Validator",
    "7": "Draft7Validator",
    "2019-09": "Draft201909Validator",
    "2020-12": "Draft202012Validator",
}


def make_validator(schema: Any, draft: str | None, documents: Mapping[str, Any], *, assert_formats: bool) -> Any:
    """A validator of jsonschema. All are plain JSON values. draft: of a schema without `$schema`. The network is never
    asked. Raises RequestError HR-CONSTRAINT-01 where jsonschema is missing."""
    try:
        import jsonschema
        from referencing import Registry
        from referencing.jsonschema import specification_with
    except ImportError as error:
        message = f'on_unsupported = "validate" needs a package that is not installed: {error}'
        raise RequestError("HR-CONSTRAINT-01", message, "pip install 'headrace[constraints]'") from error
    default = getattr(jsonschema, _CLASSES[_draft_name(draft)])
    cls = jsonschema.validators.validator_for(schema, default=default)
    specification = specification_with(default.META_SCHEMA.get("$schema", default.META_SCHEMA.get("id", "")))
    registry: Any = Registry().with_contents(documents.items(), default_specification=specification)
    return cls(schema, registry=registry, format_checker=cls.FORMAT_CHECKER if assert_formats else None)


def _draft_name(draft: str | None) -> str:
    from headrace_plugins.constraints.schema.drafts import DRAFTS, draft_of

    found = DRAFTS[-1] if draft is None else draft_of(draft)
    assert found is not None, "options check it"
    return found.name


class Checked(Program):
    """A program whose finished text must also be valid for `validator`."""

    __slots__ = ("_program", "_validator", "_vocabulary")

    def __init__(self, program: Program, validator: Any, vocabulary: Vocabulary) -> None:
        self._program, self._validator, self._vocabulary = program, validator, vocabulary

    def start(self) -> Walk:
        return _CheckedWalk(self._program.start(), self._validator, self._vocabulary.text)

    def size_bytes(self) -> int:
        return self._program.size_bytes() + 20_000


class _CheckedWalk(Walk):
    __slots__ = ("_accepted", "_text", "_validator", "_walk")

    def __init__(self, walk: Walk, validator: Any, text: Seq[bytes]) -> None:
        self._walk, self._validator, self._text = walk, validator, text
        self._accepted: list[int] = []

    def fill(self, bits: NDArray[np.int32]) -> None:
        self._walk.fill(bits)

    def accept(self, token: int) -> bool:
        accepted = self._walk.accept(token)
        if accepted:
            self._accepted.append(token)
        return accepted

    def rollback(self, n: int) -> None:
        if n:
            self._walk.rollback(n)
            del self._accepted[-n:]

    def done(self) -> bool:
        return self._walk.done()

    def complete(self) -> bool:
        return self._walk.complete()

    def forced(self) -> Forced:
        return self._walk.forced()

    def verdict(self) -> HeadraceError | None:
        data = b"".join(self._text[token] for token in self._accepted)
        try:
            error = next(self._validator.iter_errors(json.loads(data)), None)
        except Exception as failure:  # a reference to nowhere, a value that jsonschema can't take
            message = f"the finished value could not be checked: {type(failure).__name__}: {failure}"
            return RequestError("HR-CONSTRAINT-09", message, "the value is in the output, unchecked")
        if error is None:
            return None
        pointer = f"#{steps(*error.absolute_path)}"
        return RequestError(
            "HR-CONSTRAINT-09", f"the finished value breaks '{error.validator}' at {pointer}: {error.message}",
            "ask again, or write the schema so that masks can enforce it",
        )  # fmt: skip
