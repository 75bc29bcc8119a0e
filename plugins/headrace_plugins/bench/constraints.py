"""`bench constraints`: what a grammar costs per mask row, per token of a real model, and when it is used again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from headrace.catalog import Catalog
from headrace.config import Config
from headrace.contracts import ConstraintEngine, Matcher
from headrace.engine import Engine
from headrace.errors import RequestError
from headrace.grammars import Grammars
from headrace.pipeline import Pipeline, build
from headrace.scheduler import Rows
from headrace.types import Grammar, Request, SamplingParams, Sequence
from headrace_plugins.bench.report import Result, compared, measured

PROMPT = "Describe a book that you like, as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 4, "maxLength": 40},
        "kind": {"enum": ["novel", "essay", "play", "collection of poems"]},
        "published": {"type": "integer", "minimum": 1450, "maximum": 2030},
        "author": {
            "type": "object",
            "properties": {
                "given_name": {"type": "string", "minLength": 2, "maxLength": 20},
                "family_name": {"type": "string", "minLength": 2, "maxLength": 20},
                "nationality": {"type": "string", "minLength": 2, "maxLength": 20},
            },
            "required": ["given_name", "family_name", "nationality"],
            "additionalProperties": False,
        },
        "main_characters": {
            "type": "array",
            "items": {"type": "string", "minLength": 2, "maxLength": 20},
            "minItems": 2,
            "maxItems": 4,
        },
        "summary": {"type": "string", "minLength": 120, "maxLength": 400},
        "recommended": {"type": "boolean"},
    },
    "required": ["title", "kind", "published", "author", "main_characters", "summary", "recommended"],
    "additionalProperties": False,
}
WINDOW = 4
"""Drafts of a window of masks."""
MASKS = ("unsafe_compute_mask_ptr", "fill_next_token_bitmask")
"""The libraries' own calls for a mask."""
LOOKS = ("compute_ff_bytes", "compute_ff_tokens", "find_jump_forward_string")
"""For what is forced."""
MOVES = ("try_consume_tokens", "accept_token", "rollback")
"""For the drafts of a window."""


def run(config: Config, catalog: Catalog, schema: str | None, n_tokens: int, n_rounds: int) -> list[Result]:
    """schema: text of a JSON schema, None: one of ours. n_tokens: most tokens of an answer."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA) if schema is None else schema)
    with build(config, catalog=catalog) as pipeline:
        if pipeline.constraints is None:
            raise RequestError(
                "HR-BENCH-03", "this model is served without a constraint engine", 'add [constraints] use = "auto"'
            )
        results = [*_first_masks(pipeline, pipeline.constraints, grammar, n_rounds)]
        answer = _answer(pipeline, grammar, n_tokens)
        return (
            results
            + _rows(pipeline, pipeline.constraints, grammar, answer)
            + _speeds(pipeline, grammar, n_tokens, n_rounds)
        )


# --- to the first mask -----------------------------------------------------------------------------------------------


def _first_masks(
    pipeline: Pipeline, constraints: ConstraintEngine, grammar: Grammar, n_rounds: int
) -> Iterator[Result]:
    """From the request to its first mask, the hop to the compile thread and back included. The first use of all reads
    the vocabulary too."""
    grammars = Grammars(constraints, pipeline.model.vocab_size)
    yield measured("first grammar of the process: to the first mask", _first_mask(pipeline, grammars, grammar), "ms")
    fresh = [_first_mask(pipeline, grammars, _other(grammar, i)) for i in range(n_rounds)]
    yield measured("first use of a schema: to the first mask", median(fresh), "ms")
    again = [_first_mask(pipeline, grammars, grammar) for _ in range(20)]
    yield measured("second use of a schema: to the first mask", median(again), "ms")


def _first_mask(pipeline: Pipeline, grammars: Grammars, grammar: Grammar) -> float:
    seq = _sequence(pipeline)
    started = time.perf_counter()
    grammars.compile(grammar, [seq])
    grammars.start(seq)
    grammars.fill([0], Rows([seq], [1], [0]))
    return 1e3 * (time.perf_counter() - started)


def _other(grammar: Grammar, i: int) -> Grammar:
    """The same schema in other words."""
    schema = json.loads(grammar.text)
    return replace(grammar, text=json.dumps({"$comment": str(i), **(schema if isinstance(schema, dict) else {})}))


def _sequence(pipeline: Pipeline) -> Sequence:
    params = SamplingParams(temperature=0).resolved()
    return Sequence(Request(id="bench", prompt_ids=(1,), params=params), 0, pipeline.model.context_tokens)


# --- mask rows -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Spent:
    seconds: float = 0.0
    n_calls: int = 0


class _Timed:
    """Stands for a library's matcher, and notes how long the calls that count took."""

    def __init__(self, matcher: Any, calls: tuple[str, ...], spent: _Spent) -> None:
        for name in dir(matcher):
            if not name.startswith("_"):
                method = getattr(matcher, name)
                setattr(self, name, _timed(method, spent) if name in calls else method)


def _timed(call: Callable[..., Any], spent: _Spent) -> Callable[..., Any]:
    clock = time.perf_counter

    def timed(*args: Any) -> Any:
        started = clock()
        result = call(*args)
        spent.seconds += clock() - started
        spent.n_calls += 1
        return result

    return timed


def _timing_s() -> float:
    """What it costs to time a call, beside the call."""
    spent, found = _Spent(), []
    call, timed = abs, _timed(abs, spent)
    for _ in range(2000):
        spent.seconds = 0.0
        started = time.perf_counter()
        timed(1)
        middle = time.perf_counter()
        call(1)
        found.append((middle - started - spent.seconds) - (time.perf_counter() - middle))
    return max(0.0, median(found))


def _rows(pipeline: Pipeline, constraints: ConstraintEngine, grammar: Grammar, answer: list[int]) -> list[Result]:
    """Along an answer: all that the engine does for a mask row less the library's own calls, which the name lists."""
    results = []
    for n_seqs, n_drafts, calls in (
        (1, 0, MASKS + LOOKS),
        (8, 0, MASKS + LOOKS),
        (1, WINDOW, MASKS + LOOKS + MOVES),
        (8, WINDOW, MASKS + LOOKS + MOVES),
    ):
        found = _walk(pipeline, constraints, grammar, answer, n_seqs, n_drafts, calls)
        if found is None:
            continue
        ours, library, names = found
        what = f"{n_seqs} sequence{'s' if n_seqs > 1 else ''}" + (f", {n_drafts} drafts each" if n_drafts else "")
        results.append(measured(f"our layer, {what} (less {', '.join(names)})", ours, "us/mask row"))
        results.append(measured(f"the library, {what}", library, "us/mask row"))
    return results


def _walk(
    pipeline: Pipeline,
    constraints: ConstraintEngine,
    grammar: Grammar,
    answer: list[int],
    n_seqs: int,
    n_drafts: int,
    calls: tuple[str, ...],
) -> tuple[float, float, list[str]] | None:
    """Medians of (ours, library) and the calls that were met; None where the matcher hides its library."""
    grammars = Grammars(constraints, pipeline.model.vocab_size)
    seqs = [_sequence(pipeline) for _ in range(n_seqs)]
    spent, timing_s = _Spent(), _timing_s()
    names: list[str] = []
    for seq in seqs:
        grammars.compile(grammar, [seq])
        grammars.start(seq)
        walk: Any = getattr(seq.matcher, "_walk", None)
        if not hasattr(walk, "_matcher"):
            return None
        names = [name for name in calls if hasattr(walk._matcher, name)]
        walk._matcher = _Timed(walk._matcher, calls, spent)
    ours, library = [], []
    for i, token in enumerate(answer):
        drafts = answer[i : i + n_drafts]
        for seq in seqs:
            seq.draft = drafts
        rows = Rows(seqs, [1 + len(drafts)] * n_seqs, [len(drafts)] * n_seqs)
        spent.seconds, spent.n_calls = 0.0, 0
        started = time.perf_counter()
        masks = grammars.fill(list(range(n_seqs)), rows)
        seconds, inside = time.perf_counter() - started, spent.seconds
        seconds -= spent.n_calls * timing_s
        n_rows = int(masks.starts[-1])
        ours.append(1e6 * (seconds - inside) / n_rows)
        library.append(1e6 * inside / n_rows)
        for seq in seqs:
            _accept(seq.matcher, token)
    grammars._compilers.close()
    return median(ours), median(library), names


def _accept(matcher: Matcher | None, token: int) -> None:
    if matcher is None or not matcher.accept(token):
        raise AssertionError(f"token {token} of the answer is refused")


# --- speed -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Speed:
    """Of one way to decode: tokens per second of each round."""

    rounds: list[float] = field(default_factory=list)
    forced: list[float] = field(default_factory=list)
    """Share of tokens that were forced."""


def _speeds(pipeline: Pipeline, grammar: Grammar, n_tokens: int, n_rounds: int) -> list[Result]:
    """Decoding one answer: free, held to the schema, and with what the schema forces appended; in turns."""
    ways: dict[str, tuple[Grammar | None, bool]] = {
        "free": (None, False),
        "masks": (grammar, False),
        "jumps": (grammar, True),
    }
    speeds = {name: _Speed() for name in ways}
    for i in range(n_rounds):
        for name in list(ways)[i % 3 :] + list(ways)[: i % 3]:
            _decode(pipeline, *ways[name], n_tokens, speeds[name])
    # the ratio of each round's neighbours, since a shared machine drifts between rounds
    results = []
    free = speeds["free"].rounds
    for name, label in (("masks", "without forced tokens"), ("jumps", "with forced tokens")):
        speed = speeds[name]
        ratio = median([a / b for a, b in zip(speed.rounds, free, strict=True)])
        found = compared(f"schema against free, {label}", median(speed.rounds), median(free), "tokens/s")
        results.append(replace(found, ratio=round(ratio, 4)))
    results.append(measured("tokens that the schema forces", median(speeds["jumps"].forced), "share"))
    return results


def _decode(pipeline: Pipeline, grammar: Grammar | None, jumps: bool, n_tokens: int, speed: _Speed) -> None:
    with _engine(pipeline) as engine:
        engine.jumps = jumps
        seq = _begin(pipeline, engine, grammar, n_tokens)
        n_before = seq.n_generated
        started = time.perf_counter()
        while seq.finish_reason is None:
            engine.step()
        seconds = time.perf_counter() - started
    speed.rounds.append((seq.n_generated - n_before) / seconds)
    speed.forced.append(seq.n_forced / seq.n_generated)


def _answer(pipeline: Pipeline, grammar: Grammar, n_tokens: int) -> list[int]:
    with _engine(pipeline) as engine:
        seq = _begin(pipeline, engine, grammar, n_tokens)
        while seq.finish_reason is None:
            engine.step()
    if seq.error is not None:
        raise seq.error
    tokens = seq.tokens[seq.n_prompt :]
    return tokens[:-1] if tokens[-1] in pipeline.model.eos_ids else tokens


def _begin(pipeline: Pipeline, engine: Engine, grammar: Grammar | None, n_tokens: int) -> Sequence:
    """A request that has its first chosen token."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens, constraint=grammar, ignore_eos=grammar is None)
    prompt = tuple(pipeline.tokenizer.encode(PROMPT))
    (seq,) = engine.add(Request(id="bench", prompt_ids=prompt, params=params.resolved()))
    while seq.n_generated == seq.n_start and seq.finish_reason is None:
        engine.step()
    if seq.error is not None:
        raise seq.error
    return seq


@contextmanager
def _engine(pipeline: Pipeline) -> Iterator[Engine]:
    """An engine of the pipeline that leaves compiled grammars where they are."""
    engine = pipeline.engine()
    try:
        yield engine
    finally:
        if engine._grammars is not None:
            engine._grammars._compilers.close()
            engine._grammars._masker.close()
