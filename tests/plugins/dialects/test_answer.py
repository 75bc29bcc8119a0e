"""Answers read while they come: reasoning, content and calls apart, whatever the cuts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_texts import calls_of, family, read_answer, tool

from headrace_plugins.dialects.answer import MOST_BLANKS, Answer
from headrace_plugins.dialects.hermes import Hermes
from headrace_plugins.dialects.reading import Broken, CallReader, Cursor, Ended, Steps, held

HERMES = Hermes()
SHELL = tool("shell", cmd={"type": "string"})


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def at_every_place(text: str, **more: Any) -> dict[str, Any]:
    """The message; the same wherever the text is cut in two."""
    message = read_answer(HERMES, text, **more)
    for i in range(len(text) + 1):
        parser = Answer(HERMES, (), **more)
        parser.push(text[:i])
        parser.push(text[i:])
        parser.finish()
        assert parser.message() == message, i
    return message


# --- content and reasoning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain\n", "", "plain\n"),
        ("", "", ""),
        ("<think>\na\n\nb\n</think>\n\nyes", "a\n\nb", "yes"),
        ("\n<think></think>yes", "", "yes"),
        ("<think>cut of", "cut of", ""),
        ("<think>cut in its mark</thi", "cut in its mark</thi", ""),
        ("<think>a</think>\n  indented", "a", "  indented"),
        ("the <think> tag", "", "the <think> tag"),
        ("a </think> b", "", "a </think> b"),
        ("<thin", "", "<thin"),
        ("a < b", "", "a < b"),
        ("a <tool_c", "", "a <tool_c"),
        (" " * (MOST_BLANKS + 1) + "<think>x", "", " " * (MOST_BLANKS + 1) + "<think>x"),
        ("hi<|im_end|>", "", "hi"),
        ("hi \n<|im_end|>\n<|endoftext|>\n", "", "hi \n"),
        ("<|im_end|> is a mark", "", "<|im_end|> is a mark"),
        ("<think>of <tool_call> and <|im_end|></think>yes", "of <tool_call> and <|im_end|>", "yes"),
    ],
)
def test_reasoning_and_content(text: str, reasoning: str, content: str) -> None:
    message = at_every_place(text)
    assert message.get("reasoning_content", "") == reasoning
    assert message["content"] == content
    assert "tool_calls" not in message


def test_an_answer_may_begin_inside_of_its_reasoning() -> None:
    message = at_every_place("hm\n</think>\n\nyes", opened=True)
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


def test_content_comes_at_once() -> None:
    parser = Answer(HERMES)
    assert [delta.content for delta in parser.push("Hello wor")] == ["Hello wor"]
    assert [delta.content for delta in parser.push("ld <tool")] == ["ld"]
    assert [delta.content for delta in parser.push("box>")] == [" <toolbox>"]


def test_prefill_is_part_of_the_answer() -> None:
    parser = Answer(HERMES, prefill="<think>so</think>Sure, ")
    assert [(delta.reasoning, delta.content) for delta in parser.push("I")] == [("so", ""), ("", "Sure, I")]
    assert parser.message()["content"] == "Sure, I"
    assert at_every_place("b", prefill="a")["content"] == "ab"


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"a": {"b": {"c": 1}}}, {"x": True}, {}, {"n": 1.5}, {"l": [[], [None]]}])
def test_no_closing_brace_is_lost(arguments: Any) -> None:
    assert calls_of(at_every_place(call("f", arguments))) == [("f", arguments)]


def test_braces_in_strings_are_text() -> None:
    arguments = {"cmd": 'mkdir -p test/{test1,test2 "]}" \\" </tool_call> <tool_call>'}
    assert calls_of(at_every_place(call("shell", arguments))) == [("shell", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>garbage",
        "<tool_call>",
        "<tool_call>\n{}</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}',
        "<tool_call>[1]</tool_call> and so on",
        "a </tool_call> b",
    ],
)
def test_marks_without_a_call_are_content(text: str) -> None:
    assert at_every_place(text) == {"role": "assistant", "content": text}


def test_a_broken_block_hides_no_call_behind_it() -> None:
    message = at_every_place("<tool_call>oops " + call("f", {"a": 1}))
    assert message["content"] == "<tool_call>oops"
    assert calls_of(message) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ('{"name": "f", "arguments": {"a": "b\\', '{"a": "b'),
        ('{"name": "f", "arguments": {"a": {"b": 1}</tool_call>', '{"a": {"b": 1}'),
        ('{"name": "f", "arguments": {"a": ]}}\n</tool_call>', '{"a": '),
        ('{"name": "f", "arguments": [1]}\n</tool_call>', "[1]"),
        ('{"name": "f", "arguments": {"a": tru}}\n</tool_call>', '{"a": tru}'),
        ('{"name": "f", "arg', ""),
    ],
)
def test_a_call_that_breaks_off_is_incomplete(written: str, arguments: str) -> None:
    message = at_every_place("<tool_call>\n" + written)
    (told,) = message["tool_calls"]
    assert told["incomplete"] is True
    assert told["function"] == {"name": "f", "arguments": arguments}
    assert message["content"] == ""


def test_a_call_is_whole_without_its_end_mark() -> None:
    text = call("f", {"a": 1})
    for n in range(1, len("\n</tool_call>") + 1):
        assert calls_of(read_answer(HERMES, text[:-n])) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"id": [1, {}], "name": "f", "arguments": {"a": 1}, "x": null}', {"a": 1}),
        ('{"name": "f", "arguments": {"a": "two\nlines\tand a tab"}}', {"a": "two\nlines\tand a tab"}),
        ('{ "name" : "f" ,\n "arguments" : { } }', {}),
    ],
)
def test_spellings_of_a_call(written: str, arguments: Any) -> None:
    assert calls_of(at_every_place(f"<tool_call>{written}</tool_call>")) == [("f", arguments)]


def test_blanks_beside_calls_are_no_content() -> None:
    text = "Let me look.\n\n" + call("f", {}) + "\n" + call("g", {"a": 1}) + "\n<|im_end|>"
    message = at_every_place(text)
    assert message["content"] == "Let me look."
    assert calls_of(message) == [("f", {}), ("g", {"a": 1})]
    assert at_every_place(call("f", {}) + "\nDone.")["content"] == "Done."
    assert at_every_place("One." + call("f", {}) + "\nTwo.")["content"] == "One.\nTwo."


def test_clients_may_add_deltas_up() -> None:
    """By index, as the Chat Completions API says: names and ids come once."""
    parser = Answer(HERMES)
    merged: dict[int, dict[str, str]] = {}
    text = call("skills_list", {"a": "b"}) + "\n" + call("skills_list", {})
    for char in text:
        for delta in parser.push(char):
            assert delta.call is not None
            one = merged.setdefault(delta.call.index, {"name": "", "id": "", "arguments": ""})
            for key in one:
                one[key] += getattr(delta.call, key)
    assert [(one["name"], json.loads(one["arguments"])) for one in merged.values()] == [
        ("skills_list", {"a": "b"}),
        ("skills_list", {}),
    ]
    assert [one["id"] for one in merged.values()] == [told["id"] for told in parser.message()["tool_calls"]]


def test_ids_differ_between_prompts_and_not_between_runs() -> None:
    text = call("f", {}) + call("f", {})
    ids = [[told["id"] for told in read_answer(HERMES, text, seed=seed)["tool_calls"]] for seed in ("a", "a", "b")]
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4


def test_without_tools_marks_are_content() -> None:
    text = call("f", {"a": 1})
    assert at_every_place(text, calls=False) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 2_000,
        '<tool_call>{"name":"f","arguments":' + "[" * 30_000,
        '<tool_call>{"name":"f","arguments":' + "[" * 30_000 + "]" * 30_000 + "}</tool_call>",
        '<tool_call>{"arguments":"' + "<tool_call>{" * 3_000,
        '<tool_call>{"name":"f","arguments":{"n":' + "1" * 6_000 + "}}</tool_call>",
        "<think>" + "</thin" * 5_000,
        " " * 30_000,
        "<" * 30_000,
        '<tool_call>{"name":"f","arguments":"' + "\\" * 30_000,
        "\ud800<tool_call>\ud800",
    ],
)
def test_hostile_answers_are_read(text: str) -> None:
    for step in (1, len(text)):
        parser = Answer(HERMES)
        for i in range(0, len(text), step):
            parser.push(text[i : i + step])
        parser.finish()
        assert all(told["incomplete"] for told in parser.message().get("tool_calls", ()))


# --- what readers are made of ----------------------------------------------------------------------------------------


def test_only_what_may_become_a_mark_is_held() -> None:
    assert [held(text, ("<ab>", "<abc")) for text in ("x", "x<", "x<ab", "<ab>", "a<<a")] == [0, 1, 3, 0, 2]


class Pair(CallReader):
    """[NAME=VALUE]"""

    def read(self) -> Steps[None]:
        yield from self.cursor.expect("[")
        name, _ = yield from self.cursor.name("=")
        self.call(name)
        yield from self.cursor.flow(self.write, "]")
        self.close()


def test_a_reader_is_a_script() -> None:
    reader = Pair()
    assert [delta.name or delta.arguments for text in ("[a", "=", "1", "2]x") for delta in reader.push(text)] == [
        *("a", "1", "2")
    ]
    assert (reader.over, reader.rest, reader.calls[0].complete) == (True, "x", True)


def test_names_have_a_bound() -> None:
    reader = Pair()
    reader.push("[" + "n" * 1_000)
    assert reader.over
    assert (reader.raw, len(reader.rest)) == ("[", 1_000)


def test_the_cursor_tells_the_end_from_what_is_wrong() -> None:
    def run(text: str, closed: bool) -> str:
        cursor = Cursor()
        cursor.add(text)
        cursor.closed = closed
        try:
            for _ in cursor.expect("<a>", "<abc>"):
                return "waits"
        except Ended:
            return "ended"
        except Broken:
            return "broken"
        return cursor.rest

    texts = ("", "<a", "<a>", "<ab", "<abc>x", "<b")
    assert [run(text, closed=False) for text in texts] == ["waits", "waits", "", "waits", "x", "broken"]
    assert [run(text, closed=True) for text in texts] == ["ended", "ended", "", "ended", "x", "broken"]


# --- values without quotes -------------------------------------------------------------------------------------------

MIXED = tool(
    "f",
    s={"type": "string"},
    n={"type": "integer"},
    b={"type": "boolean"},
    o={"type": "object"},
    u={"type": ["string", "null"]},
    e={"enum": ["1", 2, None]},
    r={"$ref": "#/$defs/text"},
    x={},
)
MIXED["function"]["parameters"]["$defs"] = {"text": {"type": "string"}}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "5", "5"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("s", '\n a "q"\\n\n', '\n a "q"\\n\n'),
        ("n", " 5 ", 5),
        ("n", "five", "five"),
        ("b", "True", True),
        ("b", "false", False),
        ("o", "{'a': None, 'b': [1, True]}", {"a": None, "b": [1, True]}),
        ("u", "null", None),
        ("u", "None", None),
        ("u", "5", "5"),
        ("e", "2", 2),
        ("e", "x", "x"),
        ("r", "5", "5"),
        ("x", "5", 5),
        ("x", "NaN", "NaN"),
        ("unknown", "[1]", [1]),
    ],
)
@pytest.mark.parametrize("name", ["qwen-xml", "glm", "glm-compact", "minimax"])
def test_a_value_without_quotes_is_what_the_schema_allows(name: str, key: str, written: str, value: Any) -> None:
    texts = {
        "qwen-xml": f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
        "glm-compact": f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{written}</arg_value></tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{written}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }
    assert calls_of(read_answer(family(name), texts[name], [MIXED])) == [("f", {key: value})]
