"""Loads an unknown model in a process of its own first.

llama.cpp checks what it is given with assertions that end the process: 36 of 1500 randomly changed models that passed
every check of ours did so. A model that survived once is remembered, by fingerprint, and not tried again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, ModelError
from headrace.home import cache_home

if TYPE_CHECKING:
    from headrace_gguf.facts import GGUFFacts
    from headrace_gguf.llama import ContextParams

REFUSED = 3
"""Exit code: llama.cpp refuses the model with an error, as it will again in the caller's process."""
SLOWEST_BYTES_PER_S = 20 << 20
PATIENCE_S = 20
_START = "import sys; sys.path[:] = sys.argv[2:]; from headrace_gguf.trial import main; sys.exit(main(sys.argv[1]))"


def try_load(facts: GGUFFacts, params: ContextParams, gpu_layers: int) -> None:
    """Return if the model may be loaded here. Raises ModelError HR-GGUF-26 if it ended, or hung, the trial process."""
    job = json.dumps({"path": facts.path, "gpu_layers": gpu_layers, "params": asdict(params)}, sort_keys=True)
    done = _remembered(facts, job)
    if done.exists():
        return
    command = [sys.executable, "-P", "-c", _START, job, *sys.path]
    try:
        run = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S + facts.size_bytes / SLOWEST_BYTES_PER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _crash(facts, f"hung for {error.timeout:.0f} s") from None
    if run.returncode == REFUSED:
        return
    if run.returncode != 0:
        lines = run.stderr.decode("utf-8", "replace").strip().splitlines()
        last = next((line for line in lines if "ASSERT" in line or "error" in line.lower()), lines[-1] if lines else "")
        raise _crash(facts, f"ended with code {run.returncode}: {last[-300:] or 'it said nothing'}")
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    except OSError:
        pass  # not remembered: the next load tries again


def _crash(facts: GGUFFacts, what: str) -> ModelError:
    return ModelError(
        "HR-GGUF-26", f"{facts.path}: llama.cpp can't run it: a trial load in a separate process {what}",
        "the file is damaged or hostile: download or convert it again",
    )  # fmt: skip


def _remembered(facts: GGUFFacts, job: str) -> Path:
    """The empty file that says this model was tried with these settings and this llama.cpp."""
    from headrace_gguf.llama import library

    name = sha256(f"{facts.fingerprint} {library().version} {job}".encode()).hexdigest()
    return cache_home() / "gguf-tried" / name


def main(job: str) -> int:
    """What the trial process does: load, make a small context, tokenize, run a prompt and a step."""
    from headrace_gguf.llama import Context, ContextParams, Model

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        pass  # a core file is a nuisance, not a fault
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else a failed assertion starts a debugger
    asked = json.loads(job)
    params = asked["params"] | {"n_slots": 1, "slot_tokens": 256, "n_threads": 1, "n_threads_batch": 1}
    try:
        model = Model(asked["path"], gpu_layers=asked["gpu_layers"], mmap=True, mlock=False)
        if model.refusal():
            return REFUSED
        for parse_special in (False, True):
            model.tokenize("Hello <|im_end|>\n wörld 🎉 42".encode(), parse_special)
        for token in range(model.n_vocab):
            model.piece(token)
        context = Context(model, ContextParams(**params))
    except HeadraceError:
        return REFUSED
    for n, start in ((4, 0), (1, 4)):
        n = min(n, context.n_batch)
        context.token[:n], context.slot[:n], context.output[:n] = model.n_vocab - 1, 0, 1
        context.pos[:n] = range(start, start + n)
        if context.decode(n) != 0:
            return REFUSED
    return 0
