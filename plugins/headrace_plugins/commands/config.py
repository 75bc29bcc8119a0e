"""`headrace config`: check a file, explain what it would launch, write a first one."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import EXIT_OK, ConfigError, UsageError, did_you_mean
from headrace_plugins.commands.model_args import add_model_arguments, config_of
from headrace_plugins.commands.text import as_json, shown, table
from headrace_plugins.sources import without_download

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.pipeline import Decision

DEFAULT_FILE = "headrace.toml"
CHECK = """
Report what `headrace run` would refuse before it loads weights: keys and options, missing packages, a missing or
damaged model, a backend that can't serve it. Downloads nothing: a model that is not on this machine is not looked at.
"""
_MODEL_LINE = "model = "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = verbs.add_parser("check", help="report every problem of a file", description=CHECK)
    explain = verbs.add_parser(
        "explain", help="each choice, and why", description="Explain what a config launches; loads no weights."
    )
    explain.add_argument("--json", action="store_true", help="print JSON")
    for verb in (check, explain):
        verb.add_argument("file", nargs="?", metavar="FILE", help="a .toml file, or the path or URI of a model")
        add_model_arguments(verb, "a config file whose name does not end in .toml")
    init = verbs.add_parser("init", help="write a first config", description="Write a commented config to start from.")
    init.add_argument("file", nargs="?", default=DEFAULT_FILE, metavar="FILE", help=f"where (default {DEFAULT_FILE})")
    init.add_argument("--model", metavar="MODEL", help="path or URI of the model")
    init.add_argument(
        "--from", dest="preset", metavar="NAME",
        help=f"one of: {', '.join(presets())} (default: checkpoint for a MODEL that is a folder, else laptop)",
    )  # fmt: skip
    init.add_argument("--force", action="store_true", help="overwrite the file if it exists")


def run(args: argparse.Namespace) -> int:
    if args.verb == "init":
        return _init(args)
    config = config_of(args, args.file)
    if args.verb == "check":
        return _check(config, args)
    decisions = _explain(config, args)
    if args.json:
        print(as_json([asdict(decision) for decision in decisions]))
    else:
        print("\n".join(_text(decision) for decision in decisions))
    return EXIT_OK


def _check(config: Config, args: argparse.Namespace) -> int:
    if config.path is None and "://" not in config.model and not args.catalog.resolve(config.model).format:
        raise UsageError(
            "HR-USAGE-05", f"{config.model} is no model, and a config file has to be named *.toml or come after "
            "--config", f"headrace config check --config {config.model}",
        )  # fmt: skip
    local = without_download(config.model)
    if local is not None:
        _explain(replace(config, model=local), args)
    if not args.quiet:
        unseen = (
            "" if local is not None else f"; the model {config.model} itself was not looked at: that may download it"
        )
        print(f"{config.path or config.model}: no problems{unseen}")
    return EXIT_OK


def _explain(config: Config, args: argparse.Namespace) -> tuple[Decision, ...]:
    from headrace.pipeline import explain

    with redirect_stdout(sys.stderr):  # what a plugin prints is no part of the answer
        return explain(config, args.catalog)


def _text(decision: Decision) -> str:
    by = f"  [{decision.plugin}]" if decision.plugin else ""
    lines = [f"{decision.key} = {decision.value}{by}", f"    why: {decision.why}"]
    lines += [f"    not {name}: {why}" for name, why in decision.rejected]
    if decision.facts:
        lines.append(table([[f"    {key}:", shown(value)] for key, value in decision.facts.items()]))
    return "\n".join(lines)


def presets() -> dict[str, str]:
    """Name -> text of the configs that `init --from` knows."""
    folder = importlib.resources.files("headrace_plugins") / "presets"
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".toml")), key=lambda each: each.name)
    return {each.name.removesuffix(".toml"): each.read_text("utf-8") for each in files}


def _init(args: argparse.Namespace) -> int:
    known = presets()
    is_folder = args.model is not None and Path(args.model).expanduser().is_dir()
    preset = args.preset or ("checkpoint" if is_folder else "laptop")
    if preset not in known:
        raise ConfigError(
            "HR-CONFIG-12", f"no config named '{preset}' to start from",
            f"{did_you_mean(preset, known)}known: {', '.join(known)}",
        )  # fmt: skip
    path = Path(args.file)
    if not path.parent.is_dir():
        raise ConfigError("HR-CONFIG-12", f"no such folder: {path.parent}", f"mkdir -p {path.parent}")
    text = known[preset]
    if args.model is not None:
        lines = text.splitlines(keepends=True)
        first = next(i for i, line in enumerate(lines) if line.startswith(_MODEL_LINE))
        lines[first] = f"{_MODEL_LINE}{json.dumps(_from(path, args.model), ensure_ascii=False)}\n"
        text = "".join(lines)
    try:
        with open(path, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            "HR-CONFIG-12", f"{path} exists already", "--force overwrites it, or name another file"
        ) from None
    except OSError as error:
        raise ConfigError("HR-CONFIG-12", f"{path} can't be written: {error.strerror}", "name another file") from None
    if not args.quiet:
        print(f"wrote {path}; next: headrace config explain {path}")
    return EXIT_OK


def _from(file: Path, model: str) -> str:
    """A model path as the config must say it: relative paths in a config are relative to its folder."""
    if "://" in model or model.startswith(("/", "~")) or file.parent == Path():
        return model
    return str(Path(model).absolute())
