"""The dialects of DeepSeek-V4 and V4.1: prompts by DeepSeek's own package.

These models ship no chat template. https://github.com/deepseek-ai/deepseek-recipe (PyPI `deepseek-recipe`) is the
reference for their prompts; answers and the grammar of tool calls are those of `Dsml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from headrace.dialogue import AnswerParser, Prompt, Turn
from headrace.errors import RequestError, did_you_mean
from headrace_plugins.dialects.deepseek_calls import Dsml
from headrace_plugins.dialects.formats import PLAIN, offered, tools_in
from headrace_plugins.dialects.grammars import constraint_of, think_of

if TYPE_CHECKING:
    from deepseek_recipe import ConversationRequest, RenderedPrompt

    from headrace.contracts import Tokenizer

ARGUMENTS = ("thinking", "enable_thinking", "reasoning_effort", "tools", "tool_choice", "response_format")
"""What a turn's `arguments` may hold. thinking and enable_thinking mean what `Turn.thinking` does; the others are those
of the Chat Completions API."""

_MODEL = "model"
_NAMES: Mapping[str, str] = {"calls": "DeepSeek-V4.1", "tool_calls": "DeepSeek-V4"}


class DeepseekV41:
    """The dialect of DeepseekV41ForCausalLM."""

    def chat_format(self, source: str, origin: str, tokenizer: Tokenizer, **facts: Any) -> DeepseekFormat:
        return DeepseekFormat(tokenizer, "calls", " ")


class DeepseekV4:
    """The dialect of DeepseekV4ForCausalLM."""

    def chat_format(self, source: str, origin: str, tokenizer: Tokenizer, **facts: Any) -> DeepseekFormat:
        return DeepseekFormat(tokenizer, "tool_calls", "")


class DeepseekFormat:
    """A `ChatFormat`. Thread-safe.

    Roles: system, user, assistant (with reasoning_content and tool_calls), tool, latest_reminder. What messages hold is
    plain text, whatever tokens it names.
    """

    def __init__(self, tokenizer: Tokenizer, section: str = "calls", space: str = " ") -> None:
        from deepseek_recipe import ConversionOptions, DeepseekV4Encoding, DeepseekV41Encoding, ModelVersion

        self._tokenizer = tokenizer
        self._family, self._begun = Dsml(section, space), Dsml(section, space, begun=True)
        self._model_name = _NAMES[section]
        self.name = self._family.name
        latest = section == "calls"
        self._encoding: DeepseekV4Encoding | DeepseekV41Encoding
        self._encoding = DeepseekV41Encoding() if latest else DeepseekV4Encoding()
        version = ModelVersion.DeepseekV41Flash if latest else ModelVersion.DeepseekV4Pro
        self._options = ConversionOptions().with_model_alias(_MODEL, version)

    def prompt(self, messages: Seq[Mapping[str, Any]], turn: Turn = PLAIN) -> Prompt:
        """See `ChatFormat.prompt`. HR-CHAT-06: an argument; HR-CHAT-07: messages that the format does not allow."""
        rendered = self._encoding.render_conversation(self._request(messages, turn).conversation)
        if rendered.image_sources:
            raise RequestError("HR-CHAT-07", "the messages hold images", "this version reads text only")
        text = rendered.prompt
        think = think_of(self._family, turn, "open" if self._opened(text, turn) else "over")
        family = self._begun if text.endswith(self._family.opening) else self._family
        constraint = constraint_of(turn, offered(turn), think, family=family, caller=family)
        return Prompt(text, self._encode(rendered), constraint, shown=family.shown)

    def parser(self, prompt: Prompt, turn: Turn = PLAIN) -> AnswerParser:
        tools = offered(turn) or tools_in(turn.arguments)
        begun = self._family.opening if prompt.text.endswith(self._family.opening) else ""
        return self._family.parser(
            tools,
            opened=self._opened(prompt.text, turn),
            calls=turn.choice.mode != "none" and bool(tools),
            prefill=turn.prefill or begun,
            seed=prompt.text,
        )

    def _opened(self, text: str, turn: Turn) -> bool:
        """Does the answer begin inside the reasoning?"""
        return text.removesuffix(turn.prefill).endswith("<think>")

    def _request(self, messages: Seq[Mapping[str, Any]], turn: Turn) -> ConversationRequest:
        from deepseek_recipe import ChatCompletionRequest, ConversionError

        body: dict[str, Any] = {"model": _MODEL, "messages": [dict(message) for message in messages], **_fields(turn)}
        if turn.prefill:
            body["messages"].append({"role": "assistant", "content": turn.prefill, "prefix": True})
        try:
            return ChatCompletionRequest(body).convert(self._options)
        except (ConversionError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RequestError(
                "HR-CHAT-07", f"{self._model_name}'s format does not allow this: {f'{error}':.300}",
                "change the messages or the chat's arguments",
            ) from error  # fmt: skip

    def _encode(self, rendered: RenderedPrompt) -> list[int]:
        """Only what the format itself wrote may become special tokens. BOS is among these."""
        ids: list[int] = []
        text, end = rendered.prompt, 0
        for start, stop in rendered.special_ranges:
            ids += self._plain(text[end:start])
            ids += self._tokenizer.encode(text[start:stop], add_bos=False, parse_special=True)
            end = stop
        return ids + self._plain(text[end:])

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False) if text else []


def _fields(turn: Turn) -> dict[str, Any]:
    """Fields of the request's body. Raises RequestError HR-CHAT-06."""
    fields = dict(turn.arguments)
    for name in fields:
        if name not in ARGUMENTS:
            raise RequestError(
                "HR-CHAT-06",
                f"unknown chat argument {name!r:.60}",
                f"{did_you_mean(str(name), ARGUMENTS)}known: {', '.join(ARGUMENTS)}",
            )
    thinking: dict[str, Any] = {name: fields.pop(name) for name in ("thinking", "enable_thinking") if name in fields}
    for name, value in thinking.items():
        if not isinstance(value, bool):
            raise RequestError("HR-CHAT-06", f"{name} = {value!r:.60} is not allowed", "give true or false")
    if turn.thinking is not None:
        thinking["Turn.thinking"] = turn.thinking
    if len(set(thinking.values())) > 1:
        what = " and ".join(f"{name} = {value}" for name, value in thinking.items())
        raise RequestError("HR-CHAT-06", f"{what} contradict each other", "they mean the same: leave one out")
    for value in thinking.values():
        fields["thinking"] = {"type": "enabled" if value else "disabled"}
    if turn.tools:
        # with reasoning the package refuses required calls: then the grammar alone makes them
        required = turn.choice.mode == "required" and False in thinking.values() and not turn.prefill
        mode = "none" if turn.choice.mode == "none" else "required" if required else "auto"
        fields |= {"tools": [dict(tool) for tool in turn.tools], "tool_choice": mode}
    return fields
