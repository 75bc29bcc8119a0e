"""What a request must satisfy before the engine takes it, and the rare per-request data derived from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.contracts import ConstraintEngine, Executor, KVSpace
from headrace.errors import RequestError
from headrace.types import Request, SamplingParams, Sequence

_OFF = SamplingParams(temperature=0.0, top_p=1.0).resolved()
"""Parameters that ask nothing of an executor: greedy, no filter, no penalty, the default seed."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Data of the few requests that bias or ban tokens."""

    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    banned: tuple[int, ...] = ()
    """Banned at every position."""
    phrases: tuple[tuple[int, ...], ...] = ()
    """Token runs that must not be completed: the last token is banned after the others."""
    held_until: int = 0
    """Total token count below which the sequence's stop ids are banned (min_tokens)."""

    def banned_now(self, seq: Sequence) -> list[int]:
        """Ids banned at the next position of seq."""
        ids = list(self.banned)
        tokens = seq.tokens
        if len(tokens) < self.held_until:
            ids += seq.stop_ids
        for phrase in self.phrases:
            n = len(phrase) - 1
            if len(tokens) - n >= seq.n_prompt and tuple(tokens[-n:]) == phrase[:-1]:
                ids.append(phrase[-1])
        return ids

    def depends_on_position(self, seq: Sequence) -> bool:
        """Bans differ between the positions that one verification would sample, so the row is not drafted."""
        return bool(self.phrases) or len(seq.tokens) <= self.held_until


def extras_of(request: Request, executor: Executor) -> tuple[Extras | None, bool]:
    """(extras or None, whether token counts are needed for penalties)."""
    params = request.params
    bias = params.logit_bias or {}
    runs = [run for word in params.bad_words for run in _spellings(word, executor)]
    extras = Extras(
        bias_ids=tuple(int(token) for token in bias),
        bias_values=tuple(float(value) for value in bias.values()),
        banned=tuple(run[0] for run in runs if len(run) == 1),
        phrases=tuple(run for run in runs if len(run) > 1),
        held_until=len(request.prompt_ids) + params.min_tokens if params.min_tokens else 0,
    )
    counts = params.repetition_penalty != 1.0 or bool(params.presence_penalty) or bool(params.frequency_penalty)
    return (extras if extras != Extras() else None), counts


def _spellings(word: str, executor: Executor) -> Iterable[tuple[int, ...]]:
    """A word's tokens at the start of a line and in the middle of one (most vocabularies join the space to it)."""
    encode = executor.tokenizer.encode
    return {tuple(encode(text, add_bos=False)) for text in (word, " " + word.lstrip())} - {()}


_BOUND = {
    "slots": "backend.context_tokens",
    "paged": "backend.kv_tokens if the model itself has a longer context",
}
"""What bounds a sequence, by kind of KV."""


def admit_request(request: Request, executor: Executor, kv: KVSpace, constraints: ConstraintEngine | None) -> int:
    """Check a request against model, KV and executor; the total token count at which it ends. Raises RequestError."""
    params, model, n_prompt = request.params, executor.model, len(request.prompt_ids)
    if not n_prompt:
        raise RequestError("HR-REQUEST-02", "the prompt is empty", "give some text, or at least one token id")
    _check_ids("prompt_ids", request.prompt_ids, model.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, model.vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), model.vocab_size)
    context = min(model.context_tokens, kv.capacity_tokens())
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if n_prompt + min(wanted, 1) > context:
        raise RequestError(
            "HR-REQUEST-03",
            f"the prompt has {n_prompt} tokens, the context holds {context}",
            f"shorten the prompt, or raise {_BOUND[executor.caps.kv]}",
        )
    if n_prompt + wanted > context:
        raise RequestError(
            "HR-REQUEST-04",
            f"{n_prompt} prompt tokens + max_tokens {wanted} = {n_prompt + wanted} exceed the context of {context}",
            f"max_tokens may be at most {context - n_prompt} here; leave it out to use all of the context",
        )
    chunk = request.prefill_chunk_tokens
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise RequestError("HR-REQUEST-16", f"prefill_chunk_tokens = {chunk!r} can't be", "give 1 or more, or None")
    _check_support(request, executor, constraints)
    return context if params.max_tokens is None else n_prompt + wanted


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                "HR-REQUEST-05",
                f"{name}[{i}] = {token!r} is outside the vocabulary",
                f"ids go from 0 to {vocab_size - 1}",
            )


def _check_support(request: Request, executor: Executor, constraints: ConstraintEngine | None) -> None:
    params, caps = request.params, executor.caps
    for name, why in caps.refuses.items():
        if getattr(params, name) != getattr(_OFF, name):
            what = f"{name} = {getattr(params, name)!r} can't be honoured here: {why}"
            raise RequestError("HR-REQUEST-06", what, f"leave {name} out, or change what stands in its way")
    if not caps.logprobs and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise RequestError("HR-REQUEST-06", "this backend returns no log-probabilities", "leave logprobs out")
    if request.want_logits and not caps.prompt_logits:
        reason = caps.refuses.get("prompt_logprobs")  # what keeps those back does so here
        if reason:
            what = f"logits of prompts can't be had here: {reason}"
            raise RequestError("HR-REQUEST-06", what, "change what stands in their way")
        what = "this backend returns no logits of prompts"
        raise RequestError("HR-REQUEST-06", what, "`headrace config explain` shows what it can: prompt_logits")
    if request.adapter is not None and caps.adapters != "per_row":
        why = "loads no adapters" if caps.adapters == "none" else "takes one adapter per step, rows are not grouped yet"
        raise RequestError("HR-REQUEST-06", f"adapter {request.adapter[0]!r}: this backend {why}")
    if request.media:
        raise RequestError("HR-REQUEST-06", "this model takes no images or audio")
    if params.constraint is not None and not caps.masks:
        raise RequestError(
            "HR-CONSTRAINT-01",
            f"a {params.constraint.kind} constraint was asked for, but this backend takes no token masks",
            "serve the model with another one (`headrace config explain` shows why this one was chosen)",
        )
    if params.constraint is not None and constraints is None:
        raise RequestError(
            "HR-CONSTRAINT-01",
            f"a {params.constraint.kind} constraint was asked for, but no constraint engine is configured",
            'add [constraints] use = "..." to the config (`headrace plugins list` shows the engines)',
        )
