"""The `headrace` command: global flags, dispatch to sub-commands of plugins, errors to exit codes.

Sub-commands are `CommandSpec` records; their modules are imported only when they are run. `--version` loads nothing,
`--help` only the plugin modules. One broken plugin never stops any of it.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from headrace import __version__
from headrace.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPT,
    EXIT_OK,
    EXIT_OUTPUT,
    EXIT_USAGE,
    FAULTS,
    ConfigError,
    HeadraceError,
    PluginError,
    UsageError,
    did_you_mean,
    why,
)

if TYPE_CHECKING:
    from headrace.catalog import Catalog, Entry
    from headrace.hooks import CommandSpec

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_OPTION = re.compile(r"(?:^|\s)(--?[^\s=]+)")
LEVELS = ("debug", "info", "warning", "error")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, with did-you-mean for choices and options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def add_subparsers(self, **kwargs: Any) -> Any:
        return super().add_subparsers(**{"parser_class": _Verb, **kwargs})

    def error(self, message: str) -> NoReturn:
        near = ""
        if unknown := _OPTION.search(message.partition("unrecognized arguments:")[2]):
            options = [*self._option_string_actions, *global_parser()._option_string_actions]
            near = did_you_mean(unknown[1], options)
        for action in self._actions:
            choices = list(map(str, action.choices or ()))
            wrong = message.partition("invalid choice: '")[2].partition("'")[0]
            if wrong and choices and "/".join(action.option_strings) in message:
                near = near or did_you_mean(wrong, choices)
        usage = " ".join(self.format_usage().split())
        raise UsageError("HR-USAGE-01", f"{self.prog}: {message}", f"{near}{usage}")


class _Verb(Parser):
    """The parser of a word like `check` in `config check`: it answers for its own arguments, with its own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Errors are printed on stderr, never raised."""
    args = list(sys.argv[1:] if argv is None else argv)
    flags = argparse.Namespace(log_level="warning", log_json=False, no_plugin=[], quiet=False)
    _prepare_streams()
    try:
        rest = _global_flags(args, flags)
        if rest[:1] in (["--version"], ["-V"]):
            print(f"headrace {__version__}")
            code = EXIT_OK
        else:
            code = _dispatch(rest, flags)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        _show(error, flags)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:
        _drop(sys.stdout)  # whoever read our output has enough of it
        return EXIT_OK
    except OSError as error:
        return _unwritten(error, flags)
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # argparse trips when it is interrupted
            return EXIT_INTERRUPT
        return _internal(error, flags)


def global_parser() -> argparse.ArgumentParser:
    """The flags that may stand before or after the sub-command."""
    parser = Parser(prog="headrace", add_help=False)
    group = parser.add_argument_group("global options")
    group.add_argument("--log-level", choices=LEVELS, default="warning", help="how much to log (default warning)")
    group.add_argument("--log-json", action="store_true", help="log and report errors as JSON, one object a line")
    group.add_argument("--no-plugin", action="append", default=[], metavar="NAME", help="don't load this plugin")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress, no notes")
    return parser


def _global_flags(args: list[str], flags: argparse.Namespace) -> list[str]:
    """Take the global flags out of the command line, wherever they stand before a `--`."""
    end = args.index("--") if "--" in args else len(args)
    _, rest = global_parser().parse_known_args(args[:end], flags)
    return rest + args[end:]


def _dispatch(rest: list[str], flags: argparse.Namespace) -> int:
    from headrace.catalog import ENV_DISABLE, Catalog, unknown_plugin

    _set_up_logging(flags)
    with redirect_stdout(sys.stderr):  # what a plugin prints while it is imported is no output of ours
        catalog = Catalog.load(flags.no_plugin)
    known = [plugin.name for plugin in catalog.plugins]
    for name, where in catalog.unknown_disabled:
        problem = unknown_plugin(name, known, "can't be disabled", where)
        if where != ENV_DISABLE:
            raise UsageError(problem.code, problem.message, problem.help)
        _note(f"warning: {problem.message}. {problem.help}", flags)
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(_help(catalog))
        return EXIT_OK if rest else EXIT_USAGE
    if rest[0].startswith("-"):
        raise UsageError("HR-USAGE-02", f"unknown option '{rest[0]}' before the command", "see `headrace --help`")
    entry = _find_command(catalog, rest[0])
    parser, command = command_parser(catalog, entry)
    try:
        namespace = parser.parse_args(rest[1:])
    except SystemExit as error:  # argparse, after it printed --help
        return error.code if isinstance(error.code, int) else EXIT_OK
    for key, value in vars(flags).items():
        setattr(namespace, key, value)
    namespace.catalog = catalog
    with _blamed_on(entry):
        code = command.run(namespace)
    if code is not None and type(code) is not int:
        raise PluginError("HR-PLUGIN-09", f"{entry} returned {code!r:.60}, which is no exit code", _report(entry))
    return code or EXIT_OK


def commands(catalog: Catalog) -> list[Entry[CommandSpec]]:
    """Sub-commands in the order of the help."""
    from headrace.hooks import CommandSpec

    return sorted(catalog.specs(CommandSpec), key=lambda entry: (entry.spec.order, entry.spec.name))


def command_parser(catalog: Catalog, entry: Entry[CommandSpec]) -> tuple[Parser, Any]:
    """Import a sub-command: its parser and its module. PluginError when that fails."""
    command = catalog.load_object(entry.spec.factory, entry)
    for name in ("add_arguments", "run"):
        if not callable(getattr(command, name, None)):
            raise PluginError(
                "HR-PLUGIN-06", f"{entry} has no function '{name}'", "a command has add_arguments(parser) and run(args)"
            )
    epilog = "global options: --log-level LEVEL, --log-json, --no-plugin NAME, -q"
    parser = Parser(prog=f"headrace {entry.spec.name}", description=entry.spec.summary, epilog=epilog)
    with _blamed_on(entry):
        command.add_arguments(parser)
    return parser, command


@contextmanager
def _blamed_on(entry: Entry[CommandSpec]) -> Iterator[None]:
    """Whatever another distribution's command raises is its fault, not a bug of ours."""
    try:
        yield
    except (HeadraceError, BrokenPipeError):
        raise
    except FAULTS as error:
        if entry.plugin.dist == "headrace" and isinstance(error, Exception):
            raise
        raise PluginError("HR-PLUGIN-09", f"{entry} failed: {why(error)}", _report(entry)) from error


def _report(entry: Entry[CommandSpec]) -> str:
    return f"report it to the authors of {entry.plugin.dist}; --log-level debug shows where"


def _find_command(catalog: Catalog, name: str) -> Entry[CommandSpec]:
    from headrace.hooks import CommandSpec

    known = [entry.spec.name for entry in commands(catalog)]
    if name in known:
        return catalog.find(CommandSpec, name)
    broken = "".join(
        f"\n  plugin {plugin} is {plugin.status}" + (f": {plugin.error}" if plugin.error else "")
        for plugin in catalog.plugins
        if plugin.status != "ok"
    )
    help = f"{did_you_mean(name, known)}commands: {', '.join(known)}{broken}"
    if os.path.exists(name) or "://" in name:
        help = f'headrace run {name} "your prompt"'
    raise UsageError("HR-USAGE-03", f"no command named '{name}'", help)


def _help(catalog: Catalog) -> str:
    lines = [
        "usage: headrace [--version] [--help] COMMAND ...",
        "",
        "One TOML file launches an inference pipeline.",
        "",
        "commands:",
    ]
    lines += [f"  {entry.spec.name:<12} {entry.spec.summary}" for entry in commands(catalog)]
    lines += ["", global_parser().format_help().partition("\n\n")[2].rstrip()]
    lines += ["", "`headrace COMMAND --help` says more."]
    if broken := catalog.broken():
        names = ", ".join(str(plugin) for plugin in broken)
        lines += ["", f"broken plugins: {names}; see `headrace plugins list`"]
    return "\n".join(lines)


# --- streams ---------------------------------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Closed streams become /dev/null, so that no file of ours gets their number and what libraries print into it.
    Bytes that are no text, and text that the terminal has no letters for, never stop a command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            try:
                os.fstat(number)
            except OSError:
                os.dup2(null, number)
            setattr(sys, name, os.fdopen(null, "r" if number == 0 else "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if number == 0 else "backslashreplace")


def _drop(stream: Any) -> None:
    """Let what is left in a stream that can't be written vanish, or the interpreter complains when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _unwritten(error: OSError, flags: argparse.Namespace) -> int:
    """The exit code for an OSError that nobody took: a stream that can't be written names no file; else it's a bug."""
    if error.errno not in FULL or error.filename is not None:
        return _internal(error, flags)
    _drop(sys.stdout)
    message = f"the output can't be written: {error.strerror}"
    _show(HeadraceError("HR-OUTPUT-01", message, "free some room, or write elsewhere"), flags)
    return EXIT_OUTPUT


# --- reporting -------------------------------------------------------------------------------------------------------


def _set_up_logging(flags: argparse.Namespace) -> None:
    import logging

    handler = logging.StreamHandler(sys.stderr)
    if flags.log_json:
        handler.setFormatter(_json_formatter())
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%m-%d %H:%M:%S"))
    logging.basicConfig(level=flags.log_level.upper(), handlers=[handler], force=True)


def _json_formatter() -> Any:
    import json
    import logging

    class JSONFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            fields = {
                "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
            if record.exc_info:
                fields["traceback"] = self.formatException(record.exc_info)
            return json.dumps(fields | getattr(record, "fields", {}), ensure_ascii=False, default=str)

    return JSONFormatter()


def _note(text: str, flags: argparse.Namespace) -> None:
    if flags.log_json:
        import logging

        logging.getLogger("headrace").warning(text.removeprefix("warning: "))
    else:
        print(text, file=sys.stderr)


def _show(error: HeadraceError, flags: argparse.Namespace) -> None:
    """One error on stderr: text, or with --log-json one object per problem."""
    with suppress(OSError):  # stderr may be what can't be written; the exit code is left to tell
        _print_error(error, flags)


def _print_error(error: HeadraceError, flags: argparse.Namespace) -> None:
    _log_traceback(error)
    problems: Sequence[HeadraceError] = error.problems if isinstance(error, ConfigError) else (error,)
    for problem in problems:
        if flags.log_json:
            import json

            fields = {"level": "error", "code": problem.code, "message": problem.message, "help": problem.help}
            print(json.dumps(fields), file=sys.stderr)
        else:
            print(HeadraceError.__str__(problem), file=sys.stderr)


def _internal(error: Exception, flags: argparse.Namespace) -> int:
    help = "this is a bug: rerun with --log-level debug and report the traceback"
    _log_traceback(error)
    _show(HeadraceError("HR-INTERNAL", f"unexpected {why(error)}", help), flags)
    return EXIT_INTERNAL


def _log_traceback(error: Exception) -> None:
    import logging

    if error.__traceback__ is not None:
        logging.getLogger("headrace").debug("where it happened:", exc_info=error)
