"""`headrace completion SHELL`: a completion script, generated from the parsers of the installed commands."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.cli import command_parser, commands, global_parser
from headrace.errors import EXIT_OK, HeadraceError

if TYPE_CHECKING:
    from headrace.catalog import Catalog

SHELLS = ("bash", "zsh", "fish")

Tree = dict[str, list[tuple[str, str]]]
"""Words of a command ("", "plugins", "plugins show") -> the (word, help) pairs that may follow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a completion script. bash: source <(headrace completion bash); zsh: source <(headrace completion zsh); "
        "fish: headrace completion fish | source"
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    tree = words(args.catalog)
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](tree), end="")
    return EXIT_OK


def words(catalog: Catalog) -> Tree:
    """What may follow each command. A command that can't be imported completes to nothing but its name."""
    flags = list(_flags(global_parser()))
    tree: Tree = {"": [(entry.spec.name, entry.spec.summary) for entry in commands(catalog)] + flags}
    tree[""] += [("--version", "print the version"), ("--help", "show the commands")]
    for entry in commands(catalog):
        try:
            parser, _ = command_parser(catalog, entry)
        except HeadraceError:
            continue  # broken commands are for `headrace doctor` to report; completion must work beside them
        _walk(parser, entry.spec.name, flags, tree)
    return tree


def _walk(parser: argparse.ArgumentParser, path: str, flags: list[tuple[str, str]], tree: Tree) -> None:
    found: list[tuple[str, str]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                found.append((name, helps.get(name, "")))
                _walk(inner, f"{path} {name}", flags, tree)
        elif action.choices and not action.option_strings:
            found += [(str(choice), "") for choice in action.choices]
    tree[path] = [*found, *_flags(parser), *flags]


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield action.option_strings[-1], (action.help or "").replace("%(default)s", str(action.default))


_BASH = """\
# headrace completion for bash
_headrace() {
    local word path="" next words cur="${COMP_WORDS[COMP_CWORD]}"
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        next="${path:+$path }$word"
        case "$next" in
            %(paths)s) path="$next" ;;
        esac
    done
    case "$path" in
%(cases)s
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ -n "$path" && "$cur" != -* ]]; then
        COMPREPLY+=($(compgen -f -- "$cur"))
    fi
}
complete -o filenames -F _headrace headrace
"""


def _bash(tree: Tree) -> str:
    cases = "\n".join(
        f"        {shlex.quote(path)}) words={shlex.quote(' '.join(word for word, _ in following))} ;;"
        for path, following in tree.items()
    )
    return _BASH % {"paths": "|".join(shlex.quote(path) for path in tree if path), "cases": cases}


def _zsh(tree: Tree) -> str:
    return "# headrace completion for zsh\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(tree)


def _fish(tree: Tree) -> str:
    lines = ["# headrace completion for fish", "complete -c headrace -f"]
    for path, following in tree.items():
        names = path.split()
        inner = [word for word, _ in following if not word.startswith("-")]
        condition = "__fish_use_subcommand" if not names else "; and ".join(
            f"__fish_seen_subcommand_from {name}" for name in names
        )  # fmt: skip
        if names and inner:
            condition += f"; and not __fish_seen_subcommand_from {' '.join(inner)}"
        for word, help in following:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word[0] == "-" else f"-a {word}"
            lines.append(f"complete -c headrace -n {_fish_quote(condition)} {what} -d {_fish_quote(help)}")
        if names:
            lines.append(f"complete -c headrace -n {_fish_quote(condition)} -F")
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    """fish knows two escapes inside single quotes: backslash and the quote."""
    text = " ".join(text.split())
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
