"""The `headrace` command: global flags, dispatch to sub-commands of plugins, errors to exit codes.

Sub-commands are `CommandSpec` records; their modules are imported only when they are run. `--version` loads nothing,
`--help` only the plugin modules. One broken plugin never stops any of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from headrace import __version__
from headrace.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPT,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    HeadraceError,
    PluginError,
    UsageError,
    did_you_mean,
)

if TYPE_CHECKING:
    from headrace.catalog import Catalog, Entry
    from headrace.hooks import CommandSpec

LEVELS = ("debug", "info", "warning", "error")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, with did-you-mean for choices."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        near = ""
        for action in self._actions:
            choices = list(map(str, action.choices or ()))
            wrong = message.partition("invalid choice: '")[2].partition("'")[0]
            if wrong and choices and "/".join(action.option_strings) in message:
                near = near or did_you_mean(wrong, choices)
        usage = " ".join(self.format_usage().split())
        raise UsageError("HR-USAGE-01", f"{self.prog}: {message}", f"{near}{usage}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Errors are printed on stderr, never raised."""
    args = list(sys.argv[1:] if argv is None else argv)
    flags = argparse.Namespace(log_level="warning", log_json=False, no_plugin=[], quiet=False)
    try:
        if args[:1] in (["--version"], ["-V"]):
            print(f"headrace {__version__}")
            return EXIT_OK
        rest = _global_flags(args, flags)
        code = _dispatch(rest, flags)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        _show(error, flags)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:
        # whoever read our output has enough of it; keep the interpreter from complaining when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except SystemExit as error:  # argparse, after it printed --help
        return error.code if isinstance(error.code, int) else EXIT_OK
    except Exception as error:
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
    namespace = parser.parse_args(rest[1:])
    for key, value in vars(flags).items():
        setattr(namespace, key, value)
    namespace.catalog = catalog
    return int(command.run(namespace) or EXIT_OK)


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
    command.add_arguments(parser)
    return parser, command


def _find_command(catalog: Catalog, name: str) -> Entry[CommandSpec]:
    from headrace.hooks import CommandSpec

    known = [entry.spec.name for entry in commands(catalog)]
    if name in known:
        return catalog.find(CommandSpec, name)
    broken = "".join(f"\n  plugin {plugin} is broken: {plugin.error}" for plugin in catalog.broken())
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
    _log_traceback(error)
    problems: Sequence[HeadraceError] = error.problems if isinstance(error, ConfigError) else (error,)
    for problem in problems:
        if flags.log_json:
            import json

            fields = {"level": "error", "code": problem.code, "message": problem.message, "help": problem.help}
            print(json.dumps(fields, ensure_ascii=False), file=sys.stderr)
        else:
            print(HeadraceError.__str__(problem), file=sys.stderr)


def _internal(error: Exception, flags: argparse.Namespace) -> int:
    help = "this is a bug: rerun with --log-level debug and report the traceback"
    _log_traceback(error)
    _show(HeadraceError("HR-INTERNAL", f"unexpected {type(error).__name__}: {error}", help), flags)
    return EXIT_INTERNAL


def _log_traceback(error: Exception) -> None:
    import logging

    if error.__traceback__ is not None:
        logging.getLogger("headrace").debug("where it happened:", exc_info=error)
