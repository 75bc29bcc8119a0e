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
    """Of configs and of GGUF files. Where several families have one, the name of the model decides, and without one
    that is known, the last family."""
    names: tuple[str, ...] = ()
    """Parts of the model's name, in lower case."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Family:
        module, _, attribute = self.factory.partition(":")
        made: Family = getattr(importlib.import_module(_HERE + module), attribute)(**self.options)
        return made


FAMILIES: tuple[Known, ...] = (
    Known(
        "gemma4",
        "gemma:Gemma4",
        markers=(("<|tool_call>",), ("<|turn>",)),
        architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "gemma4"),
        names=("gemma-4", "gemma4"),
    ),
    Known("functiongemma", "gemma:FunctionGemma", markers=(("<start_function_call>",),), names=("functiongemma",)),
    Known(
        "mistral-id",
        "mistral:Mistral",
        markers=(("[TOOL_CALLS]", "[CALL_ID]"),),
        names=("mistral-small-3.2",),
        options={"form": "id"},
    ),
    Known(
        "mistral-thinking",
        "mistral:Mistral",
        markers=(("[TOOL_CALLS]", "[ARGS]", "[THINK]"),),
        names=("magistral",),
        options={"form": "plain", "thinking": True},
    ),
    Known(
        "mistral-plain",
        "mistral:Mistral",
        markers=(("[TOOL_CALLS]", "[ARGS]"),),
        names=("ministral-3", "mistral-large-3", "devstral"),
        options={"form": "plain"},
    ),
    Known(
        "mistral",
        "mistral:Mistral",
        markers=(("[TOOL_CALLS]",), ("[AVAILABLE_TOOLS]",)),
        names=("mistral-7b-instruct", "mistral-nemo", "mistral-small", "mistral-large", "ministral"),
    ),
    Known(
        "lfm2",
        "lfm2:Lfm2",
        markers=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "lfm2", "lfm2moe"),
        names=("lfm2",),
    ),
    Known(
        "kimi-k2",
        "kimi_k2:KimiK2",
        markers=(("<|tool_calls_section_begin|>",), ("<|im_middle|>", "tool_declare")),
        architectures=("KimiK25ForConditionalGeneration",),
        names=("kimi-k2",),
    ),
    Known(
        "gpt-oss",
        "gpt_oss:GptOss",
        markers=(("<|channel|>", "<|message|>", "<|start|>"),),
        architectures=("GptOssForCausalLM", "gpt-oss"),
        names=("gpt-oss",),
    ),
    Known(
        "deepseek-v4.1",
        "deepseek_calls:Dsml",
        markers=(("｜DSML｜", " calls>"),),
        names=("deepseek-v4.1",),
        options={"section": "calls", "space": " "},
    ),
    Known(
        "deepseek-v3.2",
        "deepseek_calls:Dsml",
        markers=(("｜DSML｜", "function_calls>"),),
        names=("deepseek-v3.2",),
        options={"section": "function_calls"},
    ),
    Known(
        "deepseek-v4",
        "deepseek_calls:Dsml",
        markers=(("｜DSML｜",),),
        names=("deepseek-v4",),
        options={"section": "tool_calls"},
    ),
    Known(
        "deepseek-v3-tools",
        "deepseek_calls:DeepseekV3",
        markers=(("<｜tool▁calls▁begin｜>", "```json", "tools"),),
        options={"fenced": True},
    ),
    Known(
        "deepseek-v3",
        "deepseek_calls:DeepseekV3",
        markers=(("<｜tool▁calls▁begin｜>", "```json"),),
        names=("deepseek-v3-0324", "deepseek-r1-0528"),
        options={"fenced": True, "describe": True},
    ),
    Known("deepseek-v3.1-tools", "deepseek_calls:DeepseekV3", markers=(("<｜tool▁calls▁begin｜>", "tools"),)),
    Known(
        "deepseek-v3.1",
        "deepseek_calls:DeepseekV3",
        markers=(("<｜tool▁calls▁begin｜>",),),
        names=("deepseek-v3.1",),
        options={"describe": True},
    ),
    Known(
        "qwen-xml",
        "tagged_calls:QwenXML",
        markers=(("<function=", "<parameter="),),
        architectures=(
            "qwen35",
            "qwen35moe",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3MoeForCausalLM",
            "qwen3moe",
        ),
        names=("qwen3-coder", "qwen3.5", "qwen3.6"),
    ),
    Known(
        "glm",
        "tagged_calls:GLM",
        markers=(("<arg_key>", "<tool_call>{function-name}\n"), ("<arg_key>", "'\\n<tool_call>'")),
        architectures=("Glm4MoeForCausalLM", "glm4moe"),
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
        names=("hermes", "qwen", "granite-4"),
    ),
    Known("granite", "granite:Granite", markers=(("<|start_of_role|>",),), names=("granite-3",)),
    Known(
        "llama-pythonic",
        "llama3:LlamaPythonic",
        markers=(("<|header_start|>",),),
        architectures=("Llama4ForConditionalGeneration", "llama4"),
        names=("llama-4",),
    ),
    Known(
        "llama3",
        "llama3:Llama3",
        markers=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters": ')),
        names=("llama-3.1", "llama-3.2", "llama-3.3"),
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
    alike = [known for known in families if architecture and architecture in known.architectures]
    for known in alike or families:
        if part := next((part for part in known.names if part in name.lower()), ""):
            if not alike:
                return known, f"the model's name has '{part}'"
            return known, f"the architecture is {architecture}, and the model's name has '{part}'"
    if alike:
        return alike[-1], f"the architecture is {architecture}"
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
