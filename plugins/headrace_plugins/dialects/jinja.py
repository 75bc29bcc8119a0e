"""The dialect of models whose chat format is a jinja2 template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_plugins.dialects.detect import Known, detect, family_named

if TYPE_CHECKING:
    from headrace.contracts import Tokenizer
    from headrace_plugins.dialects.formats import TemplateFormat


class Jinja:
    """Renders the template; tools, reasoning and answers are those of the model's family."""

    def chat_format(
        self,
        source: str,
        origin: str,
        tokenizer: Tokenizer,
        *,
        architecture: str = "",
        name: str = "",
        family: str | None = None,
    ) -> TemplateFormat:
        """family: [chat] dialect of the config; None, or this dialect's own name: found by the other facts. Raises
        ConfigError HR-CONFIG-09 for an unknown one, ModelError for the template."""
        from headrace_plugins.dialects.formats import TemplateFormat
        from headrace_plugins.templates import ChatTemplate

        known, _ = _family(source, architecture, name, family)
        return TemplateFormat(ChatTemplate(source, origin), tokenizer, known.make())

    def explain(self, source: str, *, architecture: str = "", name: str = "", family: str | None = None) -> str:
        """Which family, and why."""
        known, why = _family(source, architecture, name, family)
        return f"{known.name}: {why}"


def _family(source: str, architecture: str, name: str, family: str | None) -> tuple[Known, str]:
    if family is None or family == "jinja":
        return detect(source, architecture, name)
    return family_named(family), "[chat] dialect names it"
