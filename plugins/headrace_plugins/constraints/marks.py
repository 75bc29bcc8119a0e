"""Finds marks in bytes that come token by token (Aho-Corasick, CACM 18(6), 1975), and the tokens that complete one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from headrace_plugins.constraints.vocabulary import Vocabulary

ROOT = 0


class Found(NamedTuple):
    """The first mark that ends in some bytes; of several that end there the longest."""

    mark: int
    end: int
    """Offset behind it."""


class Marks:
    """A node stands for the longest end of the text so far that begins a mark. Immutable once built."""

    def __init__(self, marks: Seq[bytes], vocabulary: Vocabulary) -> None:
        """marks: not empty, each at least one byte."""
        self.marks = tuple(marks)
        self._vocabulary = vocabulary
        self._next: list[dict[int, int]] = [{}]
        self._ends: list[int | None] = [None]
        self.name: list[bytes] = [b""]
        """The text that each node stands for."""
        for i, mark in enumerate(self.marks):
            node = ROOT
            for at, byte in enumerate(mark):
                if byte not in self._next[node]:
                    self._next[node][byte] = len(self._next)
                    self._next.append({})
                    self._ends.append(None)
                    self.name.append(mark[: at + 1])
                node = self._next[node][byte]
            if self._ends[node] is None:
                self._ends[node] = i
        self._fall_back()
        self._inside = frozenset(
            token for token, data in enumerate(vocabulary.text) if any(mark in data for mark in self.marks)
        )
        """Tokens that hold a whole mark."""

    def _fall_back(self) -> None:
        """Complete the table: every node knows where each byte that some mark has leads."""
        trie = [dict(children) for children in self._next]
        fail = [ROOT] * len(trie)
        queue = deque([ROOT])
        while queue:
            node = queue.popleft()
            if node != ROOT:
                if self._ends[node] is None:
                    self._ends[node] = self._ends[fail[node]]
                self._next[node] = self._next[fail[node]] | trie[node]
            for byte, child in trie[node].items():
                fail[child] = self._next[fail[node]].get(byte, ROOT) if node != ROOT else ROOT
                queue.append(child)

    def read(self, node: int, data: bytes) -> tuple[int, Found | None]:
        """The node after the bytes; or, where a mark ends in them, the node there and which one it is."""
        for i, byte in enumerate(data):
            node = self._next[node].get(byte, ROOT)
            mark = self._ends[node]
            if mark is not None:
                return node, Found(mark, i + 1)
        return node, None

    def completing(self, node: int) -> Iterable[int]:
        """Tokens in which a mark ends, read from the node."""
        text, found = self._vocabulary.text, set(self._inside)
        name = self.name[node]
        for start in range(len(name)):
            begun = name[start:]
            for mark in self.marks:
                if mark.startswith(begun):
                    found.update(self._vocabulary.with_prefix(mark[len(begun) :]))
        return [token for token in sorted(found) if self.read(node, text[token])[1] is not None]
