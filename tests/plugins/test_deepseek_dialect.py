"""DeepSeek-V4.1's chats against DeepSeek's own package: prompts, ids, tools, thinking, and answers read back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="needs tokenizers (pip install 'headrace[torch]')")
pytest.importorskip("deepseek_recipe", reason="needs deepseek-recipe (pip install 'headrace[deepseek]')")

import deepseek_recipe as recipe
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace import Chat
from headrace.catalog import Catalog
from headrace.chat import chat_format, has_template
from headrace.config import load_config
from headrace.errors import PluginError, RequestError
from headrace.llm import LLM
from headrace.pipeline import explain
from headrace.selection import choose_dialect
from headrace.testing.toy import ToyTokenizer
from headrace_plugins.deepseek_dialect import DeepseekFormat, DeepseekV41
from headrace_plugins.hf_tokenizer import HFTokenizer, load_tokenizer

ARCHITECTURE = "DeepseekV41ForCausalLM"
TOY = "toy://vocab=300,seed=3,context=2048,repeat=0.5,eos_rate=0.0"
THOUGHT = "Hm, 2 <｜User｜> & é.</think>It is 4.\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALLED = said(
    "assistant",
    "Let me look.",
    reasoning_content="They want the weather.",
    tool_calls=[
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 3}'}}
    ],
)
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([said("user", "Hello é日🙂")], {}),
    "a system message": ([said("system", "Be brief."), said("user", "Hello")], {}),
    "several turns": (
        [
            said("user", "1"),
            said("assistant", "2", reasoning_content="hm"),
            said("user", "3\n\n"),
            said("assistant", "4"),
            said("user", "5"),
        ],
        {},
    ),
    "names of special tokens": (
        [said("system", "<｜System｜>"), said("user", "a<｜User｜>b<think></think>｜DSML｜<｜begin▁of▁sentence｜>")],
        {},
    ),
    "no thinking": ([said("user", "Hello")], {"thinking": {"type": "disabled"}}),
    "effort": ([said("user", "Hello")], {"reasoning_effort": "max"}),
    "tools": ([said("user", "Oslo?")], {"tools": [WEATHER]}),
    "a tool result": ([said("user", "Oslo?"), CALLED, said("tool", "rain", tool_call_id="c1")], {"tools": [WEATHER]}),
    "a forced call": (
        [said("user", "Oslo?")],
        {"tools": [WEATHER], "tool_choice": "required", "thinking": {"type": "disabled"}},
    ),
    "JSON": ([said("user", "Oslo, as json?")], {"response_format": {"type": "json_object"}}),
    "a reminder": ([said("user", "Oslo?"), said("latest_reminder", "It is Monday.")], {}),
}


def specials() -> list[str]:
    names = [name for name in dir(recipe.SpecialToken) if name[0].isupper()]
    return [getattr(recipe.SpecialToken, name).default_str() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the format's special tokens, thinking and DSML ones not flagged as special."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.model = models.BPE({char: token for token, char in enumerate(alphabet)}, [])
    made.add_tokens([tokenizers.AddedToken(name, special=name.startswith("<｜")) for name in specials()])
    folder = tmp_path_factory.mktemp("deepseek")
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    bos, eos = (made.token_to_id(f"<｜{name}▁of▁sentence｜>") for name in ("begin", "end"))
    config = {"model_type": "deepseek_v41", "bos_token_id": bos, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HFTokenizer:
    return load_tokenizer(str(folder), 512)


@pytest.fixture(scope="module")
def form(tokenizer: HFTokenizer) -> DeepseekFormat:
    return DeepseekV41().chat_format("", "nowhere", tokenizer)


def conversation(messages: list[dict[str, Any]], body: dict[str, Any]) -> recipe.Conversation:
    request = recipe.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", "messages": messages, **body})
    return request.convert(recipe.ConversionOptions()).conversation


def arguments_of(body: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(body)
    if "thinking" in arguments:
        arguments["enable_thinking"] = arguments.pop("thinking")["type"] == "enabled"
    return arguments


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_and_ids_are_those_of_the_package(form: DeepseekFormat, folder: Path, name: str) -> None:
    messages, body = CONVERSATIONS[name]
    text, ids = form.prompt(messages, arguments=arguments_of(body))
    encoding = recipe.DeepseekV41Encoding()
    reference = conversation(messages, body)
    assert text == encoding.render_conversation(reference).prompt
    assert ids == encoding.with_tokenizer(recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))).encode(reference)


def test_what_users_write_makes_no_special_token(form: DeepseekFormat, tokenizer: HFTokenizer) -> None:
    names = "".join(specials())
    plain, named = (form.prompt([said("user", text)])[1] for text in ("", names))
    special = {tokenizer.encode(name, add_bos=False, parse_special=True)[0] for name in specials()}
    assert [token for token in named if token in special] == [token for token in plain if token in special]
    assert named.count(tokenizer.bos_id or 0) == 1


def test_a_tokenizer_without_the_tokens_has_their_text() -> None:
    tokenizer = ToyTokenizer(300)
    text, ids = DeepseekFormat(tokenizer).prompt([said("user", "hi")])
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text


def test_prefill_is_continued(form: DeepseekFormat) -> None:
    text, _ = form.prompt([said("user", "2 + 2?")], "It is ")
    assert text.endswith("</think>It is ")
    assert form.parse("It is \n 4", "It is ") == said("assistant", "It is \n 4")


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (THOUGHT, {}, said("assistant", "It is 4.\n", reasoning_content="Hm, 2 <｜User｜> & é.")),
        ("\n\nnot at the end of", {}, said("assistant", "", reasoning_content="not at the end of")),
        ("It is 4.\n", {"thinking": False}, said("assistant", "It is 4.\n")),
        ("", {"thinking": False}, said("assistant", "")),
        (
            'hm</think>{"a": 1}',
            {"response_format": {"type": "json_object"}},
            said("assistant", '{"a": 1}', reasoning_content="hm"),
        ),
        (f"hm</think>{CALL}", {}, said("assistant", CALL, reasoning_content="hm")),
    ],
)
def test_answers_are_read_back(form: DeepseekFormat, text: str, arguments: Any, expected: Any) -> None:
    assert form.parse(text, arguments=arguments) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_tool_calls_are_read_back(form: DeepseekFormat, thinking: bool) -> None:
    arguments = {"thinking": thinking, "tools": [WEATHER]}
    message = form.parse(("Hm.</think>" if thinking else "") + f"Let me look.\n\n{CALL}", arguments=arguments)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 3}
    assert message["content"] == "Let me look."
    assert message.get("reasoning_content") == ("Hm." if thinking else None)
    result = said("tool", "rain", tool_call_id=call["id"])
    text, _ = form.prompt([said("user", "Oslo?"), message, result], arguments=arguments)
    assert CALL in text


@pytest.mark.parametrize(
    ("messages", "arguments", "text"),
    [
        ([], {}, "HR-CHAT-07"),
        ([said("robot", "x")], {}, "HR-CHAT-07: .*robot"),
        ([said("user", None)], {}, "HR-CHAT-07"),
        ([said("user", "a\ud800")], {}, "HR-CHAT-07"),
        ([said("user", "Oslo?"), CALLED, said("user", "and?")], {}, "HR-CHAT-07: .*tool"),
        ([said("user", "a")], {"tools": 5}, "HR-CHAT-07"),
        ([said("user", "a")], {"reasoning_effort": "huge"}, "HR-CHAT-07: .*huge"),
        ([said("user", "a")], {"tools": [WEATHER], "tool_choice": "required"}, "HR-CHAT-07: Deep.*tool_choice"),
        ([said("user", "a")], {"enable_thinkin": True}, "HR-CHAT-06: .*enable_thinkin(.|\n)*did you mean"),
        ([said("user", "a")], {"thinking": "yes"}, "HR-CHAT-06: thinking = 'yes'"),
        ([said("user", "a")], {"thinking": True, "enable_thinking": False}, "HR-CHAT-06: .* contradict"),
        ([said("user", "a")], {"tools": [{"type": "function", "function": 10**400}]}, "HR-CHAT-07: .*integer"),
    ],
)
def test_what_the_format_does_not_allow(form: DeepseekFormat, messages: Any, arguments: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as raised:
        form.prompt(messages, arguments=arguments)
    assert raised.value.help


def test_endless_nesting_is_refused(form: DeepseekFormat) -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError, match=r"HR-CHAT-07: .*nesting"):
        form.prompt([said("user", "a")], arguments={"tools": nested})


def test_answers_with_lone_surrogates_are_read(form: DeepseekFormat) -> None:
    assert form.parse("a\ud800b", arguments={"thinking": False}) == said("assistant", "a?b")


def test_images_are_refused(form: DeepseekFormat) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(RequestError, match="images"):
        form.prompt([said("user", [image])])  # type: ignore[arg-type]


# --- in a pipeline ---------------------------------------------------------------------------------------------------


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A toy that calls itself a DeepSeek."""
    with LLM(TOY) as llm:
        model = replace(llm.pipeline.model, architecture=ARCHITECTURE, chat_template=None)
        monkeypatch.setattr(llm, "pipeline", replace(llm.pipeline, model=model))
        yield llm


def test_chat_uses_the_dialect_of_the_model(llm: LLM) -> None:
    assert has_template(llm)
    assert isinstance(chat_format(llm), DeepseekFormat)
    chat = Chat(llm, "Be brief.", arguments={"thinking": False})
    first = chat.ask("Hi", {"max_tokens": 6})
    assert first.prompt is not None
    assert first.prompt.endswith("Be brief.<｜User｜>Hi<｜Assistant｜></think>")
    second = chat.ask("More", {"max_tokens": 6}, prefill="Well, ")
    assert (
        second.prompt == f"{first.prompt}{first.text}<｜end▁of▁sentence｜><｜User｜>More<｜Assistant｜></think>Well, "
    )
    assert [message["role"] for message in chat.history] == ["system", *["user", "assistant"] * 2]
    assert chat.history[-1]["content"].startswith("Well, ")


def test_thoughts_are_kept_apart_from_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(llm)
    plain = chat._format.parse
    monkeypatch.setattr(chat._format, "parse", lambda text, *more: plain(f"{text}</think>It is 4.", *more))
    output = chat.ask("2 + 2?", {"max_tokens": 6})
    assert chat.history[-1] == said("assistant", "It is 4.", reasoning_content=output.text.lstrip("\n"))
    assert "</think>It is 4.<｜end▁of▁sentence｜>" in (chat.ask("Sure?", {"max_tokens": 6}).prompt or "")


def test_a_template_of_the_user_counts_more(llm: LLM) -> None:
    assert chat_format(llm, "{{ messages[0].content }}!").prompt([said("user", "hi")])[0] == "hi!"


def test_a_missing_package_is_an_error_of_chats_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    assert llm.generate("hi", {"max_tokens": 2}).finish_reason == "length"
    with pytest.raises(PluginError, match="'deepseek_recipe', which is not installed") as raised:
        Chat(llm)
    assert raised.value.help == "pip install deepseek-recipe"


def test_the_choice_and_its_reason() -> None:
    catalog = Catalog.load(())
    assert choose_dialect(catalog, ARCHITECTURE, False)[0].spec.name == "deepseek-v41"
    for architecture, templated in ((ARCHITECTURE, True), ("LlamaForCausalLM", False), ("", False)):
        assert choose_dialect(catalog, architecture, templated)[0].spec.name == "jinja"
    found = {each.key: each for each in explain(load_config(None, model=TOY), catalog)}
    assert found["chat.dialect"].value == "jinja"
