"""The chats of DeepSeek-V4 and V4.1 against DeepSeek's own package: prompts, ids, tools, thinking, and answers."""

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
from call_texts import WRITERS, calls_of, read
from tokenizers import decoders, models, pre_tokenizers

from headrace import Chat
from headrace.catalog import Catalog
from headrace.chat import chat_format, has_template
from headrace.config import load_config
from headrace.dialogue import AnswerParser, Delta, Message, ToolChoice, Turn
from headrace.errors import PluginError, RequestError
from headrace.llm import LLM
from headrace.pipeline import explain
from headrace.selection import choose_dialect
from headrace.testing.toy import ToyTokenizer
from headrace_plugins.dialects.deepseek import DeepseekFormat, DeepseekV4, DeepseekV41
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


def conversation(messages: list[dict[str, Any]], body: dict[str, Any], v4: bool = False) -> recipe.Conversation:
    request = recipe.ChatCompletionRequest({"model": "it", "messages": messages, **body})
    version = recipe.ModelVersion.DeepseekV4Pro if v4 else recipe.ModelVersion.DeepseekV41Flash
    return request.convert(recipe.ConversionOptions().with_model_alias("it", version)).conversation


def turn_of(body: dict[str, Any]) -> Turn:
    rest = dict(body)
    tools = tuple(rest.pop("tools", ()))
    choice = ToolChoice(rest.pop("tool_choice", "auto"))
    thinking = rest.pop("thinking", {}).get("type")
    return Turn(
        tools=tools, choice=choice, thinking=None if thinking is None else thinking == "enabled", arguments=rest
    )


@pytest.mark.parametrize("version", [DeepseekV4, DeepseekV41])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_and_ids_are_those_of_the_package(
    tokenizer: HFTokenizer, folder: Path, name: str, version: type[DeepseekV4] | type[DeepseekV41]
) -> None:
    messages, body = CONVERSATIONS[name]
    prompt = version().chat_format("", "nowhere", tokenizer).prompt(messages, turn_of(body))
    encoding = recipe.DeepseekV4Encoding() if version is DeepseekV4 else recipe.DeepseekV41Encoding()
    reference = conversation(messages, body, version is DeepseekV4)
    assert prompt.text == encoding.render_conversation(reference).prompt
    made = recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert prompt.ids == encoding.with_tokenizer(made).encode(reference)


def test_arguments_say_the_same_as_the_turn(form: DeepseekFormat) -> None:
    messages = [said("user", "Oslo?")]
    turn = Turn(tools=(WEATHER,), choice=ToolChoice("required"), thinking=False)
    given = {"tools": [WEATHER], "tool_choice": "required", "enable_thinking": False}
    assert form.prompt(messages, turn).text == form.prompt(messages, Turn(arguments=given)).text


def test_what_users_write_makes_no_special_token(form: DeepseekFormat, tokenizer: HFTokenizer) -> None:
    names = "".join(specials())
    plain, named = (form.prompt([said("user", text)]).ids for text in ("", names))
    special = {tokenizer.encode(name, add_bos=False, parse_special=True)[0] for name in specials()}
    assert [token for token in named if token in special] == [token for token in plain if token in special]
    assert named.count(tokenizer.bos_id or 0) == 1


def test_a_tokenizer_without_the_tokens_has_their_text() -> None:
    tokenizer = ToyTokenizer(300)
    prompt = DeepseekFormat(tokenizer).prompt([said("user", "hi")])
    assert b"".join(tokenizer.token_bytes(token) for token in prompt.ids).decode() == prompt.text


def answer(form: DeepseekFormat, text: str, turn: Turn) -> Message:
    prompt = form.prompt([said("user", "2 + 2?")], turn)
    return read(lambda: form.parser(prompt, turn), text)


def test_prefill_is_continued(form: DeepseekFormat) -> None:
    turn = Turn(prefill="It is ")
    assert form.prompt([said("user", "2 + 2?")], turn).text.endswith("</think>It is ")
    assert answer(form, "\n 4", turn) == said("assistant", "It is \n 4")


@pytest.mark.parametrize(
    ("text", "turn", "expected"),
    [
        (THOUGHT, Turn(), said("assistant", "It is 4.\n", reasoning_content="Hm, 2 <｜User｜> & é.")),
        ("\n\nnot at the end of", Turn(), said("assistant", "", reasoning_content="not at the end of")),
        ("It is 4.\n", Turn(thinking=False), said("assistant", "It is 4.\n")),
        ("", Turn(thinking=False), said("assistant", "")),
        ('hm</think>{"a": 1}', Turn(), said("assistant", '{"a": 1}', reasoning_content="hm")),
        (f"hm</think>{CALL}", Turn(), said("assistant", CALL, reasoning_content="hm")),
    ],
)
def test_answers_are_read_back(form: DeepseekFormat, text: str, turn: Turn, expected: Any) -> None:
    assert answer(form, text, turn) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_tool_calls_are_read_back(form: DeepseekFormat, thinking: bool) -> None:
    turn = Turn(thinking=thinking, tools=(WEATHER,))
    message = answer(form, ("Hm.</think>" if thinking else "") + f"Let me look.\n\n{CALL}", turn)
    assert calls_of(message) == [("weather", {"city": "Oslo", "days": 3})]
    assert message["content"] == "Let me look."
    assert message.get("reasoning_content") == ("Hm." if thinking else None)
    result = said("tool", "rain", tool_call_id=message["tool_calls"][0]["id"])
    assert CALL in form.prompt([said("user", "Oslo?"), message, result], turn).text


def test_a_prompt_that_begins_the_calls(form: DeepseekFormat) -> None:
    """Without reasoning, the package begins required calls itself."""
    turn = Turn(thinking=False, tools=(WEATHER,), choice=ToolChoice("required"))
    begun, rest = CALL[: CALL.index("\n") + 1], CALL[CALL.index("\n") + 1 :]
    prompt = form.prompt([said("user", "Oslo?")], turn)
    assert prompt.text.endswith(begun)
    assert prompt.constraint is not None
    assert json.loads(prompt.constraint.text)["start"] == "body"
    assert begun not in json.loads(prompt.constraint.text)["body"]["seq"]
    assert calls_of(read(lambda: form.parser(prompt, turn), rest)) == [("weather", {"city": "Oslo", "days": 3})]


def test_required_calls_with_reasoning_are_made_by_the_grammar(form: DeepseekFormat) -> None:
    turn = Turn(tools=(WEATHER,), choice=ToolChoice("required"), thinking_budget=9)
    prompt = form.prompt([said("user", "Oslo?")], turn)
    assert prompt.text.endswith("<think>")
    assert prompt.constraint is not None
    document = json.loads(prompt.constraint.text)
    assert document["think"] == {"begin": None, "end": "</think>", "budget": 9}
    assert document["start"] == "body"
    message = read(lambda: form.parser(prompt, turn), f"Hm.</think>\n\n{CALL}")
    assert calls_of(message) == [("weather", {"city": "Oslo", "days": 3})]


def test_v4_calls_are_read_back(tokenizer: HFTokenizer) -> None:
    form = DeepseekV4().chat_format("", "nowhere", tokenizer)
    calls = [("weather", {"city": "Oslo", "days": 3})]
    assert calls_of(answer(form, "</think>" + WRITERS["deepseek-v4"](calls), Turn(tools=(WEATHER,)))) == calls


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
        form.prompt(messages, Turn(arguments=arguments))
    assert raised.value.help


def test_endless_nesting_is_refused(form: DeepseekFormat) -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError, match=r"HR-CHAT-07: .*nesting"):
        form.prompt([said("user", "a")], Turn(arguments={"tools": nested}))


def test_a_turn_and_its_arguments_contradict_each_other(form: DeepseekFormat) -> None:
    with pytest.raises(RequestError, match=r"HR-CHAT-06: .* contradict"):
        form.prompt([said("user", "a")], Turn(thinking=True, arguments={"thinking": False}))


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


class Closing:
    """A parser of answers that end with this text too."""

    def __init__(self, parser: AnswerParser, text: str) -> None:
        self._parser, self._text = parser, text
        self.push, self.message = parser.push, parser.message

    def finish(self) -> list[Delta]:
        return [*self._parser.push(self._text), *self._parser.finish()]


def test_thoughts_are_kept_apart_from_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(llm)
    plain = chat._format.parser
    monkeypatch.setattr(chat._format, "parser", lambda *given: Closing(plain(*given), "</think>It is 4."))
    chat.ask("2 + 2?", {"max_tokens": 6})
    assert chat.history[-1]["content"] == "It is 4."
    assert chat.history[-1]["reasoning_content"]
    assert "</think>It is 4.<｜end▁of▁sentence｜>" in (chat.ask("Sure?", {"max_tokens": 6}).prompt or "")


def test_a_template_of_the_user_counts_more(llm: LLM) -> None:
    assert chat_format(llm, "{{ messages[0].content }}!").prompt([said("user", "hi")]).text == "hi!"


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
