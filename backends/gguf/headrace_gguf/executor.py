"""Runs steps on llama.cpp: one `llama_decode` for all rows of a plan, logits sampled in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.contracts import Executor
from headrace.errors import ModelError, StepFailed
from headrace.sampling import prompt_logits, prompt_logprobs, sample_step
from headrace.types import (
    WANT_ALL_POSITIONS,
    WANT_PROMPT_LOGITS,
    WANT_PROMPT_LOGPROBS,
    Capabilities,
    Fork,
    Free,
    KVLayout,
    KVOp,
    ModelSpec,
    StepPlan,
    StepResult,
    Trim,
)
from headrace_gguf import native
from headrace_gguf.facts import GGUFFacts
from headrace_gguf.llama import FLASH_ATTENTION, KV_TYPES, Context, ContextParams, Model
from headrace_gguf.memory import Shape, slot_positions
from headrace_gguf.tokenizer import GGUFTokenizer
from headrace_gguf.trial import try_load

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.types import BuildContext, MaskBatch, ModelSource
    from headrace_gguf.options import GGUFOptions

_CODES = {1: "no KV slot for the batch", 2: "interrupted", -1: "invalid batch"}


class _Step:
    """One step between forward and collect."""

    __slots__ = ("plan", "result", "rows")

    def __init__(self, plan: StepPlan, rows: list[NDArray[np.float32]]) -> None:
        self.plan = plan
        self.rows = rows
        """[vocab] logits of the sampled positions, in plan order. llama.cpp's own, valid until the next forward."""
        self.result: StepResult | None = None


class GGUFExecutor(Executor):
    """A GGUF model in this process. `forward` blocks and releases the interpreter lock."""

    tokenizer: GGUFTokenizer

    def __init__(
        self, source: ModelSource, facts: GGUFFacts, options: GGUFOptions, shape: Shape, context: BuildContext
    ) -> None:
        self._uri = source.uri
        self._facts = facts
        self._options = options
        self._shape = shape
        self._build = context
        self._native_options = native.merged(options.native_sampler.model_dump(), facts.native_defaults)
        self._library_model: Model | None = None
        self._context: Context | None = None
        self._native: native.NativeSampler | None = None
        core = options.sampler == "core"
        self.caps = Capabilities(
            kv="slots",
            max_rows=shape.slots,
            max_tokens=min(shape.batch_tokens, shape.slots * shape.context_tokens),
            blocking_forward=True,
            deterministic=True,
            # what the metadata suggests; open() finds out
            partial_trim=not facts.recurrent,
            fork=not facts.recurrent and shape.slots > 1,
            drafts=not facts.recurrent and core,
            logprobs=core,
            masks=True,
            prompt_logits=core,
            refuses={} if core else native.REFUSES,
        )

    # --- open and close ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        report = self._build.report
        try:
            if self._options.trial_load:
                report("try the file", 0.0)
                try_load(self._facts, self._context_params(), self._shape.gpu_layers)
            model = self._library_model = Model(
                self._facts.path, gpu_layers=self._shape.gpu_layers, mmap=self._options.mmap,
                mlock=self._options.mlock, report=lambda fraction: report("load weights", fraction),
            )  # fmt: skip
            if reason := model.refusal():
                raise ModelError("HR-GGUF-10", f"{self._facts.path}: {reason}", "use a text-generation model")
            report("allocate KV", 0.0)
            self._context = Context(model, self._context_params())
            self._describe_model(model)
            self._probe()
            if self._options.sampler == "native":
                self._native = native.NativeSampler(self._context, self._native_options, self._shape.slots)
            report("allocate KV", 1.0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        native_sampler, self._native = self._native, None
        context, self._context = self._context, None
        model, self._library_model = self._library_model, None
        if native_sampler is not None:
            native_sampler.close()
        if context is not None:
            context.close()
        if model is not None:
            model.close()

    def _context_params(self) -> ContextParams:
        shape, options = self._shape, self._options
        return ContextParams(
            n_slots=shape.slots,
            slot_tokens=slot_positions(shape.context_tokens),
            n_batch=shape.batch_tokens,
            n_ubatch=min(options.ubatch_tokens, shape.batch_tokens),
            n_threads=shape.threads,
            n_threads_batch=shape.batch_threads,
            flash_attention=FLASH_ATTENTION[options.flash_attention],
            type_k=KV_TYPES[shape.type_k],
            type_v=KV_TYPES[shape.type_v],
        )

    def _describe_model(self, model: Model) -> None:
        facts = self._facts
        eos_ids = facts.eos_ids
        if not hasattr(self, "tokenizer"):
            self.tokenizer = GGUFTokenizer(model, bos_id=facts.bos_id, eos_ids=eos_ids, add_bos=facts.add_bos)
        else:
            self.tokenizer._rebind(model)
        self.tokenizer.eos_ids = eos_ids | model.eog_ids(sorted(self.tokenizer._special))
        self.model = ModelSpec(
            uri=self._uri,
            format="gguf",
            architecture=facts.architecture,
            fingerprint=facts.fingerprint,
            vocab_size=model.n_vocab,
            context_tokens=self._shape.context_tokens,
            eos_ids=self.tokenizer.eos_ids,
            bos_id=facts.bos_id,
            chat_template=facts.chat_template,
            sampling_defaults=facts.sampling_defaults,
        )
        layout = f"{facts.fingerprint}:{self._shape.type_k}:{self._shape.type_v}"
        self.layout = KVLayout(fingerprint=layout, n_slots=self._shape.slots, slot_tokens=self._shape.context_tokens)

    def _probe(self) -> None:
        """Learn by trying what the memory allows. Recurrent and hybrid models refuse partial trims."""
        context = self._open_context()
        n = 4
        token = self._facts.bos_id or 0
        context.token[:n], context.pos[:n], context.slot[:n], context.output[:n] = token, range(n), 0, (0, 0, 0, 1)
        context.clear_interrupt()
        code = context.decode(n)
        if code != 0:
            raise self._failed(code, ())
        partial_trim = context.trim(0, 2) and context.n_tokens(0) == 2
        fork = False
        if partial_trim and self._shape.slots > 1:
            context.fork(0, 1)
            fork = context.n_tokens(1) == 2 and context.trim(1, 1) and context.n_tokens(1) == 1
        context.clear()
        self._lengths = np.zeros(self._shape.slots, np.int32)
        core = self._options.sampler == "core"
        self.caps = replace(
            self.caps, max_tokens=context.n_batch, partial_trim=partial_trim, fork=fork, drafts=partial_trim and core
        )

    def _open_context(self) -> Context:
        if self._context is None:
            raise StepFailed("the executor is closed")
        return self._context

    # --- steps -------------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> _Step:
        context = self._open_context()
        context.clear_interrupt()
        if plan.kv_ops:
            self._apply_all(context, plan)
        n_tokens = len(plan.tokens)
        if n_tokens == 0:
            return _Step(plan, [])
        if n_tokens > context.n_batch:
            raise StepFailed(f"{n_tokens} tokens in one step, at most {context.n_batch} are allowed")
        if (self._lengths[plan.slot] != plan.start).any():
            # llama.cpp takes a hole at the start of a slot without a word
            bad = np.flatnonzero(self._lengths[plan.slot] != plan.start).tolist()
            raise StepFailed(f"{plan.row(bad[0])} does not continue its slot", bad)
        sampled = self._fill(context, plan, n_tokens)
        if self._native is not None:
            self._native.note(context.slot[:n_tokens], context.pos[:n_tokens], plan.tokens)
        # all bookkeeping comes before: llama_decode leaves cold caches, in which Python is several times slower
        self._lengths[plan.slot] += plan.length
        n_outputs = int(np.count_nonzero(context.output[:n_tokens]))
        code = context.decode(n_tokens)
        if code != 0:
            # an aborted or failed decode may leave a part of the batch in the KV
            for slot in plan.slot.tolist():
                self._lengths[slot] = context.n_tokens(slot)
            raise self._failed(code, self._culprits(plan) if code == -1 else ())
        rows = context.logits(n_outputs) if n_outputs else []
        return _Step(plan, rows if sampled is None else [rows[i] for i in sampled])

    def _apply_all(self, context: Context, plan: StepPlan) -> None:
        """Apply every operation, even after one was refused: the others are not told again."""
        refused: list[StepFailed] = []
        for op in plan.kv_ops:
            try:
                self._apply(context, op, plan)
            except StepFailed as error:
                refused.append(error)
        if refused:
            raise StepFailed(str(refused[0]), [row for error in refused for row in error.rows])

    def _apply(self, context: Context, op: KVOp, plan: StepPlan) -> None:
        if isinstance(op, Trim):
            slot, keep = op.slot, op.keep
        elif isinstance(op, Free):
            slot, keep = op.slot, 0
        elif isinstance(op, Fork):
            slot, keep = op.dst, op.upto
            context.fork(op.src, op.dst)
            self._lengths[op.dst] = self._lengths[op.src]
            if self._native is not None:
                self._native.fork(op.src, op.dst)
        else:
            raise StepFailed(f"the gguf backend does not know the KV operation {op}")
        if keep >= self._lengths[slot]:
            return
        if not context.trim(slot, keep):
            raise StepFailed(f"llama.cpp refused {op}", np.flatnonzero(plan.slot == slot).tolist())
        self._lengths[slot] = keep

    def _fill(self, context: Context, plan: StepPlan, n_tokens: int) -> list[int] | None:
        """Write the plan into the batch. Returns which outputs are sampled ones; None: all of them."""
        token, pos, slot, output = context.token, context.pos, context.slot, context.output
        token[:n_tokens] = plan.tokens
        if n_tokens == len(plan.seq):  # every row is one token: decoding
            pos[:n_tokens] = plan.start
            slot[:n_tokens] = plan.slot
            output[:n_tokens] = plan.sample
            if plan.targets is None:
                return None
        length, ends = plan.length, plan.offset[1:]
        index = np.arange(n_tokens, dtype=np.int32)
        pos[:n_tokens] = index + np.repeat(plan.start - plan.offset[:-1], length)
        slot[:n_tokens] = np.repeat(plan.slot, length)
        # a sampling row yields the logits of its last 1 + n_draft tokens
        sampled = index >= np.repeat(np.where(plan.sample, ends - 1 - plan.n_draft, ends), length)
        output[:n_tokens] = sampled
        if plan.targets is None:
            return None
        output[:n_tokens] |= np.repeat((plan.wants & WANT_ALL_POSITIONS) != 0, length)
        marked = np.flatnonzero(output[:n_tokens])
        return np.flatnonzero(sampled[marked]).tolist()

    def _culprits(self, plan: StepPlan) -> list[int]:
        """Rows with tokens outside the vocabulary."""
        outside = np.flatnonzero((plan.tokens < 0) | (plan.tokens >= self.model.vocab_size))
        return np.unique(np.searchsorted(plan.offset, outside, side="right") - 1).tolist()

    def _failed(self, code: int, rows: Any) -> StepFailed:
        return StepFailed(f"llama_decode: {_CODES.get(code, 'failed')} (code {code})", rows)

    def sample(self, step: _Step, masks: MaskBatch | None) -> None:
        plan = step.plan
        # before sampling, which may change the rows in place
        prompts = self._prompts(step) if plan.targets is not None else []
        scored = [(row, logits) for row, logits in prompts if plan.wants[row] & WANT_PROMPT_LOGPROBS]
        prompt = prompt_logprobs(plan, scored) if scored else None
        if self._native is not None:
            step.result = self._native.sample(plan, step.rows, masks, prompt)
            return
        kept = [(row, logits) for row, logits in prompts if plan.wants[row] & WANT_PROMPT_LOGITS]
        arrays = {"prompt_logits": prompt_logits(kept)} if kept else {}
        step.result = result = sample_step(plan, step.rows, masks)
        if scored:
            result.prompt_logprobs = prompt
        if arrays:
            result.arrays = {**result.arrays, **arrays}

    def _prompts(self, step: _Step) -> list[tuple[int, NDArray[np.float32]]]:
        """(plan row, [length, vocab] logits) of the rows that want all positions; views of llama.cpp's own."""
        plan, found, taken = step.plan, [], 0
        block = self._open_context().logits_block
        for row in range(len(plan.seq)):
            n_outputs = 1 + int(plan.n_draft[row]) if plan.sample[row] else 0
            if block is not None and plan.wants[row] & WANT_ALL_POSITIONS:
                n_outputs = int(plan.length[row])
                found.append((row, block[taken : taken + n_outputs]))
            taken += n_outputs
        return found

    def collect(self, step: _Step) -> StepResult:
        if step.result is None:
            raise StepFailed("collect before sample")
        return step.result

    def interrupt(self) -> None:
        context = self._context
        if context is not None:
            context.interrupt()

    def describe(self) -> Mapping[str, str]:
        return self._shape.describe(self._facts, self._options)
