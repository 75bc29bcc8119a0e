"""First-party plugins of Headrace, registered through the same entry point group as any other.

Only records here: what a record names is imported when a config selects it.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.hooks import (
    ArchSpec,
    BackendSpec,
    CommandSpec,
    ConstraintSpec,
    DialectSpec,
    DrafterSpec,
    KernelSpec,
    hookimpl,
)
from headrace.types import ModelSource

headrace_api = 1


@hookimpl
def headrace_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="toy",
        formats=("toy",),
        factory="headrace.testing.toy_backend:open_executor",
        probe="headrace.testing.toy_backend:probe",
        options="headrace.testing.toy_options:ToyOptions",
        summary="a model of hashes, for tests and examples: toy://vocab=512,seed=0",
        verified="any CPU",
    )
    yield BackendSpec(
        name="reference",
        formats=("safetensors",),
        factory="headrace_plugins.reference.backend:open_executor",
        probe="headrace_plugins.reference.backend:probe",
        options="headrace_plugins.reference.options:ReferenceOptions",
        summary="models on plain PyTorch ops, on the CPU",
        requires=("torch", "safetensors", "tokenizers"),
        install="pip install 'headrace[torch]'",
        verified="any CPU",
        baseline="headrace_plugins.reference.baseline:StraightLoop",
    )


@hookimpl
def headrace_kernels(device: str) -> Iterable[KernelSpec]:
    from headrace_plugins.reference import specs

    return specs.kernels() if device == "cpu" else ()


@hookimpl
def headrace_models() -> Iterable[ArchSpec]:
    yield ArchSpec(
        name="dense",
        architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        factory="headrace_plugins.models.dense:Dense",
        summary="dense decoders of the Llama family",
        requires=("torch",),
        install="pip install 'headrace[torch]'",
    )
    yield ArchSpec(
        name="deepseek_v41",
        architectures=("DeepseekV41ForCausalLM",),
        factory="headrace_plugins.models.deepseek_v41.model:DeepseekV41",
        summary="DeepSeek-V4.1: text backbone and draft stages",
        requires=("torch", "tokenizers"),
        install="pip install 'headrace[torch]'",
    )


@hookimpl
def headrace_drafters() -> Iterable[DrafterSpec]:
    yield DrafterSpec(
        name="ngram",
        factory="headrace_plugins.ngram:NGram",
        options="headrace_plugins.ngram:NGramOptions",
        summary="prompt lookup: drafts what followed the last time the current n-gram occurred",
    )


@hookimpl
def headrace_constraints() -> Iterable[ConstraintSpec]:
    options = "headrace_plugins.constraints.options:ConstraintOptions"
    read = ("json_schema", "json_object", "regex", "ebnf", "gbnf", "choice", "tagged")
    yield ConstraintSpec(
        name="auto",
        kinds=(*read, "lark"),
        factory="headrace_plugins.constraints.router:auto",
        options=options,
        summary="whichever engine enforces all of a grammar; llguidance first",
    )
    yield ConstraintSpec(
        name="llguidance",
        kinds=(*read, "lark"),
        factory="headrace_plugins.constraints.router:llguidance",
        options=options,
        summary="grammars on llguidance alone: quick to compile, no PyTorch",
        requires=("llguidance",),
        install="pip install 'headrace[constraints]'",
    )
    yield ConstraintSpec(
        name="xgrammar",
        kinds=read,
        factory="headrace_plugins.constraints.router:xgrammar",
        options=options,
        summary="grammars on xgrammar alone: quick masks, slower to compile",
        requires=("xgrammar", "torch", "transformers"),
        install="pip install 'headrace[xgrammar]'",
    )


@hookimpl
def headrace_dialects() -> Iterable[DialectSpec]:
    yield DialectSpec(
        name="jinja",
        factory="headrace_plugins.dialects.jinja:Jinja",
        summary="chat templates in jinja2, with the tool calls and reasoning of many model families",
    )
    yield DialectSpec(
        name="deepseek-v41",
        factory="headrace_plugins.dialects.deepseek:DeepseekV41",
        summary="the DSML prompt and tool format of DeepSeek-V4.1, by DeepSeek's own package",
        match=("DeepseekV41ForCausalLM",),
        requires=("deepseek_recipe",),
        install="pip install deepseek-recipe",
    )
    yield DialectSpec(
        name="deepseek-v4-recipe",
        factory="headrace_plugins.dialects.deepseek:DeepseekV4",
        summary="the same of DeepSeek-V4 (a template for it is of the family deepseek-v4)",
        match=("DeepseekV4ForCausalLM",),
        requires=("deepseek_recipe",),
        install="pip install deepseek-recipe",
    )


@hookimpl
def headrace_commands() -> Iterable[CommandSpec]:
    yield CommandSpec(
        name="run",
        factory="headrace_plugins.commands.run",
        summary="complete a prompt, or a file of prompts",
        order=10,
    )
    yield CommandSpec(name="chat", factory="headrace_plugins.commands.chat", summary="talk to a model", order=11)
    yield CommandSpec(
        name="bench",
        factory="headrace_plugins.commands.bench",
        summary="what Headrace costs, beside a baseline in the same run",
        order=20,
    )
    yield CommandSpec(
        name="constraint",
        factory="headrace_plugins.commands.constraint",
        summary="check a schema or grammar: who serves it, what is enforced",
        order=25,
    )
    yield CommandSpec(
        name="config",
        factory="headrace_plugins.commands.config",
        summary="check a config, explain what it launches, write a first one",
        order=30,
    )
    yield CommandSpec(
        name="plugins",
        factory="headrace_plugins.commands.plugins",
        summary="what is installed, and what it offers",
        order=40,
    )
    yield CommandSpec(
        name="doctor",
        factory="headrace_plugins.commands.doctor",
        summary="check this machine and the installation",
        order=41,
    )
    yield CommandSpec(
        name="completion",
        factory="headrace_plugins.commands.completion",
        summary="print a completion script for bash, zsh or fish",
        order=90,
    )


@hookimpl
def headrace_resolve(uri: str) -> ModelSource | None:
    if uri.startswith("toy://"):
        from headrace.testing.toy_backend import resolve as resolve_toy

        return resolve_toy(uri)
    from headrace_plugins.sources import resolve

    return resolve(uri)
