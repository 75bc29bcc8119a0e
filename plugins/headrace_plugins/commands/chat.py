"""`headrace chat`: talk to a model, live on a terminal or line by line in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_INTERRUPT, EXIT_OK, HeadraceError
from headrace_plugins.commands.model_args import (
    add_model_arguments,
    add_sampling_arguments,
    add_thinking_arguments,
    load,
    nothing_to_load,
    params_of,
    usage_error,
)

if TYPE_CHECKING:
    from headrace.chat import Answer, Chat

DESCRIPTION = """
Talk to a model. In a pipe every line of stdin is a message and every answer goes to stdout. ^C stops an answer, and
leaves the history as it was before it; ^C at the prompt, or twice in an answer, quits.
"""

REDRAW_S = 0.08

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the conversation, keep the system message",
    "/quit": "leave (also ^D, ^C)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_CONFIG", help="model path or URI, or a .toml file")
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_thinking_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--template", metavar="FILE", help="chat template, instead of the config's or the model's")
    parser.add_argument("--max-turns", type=int, metavar="N", help="forget what lies further back")


def run(args: argparse.Namespace) -> int:
    from headrace.chat import Chat

    if nothing_to_load(args, args.model):
        raise usage_error("no model was given", "headrace chat MODEL, or headrace chat --config FILE")
    live = sys.stdin.isatty() and sys.stdout.isatty()
    with load(args, args.model) as llm:
        chat = Chat(
            llm, args.system, args.template,
            max_turns=args.max_turns, thinking=args.thinking, thinking_budget=args.thinking_budget,
        )  # fmt: skip
        if live and not args.quiet:
            print(f"{llm.pipeline.model.uri} · /help for commands", file=sys.stderr)
        return _talk(chat, args, _Screen() if live else _Pipe())


def _talk(chat: Chat, args: argparse.Namespace, view: _Screen | _Pipe) -> int:
    params = params_of(args)
    failed = EXIT_OK
    while True:
        try:
            line = view.read()
        except KeyboardInterrupt:
            return EXIT_INTERRUPT
        if line is None:
            return failed
        text = line.strip()
        if not text:
            continue
        if text.startswith("/"):
            if not _command(chat, text, view):
                return failed
            continue
        try:
            answer = chat.stream(text, params)
            with _stoppable(answer):
                view.show(answer)
            if answer.result().finish_reason == "abort":
                view.say("[stopped; this turn is forgotten]")
        except KeyboardInterrupt:  # the second one
            return EXIT_INTERRUPT
        except HeadraceError as error:
            print(error, file=sys.stderr)
            failed = EXIT_OK if view.forgives else error.exit_code


def _command(chat: Chat, text: str, view: _Screen | _Pipe) -> bool:
    """Carry out /command; False quits."""
    if text == "/quit":
        return False
    if text == "/reset":
        chat.reset()
        view.say("forgotten")
    elif text == "/help":
        view.say("\n".join(f"{name:8}{what}" for name, what in COMMANDS.items()))
    else:
        view.say(f"unknown command {text.split()[0]}; /help lists them")
    return True


@contextlib.contextmanager
def _stoppable(answer: Answer) -> Iterator[None]:
    """^C stops the answer, wherever the program is just then; a second ^C is a KeyboardInterrupt again."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        answer.cancel()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Pipe:
    """One line of stdin is one message."""

    forgives = False

    def read(self) -> str | None:
        return sys.stdin.readline() or None

    def show(self, answer: Answer) -> None:
        last = ""
        for chunk in answer:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            last = chunk.text or last
        if not last.endswith("\n"):
            print(flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


class _Screen:
    """A terminal: line editing where readline is there, answers as live Markdown."""

    forgives = True

    def __init__(self) -> None:
        from rich.console import Console

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() history and editing
        self._console: Any = Console()

    def read(self) -> str | None:
        try:
            return input("> ")
        except EOFError:
            return None

    def show(self, answer: Answer) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        text, thought, n_tokens, shown = "", "", 0, 0.0
        started = time.monotonic()
        with Live(console=self._console, auto_refresh=False) as live:
            for chunk in answer:
                text += chunk.text
                thought += chunk.reasoning
                n_tokens += len(chunk.token_ids)
                now = time.monotonic()
                if now - shown > REDRAW_S:  # parsing Markdown anew for each token would cost more than the token
                    live.update(self._running(text or thought, n_tokens / max(now - started, 1e-6)), refresh=True)
                    shown = now
            live.update(Markdown(text), refresh=True)

    def _running(self, text: str, rate: float) -> Any:
        """The answer so far and its speed. What is taller than the screen shows its end."""
        from rich.console import Group
        from rich.markdown import Markdown
        from rich.segment import SegmentLines
        from rich.text import Text

        width, height = self._console.size
        rows = text.split("\n")
        fits = sum(1 + len(row) // width for row in rows) < height - 4
        body = Markdown(text) if fits else Text(text[-width * (height // 2) :])
        lines = self._console.render_lines(body, pad=False)[2 - height :]  # Live would cut off the end instead
        return Group(SegmentLines(lines, new_lines=True), Text(f"{rate:.1f} tok/s · ^C stops", style="dim"))

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)
