"""Calls as models write them, and answers read back at every cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.dialogue import AnswerParser, Message, Tool
from headrace_plugins.dialects.detect import family_named
from headrace_plugins.dialects.family import Family

CUTS = (None, 1, 2, 3, 5, 8)
Calls = Seq[tuple[str, Mapping[str, Any]]]


def tool(name: str, required: Seq[str] = (), /, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": schema}}


def read(made: Callable[[], AnswerParser], text: str) -> Message:
    """The message of an answer; the same for every cut, and what its deltas say."""
    messages = [_read(made(), text, n_chars) for n_chars in CUTS]
    assert all(message == messages[0] for message in messages), messages
    return messages[0]


def read_answer(family: Family, text: str, tools: Seq[Tool] = (), **more: Any) -> Message:
    return read(lambda: family.parser(tools, **more), text)


def _read(parser: AnswerParser, text: str, n_chars: int | None) -> Message:
    step = n_chars or len(text) or 1
    deltas = [delta for i in range(0, len(text), step) for delta in parser.push(text[i : i + step])]
    deltas += parser.finish()
    message = parser.message()
    assert "".join(delta.content for delta in deltas) == message["content"]
    assert "".join(delta.reasoning for delta in deltas) == message.get("reasoning_content", "")
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    ids: dict[int, str] = {}
    for call in (delta.call for delta in deltas if delta.call is not None):
        assert not (call.name and call.index in names), "a name is told once"
        names.setdefault(call.index, call.name)
        ids.setdefault(call.index, call.id)
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    told = message.get("tool_calls", [])
    assert [call["function"] for call in told] == [
        {"name": names[i], "arguments": arguments[i]} for i in range(len(names))
    ]
    assert [call["id"] for call in told] == list(ids.values())
    assert all(ids.values())
    assert len(set(ids.values())) == len(ids)
    return message


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """(name, arguments as a value; as text where the call is incomplete)."""
    return [
        (
            call["function"]["name"],
            call["function"]["arguments"] if call.get("incomplete") else json.loads(call["function"]["arguments"]),
        )
        for call in message.get("tool_calls", [])
    ]


def family(name: str) -> Family:
    return family_named(name).make()


# --- what models write -----------------------------------------------------------------------------------------------


def _marked(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_marked(each, mark)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_marked(each, mark) for each in value) + "]"
    return json.dumps(value)


def gemma4(calls: Calls) -> str:
    return "".join(f"<|tool_call>call:{name}{_marked(given, QUOTE)}<tool_call|>" for name, given in calls)


QUOTE = '<|"|>'


def functiongemma(calls: Calls) -> str:
    begin, end = "<start_function_call>", "<end_function_call>"
    return "".join(f"{begin}call:{name}{_marked(given, '<escape>')}{end}" for name, given in calls)


def _list(calls: Calls, key: str = "arguments") -> str:
    return json.dumps([{"name": name, key: given} for name, given in calls], ensure_ascii=False)


def mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS] {_list(calls)}"


def mistral_plain(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def mistral_id(calls: Calls) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abcDEF12{i}[ARGS]{json.dumps(given)}" for i, (name, given) in enumerate(calls)
    )


def _python(calls: Calls) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def lfm2(calls: Calls) -> str:
    return f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>"


def llama3(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def granite(calls: Calls) -> str:
    return f"<|tool_call|>{_list(calls)}"


def kimi_k2(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _section(calls: Seq[str], between: str = "") -> str:
    marked = (f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{between.join(marked)}<｜tool▁calls▁end｜>"


def deepseek_v3(calls: Calls) -> str:
    return _section(
        [f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}\n```" for name, given in calls], between="\n"
    )


def deepseek_v31(calls: Calls) -> str:
    return _section([f"{name}<｜tool▁sep｜>{json.dumps(given)}" for name, given in calls])


def dsml(section: str, space: str = "") -> Callable[[Calls], str]:
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"

    def parameter(key: str, value: Any) -> str:
        kind, text = ("true", value) if isinstance(value, str) else ("false", json.dumps(value))
        return f'{begin}parameter name="{key}" string="{kind}">{text}{end}parameter>\n'

    def write(calls: Calls) -> str:
        invokes = (
            f'{begin}invoke name="{name}">\n{"".join(parameter(*each) for each in given.items())}{end}invoke>\n'
            for name, given in calls
        )
        return f"{begin}{section}>\n{''.join(invokes)}{end}{section}>"

    return write


def gpt_oss(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
        for name, given in calls
    )


def hermes(calls: Calls) -> str:
    written = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen_xml(calls: Calls) -> str:
    def write(name: str, given: Mapping[str, Any]) -> str:
        lines = "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    return "\n".join(write(*call) for call in calls)


def glm(gap: str) -> Callable[[Calls], str]:
    def write(name: str, given: Mapping[str, Any]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_raw(value)}</arg_value>{gap}" for key, value in given.items()
        )
        return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"

    return lambda calls: gap.join(write(*call) for call in calls)


def minimax(calls: Calls) -> str:
    def write(name: str, given: Mapping[str, Any]) -> str:
        lines = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in given.items())
        return f'<invoke name="{name}">\n{lines}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(write(*call) for call in calls)}</minimax:tool_call>"


def minimax_m1(calls: Calls) -> str:
    written = (json.dumps({"name": name, "arguments": given}) + "\n" for name, given in calls)
    return f"<tool_calls>\n{''.join(written)}</tool_calls>"


WRITERS: Mapping[str, Callable[[Calls], str]] = {
    "gemma4": gemma4,
    "functiongemma": functiongemma,
    "mistral": mistral,
    "mistral-plain": mistral_plain,
    "mistral-id": mistral_id,
    "lfm2": lfm2,
    "llama3": llama3,
    "llama-pythonic": _python,
    "granite": granite,
    "kimi-k2": kimi_k2,
    "deepseek-v3": deepseek_v3,
    "deepseek-v3.1": deepseek_v31,
    "deepseek-v3.2": dsml("function_calls"),
    "deepseek-v4": dsml("tool_calls"),
    "deepseek-v4.1": dsml("calls", " "),
    "gpt-oss": gpt_oss,
    "hermes": hermes,
    "generic": hermes,
    "qwen-xml": qwen_xml,
    "glm": glm("\n"),
    "glm-compact": glm(""),
    "minimax": minimax,
    "minimax-m1": minimax_m1,
}
"""Family, as `[chat] dialect` calls it -> what writes its calls."""
