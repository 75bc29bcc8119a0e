"""GGUF models for Headrace, on llama.cpp. Importing this loads neither llama.cpp nor numpy."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.hooks import BackendSpec, CheckSpec, hookimpl

headrace_api = 1


@hookimpl
def headrace_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="gguf",
        factory="headrace_gguf.backend:open_executor",
        options="headrace_gguf.options:GGUFOptions",
        probe="headrace_gguf.backend:probe",
        formats=("gguf",),
        devices=("cpu",),
        summary="GGUF models on llama.cpp",
        requires=("llama_cpp",),
        install="pip install 'headrace[gguf]'",
        verified="x86-64 CPU",
        baseline="headrace_gguf.baseline:RawLoop",
    )


@hookimpl
def headrace_checks() -> Iterable[CheckSpec]:
    yield CheckSpec(
        name="gguf", factory="headrace_gguf.backend:checks", summary="llama.cpp: version, CPU features, OpenMP"
    )
