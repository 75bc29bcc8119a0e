"""Layers of a configuration: files that extend each other, `--set` and arguments, merged into one tree.

Tables merge key by key. The exception: a table whose `use` names another plugin replaces the whole table below it,
since the old keys were options of the old plugin.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, HeadraceError
from headrace.textfile import expanded, read_text
from headrace.tomlmap import DEEPEST, KeyPath, dotted, key_lines

LONGEST_CHAIN = 32
"""Files that may extend each other."""

_AT = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class Where:
    """Where a key was said: a file and line, or `--set ...` or an argument (then line is 0)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def folder(self) -> Path:
        """What relative paths in the value are relative to: the file's folder, or the working directory."""
        return Path(self.file).parent if self.line else Path()


@dataclass(slots=True)
class Tree:
    """Nested tables and where each key came from."""

    data: dict[str, Any] = field(default_factory=dict)
    origin: dict[KeyPath, Where] = field(default_factory=dict)

    def where(self, path: KeyPath) -> Where | None:
        """Origin of a key, or of the nearest table around it."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.origin:
                return self.origin[path[:n]]
        return None

    def add(self, over: Tree) -> None:
        """Put another layer on top of this one."""
        _merge(self.data, over.data, (), self.origin)
        self.origin.update(over.origin)


def _merge(base: dict[str, Any], over: Mapping[str, Any], path: KeyPath, origin: dict[KeyPath, Where]) -> None:
    for key, value in over.items():
        here = (*path, key)
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _other_plugin(old, value):
            _merge(old, value, here, origin)
            continue
        for known in [known for known in origin if known[: len(here)] == here]:
            del origin[known]
        base[key] = _copy(value)


def _other_plugin(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "use" in old and "use" in new and old["use"] != new["use"]


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def file_tree(path: str | os.PathLike[str]) -> Tree:
    """Read a TOML file and everything that it extends. ConfigError: missing, unreadable, bad TOML, a cycle."""
    return _read(expanded(path), None, ())


def _read(path: Path, asked: Where | None, chain: tuple[str, ...]) -> Tree:
    said = f" (extended by {asked})" if asked else ""
    text = _text(path, said, bool(asked))
    real = os.path.realpath(path)
    if real in chain:
        loop = " -> ".join(os.path.basename(each) for each in (*chain[chain.index(real) :], real))
        raise ConfigError(
            "HR-CONFIG-06", f"config files extend each other in a circle: {loop}{said}", "remove one `extends`"
        )
    if len(chain) == LONGEST_CHAIN:
        message = f"more than {LONGEST_CHAIN} config files extend each other{said}"
        raise ConfigError("HR-CONFIG-06", message, "put the keys of several of them into one")
    try:
        data = tomllib.loads(text)
        lines = key_lines(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise _syntax(path, text, error) from error
    except RecursionError:
        message = f"{path}{said} holds values that are nested more than {DEEPEST} levels deep"
        raise ConfigError("HR-CONFIG-02", message, "no option is nested like that") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError("HR-CONFIG-02", f"{path}{said} is not valid TOML: {error}", "shorten the number") from error
    layer = Tree(data, {key: Where(str(path), line) for key, line in lines.items()})
    base = data.pop("extends", None)
    if base is None:
        return layer
    where = layer.origin.pop(("extends",))
    if not isinstance(base, str) or not base:
        raise ConfigError("HR-CONFIG-04", f"extends = {base!r} ({where}) must be a file name", 'extends = "base.toml"')
    tree = _read(path.parent / expanded(base), where, (*chain, real))
    tree.add(layer)
    return tree


def _text(path: Path, said: str, extended: bool) -> str:
    code = "HR-CONFIG-06" if extended else "HR-CONFIG-01"
    try:
        return read_text(path)
    except FileNotFoundError:
        near = sorted(each.name for each in path.parent.glob("*.toml"))[:8] if os.path.isdir(path.parent) else []
        help = f"TOML files in {path.parent}: {', '.join(near)}" if near else "`headrace config init` writes one"
        raise ConfigError(code, f"no such config file: {path}{said}", help) from None
    except IsADirectoryError:
        raise ConfigError(code, f"{path}{said} is a folder, not a config file", "name the .toml file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "HR-CONFIG-02", f"{path}{said} is not a text file: byte {error.start} is not UTF-8",
            "a model goes in the place of MODEL, --config wants TOML",
        ) from None  # fmt: skip
    except OSError as error:
        raise ConfigError(code, f"{path}{said} can't be read: {error.strerror}", "name a TOML file") from None


def _syntax(path: Path, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    message = str(error)
    found = _AT.search(message)
    reason = _AT.sub("", message)
    if found and found[1]:
        line, column = int(found[1]), int(found[2])
    else:
        line, column = text.count("\n") + 1, len(text.rpartition("\n")[2]) + 1
    shown = "".join(text.split("\n")[line - 1 : line]).strip()
    return ConfigError(
        "HR-CONFIG-02", f"{path}:{line}:{column} is not valid TOML: {reason}",
        (f"the line is: {shown:.100}\n  " if shown else "") + 'texts need quotes: key = "value"; tables are [name]',
    )  # fmt: skip


def set_tree(sets: Sequence[str], problems: list[HeadraceError]) -> Tree:
    """The layer of `--set a.b=c` texts: the value is TOML where it parses as such, else a text."""
    tree = Tree()
    for text in sets:
        name, equals, value = text.partition("=")
        keys = _toml(f"{name.strip()} = 0")
        path: KeyPath = ()
        while isinstance(keys, dict) and len(keys) == 1:
            key, keys = next(iter(keys.items()))
            path = (*path, key)
        if not equals or not path or keys != 0 or len(path) > DEEPEST:
            problems.append(
                ConfigError(
                    "HR-CONFIG-07", f"--set {text!r} is not of the form KEY=VALUE", "--set engine.max_sequences=4"
                )
            )
            continue
        if path[0] == "extends":
            problems.append(
                ConfigError("HR-CONFIG-07", f"--set {text!r}: extends can only be said in a file", "use --config FILE")
            )
            continue
        parsed = _toml(f"x = {value}")
        where = Where(f"--set {text}")
        tree.add(nested(path, parsed["x"] if parsed is not None and set(parsed) == {"x"} else value.strip(), where))
    return tree


def _toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def nested(path: KeyPath, value: Any, where: Where) -> Tree:
    """A layer that says one key."""
    tree = Tree(origin={path[:n]: where for n in range(1, len(path) + 1)})
    inner = tree.data
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = value
    _note(value, path, where, tree.origin)
    return tree


def _note(value: Any, path: KeyPath, where: Where, origin: dict[KeyPath, Where]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            origin[(*path, key)] = where
            _note(item, (*path, key), where, origin)


def argument_tree(overrides: Mapping[str, Any], where: Where) -> Tree:
    """The layer of keyword arguments: nested mappings, or dotted keys."""
    tree = Tree()
    for key, value in overrides.items():
        tree.add(nested(tuple(key.split(".")), value, where))
    return tree


def at(path: KeyPath, tree: Tree) -> str:
    """ " 'drafter.max_draft' (node.toml:7)" : how every message names a key."""
    where = tree.where(path)
    return f"'{dotted(path)}'" + (f" ({where})" if where else "")
