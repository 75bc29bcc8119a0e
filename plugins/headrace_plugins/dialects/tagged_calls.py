"""Families whose calls are written in tags, with an own element for every argument: Qwen3-Coder, GLM, MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated, with_objects
from headrace_plugins.dialects.parameters import ParameterReader, Schema, arguments_expression, value_of
from headrace_plugins.dialects.reading import CallReader, Steps
from headrace_plugins.dialects.values import WORDS

CALL, CALL_END = "<tool_call>", "</tool_call>"


class QwenXML(Family):
    """Qwen3-Coder, Qwen3.5, Qwen3.6: every value on lines of its own.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
    """

    name = "qwen-xml"
    think = ("<think>", "</think>")
    triggers = (CALL,)
    shown = (CALL, CALL_END, "<think>", "</think>")
    ends = ("<|im_end|>", "<|endoftext|>")

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        bodies = [_qwen_function(*function_of(tool)) for tool in tools]
        call = {"seq": [{"special": CALL}, "\n", any_of(bodies), "\n", {"special": CALL_END}]}
        return repeated(call, choice, "\n")

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return QwenCalls(dict(map(function_of, tools)))

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """The templates write other values than strings, lists and objects as Python does; the grammar says JSON."""
        return [_with_words(with_objects(message)) for message in messages]


def _qwen_function(name: str, schema: Mapping[str, Any]) -> Expression:
    def write(key: Expression, value: Schema) -> Expression:
        written = value_of(value, "\n</parameter>", "</parameter>")
        return {"seq": ["<parameter=", key, ">\n", written, "\n</parameter>\n"]}

    arguments = arguments_expression(name, schema, write)
    return {"seq": [f"<function={name}>\n", *arguments, "</function>"]}


class QwenCalls(ParameterReader):
    end = (CALL_END,)

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.expect(CALL)
        yield from cursor.blanks()
        yield from cursor.expect("<function=")
        name, _ = yield from cursor.name(">")
        self.begin(name)
        yield from cursor.blanks()
        while (yield from cursor.expect("<parameter=", "</function>")) == "<parameter=":
            key, _ = yield from cursor.name(">")
            yield from cursor.take("\n")
            yield from self.argument(key, "\n</parameter>", "</parameter>")
            yield from cursor.blanks()
        self.finish_call()
        yield from cursor.blanks()
        yield from cursor.expect(CALL_END)


class GLM(Family):
    """GLM-4.5 and later. GLM-4.7 and later leave the line breaks out.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>
    """

    name = "glm"
    think = ("<think>", "</think>")
    triggers = (CALL,)
    shown = (
        *(CALL, CALL_END, "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<|user|>", "<|observation|>"),
    )
    stop = ("<|user|>", "<|observation|>")
    ends = ("<|user|>", "<|observation|>", "<|endoftext|>")

    def __init__(self, *, lines: bool = True) -> None:
        self._break = "\n" if lines else ""

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        bodies = [self._function(*function_of(tool)) for tool in tools]
        call = {"seq": [{"special": CALL}, any_of(bodies), {"special": CALL_END}]}
        return repeated(call, choice, self._break)

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return GLMCalls(dict(map(function_of, tools)))

    def _function(self, name: str, schema: Mapping[str, Any]) -> Expression:
        def write(key: Expression, value: Schema) -> Expression:
            opened = [{"special": "<arg_key>"}, key, {"special": "</arg_key>"}, self._break, {"special": "<arg_value>"}]
            return {"seq": [*opened, value_of(value, "</arg_value>"), {"special": "</arg_value>"}, self._break]}

        return {"seq": [name, self._break, *arguments_expression(name, schema, write)]}


class GLMCalls(ParameterReader):
    end = (CALL_END,)

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.expect(CALL)
        name, mark = yield from cursor.name("\n", "<arg_key>", CALL_END)
        self.begin(name)
        if mark == "\n":
            yield from cursor.blanks()
            mark = yield from cursor.expect("<arg_key>", CALL_END)
        while mark == "<arg_key>":
            key, _ = yield from cursor.name("</arg_key>")
            yield from cursor.blanks()
            yield from cursor.expect("<arg_value>")
            yield from self.argument(key, "</arg_value>")
            yield from cursor.blanks()
            mark = yield from cursor.expect("<arg_key>", CALL_END)
        self.finish_call()


class MiniMax(Family):
    """MiniMax-M2 and later: all calls of an answer in one block.

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>
    """

    name = "minimax"
    think = ("<think>", "</think>")
    triggers = ("<minimax:tool_call>",)
    shown = ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
    ends = ("[e~[",)

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        bodies = [_minimax_invoke(*function_of(tool)) for tool in tools]
        begin, end = {"special": "<minimax:tool_call>"}, {"special": "</minimax:tool_call>"}
        return {"seq": [begin, "\n", repeated(any_of(bodies), choice), end]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return MiniMaxCalls(dict(map(function_of, tools)))


def _minimax_invoke(name: str, schema: Mapping[str, Any]) -> Expression:
    def write(key: Expression, value: Schema) -> Expression:
        return {"seq": ['<parameter name="', key, '">', value_of(value, "</parameter>"), "</parameter>\n"]}

    arguments = arguments_expression(name, schema, write)
    return {"seq": [f'<invoke name="{name}">\n', *arguments, "</invoke>\n"]}


class MiniMaxCalls(ParameterReader):
    end = ("</minimax:tool_call>",)

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.expect("<minimax:tool_call>")
        yield from cursor.blanks()
        while (yield from cursor.expect("<invoke", "</minimax:tool_call>")) == "<invoke":
            self.begin((yield from self._name()))
            yield from cursor.blanks()
            while (yield from cursor.expect("<parameter", "</invoke>")) == "<parameter":
                yield from self.argument((yield from self._name()), "</parameter>")
                yield from cursor.blanks()
            self.finish_call()
            yield from cursor.blanks()

    def _name(self) -> Steps[str]:
        yield from self.cursor.blanks()
        yield from self.cursor.expect('name="')
        name, _ = yield from self.cursor.name('">')
        return name


def _with_words(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_word(call) for call in message["tool_calls"]]}


def _with_word(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], Mapping):
        return dict(call)
    arguments = {key: WORDS.get(repr(value), value) for key, value in function["arguments"].items()}
    return {**call, "function": {**function, "arguments": arguments}}
