"""Option models: pydantic at the edge, with errors that name the key, the file and the line.

A plugin's options are a subclass of `Options`, named by its record as "module:Model". Docstrings below the fields
become the text of docs/config.md and `headrace plugins show`.
"""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.errors import ConfigError, HeadraceError, did_you_mean
from headrace.layers import Tree, at
from headrace.textfile import expanded
from headrace.tomlmap import KeyPath, dotted

M = TypeVar("M", bound=BaseModel)

FEW_KEYS = 16
"""Up to so many valid keys are listed in an error."""


class Options(BaseModel):
    """Base of all option models. Unknown keys are errors; types are strict ("8" is not 8); `~` in paths is expanded
    and a relative path is relative to the config file that says it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    @field_validator("*", mode="after")
    @classmethod
    def _expand(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Path):
            return value
        folders: Mapping[str, Path] = info.context or {}
        return folders.get(info.field_name or "", Path()) / expanded(value)

    @model_validator(mode="after")
    def _expand_defaults(self) -> Self:
        for name in set(type(self).model_fields) - self.model_fields_set:
            if isinstance(value := getattr(self, name), Path):
                self.__dict__[name] = expanded(value)  # frozen for others, not finished yet for us
        return self


class _Unit:
    """Marks an annotated type with the word that docs use for it."""

    def __init__(self, word: str) -> None:
        self.word = word


_BYTES = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGTP", 1)
    for infix, base in (("", 1000), ("i", 1024))
}
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_BYTES = 1 << 63
_MOST_SECONDS = 3.2e11
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def _bytes(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < _MOST_BYTES:
            raise ValueError("a size can't be negative" if value < 0 else "a size has to be below 2**63 bytes")
        return value
    found = _QUANTITY.match(value) if isinstance(value, str) else None
    if not found or found[2] not in _BYTES:
        raise ValueError('write a size such as "64GiB" (2**30 bytes), "500MB" (10**6 bytes), or a number of bytes')
    size = float(found[1]) * _BYTES[found[2]]
    if size >= _MOST_BYTES:
        raise ValueError("a size has to be below 2**63 bytes")
    return int(size)


def _seconds(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < _MOST_SECONDS:
            raise ValueError("a time can't be negative, infinite or longer than 10,000 years")
        return float(value)
    found = _QUANTITY.match(value) if isinstance(value, str) else None
    if not found or found[2] not in _SECONDS:
        raise ValueError('write a time such as "500ms", "20s", "5min", "1h", "7d", or a number of seconds')
    return _seconds(float(found[1]) * _SECONDS[found[2]])


ByteSize = Annotated[int, pydantic.BeforeValidator(_bytes), _Unit("size")]
"""A size in bytes, written "64GiB", "500MB" or as a number."""
Seconds = Annotated[float, pydantic.BeforeValidator(_seconds), _Unit("time")]
"""A time in seconds, written "20s", "1h", "7d" or as a number."""


def validate(
    model: type[M],
    raw: Mapping[str, Any],
    path: KeyPath,
    tree: Tree,
    label: str,
    problems: list[HeadraceError],
    elsewhere: Mapping[str, str] | None = None,
) -> M | None:
    """Check a table against its model. Every fault is added to `problems`; None when there was one.

    path: of the table, e.g. ("drafter",). label: who accepts the keys, e.g. "drafter 'ngram'".
    elsewhere: key -> table where it would be valid.
    """
    before = len(problems)
    values = _written(_secrets(model, raw, path, tree, problems), path, tree, problems)
    folders = {key: where.folder() for key in raw if (where := tree.where((*path, key)))}
    try:
        checked = model.model_validate_json(json.dumps(values, default=str), strict=True, context=folders)
    except ValidationError as error:
        known = {each.path for each in problems[before:] if isinstance(each, _KeyError)}
        for key, faults in _by_key(error, raw).items():
            if (*path, *key) not in known:
                problems.append(_problem(model, faults, key, path, tree, label, elsewhere or {}))
        return None
    return checked if len(problems) == before else None


def _written(value: Any, path: KeyPath, tree: Tree, problems: list[HeadraceError]) -> Any:
    """The value, its texts fit for JSON. Those that are no UTF-8 (a path may be so) are added to `problems`."""
    if isinstance(value, Mapping):
        return {key: _written(each, (*path, str(key)), tree, problems) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(each, path, tree, problems) for each in value]
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        where = tree.where(path)
        message = f"{dotted(path)}{f' ({where})' if where else ''} is no UTF-8 text"
        problems.append(_key_error(path, "HR-CONFIG-04", message, "if it is a path, rename the file or folder"))
        return value.encode("utf-8", "replace").decode()
    return value


class _KeyError(ConfigError):
    """A problem that remembers which key it is about."""

    path: KeyPath = ()


def _key_error(path: KeyPath, code: str, message: str, help: str) -> _KeyError:
    error = _KeyError(code, message, help)
    error.path = path
    return error


def _by_key(error: ValidationError, raw: Mapping[str, Any]) -> dict[KeyPath, list[Any]]:
    """Faults grouped by the key they are about. pydantic appends names of union members to a location; a key that
    was given ends where the data ends."""
    grouped: dict[KeyPath, list[Any]] = {}
    for fault in error.errors(include_url=False):
        key: KeyPath = ()
        inner: Any = raw
        for part in fault["loc"]:
            table = isinstance(inner, Mapping) and part in inner
            if table or (isinstance(inner, list | tuple) and isinstance(part, int) and part < len(inner)):
                inner = inner[part]
            elif not (fault["type"] == "missing" and part == fault["loc"][-1]):
                continue
            key = (*key, str(part))
        grouped.setdefault(key, []).append(fault)
    return grouped


def _problem(
    model: type[BaseModel],
    faults: list[Any],
    key: KeyPath,
    path: KeyPath,
    tree: Tree,
    label: str,
    elsewhere: Mapping[str, str],
) -> ConfigError:
    full = (*path, *key)
    around = _model_at(model, key[:-1])
    fields = around.model_fields if around else {}
    if faults[0]["type"] == "extra_forbidden":
        owner = label if len(key) == 1 else f"'{dotted(full[:-1])}'"
        help = _advice(key[-1], fields, owner, elsewhere)
        return _key_error(full, "HR-CONFIG-03", f"unknown key {at(full, tree)}", help)
    if faults[0]["type"] == "missing":
        help = _doc(fields.get(key[-1])) or f"{label} needs it"
        return _key_error(full, "HR-CONFIG-05", f"required key {at(full, tree)} is missing", help)
    value = faults[0]["input"]
    secret = key and key[0] in model.model_fields and _is_secret(model.model_fields[key[0]].annotation)
    shown = f" = {_short(value)}" if key and not secret else ""
    expected = " ".join(str(fault.get("ctx", {}).get("expected", "")) for fault in faults)
    near = did_you_mean(value, re.findall(r"'([^']*)'", expected)) if isinstance(value, str) else ""
    where = tree.where(full)
    message = f"{dotted(full)}{shown} is not allowed" + (f" ({where})" if where else "")
    return _key_error(full, "HR-CONFIG-04", message, near + ", or ".join(dict.fromkeys(map(_reason, faults))))


def _reason(fault: Any) -> str:
    message: str = fault["msg"]
    if fault["type"] in ("value_error", "assertion_error"):  # "Value error, " and the text of the validator
        return message.partition(", ")[2]
    return message.replace("Input should", "it should", 1)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _advice(key: str, fields: Mapping[str, Any], owner: str, elsewhere: Mapping[str, str]) -> str:
    near = did_you_mean(key, fields)
    place = f"'{key}' belongs in {elsewhere[key]}. " if key in elsewhere else ""
    if not fields:
        return f"{place}{owner} has no options"
    listed = f"{owner} accepts: {', '.join(sorted(fields))}" if len(fields) <= FEW_KEYS or not (near or place) else ""
    return f"{near}{place}{listed}".strip()


def _model_at(model: type[BaseModel], key: KeyPath) -> type[BaseModel] | None:
    for part in key:
        field = model.model_fields.get(part)
        if field is None:
            return None
        inner = [each for each in _flat(field.annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
        if not inner:
            return None
        model = inner[0]
    return model


def _flat(annotation: Any) -> Iterator[Any]:
    """The types inside unions, Optional and Annotated."""
    if get_origin(annotation) is Annotated:
        yield from _flat(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _flat(each)
    else:
        yield annotation


def _is_secret(annotation: Any) -> bool:
    return any(each is SecretStr for each in _flat(annotation))


def _secrets(
    model: type[BaseModel] | None, raw: Mapping[str, Any], path: KeyPath, tree: Tree, problems: list[HeadraceError]
) -> dict[str, Any]:
    """`raw` with `{env = "NAME"}` replaced by the variable's value where the option is a secret, else a problem."""
    values: dict[str, Any] = dict(raw)
    for key, value in raw.items():
        if not isinstance(value, Mapping):
            continue
        field = model.model_fields.get(key) if model else None
        kinds = list(_flat(field.annotation)) if field else []
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        here = (*path, key)
        name = value.get("env")
        if set(value) != {"env"} or not isinstance(name, str) or any(_is_table(kind) for kind in kinds):
            values[key] = _secrets(inner[0] if inner else None, value, here, tree, problems)
        elif SecretStr in kinds and name in os.environ:
            values[key] = os.environ[name]
        elif SecretStr in kinds:
            message = f"environment variable '{name}', which {at(here, tree)} reads, is not set"
            problems.append(_key_error(here, "HR-CONFIG-08", message, f"export {name}=..."))
        elif field:
            message = f"{at(here, tree)} can't be read from the environment: it is not a secret"
            help = "write the value itself; {env = ...} is for passwords, tokens and the like"
            problems.append(_key_error(here, "HR-CONFIG-08", message, help))
    return values


def _is_table(kind: Any) -> bool:
    kind = get_origin(kind) or kind
    return kind is Any or (isinstance(kind, type) and issubclass(kind, (dict, Mapping, BaseModel)))


# --- describing models -----------------------------------------------------------------------------------------------


def describe(model: type[BaseModel]) -> list[dict[str, str]]:
    """Rows of {name, type, default, doc} for docs and `plugins show`, in the order of the model."""
    return [
        {
            "name": name,
            "type": type_text(field.annotation, field.metadata),
            "default": _default(field),
            "doc": _doc(field),
        }
        for name, field in model.model_fields.items()
    ]


def _doc(field: FieldInfo | None) -> str:
    return " ".join((field.description or "").split()) if field else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True) if field.default_factory is not None else field.default
    if value is PydanticUndefined or value is None:
        return "unset"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return _short(list(value) if isinstance(value, tuple | frozenset | set) else value)


def type_text(annotation: Any, metadata: Any = ()) -> str:
    """A type in config words: "integer", "size", "text", "list of text", ..."""
    for mark in metadata:
        if isinstance(mark, _Unit):
            return mark.word
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(inner[0], inner[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(each) for each in inner if each is not type(None)))
    if origin is Literal:
        return " or ".join(_short(each) for each in inner)
    if origin in (tuple, list, set, frozenset):
        return f"list of {type_text(inner[0])}" if inner else "list"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {type_text(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    words = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "secret"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))
