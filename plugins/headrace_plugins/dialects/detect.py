"""Which family's chats a model writes: told by marks in its template, then its architecture, then its name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError, did_you_mean
from headrace_plugins.dialects.family import Family

_HERE = "headrace_plugins.dialects."


@dataclass(frozen=True, slots=True)
class Known:
    """A family and how it is found."""

    name: str
    """What [chat] dialect calls it."""
    factory: str
    """"module:class", the module within this package."""
    markers: tuple[tuple[str, ...], ...] = ()
    """Texts of which a template has all of one tuple."""
    architectures: tuple[str, ...] = ()
    """Of configs and of GGUF files. Only of models that all write alike."""
    names: tuple[str, ...] = ()
    """Parts of the model's name, in lower case."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Family:
        module, _, attribute = self.factory.partition(":")
        made: Family = getattr(importlib.import_module(_HERE + module), attribute)(**self.options)
        return made


FAMILIES: tuple[Known, ...] = (
    Known(
        "qwen-xml",
        "tagged_calls:QwenXML",
        markers=(("<function=", "<parameter="),),
        architectures=("qwen35", "qwen35moe", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        names=("qwen3-coder", "qwen3.5", "qwen3.6"),
    ),
    Known(
        "glm",
        "tagged_calls:GLM",
        markers=(("<arg_key>", "<tool_call>{function-name}\n"), ("<arg_key>", "'\\n<tool_call>'")),
        names=("glm-4.5", "glm-4.6"),
    ),
    Known(
        "glm-compact",
        "tagged_calls:GLM",
        markers=(("<arg_key>",),),
        architectures=("Glm4MoeForCausalLM", "glm4moe", "GlmMoeDsaForCausalLM", "glm-dsa"),
        names=("glm-4.7", "glm-5"),
        options={"lines": False},
    ),
    Known(
        "minimax",
        "tagged_calls:MiniMax",
        markers=(("minimax:tool_call",),),
        architectures=("MiniMaxM2ForCausalLM", "minimax-m2"),
        names=("minimax-m2",),
    ),
    Known(
        "minimax-m1",
        "generic:MiniMaxM1",
        markers=(("<tool_calls>", "<end_of_sentence>"),),
        architectures=("MiniMaxM1ForCausalLM",),
        names=("minimax-m1", "minimax-text"),
    ),
    Known(
        "hermes",
        "hermes:Hermes",
        markers=(("<tool_call>",),),
        architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "qwen3", "qwen3moe", "qwen2"),
        names=("hermes", "qwen"),
    ),
    Known("generic", "generic:Generic"),
)
"""In the order in which markers are looked for: who has more of them comes first. The last one is for all others."""


def detect(template: str, architecture: str = "", name: str = "", families: Seq[Known] = FAMILIES) -> tuple[Known, str]:
    """(family, why). A template without a family's marks counts less than the architecture and the name of the model,
    but a family that is found by these writes the tools itself (`TemplateFormat`)."""
    for known in families:
        for markers in known.markers:
            if all(marker in template for marker in markers):
                return known, f"the template has {' and '.join(repr(marker) for marker in markers)}"
    for known in families:
        if architecture and architecture in known.architectures:
            return known, f"the architecture is {architecture}"
    lower = name.lower()
    for known in families:
        for part in known.names:
            if part in lower:
                return known, f"the model's name has '{part}'"
    return families[-1], "neither template, architecture nor name tell of a family"


def family_named(name: str, families: Seq[Known] = FAMILIES) -> Known:
    """Raises ConfigError HR-CONFIG-09 for an unknown one."""
    for known in families:
        if known.name == name:
            return known
    names = [known.name for known in families]
    raise ConfigError(
        "HR-CONFIG-09", f"unknown dialect '{name:.60}' ([chat] dialect)",
        f"{did_you_mean(name, names)}known: {', '.join(names)}",
    )  # fmt: skip
