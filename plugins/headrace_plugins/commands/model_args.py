"""Arguments that `run` and `chat` share: which model, how it samples."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.llm import LLM
    from headrace.types import SamplingParams


def _seed(text: str) -> int | str:
    try:
        return text if text == "random" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is neither a number nor 'random'") from None


_SAMPLING: tuple[tuple[str, Any, str, str], ...] = (
    ("max_tokens", int, "N", "most tokens to generate (default: what the context holds)"),
    ("temperature", float, "T", "0 is greedy (default: the config's, else the model's own)"),
    ("top_p", float, "P", "keep the likeliest tokens that hold this much probability"),
    ("top_k", int, "K", "keep the K likeliest tokens; 0 = all"),
    ("min_p", float, "P", "keep tokens of at least this share of the likeliest one's probability"),
    ("seed", _seed, "SEED", 'a number, or "random" (default: a fixed one, so that output repeats)'),
)


def add_model_arguments(
    parser: argparse.ArgumentParser, config: str = "pipeline file; MODEL_OR_CONFIG may then be left out"
) -> None:
    """--config (with its help), --set and --backend; the positional model is the command's own."""
    parser.add_argument("--config", metavar="FILE", help=config)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a config key, e.g. engine.max_sequences=4",
    )
    parser.add_argument("--backend", metavar="NAME", help="backend to use instead of the best one found")


def add_thinking_arguments(parser: argparse.ArgumentParser) -> None:
    """--thinking, --no-thinking, --thinking-budget, --dialect: how a model's chats are written and read."""
    group = parser.add_argument_group("chat format")
    group.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, default=None,
        help="reason before the answer, or not (default: the model's own)",
    )  # fmt: skip
    group.add_argument("--thinking-budget", type=int, metavar="N", help="most tokens of reasoning; then it is ended")
    group.add_argument("--dialect", metavar="NAME", help="how chats are written, instead of what the model tells")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, metavar, help in _SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, metavar=metavar, help=help)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )


def config_of(args: argparse.Namespace, model: str | None) -> Config:
    """The config that the arguments describe. model: a URI, or a pipeline file; None: --config, or $HEADRACE_CONFIG."""
    from headrace.config import file_or_model, load_config

    path = args.config
    if model is not None and path is None:
        path, model = file_or_model(model)
    sets = list(args.set)
    for key, value in (("backend.use", args.backend), ("chat.dialect", getattr(args, "dialect", None))):
        sets += [] if value is None else [f"{key}={json.dumps(value)}"]
    return load_config(path, model=model, sets=sets, catalog=args.catalog)


def nothing_to_load(args: argparse.Namespace, model: str | None) -> bool:
    """Neither a model nor --config was given, and $HEADRACE_CONFIG names no file either."""
    return model is None and not args.config and not os.environ.get("HEADRACE_CONFIG")


def load(args: argparse.Namespace, model: str | None) -> LLM:
    from headrace.llm import LLM

    config = config_of(args, model)
    with redirect_stdout(sys.stderr):  # what a backend prints while it loads is no answer
        return LLM(config, catalog=args.catalog)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """SamplingParams fields that were given."""
    given = {name: getattr(args, name) for name, *_ in _SAMPLING if getattr(args, name) is not None}
    return given | ({"stop": tuple(args.stop)} if args.stop else {})


def params_of(args: argparse.Namespace, **more: Any) -> SamplingParams:
    from headrace.types import SamplingParams

    return SamplingParams(**sampling_of(args), **{name: value for name, value in more.items() if value is not None})


def usage_error(message: str, help: str) -> UsageError:
    """How a command was called makes no sense."""
    return UsageError("HR-USAGE-04", message, help)
