"""Reading the small text files that users name (configs, chat templates), whatever the name stands for.

A name may turn out to be a device without an end, a pipe that nobody writes to, a loop of links. Each is an OSError
here; nothing waits and nothing fills the memory.
"""

from __future__ import annotations

import os
import stat
from errno import EFBIG, EINVAL
from pathlib import Path

MOST_BYTES = 1 << 20
"""Configs and templates are written by hand: the largest known template has 100 KB."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` and `~user` replaced. A user that doesn't exist stays as written: then no file has the name."""
    return Path(os.path.expanduser(path))


def is_template(text: str) -> bool:
    """Is this the source of a chat template, and not the name of a file with one?"""
    return any(mark in text for mark in ("{%", "{{", "\n"))


def read_text(path: str | os.PathLike[str], most_bytes: int | None = MOST_BYTES) -> str:
    """A file's UTF-8 text without a byte order mark. OSError (its `strerror` is for users) or UnicodeDecodeError."""
    return read_bytes(path, most_bytes).decode("utf-8").removeprefix("\ufeff")


def read_bytes(path: str | os.PathLike[str], most_bytes: int | None = MOST_BYTES) -> bytes:
    """A regular file or a pipe as a whole. OSError for devices, and for more than `most_bytes` (None: no bound)."""
    if "\0" in os.fspath(path):
        raise OSError(EINVAL, "its name holds a null character", os.fspath(path))
    with open(path, "rb", opener=_at_once) as file:
        kind = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISFIFO(kind):
            raise OSError(EINVAL, "it is a device, not a file")
        os.set_blocking(file.fileno(), True)
        data = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(data) > most_bytes:
        raise OSError(EFBIG, f"it has more than {most_bytes:,} bytes")
    if stat.S_ISFIFO(kind) and not data:
        raise OSError(EINVAL, "it is a pipe that nothing is written to")
    return data


def _at_once(path: str, flags: int) -> int:
    """Opening a pipe would wait for a writer without O_NONBLOCK; regular files don't mind."""
    return os.open(path, flags | os.O_NONBLOCK)
