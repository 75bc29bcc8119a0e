"""`headrace run --batch`: a JSONL file of requests to a JSONL file of results, which a second run continues.

A result line names its input line and a digest of it, of the options and of the model, so that a file of other results
is noticed. It is written and synced whole; what a kill left of a line is dropped at the next start, and done again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_REQUEST, HeadraceError, RequestError, did_you_mean
from headrace_plugins.commands.model_args import config_of, params_of, sampling_of
from headrace_plugins.commands.run import as_json, make_job

if TYPE_CHECKING:
    from headrace.llm import LLM, Job
    from headrace.types import Output

_HEAD = b'{"id": '
"""How every record starts."""
_PROMPTS = ("prompt", "messages", "prompt_ids")


def run_batch(args: argparse.Namespace, model: str | None) -> int:
    from headrace.llm import LLM

    config = config_of(args, model)
    lines = _read_lines(args.batch)
    options = {**sampling_of(args), "n": args.n, "logprobs": args.logprobs, "model": config.model}
    options |= {"chat": args.chat, "system": args.system, "prefill": args.prefill, "echo": args.echo}
    salt = json.dumps(options, sort_keys=True)
    digests = [hashlib.sha256(f"{salt}\n{line}".encode("utf-8", "surrogateescape")).hexdigest()[:16] for line in lines]
    with Results(args.out, args.batch, digests) as results:
        if len(results.done) == len([line for line in lines if line.strip()]):
            _report(args, results, "nothing left to do")
            return EXIT_REQUEST if results.n_failed else EXIT_OK
        try:
            with LLM(config, catalog=args.catalog) as llm:
                batch = _Batch(llm, args, lines, results)
                llm.run(batch.jobs(), batch.ended, progress=not args.quiet and sys.stderr.isatty())
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one kills
            _report(args, results, "stopped; run the same command to go on")
            return EXIT_INTERRUPT
        _report(args, results, "done")
    return EXIT_REQUEST if results.n_failed else EXIT_OK


def _report(args: argparse.Namespace, results: Results, what: str) -> None:
    if not args.quiet:
        print(f"[{what}: {len(results.done)} results, {results.n_failed} failed, in {args.out}]", file=sys.stderr)


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().split("\n")
    except OSError as error:
        raise RequestError("HR-BATCH-01", f"the batch {path} can't be read: {error.strerror}") from error


@dataclass
class _Batch:
    llm: LLM
    args: argparse.Namespace
    lines: list[str]
    results: Results
    _ids: dict[str, int] = field(default_factory=dict)
    """Id -> line number of every line so far."""
    _under_way: list[int] = field(default_factory=list)
    """Line index of each job handed out."""

    def jobs(self) -> Iterator[Job]:
        """Jobs of the lines that are not done; lines that can't become one get their error record."""
        for index, line in enumerate(self.lines):
            if not line.strip():
                continue
            try:
                item = _parse(line)
                name = self._id(item, index)
            except RequestError as error:
                if index not in self.results.done:
                    self.results.add(index, None, {"error": _error(error)})
                continue
            if index in self.results.done:
                continue
            try:
                job = self._job(item)
            except HeadraceError as error:
                self.results.add(index, name, {"error": _error(error)})
                continue
            self.results.names[index] = name
            self._under_way.append(index)
            yield job

    def ended(self, number: int, output: Output) -> None:
        index = self._under_way[number]
        name = self.results.names.pop(index)
        if output.error is not None:
            self.results.add(index, name, {"error": _error(output.error)})
        elif output.finish_reason != "abort":  # an aborted one is to be done again
            self.results.add(index, name, as_json(self.llm.echoed(output) if self.args.echo else output))

    def _id(self, item: dict[str, Any], index: int) -> str | int | None:
        name = item.pop("id", None)
        if name is None:
            return None
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            raise RequestError("HR-BATCH-02", f"id = {name!r:.60} is neither text nor a number")
        first = self._ids.setdefault(str(name), index)
        if first != index:
            raise RequestError("HR-BATCH-02", f"id {name!r} was used in line {first + 1} already", "ids must differ")
        return name

    def _job(self, item: dict[str, Any]) -> Job:
        from headrace.chat import check_messages
        from headrace.types import Grammar, SamplingParams, field_names

        given = [name for name in _PROMPTS if name in item]
        if len(given) != 1:
            raise RequestError(
                "HR-BATCH-02", f"a line needs one of {', '.join(_PROMPTS)}; this has {' and '.join(given) or 'none'}"
            )
        value = item.pop(given[0])
        known = field_names(SamplingParams)
        for key in item:
            if key not in known:
                help = f"{did_you_mean(key, (*known, *_PROMPTS))}known: id, {', '.join((*_PROMPTS, *known))}"
                raise RequestError("HR-BATCH-02", f"unknown key {key!r}", help)
        if isinstance(item.get("constraint"), dict):
            item["constraint"] = _typed(Grammar, item["constraint"])
        if isinstance(item.get("logit_bias"), dict):  # JSON has no integer keys
            item["logit_bias"] = {_int(key): bias for key, bias in item["logit_bias"].items()}
        base = params_of(self.args, n=self.args.n, logprobs=self.args.logprobs)
        params = _typed(SamplingParams, {name: getattr(base, name) for name in known} | item)
        if given[0] == "messages":
            return make_job(self.llm, self.args, params, messages=check_messages(value))  # type: ignore[arg-type]
        wanted = str if given[0] == "prompt" else list
        if not isinstance(value, wanted):
            raise RequestError("HR-BATCH-02", f"{given[0]} must be {'text' if wanted is str else 'a list of ids'}")
        return make_job(self.llm, self.args, params, prompt=value)


def _parse(line: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
        line.encode()
    except (ValueError, RecursionError) as error:
        raise RequestError("HR-BATCH-02", f"the line is not JSON: {error}") from error
    if not isinstance(item, dict):
        raise RequestError("HR-BATCH-02", f"the line is a {type(item).__name__}, not an object")
    return item


def _typed(cls: Any, values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except (TypeError, AttributeError) as error:
        raise RequestError("HR-BATCH-02", f"{cls.__name__}: {error}") from error


def _int(key: str) -> Any:
    return int(key) if key.isdecimal() else key


def _error(error: Exception) -> dict[str, str]:
    if isinstance(error, HeadraceError):
        return {"code": error.code, "message": error.message, "help": error.help}
    return {"code": "HR-INTERNAL-01", "message": repr(error), "help": ""}


class Results:
    """The result file: what is in it already, and how to add to it."""

    def __init__(self, path: str, batch: str, digests: list[str]) -> None:
        self.path = path
        self.batch = batch
        self.digests = digests
        self.done: set[int] = set()
        """Line indices that have a result."""
        self.n_failed = 0
        self.names: dict[int, Any] = {}
        """Ids of the lines under way."""
        try:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise RequestError("HR-BATCH-01", f"the results {path} can't be opened: {error.strerror}") from error
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def _resume(self) -> None:
        n_whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                # a kill cut it; but only if it is the start of a record, never someone else's text
                if not line.startswith(_HEAD[: len(line)]):
                    raise self._foreign(f"line {number} is no result")
                break
            self._take(number, line)
            n_whole += len(line)
        self._file.truncate(n_whole)
        self._file.seek(n_whole)

    def _take(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            index, digest = record["line"] - 1, record["input"]
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(f"line {number} is no result ({type(error).__name__})") from error
        if not 0 <= index < len(self.digests) or self.digests[index] != digest:
            raise self._foreign(f"line {number} is the result of another line {index + 1}, or of other options")
        if index in self.done:
            raise self._foreign(f"line {number} is a second result of line {index + 1}")
        self.done.add(index)
        self.n_failed += "error" in record

    def _foreign(self, why: str) -> RequestError:
        return RequestError(
            "HR-BATCH-03",
            f"{self.path} does not belong to {self.batch}: {why}",
            "give another --out, or remove the file to start anew",
        )

    def add(self, index: int, name: Any, record: dict[str, Any]) -> None:
        """Append a result and wait until it is on the disk."""
        head = {"id": name, "line": index + 1, "input": self.digests[index]}
        data = json.dumps(head | record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RequestError(
                "HR-BATCH-04", f"the results {self.path} can't be written: {error.strerror}", "run it again to go on"
            ) from error
        self.done.add(index)
        self.n_failed += "error" in record

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
