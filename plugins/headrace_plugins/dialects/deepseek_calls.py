"""Calls of DeepSeek V3 to V4.1, which changed with nearly every version.

Formats: tokenizer_config.json of deepseek-ai/DeepSeek-R1-0528, -V3-0324 and -V3.1, encoding/ of -V3.2, and the package
`deepseek-recipe` for V4 and V4.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import Message, Tool, ToolChoice
from headrace_plugins.dialects.family import Expression, Family, any_of, function_of, repeated
from headrace_plugins.dialects.parameters import ParameterReader, arguments_expression, narrowed, types_of, value_of
from headrace_plugins.dialects.reading import NAME_CHARS, Broken, CallReader, Steps, quoted

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
EOS = "<｜end▁of▁sentence｜>"
THINK = ("<think>", "</think>")


class DeepseekV3(Family):
    """fenced: V3, R1 and their updates: in a section, each call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, its
    arguments in a fenced block, and <｜tool▁call▁end｜>. Else V3.1: NAME<｜tool▁sep｜>{...} between these marks.

    describe: the template does not write the tools.
    """

    name = "deepseek-v3"
    think = THINK
    triggers = (CALLS,)
    shown = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR, *THINK)
    ends = (EOS,)

    def __init__(self, *, fenced: bool = False, describe: bool = False) -> None:
        self.name = "deepseek-v3" if fenced else "deepseek-v3.1"
        self.tools_in_template = not describe
        self._fenced = fenced

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        bodies = any_of([self._call(*function_of(tool)) for tool in tools])
        calls = repeated(bodies, choice, "\n" if self._fenced else "")
        return {"seq": [{"special": CALLS}, calls, {"special": CALLS_END}]}

    def _call(self, name: str, schema: dict[str, Any]) -> Expression:
        if self._fenced:
            body = ["function", {"special": SEPARATOR}, f"{name}\n```json\n", {"schema": schema}, "\n```"]
        else:
            body = [name, {"special": SEPARATOR}, {"schema": schema}]
        return {"seq": [{"special": CALL}, *body, {"special": CALL_END}]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return SectionCalls()

    def adapt(self, messages: Seq[Mapping[str, Any]], tools: Seq[Tool]) -> list[Message]:
        """The templates join arguments as text, and write content beside calls only where there is some."""
        adapted = [_with_texts(message) for message in messages]
        if self.tools_in_template or not tools:
            return adapted
        told = self._description(tools)
        if adapted and adapted[0]["role"] == "system":
            return [{**adapted[0], "content": f"{adapted[0]['content']}\n\n{told}"}, *adapted[1:]]
        return [{"role": "system", "content": told}, *adapted]

    def switch(self, thinking: bool | None) -> dict[str, Any]:
        return {} if thinking is None else {"thinking": thinking}

    def _description(self, tools: Seq[Tool]) -> str:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        form = f"{CALL}NAME{SEPARATOR}ARGUMENTS{CALL_END}"
        if self._fenced:
            form = f"{CALL}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_END}"
        return (
            "## Tools\n\nThese tools may be called, one JSON object each:\n"
            + "\n".join(lines)
            + f"\n\nTo call them, answer with\n{CALLS}{form}{CALLS_END}\nwhere ARGUMENTS is a JSON object that fits "
            "the parameters of the tool NAME. Calls follow each other before the last mark."
        )


class SectionCalls(CallReader):
    """A section of calls of either form."""

    end = (CALLS_END,)

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.expect(CALLS)
        while True:
            yield from cursor.blanks()
            if (yield from cursor.expect(CALL, CALLS_END)) == CALLS_END:
                return
            name, _ = yield from cursor.name(SEPARATOR)
            fenced = (yield from cursor.blanks()) != "{"
            if fenced:
                name, _ = yield from cursor.name("```json")
            self.call(name)
            yield from cursor.json(self.write)
            self.close()
            yield from cursor.blanks()
            if fenced:
                yield from cursor.take("```")
                yield from cursor.blanks()
            yield from cursor.expect(CALL_END)


# --- DSML ------------------------------------------------------------------------------------------------------------

DSML = "｜DSML｜"
SECTIONS = ("function_calls", "tool_calls", "calls")
"""Name of the element around all calls in V3.2, V4 and V4.1."""

_PARAMETER_ENDS = (f"</{DSML}parameter>", f"</{DSML} parameter>")
_INVOKE_ENDS = (f"</{DSML}invoke>", f"</{DSML} invoke>")


class Dsml(Family):
    """Elements of DeepSeek's own kind: calls of invokes of parameters, each of these a text or JSON.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="NAME">
    <｜DSML｜ parameter name="KEY" string="true">TEXT</｜DSML｜ parameter>
    <｜DSML｜ parameter name="KEY" string="false">JSON</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

    begun: prompts that require calls end with `opening`.
    """

    name = "deepseek-v3.2"
    think = THINK
    shown = (DSML, *THINK)
    ends = (EOS,)

    def __init__(self, section: str = "function_calls", space: str = "", *, begun: bool = False) -> None:
        self.name = {"function_calls": "deepseek-v3.2", "tool_calls": "deepseek-v4"}.get(section, "deepseek-v4.1")
        self._open, self._close = f"<{DSML}{space}", f"</{DSML}{space}"
        self._section = section
        self._begun = begun
        self.triggers = (f"{self._open}{section}>",)

    @property
    def opening(self) -> str:
        """What stands before the first call."""
        return f"{self._open}{self._section}>\n"

    def calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return {"seq": [self.opening, self._inside(tools, choice)]}

    def only_calls(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        return self._inside(tools, choice) if self._begun else self.calls(tools, choice)

    def _inside(self, tools: Seq[Tool], choice: ToolChoice) -> Expression:
        """What follows `opening`."""
        bodies = any_of([self._invoke(*function_of(tool)) for tool in tools])
        return {"seq": [repeated(bodies, choice), f"{self._close}{self._section}>"]}

    def reader(self, tools: Seq[Tool]) -> CallReader:
        return DsmlCalls(dict(map(function_of, tools)))

    def switch(self, thinking: bool | None) -> dict[str, Any]:
        return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}

    def _invoke(self, name: str, schema: Mapping[str, Any]) -> Expression:
        arguments = arguments_expression(name, schema, self._parameter)
        if not arguments:
            arguments = [{"opt": "\n"}]  # the package writes an empty line there
        return {"seq": [f'{self._open}invoke name="{name}">\n', *arguments, f"{self._close}invoke>\n"]}

    def _parameter(self, key: Expression, schema: Any) -> Expression:
        end = f"{self._close}parameter>"
        types = types_of(schema)
        values: list[Expression] = []
        if "string" in types:
            text = schema if types == {"string"} else narrowed(schema, ["string"])
            values.append({"seq": ['true">', value_of(text, end)]})
        if types != {"string"}:
            others = sorted(types - {"string"})
            value = schema if "string" not in types else narrowed(schema, others)
            values.append({"seq": ['false">', {"schema": value}]})
        return {"seq": [f'{self._open}parameter name="', key, '" string="', any_of(values), f"{end}\n"]}


class DsmlCalls(ParameterReader):
    """A section of any version."""

    end = tuple(f"</{DSML}{space}{section}>" for section in SECTIONS for space in ("", " "))

    def read(self) -> Steps[None]:
        cursor = self.cursor
        yield from self._element(*SECTIONS)
        yield from cursor.expect(">")
        while True:
            yield from cursor.blanks()
            if (yield from cursor.take(*self.end)):
                return
            yield from self._element("invoke")
            self.begin((yield from self._name()))
            yield from cursor.until(">", most=NAME_CHARS)
            yield from self._parameters()
            self.finish_call()

    def _parameters(self) -> Steps[None]:
        """Up to the end of the invoke."""
        while True:
            yield from self.cursor.blanks()
            if (yield from self.cursor.take(*_INVOKE_ENDS)):
                return
            yield from self._element("parameter")
            key = yield from self._name()
            kind, _ = yield from self.cursor.until(">", most=NAME_CHARS)
            if (yield from self._value(key, kind.strip())) in _INVOKE_ENDS:
                return  # models sometimes forget to end the last parameter

    def _value(self, key: str, kind: str) -> Steps[str]:
        marks = (*_PARAMETER_ENDS, *_INVOKE_ENDS)
        if kind == 'string="false"':
            self.write_name(key)
            yield from self.cursor.json(self.write)
            yield from self.cursor.blanks()
            return (yield from self.cursor.expect(*marks))
        if kind != 'string="true"':
            return (yield from self.argument(key, *marks))
        self.write_name(key)
        self.write('"')
        mark = yield from self.cursor.flow(lambda piece: self.write(quoted(piece)), *marks)
        self.write('"')
        return mark

    def _element(self, *names: str) -> Steps[None]:
        yield from self.cursor.expect(f"<{DSML}")
        yield from self.cursor.blanks()
        yield from self.cursor.expect(*names)

    def _name(self) -> Steps[str]:
        yield from self.cursor.blanks()
        yield from self.cursor.expect('name="')
        name, _ = yield from self.cursor.until('"', most=NAME_CHARS)
        if not name:
            raise Broken
        return name


def _with_texts(message: Mapping[str, Any]) -> Message:
    adapted = dict(message)
    if not adapted.get("tool_calls"):
        adapted["content"] = adapted.get("content") or ""
        return adapted
    adapted["content"] = adapted.get("content") or None
    adapted["tool_calls"] = [_with_text(call) for call in adapted["tool_calls"]]
    return adapted


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**call["function"], "arguments": text}}
