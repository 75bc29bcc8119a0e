"""Compiles in a child process, for grammars that might take for ever, all memory, or the whole process with them.

    parent -> child   the vocabulary, once; then a grammar at a time
    child  -> parent  how each went

A message is a length (8 bytes, little-endian) and as many bytes of JSON; behind the vocabulary's are the raw tokens.
What went well in the child is compiled again in the parent, because a compiled grammar can't be sent. `python -m` runs
this file as the child: it holds no model, and ends when its input does.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import IO, Any

from headrace.contracts import Tokenizer
from headrace.errors import RequestError
from headrace_plugins.constraints.vocabulary import Vocabulary

POLL_S = 0.02
"""How often a wait for the child asks whether the request was cancelled."""
_LENGTH = struct.Struct("<Q")

Stopped = Callable[[], None]
"""Raises RequestError when the work is to stop: cancelled, or out of time."""


class ChildDied(RequestError):
    """The child ended in the middle of a grammar."""


class Children:
    """Child processes for trial compiles with one engine. One grammar at a time each; one stays for the next. Any
    thread."""

    def __init__(self, engine: str, vocabulary: Vocabulary, memory_bytes: int) -> None:
        self._engine, self._vocabulary, self._memory_bytes = engine, vocabulary, memory_bytes
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._n_closed = 0

    def try_compile(self, text: str, stopped: Stopped) -> None:
        """Compile in a child. Raises what compiling raises; what `stopped` raises, after killing the child; and
        HR-CONSTRAINT-08 when the child dies."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
            n_closed = self._n_closed
            if child is not None:
                self._busy.add(child)
        if child is not None:
            try:
                return self._ask(child, b"", text, stopped)
            except ChildDied:  # of something else perhaps: it waited, and anybody may have ended it
                if n_closed != self._n_closed:
                    raise
        child = _Child(self._engine, self._memory_bytes)
        with self._lock:
            self._busy.add(child)
        self._ask(child, _vocabulary_message(self._vocabulary), text, stopped)

    def _ask(self, child: _Child, greeting: bytes, text: str, stopped: Stopped) -> None:
        """child: one of the busy ones."""
        keep = False
        try:
            answer = child.ask(greeting + _message({"grammar": text}), stopped)
            keep = True
        finally:
            with self._lock:
                self._busy.discard(child)
                keep = keep and not self._idle
                if keep:
                    self._idle.append(child)
            if not keep:
                child.kill()
        if "code" in answer:
            raise RequestError(answer["code"], answer["message"], answer["help"])

    def close(self) -> None:
        """End all children; a compile in one of them fails with HR-CONSTRAINT-08. Safe to call twice."""
        with self._lock:
            idle, busy = [*self._idle], [*self._busy]
            self._idle.clear()
            self._n_closed += 1
        for child in busy:
            child.stop()  # its own thread sees that, and clears up
        for child in idle:
            child.kill()

    __del__ = close


class _Child:
    def __init__(self, engine: str, memory_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, engine, str(memory_bytes)],  # -P: nothing of the working directory
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)

    def stop(self) -> None:
        self._process.kill()

    def kill(self) -> None:
        self.stop()
        self._process.wait()
        self._in.close()
        self._out.close()

    def ask(self, data: bytes, stopped: Stopped) -> dict[str, Any]:
        """Send, and wait for the answer. Never blocks for longer than POLL_S at a time."""
        unsent, received = memoryview(data), bytearray()
        with DefaultSelector() as selector:
            selector.register(self._out, EVENT_READ)
            selector.register(self._in, EVENT_WRITE)
            while True:
                stopped()
                for key, _ in selector.select(POLL_S):
                    try:
                        if key.fileobj is self._in:
                            unsent = unsent[os.write(self._in.fileno(), unsent[:65536]) :]
                            if not unsent:
                                selector.unregister(self._in)
                            continue
                        part = os.read(self._out.fileno(), 65536)
                    except BlockingIOError:
                        continue
                    except (OSError, ValueError) as error:
                        raise self._death() from error
                    if not part:
                        raise self._death()
                    received += part
                size = _LENGTH.unpack_from(received)[0] if len(received) >= _LENGTH.size else None
                if size is not None and len(received) >= _LENGTH.size + size:
                    answer: dict[str, Any] = json.loads(received[_LENGTH.size : _LENGTH.size + size])
                    return answer

    def _death(self) -> ChildDied:
        self._process.kill()
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ChildDied(
            "HR-CONSTRAINT-08", f"the process that compiled the grammar died ({how})",
            "the grammar asks too much of the engine, most often of its memory: make it smaller",
        )  # fmt: skip


def _message(content: Any, rest: bytes = b"") -> bytes:
    """rest: raw bytes behind the JSON; its length is told in front of it."""
    text = json.dumps(content).encode()
    return _LENGTH.pack(len(text)) + text + rest


def _vocabulary_message(vocabulary: Vocabulary) -> bytes:
    tokenizer = vocabulary.tokenizer
    tokens = [
        tokenizer.token_bytes(token) if token in vocabulary.special_ids else data
        for token, data in enumerate(vocabulary.text)
    ]
    header = {
        "lengths": [len(token) for token in tokens],
        "special": sorted(vocabulary.special_ids),
        "eos": sorted(vocabulary.eos_ids),
        "bos": tokenizer.bos_id,
    }
    return _message(header, b"".join(tokens))


# --- the child's side ------------------------------------------------------------------------------------------------


class _SentTokenizer(Tokenizer):
    """The parent's vocabulary; it encodes nothing."""

    def __init__(self, header: dict[str, Any], data: bytes) -> None:
        self._tokens, at = [], 0
        for length in header["lengths"]:
            self._tokens.append(data[at : at + length])
            at += length
        self._special = frozenset(header["special"])
        self.n_vocab = len(self._tokens)
        self.bos_id, self.eos_ids = header["bos"], frozenset(header["eos"])

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return []

    def token_bytes(self, token: int) -> bytes:
        return self._tokens[token]

    def is_special(self, token: int) -> bool:
        return token in self._special


def serve(engine_name: str, memory_bytes: int, source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer until the input ends."""
    from headrace_plugins.constraints.engines import load_engine

    header = _read_json(source)
    if header is None:
        return
    vocabulary = Vocabulary(_SentTokenizer(header, source.read(sum(header["lengths"]))))
    engine = load_engine(engine_name, vocabulary)
    _limit_memory(memory_bytes)
    while (request := _read_json(source)) is not None:
        answer: dict[str, str] = {}
        try:
            engine.compile_text(request["grammar"]).start().forced()  # it may be long without end
        except RequestError as error:
            answer = {"code": error.code, "message": error.message, "help": error.help}
        except MemoryError:
            os._exit(1)  # the parent knows what to say
        sink.write(_message(answer))
        sink.flush()


def _read_json(source: IO[bytes]) -> dict[str, Any] | None:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    content: dict[str, Any] = json.loads(source.read(_LENGTH.unpack(head)[0]))
    return content


def _limit_memory(memory_bytes: int) -> None:
    """From now on this process may take so much more address space, where the system has such a limit."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, most))
    except (ImportError, OSError, ValueError):
        pass  # without it, the parent's own limits and the time bound remain


def watch_parent() -> None:
    """End with the parent, even in the middle of a compile."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    watch_parent()
    serve(sys.argv[1], int(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
