"""Chat templates: messages to prompt text, and prompt text to ids.

Templates are rendered as transformers does it (same whitespace rules, `raise_exception`, `strftime_now`, `tojson`, loop
controls, `{% generation %}`), inside the bounds of `headrace_plugins.sandbox`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from datetime import datetime
from functools import cached_property
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser

from headrace.errors import ModelError, RequestError
from headrace.llm import encode_text
from headrace_plugins.sandbox import METER, LimitReached, Limits, Meter, Sandbox

if TYPE_CHECKING:
    from headrace.contracts import Tokenizer

RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "chat_template"}
    | {"tokenize", "return_tensors", "return_dict", "raise_exception", "strftime_now", "range", "namespace", "dict"}
)
"""Names that a caller's template arguments may not replace."""

_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_BLOCKS = frozenset({"for", "if", "macro", "call", "filter", "block", "generation"})
_OVERRIDE = "replace the template with [chat] template = ... in the config"


class ChatTemplate:
    """A compiled template. Compiling and rendering are bounded; thread-safe.

    origin says where the source came from, for error texts. Raises ModelError HR-TEMPLATE-01 (syntax), -02 (too large
    or nested).
    """

    def __init__(
        self,
        source: str,
        origin: str = "the model's chat template",
        *,
        limits: Limits | None = None,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.origin = origin
        self.limits = limits or Limits()
        self.names: set[str] = set()
        """Identifiers that occur in it: variables, attributes, filters."""
        self._clock = clock
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: _strftime(now(), format)
        try:
            self._check_size(environment)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise self._error("01", f"has a syntax error in line {error.lineno}: {error.message}") from error
        except TemplateError as error:
            raise self._error("01", f"can't be compiled: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise self._error("02", f"is nested too deeply to compile ({type(error).__name__})") from error

    def _check_size(self, environment: Sandbox) -> None:
        """Refuse sources that would cost the parser too much: it recurses, and so does Python's own."""
        limits, depth, n_tokens, in_block = self.limits, 0, 0, False
        if len(self.source) > limits.source_chars:
            raise self._error("02", f"has {len(self.source):,} characters, the limit is {limits.source_chars:,}")
        for _, kind, text in environment.lex(self.source):
            n_tokens += kind != "whitespace"
            if kind == "name":
                self.names.add(text)
            if kind == "operator":
                depth += (text in _OPENING) - (text in _CLOSING)
            elif kind == "block_begin":
                in_block = True
            elif kind == "name" and in_block:
                depth += (text in _BLOCKS) - (text.startswith("end") and text[3:] in _BLOCKS)
                in_block = False
            if depth > limits.nesting or n_tokens > limits.tokens:
                what = f"{limits.nesting} levels deep" if depth > limits.nesting else f"{limits.tokens:,} tokens long"
                raise self._error("02", f"is more than {what}")

    def render(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        values: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `values` are the program's own variables (bos_token, eos_token, tools, ...); `arguments`
        come from a caller and may not replace RESERVED names.

        Raises ModelError HR-TEMPLATE-03 (it reached for internals), -04 (a limit), -06 (it failed), or RequestError
        -05: the template itself refused the messages with raise_exception.
        """
        arguments = arguments or {}
        for name in arguments:
            if name in RESERVED or not name.isidentifier() or name.startswith("_"):
                raise RequestError(
                    "HR-CHAT-02",
                    f"the template argument {name!r} is reserved",
                    f"reserved names: {', '.join(sorted(RESERVED))}",
                )
        variables: dict[str, Any] = {**arguments, **(values or {}), "messages": list(messages)}
        variables |= {"add_generation_prompt": add_generation_prompt, METER: Meter(self.limits, self._clock)}
        try:
            return self._collect(variables)
        except _Refused as refusal:
            raise RequestError(
                "HR-TEMPLATE-05",
                f"{self.origin} refused the messages{_place(refusal)}: {refusal}",
                "change the order or roles of the messages, or use another template",
            ) from refusal
        except SecurityError as error:
            raise self._error("03", f"tried to leave its sandbox{_place(error)}: {error}") from error
        except (LimitReached, OverflowError, MemoryError) as error:
            raise self._error("04", f"was stopped{_place(error)}: {error}") from error
        except Exception as error:
            raise self._error("06", f"failed{_place(error)}: {type(error).__name__}: {str(error)[:300]}") from error

    def _collect(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        n_chars = 0
        for piece in self._template.generate(variables):
            n_chars += len(piece)
            if n_chars > self.limits.output_chars:
                raise LimitReached(f"it writes more than {self.limits.output_chars:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _error(self, number: str, what: str) -> ModelError:
        return ModelError(f"HR-TEMPLATE-{number}", f"{self.origin} {what}", _OVERRIDE)


def _place(error: Exception) -> str:
    """The innermost line of the template, where jinja2 noted one."""
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


class _Refused(TemplateError):
    pass


def _refuse(message: object = "") -> NoReturn:
    raise _Refused(str(message)[:1000])


def _strftime(now: datetime, format: str) -> str:
    """%-codes with a width (a C library extension) could print megabytes."""
    if not isinstance(format, str) or len(format) > 200 or re.search(r"%[^a-zA-Z%]*\d", format):
        raise LimitReached(f"strftime_now got the format {str(format)[:40]!r}")
    return now.strftime(format)


class _Generation(Extension):
    """`{% generation %}` marks assistant tokens for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- prompt text to ids ----------------------------------------------------------------------------------------------


class PromptEncoder:
    """Encodes rendered prompts so that only the template's own text can make special tokens.

    A user may write "<|im_start|>". Before rendering, a private character is put inside each such text wherever it
    occurs in a message; after rendering the prompt is cut at these characters and encoded piece by piece, so that no
    piece holds the whole name.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        """Finds every place where the name of a special token starts."""
        tokenizer = self.tokenizer
        names = set()
        for token in range(tokenizer.n_vocab):
            if tokenizer.is_special(token):
                name = tokenizer.token_bytes(token).decode("utf-8", "replace")
                if len(name) > 1 and "\ufffd" not in name:
                    names.add(name)
        if not names:
            return None
        return re.compile(f"(?=({'|'.join(re.escape(name) for name in sorted(names, key=len, reverse=True))}))")

    def is_special(self, name: str) -> bool:
        """Is there a special token of this name?"""
        ids = self.tokenizer.encode(name, add_bos=False, parse_special=True)
        return len(ids) == 1 and self.tokenizer.is_special(ids[0])

    def shield(self, messages: Any) -> tuple[Any, str]:
        """(messages with broken-up names, the private character; empty if no name occurs)."""
        pattern = self._names
        texts = list(_strings(messages))
        if pattern is None or not any(pattern.search(text) for text in texts):
            return messages, ""
        used = set().union(*texts)
        mark = next(chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)
        return _map_strings(messages, lambda text: _break_up(text, pattern, mark)), mark

    def encode(self, prompt: str, mark: str = "") -> list[int]:
        """Ids of a rendered prompt; BOS first where the model wants one, and never twice."""
        pieces = prompt.split(mark) if mark else [prompt]
        ids = encode_text(self.tokenizer, pieces[0])
        for piece in pieces[1:]:
            ids += self.tokenizer.encode(piece, add_bos=False, parse_special=True)
        return ids


def special_texts(tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token and eos_token as a template prints them."""
    found = {"bos_token": "", "eos_token": ""}
    if tokenizer.bos_id is not None:
        found["bos_token"] = tokenizer.token_bytes(tokenizer.bos_id).decode("utf-8", "replace")
    if tokenizer.eos_ids:
        found["eos_token"] = tokenizer.token_bytes(min(tokenizer.eos_ids)).decode("utf-8", "replace")
    return found


def _break_up(text: str, pattern: re.Pattern[str], mark: str) -> str:
    parts, last = [], 0
    for match in pattern.finditer(text):
        parts.append(text[last : match.start() + 1])
        last = match.start() + 1
    return mark.join([*parts, text[last:]])


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
