"""Which family a model's chats are of: by marks of its template, its architecture, its name, or the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.catalog import Catalog
from headrace.chat import chat_format
from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.hooks import DialectSpec
from headrace.llm import LLM
from headrace.pipeline import explain
from headrace.selection import choose_dialect
from headrace_plugins.dialects.detect import FAMILIES, Known, detect, family_named
from headrace_plugins.dialects.jinja import Jinja

TOY = "toy://vocab=300"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\n<function=' + c.name }}{{ '<parameter=' + k }}", "qwen-xml"),
        ("<tool_call>\n{{ c.function | tojson }}\n</tool_call>", "hermes"),
        ("{{ '\\n<tool_call>' + c.name }}\n<arg_key>{{ k }}</arg_key>\n", "glm"),
        ("{{ '<tool_call>' + c.name }}<arg_key>{{ k }}</arg_key>", "glm-compact"),
        ("{% set begin = '<minimax:tool_call>' %}", "minimax"),
        ("<tool_calls>{% for c in m.tool_calls %}{% endfor %}</tool_calls><end_of_sentence>", "minimax-m1"),
        ("<|im_start|>{{ messages }}", "generic"),
    ],
)
def test_marks_of_templates(template: str, name: str) -> None:
    known, why = detect(template)
    assert known.name == name
    assert ("the template has" in why) == (name != "generic")


def test_the_template_counts_most_then_the_architecture_then_the_name() -> None:
    mark, architecture, name = "<tool_call>", "minimax-m2", "models/GLM-5-Q4.gguf"
    assert detect(mark, architecture, name)[0].name == "hermes"
    assert detect("", architecture, name) == (family_named("minimax"), "the architecture is minimax-m2")
    assert detect("", "llama", name) == (family_named("glm-compact"), "the model's name has 'glm-5'")
    assert detect("", "llama", "smollm2.gguf")[0].name == "generic"


@pytest.mark.parametrize(
    ("architecture", "name", "family"),
    [
        ("Qwen3MoeForCausalLM", "Qwen3-30B-A3B", "hermes"),
        ("qwen3moe", "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", "qwen-xml"),
        ("qwen3moe", "finetune", "hermes"),
        ("Glm4MoeForCausalLM", "GLM-4.5-Air", "glm"),
        ("glm4moe", "GLM-4.7.gguf", "glm-compact"),
        ("glm4moe", "", "glm-compact"),
        ("Glm4MoeForCausalLM", "hermes", "glm-compact"),
        ("MistralForCausalLM", "Mistral-7B-Instruct-v0.3", "mistral"),
        ("MistralForCausalLM", "Hermes-2-Pro-Mistral-7B", "hermes"),
        ("mistral3", "Ministral-3-8B-Instruct-2512", "mistral-plain"),
        ("llama", "Ministral-8B-Instruct-2410", "mistral"),
        ("Mistral3ForConditionalGeneration", "Mistral-Small-3.2-24B", "mistral-id"),
        ("Mistral3ForConditionalGeneration", "Magistral-Small-2509", "mistral-thinking"),
        ("DeepseekV3ForCausalLM", "DeepSeek-V3.1", "deepseek-v3.1"),
        ("deepseek2", "DeepSeek-V3-0324", "deepseek-v3"),
        ("DeepseekV3ForCausalLM", "Kimi-K2-Instruct", "kimi-k2"),
        ("GraniteForCausalLM", "granite-3.3-2b-instruct", "granite"),
        ("granitehybrid", "granite-4.0-h-tiny", "hermes"),
    ],
)
def test_the_name_decides_between_those_of_one_architecture(architecture: str, name: str, family: str) -> None:
    assert detect("", architecture, name)[0].name == family


def test_markers_of_a_family_are_not_hidden_by_another() -> None:
    """Each set of markers finds a family, whatever stands before it in the table."""
    for known in FAMILIES:
        for markers in known.markers:
            assert detect(" ".join(markers))[0].name == known.name, markers


@pytest.mark.parametrize("known", FAMILIES, ids=lambda known: known.name)
def test_every_family_can_be_made(known: Known) -> None:
    made = known.make()
    assert made.name
    assert not {mark for mark in (*made.shown, *made.triggers) if not mark.strip()}


def test_names_are_unique_and_unknown_ones_are_told() -> None:
    assert len({known.name for known in FAMILIES}) == len(FAMILIES)
    with pytest.raises(ConfigError, match=r"HR-CONFIG-09: unknown dialect 'hermess' \(\[chat\] dialect\)") as caught:
        family_named("hermess")
    assert "did you mean 'hermes'?" in caught.value.help


def test_explain_says_which_and_why(tmp_path: Path) -> None:
    def told(chat: str) -> tuple[str, str, str]:
        path = tmp_path / "p.toml"
        path.write_text(f'model = "{TOY}"\n[chat]\n{chat}\n')
        (decision,) = (each for each in explain(load_config(path)) if each.key == "chat.dialect")
        return decision.value, decision.why, decision.facts["family"]

    assert told("") == (
        "jinja",
        "the model's own chat template, if it has one",
        "generic: neither template, architecture nor name tell of a family",
    )
    assert told('template = "<tool_call>{{ 1 }}"')[1:] == (
        "a template is given",
        "hermes: the template has '<tool_call>'",
    )
    value, why, family = told('dialect = "glm"')
    assert (value, family) == ("jinja", "glm: [chat] dialect names it")
    assert "p.toml" in why
    assert told('dialect = "jinja"')[2].startswith("generic: ")
    with pytest.raises(ConfigError, match="HR-CONFIG-09"):
        told('dialect = "nothing"')


def test_the_config_overrides(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(f'model = "{TOY}"\n[chat]\ndialect = "minimax"\n')
    with LLM(load_config(tmp_path / "p.toml")) as llm:
        assert chat_format(llm).name == "minimax"
    with LLM(TOY) as llm:
        assert chat_format(llm, "<tool_call>{{ messages }}").name == "hermes"
    entry, why = choose_dialect(Catalog.load(()), "DeepseekV41ForCausalLM", False, "hermes")
    assert (entry.spec.name, why) == ("jinja", "[chat] dialect names it")
    entry, _ = choose_dialect(Catalog.load(()), "qwen3", False, "deepseek-v41")
    assert entry.spec.name == "deepseek-v41"
    assert "jinja" in {each.spec.name for each in Catalog.load(()).specs(DialectSpec)}


def test_the_dialect_tells_without_rendering() -> None:
    assert Jinja().explain("{% broken", architecture="qwen3") == "hermes: the architecture is qwen3"
