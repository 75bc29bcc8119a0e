"""Line numbers of the keys in a TOML file that `tomllib` has parsed already.

tomllib tells where a syntax error is, but not where a key was. This scanner assumes a valid file and only follows
headers, keys, strings and brackets.
"""

from __future__ import annotations

import json
import re
import tomllib

KeyPath = tuple[str, ...]
"""Keys from the root; elements of arrays are their index as text."""

DEEPEST = 64
"""Levels of tables and arrays that a config may have."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}\n#]*")


def dotted(path: KeyPath) -> str:
    """A key path as it is written in TOML."""
    return ".".join(key if _BARE_KEY.match(key) else json.dumps(key, ensure_ascii=False) for key in path)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Key path -> 1-based line of its first appearance, for every key and table of a valid TOML text. RecursionError:
    it is nested more than DEEPEST levels deep."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.line_at = 0
        """Where `line` was counted."""
        self.lines: dict[KeyPath, int] = {}
        self.n_elements: dict[KeyPath, int] = {}
        """Elements seen so far of each array of tables."""

    def document(self) -> None:
        table: KeyPath = ()
        self._blank()
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                self.at += 2
                table = self._inside(self._key())
                index = self.n_elements.get(table, 0)
                self.n_elements[table] = index + 1
                self._note(table)
                table = (*table, str(index))
                self._note(table)
                self.at += 2
            elif self.text[self.at] == "[":
                self.at += 1
                table = self._inside(self._key())
                self._note(table)
                self.at += 1
            else:
                self._pair(table)
            self._blank()

    def _inside(self, path: KeyPath) -> KeyPath:
        """A header below an array of tables means its last element."""
        resolved: KeyPath = ()
        for i, key in enumerate(path):
            resolved = (*resolved, key)
            if i < len(path) - 1 and resolved in self.n_elements:
                resolved = (*resolved, str(self.n_elements[resolved] - 1))
        return resolved

    def _note(self, path: KeyPath) -> None:
        if len(path) > DEEPEST:
            raise RecursionError
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        for n in range(1, len(path) + 1):
            self.lines.setdefault(path[:n], self.line)

    def _blank(self) -> None:
        found = _BLANK.match(self.text, self.at)
        assert found
        self.at = found.end()

    def _key(self) -> KeyPath:
        """A key, perhaps dotted; stops at what follows it."""
        keys: list[str] = []
        while True:
            self._blank()
            if found := _STRING.match(self.text, self.at):
                keys.append(tomllib.loads(f"x = {found[0]}")["x"])
            else:
                found = _BARE.match(self.text, self.at)
                assert found, f"no key at offset {self.at}"
                keys.append(found[0])
            self.at = found.end()
            self._blank()
            if not self.text.startswith(".", self.at):
                return tuple(keys)
            self.at += 1

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        path = (*table, *self._key())
        after, self.at = self.at, start
        self._note(path)
        self.at = after + 1  # the "="
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._blank()
        match self.text[self.at]:
            case "[":
                self._bracket(path, "]")
            case "{":
                self._bracket(path, "}")
            case '"' | "'":
                found = _STRING.match(self.text, self.at)
                assert found
                self.at = found.end()
            case _:
                found = _SCALAR.match(self.text, self.at)
                assert found
                self.at = found.end()

    def _bracket(self, path: KeyPath, closing: str) -> None:
        """An array or an inline table."""
        self.at += 1
        index = 0
        self._blank()
        while self.text[self.at] != closing:
            if closing == "}":
                self._pair(path)
            else:
                self._note((*path, str(index)))
                self._value((*path, str(index)))
                index += 1
            self._blank()
            if self.text[self.at] == ",":
                self.at += 1
                self._blank()
        self.at += 1
