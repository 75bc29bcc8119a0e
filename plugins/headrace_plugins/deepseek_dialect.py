"""The dialect of DeepSeek-V4.1: messages to its DSML prompts and answers back to messages, with DeepSeek's own package.

DeepSeek-V4.1 ships no chat template. https://github.com/deepseek-ai/deepseek-recipe (PyPI `deepseek-recipe`) is the
reference for prompts, tools, thinking and tool calls; nothing of the format is written down here a second time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    from deepseek_recipe import ConversationRequest, RenderedPrompt

    from headrace.contracts import Tokenizer

ARGUMENTS = ("thinking", "enable_thinking", "reasoning_effort", "tools", "tool_choice", "response_format")
"""What a chat may set beside its messages. thinking and enable_thinking mean the same: true (the default) or false; the
others are those of the Chat Completions API."""

_MODEL = "model"


class DeepseekV41:
    """The dialect of DeepseekV41ForCausalLM."""

    def chat_format(self, source: str, origin: str, tokenizer: Tokenizer) -> DeepseekFormat:
        return DeepseekFormat(tokenizer)


class DeepseekFormat:
    """Turns messages into a prompt, and answers into messages. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from deepseek_recipe import ConversionOptions, DeepseekV41Encoding, ModelVersion

        self._tokenizer = tokenizer
        self._encoding = DeepseekV41Encoding()
        self._options = ConversionOptions().with_model_alias(_MODEL, ModelVersion.DeepseekV41Flash)

    def prompt(
        self, messages: Seq[Mapping[str, Any]], prefill: str = "", arguments: Mapping[str, Any] | None = None
    ) -> tuple[str, list[int]]:
        """(text, ids) that asks for the next assistant message, which is to begin with `prefill`. Roles: system, user,
        assistant (with reasoning_content and tool_calls), tool, latest_reminder. arguments: see ARGUMENTS.

        What messages hold is plain text, whatever tokens it names. Raises RequestError HR-CHAT-06 for an argument,
        HR-CHAT-07 for messages that the format does not allow.
        """
        rendered = self._encoding.render_conversation(self._request(messages, prefill, arguments).conversation)
        if rendered.image_sources:
            raise RequestError("HR-CHAT-07", "the messages hold images", "this version reads text only")
        return rendered.prompt, self._encode(rendered)

    def parse(self, text: str, prefill: str = "", arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The message that an answer to `prompt` with the same prefill and arguments is. text: all of it, prefill
        included. Reasoning and tool calls are apart from the content; a call that was cut off has arguments that are
        no JSON. Raises RequestError as `prompt` does."""
        from deepseek_recipe import ChatCompletionRequest, ChatCompletionResponse, InferenceChunk, InferenceFinishReason
        from deepseek_recipe import StreamProcessor as Processor

        # the messages don't matter, but that the package wants the word where it is to answer in JSON
        request = self._request([{"role": "user", "content": "json"}], prefill, arguments)
        generator = ChatCompletionRequest.chunk_generator(request, "", _MODEL)
        processor = Processor(generator, request.parsing_options)
        chunks = [
            InferenceChunk.ready(),
            InferenceChunk.text(_without_surrogates(text.removeprefix(prefill))),
            InferenceChunk.finish(InferenceFinishReason.Stop),
        ]
        response = ChatCompletionResponse("", _MODEL, 0, 0, 0)
        for event in [*(event for chunk in chunks for event in processor.push(chunk)), *processor.finish()]:
            response.accumulate(event)  # type: ignore[arg-type]
        message: dict[str, Any] = json.loads(response.to_json())["choices"][0]["message"]
        message["content"] = prefill + (message.get("content") or "")
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
        return {key: value for key, value in message.items() if value is not None}

    def _request(
        self, messages: Seq[Mapping[str, Any]], prefill: str, arguments: Mapping[str, Any] | None
    ) -> ConversationRequest:
        from deepseek_recipe import ChatCompletionRequest, ConversionError

        body: dict[str, Any] = {"model": _MODEL, "messages": [dict(message) for message in messages]}
        body |= _checked(arguments or {})
        if prefill:
            body["messages"].append({"role": "assistant", "content": prefill, "prefix": True})
        try:
            return ChatCompletionRequest(body).convert(self._options)
        except (ConversionError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RequestError(
                "HR-CHAT-07", f"DeepSeek-V4.1's format does not allow this: {f'{error}':.300}",
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


def _checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the request's body. Raises RequestError HR-CHAT-06."""
    fields = dict(arguments)
    for name in fields:
        if name not in ARGUMENTS:
            raise RequestError(
                "HR-CHAT-06",
                f"unknown chat argument {name!r:.60}",
                f"{did_you_mean(str(name), ARGUMENTS)}known: {', '.join(ARGUMENTS)}",
            )
    thinking = {name: fields.pop(name) for name in ("thinking", "enable_thinking") if name in fields}
    for name, value in thinking.items():
        if not isinstance(value, bool):
            raise RequestError("HR-CHAT-06", f"{name} = {value!r:.60} is not allowed", "give true or false")
        fields["thinking"] = {"type": "enabled" if value else "disabled"}
    if len(set(thinking.values())) > 1:
        what = " and ".join(f"{name} = {value}" for name, value in thinking.items())
        raise RequestError("HR-CHAT-06", f"{what} contradict each other", "they mean the same: leave one out")
    return fields


def _without_surrogates(text: str) -> str:
    """What can't be written as UTF-8 as "?": a model never says it, but callers may have joined texts of their own."""
    return text.encode("utf-8", "replace").decode("utf-8")
