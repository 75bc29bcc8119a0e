"""What the catalog calls: probe a model, make an executor. Importing this does not import torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.types import Fit, Reject
from headrace_plugins.reference.facts import folder_of, read_facts

if TYPE_CHECKING:
    from headrace.types import BuildContext, MachineInfo, ModelSource
    from headrace_plugins.reference.executor import ReferenceExecutor
    from headrace_plugins.reference.options import ReferenceOptions

SCORE = 20


def probe(machine: MachineInfo, source: ModelSource) -> Fit | Reject:
    """Read config.json and say what the model is. Raises ModelError for a damaged one: no other backend should try it.

    Whether a plugin knows the architecture turns out when the executor is made; the error then lists those known.
    """
    if source.format != "safetensors":
        return Reject(f"{source.uri} is {source.format or 'no known format'}, not safetensors")
    folder = folder_of(source)
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return Reject(f"{folder} has no config.json", "name a folder with config.json beside the safetensors files")
    facts = read_facts(folder, weights=False)
    return Fit(SCORE, f"a {facts.architecture} checkpoint in safetensors", facts.describe())


def open_executor(source: ModelSource, options: ReferenceOptions, context: BuildContext) -> ReferenceExecutor:
    """Read the config, choose kernels and sizes, check the memory; loads no weights. ModelError or ConfigError."""
    facts = read_facts(folder_of(source), weights=not options.dummy_weights)
    from headrace_plugins.reference.executor import ReferenceExecutor

    return ReferenceExecutor(source.uri, facts, options, context)
