"""What the catalog calls: probe a model, open an executor, check the installation."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.hooks import CheckResult
from headrace.types import Fit, Reject
from headrace_gguf.facts import read_facts
from headrace_gguf.llama import INSTALL, VERSION, library
from headrace_gguf.memory import as_facts, resolve

if TYPE_CHECKING:
    from headrace.types import BuildContext, MachineInfo, ModelSource
    from headrace_gguf.executor import GGUFExecutor
    from headrace_gguf.options import GGUFOptions

SCORE = 50


def probe(machine: MachineInfo, source: ModelSource) -> Fit | Reject:
    """Check the file and say what it is; loads neither weights nor llama.cpp. Raises ModelError for a damaged file: no
    other backend should try it."""
    if source.format != "gguf":
        return Reject(f"{source.uri} is {source.format or 'no known format'}, not GGUF")
    facts = read_facts(source.path)
    return Fit(SCORE, f"a {facts.quantisation} {facts.architecture} model in GGUF", as_facts(facts))


def open_executor(source: ModelSource, options: GGUFOptions, context: BuildContext) -> GGUFExecutor:
    """Check the file and the memory, then make an executor (not opened). Raises ModelError or ConfigError."""
    facts = read_facts(source.path)
    shape = resolve(facts, options, context.engine, context.machine, library().gpu_offload)
    from headrace_gguf.executor import GGUFExecutor

    return GGUFExecutor(source, facts, options, shape, context)


def checks() -> Iterable[CheckResult]:
    """For `headrace doctor`: is llama.cpp here, is it the right one, is it built well for this CPU?"""
    if importlib.util.find_spec("llama_cpp") is None:
        yield CheckResult("llama.cpp", "fail", "llama-cpp-python is not installed", INSTALL)
        return
    try:
        lib = library()
    except HeadraceError as error:
        yield CheckResult("llama.cpp", "fail", error.message, error.help)
        return
    same = lib.version == VERSION
    yield CheckResult(
        "llama.cpp", "ok" if same else "warn", f"llama-cpp-python {lib.version}",
        "" if same else f"this backend was tested with {VERSION}: pip install llama-cpp-python=={VERSION}",
        {"version": lib.version, "gpu": lib.gpu_offload},
    )  # fmt: skip
    yield _cpu(lib.system_info())
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    good = policy.lower() == "passive" and lib.omp_in_time
    late = "" if lib.omp_in_time else ", set after llama.cpp was loaded by somebody else"
    help = "" if good else "export OMP_WAIT_POLICY=passive, or generation slows beside other work"
    yield CheckResult("OpenMP", "ok" if good else "warn", f"OMP_WAIT_POLICY={policy}{late}", help)


def _cpu(info: str) -> CheckResult:
    """Compare the build's instruction sets with the CPU's."""
    built = {part.split("=")[0].split(":")[-1].strip() for part in info.split("|") if part.strip().endswith("= 1")}
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split(":", 1)[1].split() for line in file if line.startswith("flags")), [])
    except OSError:
        flags = []
    missing = [name for name in ("AVX2", "FMA", "F16C") if name.lower() in flags and name not in built]
    detail = f"built with {', '.join(sorted(built))}"
    if missing:
        help = f"llama.cpp was built without {', '.join(missing)}, which this CPU has: rebuild it, see the README"
        return CheckResult("CPU features", "warn", detail, help)
    return CheckResult("CPU features", "ok", detail)
