"""`headrace run --batch`: a JSONL file of requests to a JSONL file of results, which a second run continues.

A result line names its input line and a digest of it, of the options and of the model, so that a file of other results
is noticed. It is written and synced whole; what a kill left of a line is dropped at the next start, and done again.

An error is no result: the next run drops it, from a copy that takes the file's place in one step, and does the line
again as it reads then. So a line never has two records, and a kill loses none but errors about to be retried.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_REQUEST, HeadraceError, RequestError, did_you_mean
from headrace.textfile import read_bytes
from headrace_plugins.commands.grammar_args import grammar_of
from headrace_plugins.commands.model_args import config_of, params_of, sampling_of
from headrace_plugins.commands.run import Asked, as_json, ask

if TYPE_CHECKING:
    from headrace.llm import LLM, Job
    from headrace.types import Grammar, Output

_HEAD = b'{"id": '
"""How every record starts."""
_ID = re.compile(rb'\{"id": (?:null|-?\d+|"(?:[^"\\]|\\.)*")')
_AFTER_ID = b', "line": '
_EXAMPLE = 'a line looks like {"id": "a", "prompt": "Hi", "max_tokens": 20}'
_PROMPTS = ("prompt", "messages", "prompt_ids")


def run_batch(args: argparse.Namespace, model: str | None) -> int:
    from headrace.llm import LLM

    config = config_of(args, model)
    lines = _read_lines(args.batch)
    options = {**sampling_of(args), "n": args.n, "logprobs": args.logprobs, "model": config.model}
    options["defaults"] = dict(config.sampling)
    options |= {"chat": args.chat, "system": args.system, "prefill": args.prefill, "echo": args.echo}
    asked = {"thinking": args.thinking, "thinking_budget": args.thinking_budget, "dialect": args.dialect}
    grammar = grammar_of(args)
    if grammar is not None:
        asked["constraint"] = [grammar.kind, grammar.text]
    options |= {name: value for name, value in asked.items() if value is not None}
    salt = json.dumps(options, sort_keys=True)
    digests = [hashlib.sha256(f"{salt}\n{line}".encode("utf-8", "surrogateescape")).hexdigest()[:16] for line in lines]
    with Results(args.out, args.batch, digests) as results:
        if not results.failed and len(results.done) == len([line for line in lines if line.strip()]):
            _report(args, results, "nothing left to do")
            return EXIT_OK
        try:
            with LLM(config, catalog=args.catalog) as llm:
                results.drop_failed()
                batch = _Batch(llm, args, lines, results, grammar)
                llm.run(batch, batch.ended, progress=not args.quiet and sys.stderr.isatty())
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one kills
            _report(args, results, "stopped; run the same command to go on")
            return EXIT_INTERRUPT
        _report(args, results, "done")
    return EXIT_REQUEST if results.failed else EXIT_OK


def _report(args: argparse.Namespace, results: Results, what: str) -> None:
    if not args.quiet:
        n, n_failed = len(results.done) + len(results.failed), len(results.failed)
        retry = "; the same command tries those again" if n_failed and what == "done" else ""
        counted = f"{n} result{'' if n == 1 else 's'}, {n_failed} failed, in {args.out}"
        print(f"[{what}: {counted}{retry}]", file=sys.stderr)


def _read_lines(path: str) -> list[str]:
    try:
        text = read_bytes(path, None).decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    except OSError as error:
        raise RequestError(
            "HR-BATCH-01", f"the batch {path} can't be read: {error.strerror}", "name a file of JSON lines"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


@dataclass
class _Batch:
    llm: LLM
    args: argparse.Namespace
    lines: list[str]
    results: Results
    grammar: Grammar | None
    """Of lines that have none."""
    _ids: dict[str, int] = field(default_factory=dict)
    """Id -> line number of every line so far."""
    _under_way: list[tuple[int, Asked]] = field(default_factory=list)
    """Line index of each job handed out, and how its answer is read."""

    def __len__(self) -> int:
        """Lines to do, for the progress bar."""
        return sum(bool(line.strip()) for line in self.lines) - len(self.results.done)

    def __iter__(self) -> Iterator[Job]:
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
                asked = self._job(item)
            except HeadraceError as error:
                self.results.add(index, name, {"error": _error(error)})
                continue
            self.results.names[index] = name
            self._under_way.append((index, asked))
            yield asked.job

    def ended(self, number: int, output: Output) -> None:
        index, asked = self._under_way[number]
        name = self.results.names.pop(index)
        if output.error is not None:
            self.results.add(index, name, {"error": _error(output.error)})
        elif output.finish_reason != "abort":  # an aborted one is to be done again
            self.results.add(index, name, as_json(asked.read(self.llm, output, self.args.echo)))

    def _id(self, item: dict[str, Any], index: int) -> str | int | None:
        name = item.pop("id", None)
        if name is None:
            return None
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            raise RequestError("HR-BATCH-02", f"id = {name!r:.60} is neither text nor a number", _EXAMPLE)
        first = self._ids.setdefault(str(name), index)
        if first != index:
            raise RequestError("HR-BATCH-02", f"id {name!r} was used in line {first + 1} already", "ids must differ")
        return name

    def _job(self, item: dict[str, Any]) -> Asked:
        from headrace.chat import check_messages
        from headrace.types import SamplingParams, field_names

        given = [name for name in _PROMPTS if name in item]
        if len(given) != 1:
            raise RequestError(
                "HR-BATCH-02",
                f"a line needs one of {', '.join(_PROMPTS)}; this has {' and '.join(given) or 'none'}",
                _EXAMPLE,
            )
        value = item.pop(given[0])
        known = field_names(SamplingParams)
        for key in item:
            if key not in known:
                help = f"{did_you_mean(key, (*known, *_PROMPTS))}known: id, {', '.join((*_PROMPTS, *known))}"
                raise RequestError("HR-BATCH-02", f"unknown key {key!r}", help)
        if isinstance(item.get("constraint"), dict):
            item["constraint"] = _constraint(item["constraint"])
        if isinstance(item.get("logit_bias"), dict):  # JSON has no integer keys
            item["logit_bias"] = {_int(key): bias for key, bias in item["logit_bias"].items()}
        base = params_of(self.args, n=self.args.n, logprobs=self.args.logprobs, constraint=self.grammar)
        params = _typed(SamplingParams, {name: getattr(base, name) for name in known} | item, "the line")
        if given[0] == "messages":
            return ask(self.llm, self.args, params, messages=check_messages(value))
        wanted = str if given[0] == "prompt" else list
        if not isinstance(value, wanted):
            message = f"{given[0]} must be {'text' if wanted is str else 'a list of ids'}, not {value!r:.60}"
            raise RequestError("HR-BATCH-02", message, _EXAMPLE)
        return ask(self.llm, self.args, params, prompt=value)


def _parse(line: str) -> dict[str, Any]:
    try:
        line.encode()
        item = json.loads(line, object_pairs_hook=_object)
    except UnicodeEncodeError as error:
        message = f"the line is not UTF-8: a wrong byte in place of character {error.start}"
        raise RequestError("HR-BATCH-02", message, _EXAMPLE) from error
    except (ValueError, RecursionError) as error:
        raise RequestError("HR-BATCH-02", f"the line is not JSON: {error}", _EXAMPLE) from error
    if not isinstance(item, dict):
        raise RequestError("HR-BATCH-02", f"the line is not an object but {line:.60}", _EXAMPLE)
    return item


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError("HR-BATCH-02", f"the key {key!r} appears twice in an object", "leave one of them out")
        found[key] = value
    return found


def _typed(cls: Any, values: dict[str, Any], what: str) -> Any:
    from headrace.types import field_names

    try:
        return cls(**values)
    except TypeError as error:  # of missing or unknown keys; SamplingParams checks its values
        why = str(error).partition("__init__() ")[2]
        raise RequestError("HR-BATCH-02", f"{what}: {why}", f"known: {', '.join(field_names(cls))}") from error


def _constraint(given: dict[str, Any]) -> Grammar:
    """{"kind", "text", ...}; a schema or a list of choices may be JSON itself."""
    from headrace.types import Grammar

    if isinstance(given.get("text"), (dict, list)):
        given = {**given, "text": json.dumps(given["text"], ensure_ascii=False)}
    grammar: Grammar = _typed(Grammar, given, "constraint")
    return grammar


def _int(key: str) -> Any:
    return int(key) if re.fullmatch(r"[0-9]{1,19}", key) else key


def _error(error: Exception) -> dict[str, str]:
    if isinstance(error, HeadraceError):
        return {"code": error.code, "message": error.message, "help": error.help}
    return {"code": "HR-INTERNAL-01", "message": repr(error), "help": ""}


def _is_torn(line: bytes) -> bool:
    """Was this the start of a record of ours that a kill or a full disk cut, and never someone else's text?"""
    found = _ID.match(line)
    if found is None:
        return line.startswith(_HEAD[: len(line)])
    rest = line[found.end() :]
    return rest[: len(_AFTER_ID)] == _AFTER_ID[: len(rest)]


class Results:
    """The result file: what is in it already, and how to add to it."""

    def __init__(self, path: str, batch: str, digests: list[str]) -> None:
        self.path = path
        self.batch = batch
        self.digests = digests
        self.done: set[int] = set()
        """Line indices that have a result."""
        self.failed: set[int] = set()
        """Line indices whose record is an error."""
        self._errors: set[int] = set()
        """Where such records were in the file at the start, counted from 1."""
        self.names: dict[int, Any] = {}
        """Ids of the lines under way."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise RequestError(
                "HR-BATCH-01", f"the results {path} can't be opened: {error.strerror}", "name another --out"
            ) from error
        try:
            self._claim()
            self._n_bytes = self._resume()
            os.ftruncate(self._fd, self._n_bytes)
            os.lseek(self._fd, self._n_bytes, os.SEEK_SET)
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self) -> None:
        """Only a file that can be continued, and that nobody else is writing. A file system without locks can't tell:
        there two runs at once are the user's to avoid."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise RequestError("HR-BATCH-01", f"the results {self.path} are no regular file", "name another --out")
        if os.path.exists(self.batch) and os.path.samestat(status, os.stat(self.batch)):
            raise RequestError("HR-BATCH-01", f"--out {self.path} is the batch itself", "name another --out")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.exists(self.path) and os.path.samestat(status, os.stat(self.path))
        except BlockingIOError:
            ours = False
        except OSError:
            ours = True
        if not ours:  # or no longer: a run that has just ended put a copy in its place
            message = f"the results {self.path} are being written by another run"
            raise RequestError("HR-BATCH-05", message, "wait for it to end, or name another --out")

    def _resume(self) -> int:
        """Take what is there; the length of the whole lines."""
        n_whole = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not _is_torn(line):
                        raise self._foreign(f"line {number} is no result")
                    break
                self._take(number, line)
                n_whole += len(line)
        return n_whole

    def _take(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            index, digest, error = record["line"] - 1, record["input"], record.get("error")
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise self._foreign(f"line {number} is no result ({type(fault).__name__})") from fault
        if not isinstance(index, int) or index < 0 or not isinstance(digest, str):
            raise self._foreign(f"line {number} is no result")
        if index in self.done or index in self.failed:
            raise self._foreign(f"line {number} is a second result of input line {index + 1}")
        if isinstance(error, dict) and "code" in error:
            self.failed.add(index)
            self._errors.add(number)
            return
        if index >= len(self.digests):
            raise self._foreign(f"line {number} is the result of input line {index + 1}, and there is none")
        if self.digests[index] != digest:
            raise self._foreign(
                f"line {number} is the result of input line {index + 1} as it read before, or of other options",
                "undo the change (only lines that failed may be changed between runs), ",
            )
        self.done.add(index)

    def _foreign(self, why: str, undo: str = "") -> RequestError:
        return RequestError(
            "HR-BATCH-03",
            f"{self.path} does not belong to {self.batch}: {why}",
            f"{undo}give another --out, or remove the file to start anew",
        )

    def drop_failed(self) -> None:
        """Take the errors off the file, so that their lines are done again. It is never seen half done."""
        if not self.failed:
            return
        path = os.path.realpath(self.path)
        copy = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.retry")
        try:
            fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            with contextlib.suppress(OSError):  # as in _claim
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(path, "rb") as old, open(fd, "wb", closefd=False) as new:
                new.writelines(line for number, line in enumerate(old, 1) if number not in self._errors)
            os.fsync(fd)
            os.replace(copy, path)
        except BaseException as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(copy)
            if isinstance(error, OSError):
                raise self._unwritten(error) from error
            raise
        os.close(self._fd)
        self._fd, self._n_bytes = fd, os.lseek(fd, 0, os.SEEK_END)
        self.failed.clear()

    def _unwritten(self, error: OSError) -> RequestError:
        message = f"the results {self.path} can't be written: {error.strerror}"
        return RequestError("HR-BATCH-04", message, "run it again to go on")

    def add(self, index: int, name: Any, record: dict[str, Any]) -> None:
        """Append a result and wait until it is on the disk."""
        head = {"id": name, "line": index + 1, "input": self.digests[index]}
        data = json.dumps(head | record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            n_written = 0
            while n_written < len(data):
                n_written += os.write(self._fd, data[n_written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._n_bytes)  # no line is better than half of one
            raise self._unwritten(error) from error
        self._n_bytes += len(data)
        (self.failed if "error" in record else self.done).add(index)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
