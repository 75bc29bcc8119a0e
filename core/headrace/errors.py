"""Errors that users, plugin authors and the engine see.

Every user-facing error is a `HeadraceError`: a stable `code`, a `message` (what happened, with the value and where it
came from) and a `help` line (the next command or edit). `StepFailed` and `Fatal` are how an executor tells the engine
that rows, or the device, failed; they never reach a user unwrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_CONFIG = 3
EXIT_PLUGIN = 4
EXIT_MODEL = 5
EXIT_REQUEST = 6
EXIT_DEVICE = 7
EXIT_CHECK = 8
EXIT_OUTPUT = 9
EXIT_INTERRUPT = 130


class HeadraceError(Exception):
    """An error with a code, a message and a next step. `str()` gives the two-line text that the CLI prints."""

    exit_code = EXIT_INTERNAL

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__(code, message, help)
        self.code = code
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f"\nhelp: {self.help}" if self.help else "")


class UsageError(HeadraceError):
    """The command line can't be understood."""

    exit_code = EXIT_USAGE


class ConfigError(HeadraceError):
    """The configuration can't be used. `problems` holds every fault of the file, first one first."""

    exit_code = EXIT_CONFIG

    def __init__(self, code: str, message: str, help: str = "", problems: Sequence[HeadraceError] = ()) -> None:
        super().__init__(code, message, help)
        self.problems: tuple[HeadraceError, ...] = tuple(problems) or (self,)

    def __str__(self) -> str:
        if self.problems == (self,):
            return super().__str__()
        return "\n".join(str(problem) for problem in self.problems)


class PluginError(HeadraceError):
    """A plugin is missing, broken, duplicated or speaks another hook API."""

    exit_code = EXIT_PLUGIN


class ModelError(HeadraceError):
    """A model can't be found, read or loaded."""

    exit_code = EXIT_MODEL


class RequestError(HeadraceError):
    """One request was refused or failed. The engine and every other request go on."""

    exit_code = EXIT_REQUEST


class AnswerError(RequestError):
    """An answer came, but it is not what was asked for. `output`: what came; `outputs`: those of every prompt, for a
    list."""

    def __init__(
        self, code: str, message: str, help: str = "", *, output: Any = None, outputs: Sequence[Any] = ()
    ) -> None:
        super().__init__(code, message, help)
        self.output = output
        self.outputs = tuple(outputs)


class Busy(RequestError):
    """The waiting queue is full. Retry later; nothing was enqueued."""


class DeviceError(HeadraceError):
    """The device or the library behind it failed; running requests ended with this error."""

    exit_code = EXIT_DEVICE


class StepFailed(Exception):
    """Raised by an executor between `forward` and `collect`: the rows named can't be computed.

    rows: row indices into the plan; empty when the executor can't tell, then the engine bisects to the culprit.
    All KV written by the step counts as undefined; the engine trims every slot of the plan back to its base.
    """

    def __init__(self, message: str, rows: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class Fatal(Exception):
    """Raised by an executor when the device is lost: running requests end with an error, the executor is reopened."""


FAULTS = (Exception, SystemExit)
"""What code of a plugin may raise where a failure has to stay the plugin's own: some call sys.exit()."""


def why(error: BaseException) -> str:
    """An error in one line: the message of ours, else the type and its text. Never raises."""
    if isinstance(error, HeadraceError):
        return error.message
    try:
        text = str(error)
    except Exception:  # a plugin's own exception class may fail here; its type is all that is lost
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'x'? " or an empty string."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'? " if close else ""
