"""`headrace run`: one prompt to stdout, or a file of prompts to a file of results."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_INTERRUPT, EXIT_OK, RequestError
from headrace_plugins.commands.grammar_args import add_grammar_arguments, grammar_of
from headrace_plugins.commands.model_args import (
    add_model_arguments,
    add_sampling_arguments,
    add_thinking_arguments,
    load,
    nothing_to_load,
    params_of,
    usage_error,
)
from headrace_plugins.commands.text import dumps
from headrace_plugins.sources import after_model

if TYPE_CHECKING:
    from headrace.answers import Reading
    from headrace.llm import LLM, Job
    from headrace.runner import Handle
    from headrace.types import Completion, Output

DESCRIPTION = """
Complete a prompt and stream the answer to stdout. The prompt is taken from stdin when it is "-", or left out in a pipe.
If the model or the config has a chat template, the prompt is a user message (--chat is the default); otherwise, and
with --raw, it is plain text that the model continues.

--batch reads one JSON object per line: {"id"?, "prompt" | "messages" | "prompt_ids", and sampling parameters}. Each
result is appended to --out as it comes; run the same command again to go on where it stopped, and to try the lines that
failed again, as they are by then. ^C stops in order, a second ^C at once.

Of a chat's answer, stdout gets the content. Reasoning is shown on stderr where that is a terminal, and with --json.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    # options may stand between the model and the prompt
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
    parser.add_argument(
        "words", nargs="*", metavar="MODEL_OR_CONFIG [PROMPT]", help="model path or URI, or a .toml file"
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_grammar_arguments(parser)
    add_thinking_arguments(parser)
    parser.add_argument("--n", type=int, metavar="N", help="number of samples")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", dest="chat", action="store_true", default=None, help="the prompt is a user message")
    form.add_argument("--raw", dest="chat", action="store_false", help="the prompt is text to continue")
    parser.add_argument("--system", metavar="TEXT", help="system message, with a chat template")
    parser.add_argument(
        "--prefill", default="", metavar="TEXT", help="how the answer is to begin, with a chat template"
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt in front")
    parser.add_argument("--logprobs", type=int, metavar="K", help="K alternatives per token (shown with --json)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    batch = parser.add_argument_group("batch")
    batch.add_argument("--batch", metavar="IN", help="JSONL file of requests")
    batch.add_argument("--out", metavar="OUT", help="JSONL file that results are appended to")


def run(args: argparse.Namespace) -> int:
    model, prompt = _words(args)
    if args.batch:
        from headrace_plugins.commands.batch import run_batch

        return run_batch(args, model)
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
        prompt = prompt[:-1] if prompt.endswith("\n") else prompt
        if not prompt and not after_model(model or ""):  # else that the model isn't one says more
            raise _no_prompt(": nothing came from stdin")
    elif not prompt:
        raise _no_prompt()
    params = params_of(args, n=args.n, logprobs=args.logprobs, constraint=grammar_of(args))
    with load(args, model) as llm:
        asked = ask(llm, args, params, prompt=prompt)
        return _print_json(llm, args, asked) if args.json else _print_text(llm, args, asked)


def _words(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """(model, prompt) of the positional words; with --config the model may be left out."""
    words = list(args.words)
    if bool(args.batch) != bool(args.out):
        raise usage_error("--batch and --out belong together", "headrace run MODEL --batch in.jsonl --out out.jsonl")
    n_prompts = 0 if args.batch else 1
    has_model = not args.config or len(words) > n_prompts
    model = words.pop(0) if words and has_model else None
    if not args.batch and nothing_to_load(args, model):
        raise usage_error("no model was given", 'headrace run MODEL "prompt", or headrace run --config FILE "prompt"')
    if len(words) > n_prompts:
        raise usage_error(f"one word too many: {words[-1]!r}", "put quotes around the prompt")
    if not words and n_prompts and sys.stdin.isatty():
        help = "give one, pipe one in, or use `headrace chat` to talk"
        raise usage_error("no prompt was given", after_model(model or "") or help)
    return model, words[0] if words else None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and how its answer is read."""

    job: Job
    reading: Reading | None = None
    """None: the text is the answer."""
    prefill: str = ""

    def read(self, llm: LLM, output: Output, echo: bool = False) -> Output:
        """The answer, with `echo` behind its prompt."""
        from headrace.llm import prefixed

        found = output if self.reading is None else self.reading.reply(output)
        if not echo:
            return found
        text = self.job[1] if self.job[1] is not None else llm.detokenize(output.prompt_token_ids)
        return prefixed(found, text.removesuffix(self.prefill), output.prompt_token_ids)


def ask(
    llm: LLM,
    args: argparse.Namespace,
    params: Any,
    *,
    prompt: Any = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> Asked:
    """A request for text, token ids or messages, formatted as the arguments say. Raises RequestError."""
    from headrace.answers import Reading, job_for
    from headrace.chat import chat_format, has_template, sayable
    from headrace.dialogue import Turn

    params = llm.resolve(params)
    if messages is None and (
        not isinstance(prompt, str) or not (has_template(llm) if args.chat is None else args.chat)
    ):
        if args.system is not None or args.prefill:
            raise usage_error(
                "--system and --prefill need a chat template", "use --chat, or put the text into the prompt"
            )
        if args.thinking is not None or args.thinking_budget is not None:
            raise usage_error("--thinking and --thinking-budget need a chat template", "use --chat")
        return Asked(llm.request(prompt, params))
    if messages is None:
        if not prompt.strip():
            message = "the prompt is empty" + (": only blanks" if prompt else "")
            raise RequestError("HR-REQUEST-02", message, "write some text (with --raw, blanks are taken as they are)")
        system = args.system if args.system is not None else llm.pipeline.config.chat.get("system")
        first = [] if system is None else [{"role": "system", "content": system}]
        messages = [*first, {"role": "user", "content": prompt}]
    if not hasattr(args, "chat_format"):
        args.chat_format = chat_format(llm)
    turn = Turn(prefill=args.prefill, thinking=args.thinking, thinking_budget=args.thinking_budget)
    job, written = job_for(llm, args.chat_format, sayable(map(dict, messages)), turn, params)
    return Asked(job, Reading(args.chat_format.parser, written, turn, params.n), args.prefill)


def _no_prompt(why: str = "") -> RequestError:
    help = 'write some text: headrace run MODEL "What is a river?", or pipe it in: echo "Hi" | headrace run MODEL'
    return RequestError("HR-REQUEST-02", f"the prompt is empty{why}", help)


def _print_text(llm: LLM, args: argparse.Namespace, asked: Asked) -> int:
    request, text = asked.job
    handle = llm.start(asked.job)
    several = request.params.n > 1
    try:
        if args.echo and not several:
            shown = text if text is not None else llm.detokenize(request.prompt_ids)
            _write(shown.removesuffix(asked.prefill))
        if not several:
            _show(handle, asked, args.quiet)
        output, code = handle.result(), EXIT_OK
    except KeyboardInterrupt:
        output, code = _stopped(handle), EXIT_INTERRUPT
    output = asked.read(llm, output, args.echo)
    if several:
        for completion in output.completions:
            _write(f"--- {completion.index + 1}\n{completion.text}\n")
    else:
        _write("" if output.text.endswith("\n") else "\n")
    if not args.quiet:
        print(summary(output), file=sys.stderr)
    if output.error is not None:
        raise output.error
    return code


def _show(handle: Handle, asked: Asked, quiet: bool) -> None:
    """The answer as it comes."""
    if asked.reading is None:
        for chunk in handle:
            _write(chunk.text)
        return
    aside = sys.stderr.isatty() and not quiet
    begun = asked.reading.begin()
    _write(begun.text if begun is not None else "")
    for chunk in handle:
        piece = asked.reading.chunk(chunk)
        if piece is not None:
            if aside and piece.reasoning:
                print(piece.reasoning, end="", file=sys.stderr, flush=True)
            _write(piece.text)


def _print_json(llm: LLM, args: argparse.Namespace, asked: Asked) -> int:
    handle = llm.start(asked.job)
    try:
        output, code = handle.result(), EXIT_OK
    except KeyboardInterrupt:
        output, code = _stopped(handle), EXIT_INTERRUPT
    if output.error is not None:
        raise output.error
    print(dumps(as_json(asked.read(llm, output, args.echo))))
    return code


def _stopped(handle: Handle) -> Output:
    """End a request after ^C; the next ^C kills the program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    handle.cancel()
    return handle.result()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(output: Output) -> str:
    """One line: tokens and speeds."""
    usage, timings = output.usage, output.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return (
        f"[{usage.prompt_tokens} prompt tokens{cached} at {timings.prefill_tokens_per_s:,.1f} tok/s · "
        f"{usage.completion_tokens} generated at {timings.decode_tokens_per_s:,.1f} tok/s · "
        f"{timings.total_s:.2f} s · {output.finish_reason}]"
    )


def as_json(output: Output) -> dict[str, Any]:
    """An output as plain JSON values."""
    usage, timings = output.usage, output.timings
    message = getattr(output, "message", {})
    record: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "completions": [_completion(completion) for completion in output.completions],
        "prompt": output.prompt,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "total_tokens": usage.total_tokens,
        },
        "timings": {name: getattr(timings, name) for name in type(timings).__slots__},
    }
    for name in ("reasoning_content", "tool_calls"):
        if message.get(name):
            record[name] = message[name]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entry and _logprob(entry) for entry in output.prompt_logprobs]
    return record


def _completion(completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [_logprob(entry) for entry in completion.logprobs]
    return found


def _logprob(entry: Any) -> dict[str, Any]:
    top = [{"id": id, "text": text, "logprob": value} for id, text, value in entry.top]
    return {"id": entry.id, "text": entry.text, "logprob": entry.logprob, "top": top}
