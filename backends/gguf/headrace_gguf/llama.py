"""The one module that touches llama.cpp: its library, models, contexts and samplers over low-level ctypes calls.

Nothing here is imported, and no library loaded, before `library()` is called. Handles are owned by the objects here and
freed by `close()`; every object keeps alive what C still points to.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from headrace.errors import DeviceError, ModelError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION = "0.3.36"
"""The llama-cpp-python whose structs and calls this module was written for."""
MAX_TEXT_BYTES = 1 << 30
"""Lengths are 32 bits in llama.cpp."""
IDLE_POLL_S = 0.001
"""How often close() looks whether the last tokenizer call has returned."""
INSTALL = "pip install 'headrace[gguf]'"

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
KV_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
"""Name -> ggml type."""
LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}
"""(mmap, mlock) -> llama_load_mode."""
ATTR_CONTROL, ATTR_UNKNOWN = 1 << 3, 1 << 0

_WARN, _ERROR = 3, 4
_LEVELS = {_WARN: logging.INFO, _ERROR: logging.INFO}
"""ggml log level -> ours, else debug. Its errors are information here: what fails raises, with the text."""


@cache
def library() -> Library:
    """Load llama.cpp once per process. Raises ModelError HR-GGUF-21 with the pip line."""
    return Library()


class Library:
    """The loaded library and what must live as long as the process: the log callback and call signatures."""

    def __init__(self) -> None:
        # libgomp reads this once, when it is loaded. Its spinning threads cost 10x beside a busy process: 29 -> 3 tok/s
        # on two cores. A value that the user has set is kept.
        self.omp_in_time = "llama_cpp" not in sys.modules
        """False: somebody loaded llama.cpp before us, OpenMP may spin."""
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        try:
            self.package = importlib.import_module("llama_cpp")
        except (ImportError, OSError, RuntimeError) as error:
            raise ModelError("HR-GGUF-21", f"llama.cpp can't be loaded: {error}", INSTALL) from error
        self.version: str = self.package.__version__
        if self.version.split(".")[:2] != VERSION.split(".")[:2]:
            raise ModelError(
                "HR-GGUF-21", f"llama-cpp-python {self.version} is installed, {VERSION} is needed",
                f"pip install llama-cpp-python=={VERSION}",
            )  # fmt: skip
        self.c: Any = self.package.llama_cpp
        self._local = threading.local()
        self._partial = ""
        self._log_callback = self.c.llama_log_callback(self._log)
        self.c.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        raw: Any = self.c._lib
        # the same function, giving an address instead of a pointer object: 0.2 us instead of 1
        self.logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", raw))
        # ggml asks "abort?" before every node, 20 times per ms; a Python callback would take the interpreter lock each
        # time. strlen of a two-byte buffer is the C function we want: 0 while the first byte is NUL, else 1.
        self._strlen = ctypes.CDLL(None if os.name == "posix" else "msvcrt").strlen
        self.abort_if_set = ctypes.cast(self._strlen, self.c.ggml_abort_callback)
        self.c.llama_backend_init()

    def _log(self, level: int, text: bytes, _: Any) -> None:
        """Collect whole lines. Called by llama.cpp on whichever thread it runs; must not raise."""
        line = self._partial + text.decode("utf-8", "replace")
        if not line.endswith("\n"):
            self._partial = line[-4096:]
            return
        self._partial = ""
        line = line.rstrip()
        if not line.strip("."):
            return
        if level in (_WARN, _ERROR) and (captured := getattr(self._local, "captured", None)) is not None:
            captured.append(line)
        logging.getLogger("headrace.gguf").log(_LEVELS.get(level, logging.DEBUG), "llama.cpp: %s", line)

    @contextmanager
    def captured_log(self) -> Iterator[deque[str]]:
        """The last warnings and errors that llama.cpp writes on this thread, for an error message."""
        lines: deque[str] = deque(maxlen=4)
        self._local.captured = lines
        try:
            yield lines
        finally:
            self._local.captured = None

    @property
    def gpu_offload(self) -> bool:
        return bool(self.c.llama_supports_gpu_offload())

    def system_info(self) -> str:
        """CPU features and build flags, as llama.cpp prints them."""
        return str(self.c.llama_print_system_info().decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    n_slots: int
    slot_tokens: int
    """A multiple of what llama.cpp rounds to (`headrace_gguf.memory`)."""
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    flash_attention: int
    type_k: int
    type_v: int


class Model:
    """A loaded model. Tokenizer threads use it through `held()`, so that close() waits for them."""

    def __init__(
        self, path: str, *, gpu_layers: int, mmap: bool, mlock: bool, report: Callable[[float], None] | None = None
    ) -> None:
        """Load weights; takes seconds to minutes. Raises ModelError HR-GGUF-20 with llama.cpp's own words."""
        self.library = library()
        c = self.library.c
        params = c.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = LOAD_MODES[mmap, mlock]
        stopped: list[BaseException] = []

        def progress(fraction: float, _: Any) -> bool:
            try:
                if report is not None:
                    report(fraction)
            except BaseException as error:  # must not cross C; raised again below
                stopped.append(error)
            return not stopped

        callback = c.llama_progress_callback(progress)
        params.progress_callback = callback
        self._users = 0
        self._lock = threading.Lock()  # a Condition's methods are Python: ^C inside one could leave it locked for good
        with self.library.captured_log() as lines:
            self.handle = c.llama_model_load_from_file(os.fsencode(path), params)
        if stopped:
            self.close()
            raise stopped[0]
        if not self.handle:
            raise ModelError(
                "HR-GGUF-20", f"llama.cpp can't load {path}: {'; '.join(lines) or 'no reason given'}",
                "the file may be damaged, or need a newer llama.cpp",
            )  # fmt: skip
        self.vocab = c.llama_model_get_vocab(self.handle)
        self.n_vocab: int = c.llama_vocab_n_tokens(self.vocab)

    @contextmanager
    def held(self) -> Iterator[Model]:
        """Use the model from any thread. Raises ModelError once close() was called."""
        counted = False
        try:
            with self._lock:
                if not self.handle:
                    raise ModelError(
                        "HR-GGUF-22", "the model is closed", "keep the pipeline open while its tokenizer is in use"
                    )
                self._users += 1
                counted = True
            yield self
        finally:
            if counted:
                with self._lock:
                    self._users -= 1

    def close(self) -> None:
        """Free the weights once no thread uses them; new users are refused meanwhile. Idempotent."""
        with self._lock:
            handle, self.handle = self.handle, None
        while handle and self._users:
            time.sleep(IDLE_POLL_S)
        if handle:
            self.library.c.llama_model_free(handle)

    def refusal(self) -> str:
        """Why this model can't be decoded token by token; empty when it can."""
        c = self.library.c
        if c.llama_model_has_encoder(self.handle):
            return "encoder-decoder models are not supported"
        if c.llama_model_is_diffusion(self.handle):
            return "diffusion models are not supported"
        return "" if c.llama_model_has_decoder(self.handle) else "the model has no decoder"

    def tokenize(self, text: bytes, parse_special: bool) -> list[int]:
        """Ids of UTF-8 text, nothing added. Raises RequestError for a text beyond 1 GiB."""
        c = self.library.c
        if len(text) > MAX_TEXT_BYTES:
            raise RequestError("HR-TOKEN-02", f"a text of {len(text)} bytes is too long to tokenize", "split it")
        size = len(text) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            n = c.llama_tokenize(self.vocab, text, len(text), buffer, size, False, parse_special)
            if n >= 0:
                return buffer[:n]
            size = -n

    def piece(self, token: int) -> bytes:
        """Bytes of one token, special ones by name."""
        c = self.library.c
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = c.llama_token_to_piece(self.vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def eog_ids(self, candidates: list[int]) -> frozenset[int]:
        """Those that llama.cpp takes for the end of a text: declared ones and those that it knows by name."""
        is_eog = self.library.c.llama_vocab_is_eog
        return frozenset(token for token in candidates if is_eog(self.vocab, token))

    def attributes(self) -> list[int]:
        attr, vocab = self.library.c.llama_vocab_get_attr, self.vocab
        return [attr(vocab, token) for token in range(self.n_vocab)]


class Context:
    """KV memory and compute buffers for `n_slots` sequences. One thread; `interrupt` alone may come from any."""

    def __init__(self, model: Model, params: ContextParams) -> None:
        """Raises DeviceError HR-GGUF-24 when llama.cpp refuses, most often for want of memory."""
        self.model = model
        self.library = model.library
        c = self.library.c
        self._flag = ctypes.create_string_buffer(2)
        raw = c.llama_context_default_params()
        raw.n_ctx = params.n_slots * params.slot_tokens
        raw.n_seq_max = params.n_slots
        raw.n_batch, raw.n_ubatch = params.n_batch, params.n_ubatch
        raw.n_threads, raw.n_threads_batch = params.n_threads, params.n_threads_batch
        raw.flash_attn_type = params.flash_attention
        raw.type_k, raw.type_v = params.type_k, params.type_v
        raw.kv_unified = False
        # sliding-window layers keep all positions, or a trim would leave holes that nobody reports
        raw.swa_full = True
        raw.no_perf = True
        raw.abort_callback = self.library.abort_if_set
        raw.abort_callback_data = ctypes.cast(self._flag, ctypes.c_void_p)
        with self.library.captured_log() as lines:
            self.handle = c.llama_init_from_model(model.handle, raw)
        if not self.handle:
            raise DeviceError(
                "HR-GGUF-24", f"llama.cpp can't make a context: {'; '.join(lines) or 'no reason given'}",
                "lower context_tokens or slots, or use another kv_type",
            )  # fmt: skip
        self.memory = c.llama_get_memory(self.handle)
        self.slot_tokens = int(c.llama_n_ctx(self.handle)) // params.n_slots
        # llama.cpp lowers it to the size of the KV, and ends the process when more is decoded at once
        self.n_batch = min(params.n_batch, int(c.llama_n_batch(self.handle)))
        self._decode = c.llama_decode
        self._seq_rm = c.llama_memory_seq_rm
        self._logits_address = self.library.logits_address
        self._rows: tuple[int, list[NDArray[np.float32]]] = (0, [])
        self.logits_block: NDArray[np.float32] | None = None
        """[rows, vocab] float32: what `logits` gives the rows of."""
        self._allocate(self.n_batch)

    def _allocate(self, n: int) -> None:
        """The batch: one set of arrays for the context's life, which C reads in place."""
        import numpy as np

        c = self.library.c
        self.token = np.zeros(n, np.int32)
        self.pos = np.zeros(n, np.int32)
        self.slot = np.zeros(n, np.int32)
        """Sequence id of each token; `seq_id[i]` of the C struct points at entry i."""
        self.output = np.zeros(n, np.int8)
        """1 where logits are wanted."""
        self._n_seq_id = np.ones(n, np.int32)
        self._seq_id = self.slot.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        self._batch = c.llama_batch()
        for name, array, kind in (
            ("token", self.token, ctypes.c_int32),
            ("pos", self.pos, ctypes.c_int32),
            ("n_seq_id", self._n_seq_id, ctypes.c_int32),
            ("seq_id", self._seq_id, ctypes.POINTER(ctypes.c_int32)),
            ("logits", self.output, ctypes.c_int8),
        ):
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, ctypes.POINTER(kind)))

    def close(self) -> None:
        """Free buffers. Idempotent."""
        handle, self.handle = self.handle, None
        self._rows, self.logits_block = (0, []), None
        if handle:
            self.library.c.llama_free(handle)

    def decode(self, n_tokens: int) -> int:
        """Run the first n_tokens of the batch arrays. Returns llama_decode's code: 0 done, 1 no room, 2 aborted, < 0
        failed. The interpreter lock is released meanwhile."""
        self._batch.n_tokens = n_tokens
        return int(self._decode(self.handle, self._batch))

    def logits(self, n_rows: int) -> list[NDArray[np.float32]]:
        """Views of the last decode's logits, [vocab] float32 each, one per marked token in batch order. They are
        llama.cpp's own buffer: writable, valid until the next decode."""
        import numpy as np

        address, rows = self._logits_address(self.handle), self._rows[1]
        if address != self._rows[0] or n_rows != len(rows):
            if not address:
                raise DeviceError("HR-GGUF-25", "llama.cpp returned no logits", "report this with the model's name")
            flat = (ctypes.c_float * (n_rows * self.model.n_vocab)).from_address(address)
            self.logits_block = np.ctypeslib.as_array(flat).reshape(n_rows, self.model.n_vocab)
            self._rows = (address, list(self.logits_block))
        return self._rows[1]

    def interrupt(self) -> None:
        self._flag[0] = b"\1"

    def clear_interrupt(self) -> None:
        self._flag[0] = b"\0"

    def trim(self, slot: int, keep: int) -> bool:
        """Drop positions from `keep` on. False: refused (recurrent memory), nothing changed."""
        return bool(self._seq_rm(self.memory, slot, keep if keep > 0 else -1, -1))

    def fork(self, src: int, dst: int) -> None:
        """Copy all of src over dst. A part can't be copied: llama.cpp ends the process when the KV is split."""
        self._seq_rm(self.memory, dst, -1, -1)
        self.library.c.llama_memory_seq_cp(self.memory, src, dst, -1, -1)

    def n_tokens(self, slot: int) -> int:
        return int(self.library.c.llama_memory_seq_pos_max(self.memory, slot)) + 1

    def clear(self) -> None:
        self.library.c.llama_memory_clear(self.memory, True)
