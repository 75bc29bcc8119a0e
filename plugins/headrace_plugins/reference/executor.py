"""Runs steps of any `headrace.modeling.Model` in this process: weights, caches and batches around `model.forward`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.contracts import Executor
from headrace.errors import ConfigError, Fatal, ModelError, StepFailed
from headrace.modeling import Model, ModelContext, build_model
from headrace.ops import BoundOp, KernelContext, Ops, bind
from headrace.sampling import prompt_logits, prompt_logprobs
from headrace.types import (
    WANT_PROMPT_LOGITS,
    WANT_PROMPT_LOGPROBS,
    Capabilities,
    KVGroup,
    KVLayout,
    MaskBatch,
    ModelSpec,
    StepPlan,
    StepResult,
)
from headrace_plugins.reference.batch import Wanted, make_batch, wanted_positions
from headrace_plugins.reference.caches import Pools, arrange
from headrace_plugins.reference.sizes import resolve
from headrace_plugins.reference.tokenizer import IdTokenizer, tokenizer_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.types import BuildContext
    from headrace_plugins.reference.facts import ModelFacts
    from headrace_plugins.reference.options import ReferenceOptions

DEVICE = "cpu"
RING_BLOCK_TOKENS = 128
"""Block of models with rings: few snapshots and still frequent prefix hits."""
RING_SLACK = 12
"""Entries of rings beyond a window: most drafts of a row. With a window of 128 it makes the 140 tokens of a prompt that
DeepInfer's README keeps."""
COMPILED = frozenset({"norm.rms", "rope.apply", "act.swiglu", "mhc.collapse", "mhc.update", "engram.gate"})
"""Ops of element-wise work, which torch.compile turns into one loop each. Whole models have too many loops over data
for it to help."""
WATCHED = "norm.rms"
"""An op that every layer of every model calls: there an interrupt is noticed."""


class _Step:
    """One step between forward and collect."""

    __slots__ = ("logits", "plan", "result", "wanted")

    def __init__(self, plan: StepPlan, wanted: Wanted, logits: NDArray[np.float32]) -> None:
        self.plan = plan
        self.wanted = wanted
        self.logits = logits
        """[M, vocab] of the wanted positions."""
        self.result: StepResult | None = None


class ReferenceExecutor(Executor):
    """A model on torch ops, on the CPU. `forward` blocks; torch releases the interpreter lock inside its kernels."""

    def __init__(self, uri: str, facts: ModelFacts, options: ReferenceOptions, context: BuildContext) -> None:
        self._uri, self._facts, self._options, self._build = uri, facts, options, context
        self._interrupted = threading.Event()
        self.tokenizer = tokenizer_of(facts)
        self._factory = _architecture(facts, context)
        self._ops = self._bind()
        model = self._new_model(options.block_tokens or RING_BLOCK_TOKENS)
        has_rings = any(state.kind == "ring" for state in model.states())
        if options.block_tokens is None and not has_rings and context.engine.block_tokens != RING_BLOCK_TOKENS:
            model = self._new_model(context.engine.block_tokens)
        self._model = model
        self._loaded = False
        self._arrangement = arrange(model.states(), self._block_tokens)
        self._sizes = resolve(facts, model, self._arrangement, self._block_tokens, options, context)
        self._keep = self._replay_keep(model)
        self._history = model.history_tokens
        self._context_tokens = min(model.context_tokens, self._sizes.n_blocks * self._block_tokens)
        self._forward: Callable[..., Any] = _closed
        self._pools: Pools | None = None
        self._step: _Step | None = None
        self.caps = self._capabilities(model, has_rings)
        self.layout = self._layout(model, has_rings)

    # --- built before the load -------------------------------------------------------------------------------------

    def _bind(self) -> Ops:
        """Kernels of the model's ops, and of sampling."""
        options, context = self._options, self._build
        exact = context.determinism == "batch-invariant"
        if exact and options.compile:
            raise ConfigError(
                "HR-CONFIG-10", "determinism = 'batch-invariant' can't be served: loops that backend.compile makes "
                "round their last few elements by other code", "set compile = false, or determinism = 'seeded'",
            )  # fmt: skip
        made_for = KernelContext(
            device=DEVICE, compute=options.compute, exact=exact, facts={"arch": self._facts.architecture}
        )
        needed = (*getattr(self._factory, "needs", ()), "sample.step")
        ops = bind(needed, context.kernels(DEVICE), made_for, options.kernels)
        return _wrapped(ops, self._interrupted, options.compile)

    def _new_model(self, block_tokens: int) -> Model:
        options = self._options
        self._block_tokens = block_tokens
        context = ModelContext(
            block_tokens=block_tokens,
            slack_tokens=RING_SLACK,
            cache=options.cache,
            compute=options.compute,
            quantise_activations=options.quantise_activations,
            replay=options.replay,
            draft=options.draft,
            # ids alone are no text that a model could read
            tokenizer=None if isinstance(self.tokenizer, IdTokenizer) else self.tokenizer,
        )
        return build_model(self._factory, self._facts.config, self._ops, context)

    def _replay_keep(self, model: Model) -> int:
        """Prompt tokens that the second half of a split model computes; 0: all."""
        options = self._options
        if options.replay == "off":
            return 0
        if not model.rerun_tokens:
            raise ConfigError(
                "HR-REFERENCE-12", f"backend.replay = '{options.replay}', but a {self._facts.architecture} has no half "
                "that can skip prompt tokens", 'set replay = "off"',
            )  # fmt: skip
        keep = options.replay_keep_tokens or model.rerun_tokens
        if keep < model.rerun_tokens:
            raise ConfigError(
                "HR-REFERENCE-13", f"backend.replay_keep_tokens = {keep} is less than this model's windows need",
                f"set {model.rerun_tokens} or more",
            )  # fmt: skip
        return keep

    def _capabilities(self, model: Model, has_rings: bool) -> Capabilities:
        engine, options = self._build.engine, self._options
        approximations: tuple[str, ...] = ()
        if has_rings and options.prefix == "replay":
            approximations = (
                f"a prefix hit rebuilds the sliding windows from the {model.replay_tokens} tokens before it "
                '(backend.prefix = "replay")',
            )
        cut = f"the second half of the model sees {self._keep} prompt tokens only (backend.replay = '{options.replay}')"
        return Capabilities(
            kv="paged",
            max_rows=engine.max_sequences,
            max_tokens=engine.max_batch_tokens,
            blocking_forward=True,
            row_invariant=self._build.determinism == "batch-invariant",
            deterministic=True,
            partial_trim=True,
            drafts=True,
            logprobs=True,
            masks=True,
            prompt_logits=not self._keep,
            history_tokens=self._history,
            approximations=approximations,
            departures=(cut,) if self._keep else (),
            refuses={"prompt_logprobs": cut} if self._keep else {},
        )

    def _layout(self, model: Model, has_rings: bool) -> KVLayout:
        options, sizes = self._options, self._sizes
        groups = [KVGroup(name="blocks", grain_bytes=sizes.block_bytes)]
        if has_rings:
            groups.append(KVGroup(name="rings", grain_bytes=sizes.ring_bytes, kind="ring"))
        # what decides the bytes in a block, beside the weights
        form = (options.compute, options.weights, options.cache, options.quantise_activations, self._block_tokens)
        return KVLayout(
            fingerprint=":".join(str(part) for part in (self._facts.fingerprint, *form)),
            groups=tuple(groups),
            n_blocks=sizes.n_blocks,
            block_tokens=self._block_tokens,
            n_snapshots=sizes.n_snapshots,
            replay_tokens=model.replay_tokens if has_rings and options.prefix == "replay" else 0,
            rerun_tokens=self._keep,
            slack_tokens=RING_SLACK if has_rings else 0,
        )

    # --- open and close ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        options = self._options
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        model, self._loaded = self._model, True
        try:
            model.load(self._weights(model))
            self._build.report("allocate KV", 0.0)
            sizes = self._sizes
            self._pools = Pools(self._arrangement, sizes.n_blocks, sizes.n_slots, sizes.n_snapshots)
            self._build.report("allocate KV", 1.0)
        except MemoryError as error:
            self.close()
            raise ModelError(
                "HR-MEMORY-01", f"{self._facts.folder} does not fit: {error}",
                "set fewer kv_tokens, or a smaller model",
            ) from error  # fmt: skip
        except BaseException:
            self.close()
            raise
        self._forward = model.forward
        self.model = self._describe_model(model)

    def _weights(self, model: Model) -> Mapping[str, Any]:
        options = self._options
        compute = torch.bfloat16 if options.compute == "bfloat16" else torch.float32
        if options.dummy_weights:
            from headrace_plugins.checkpoint import dummy_weights

            return dummy_weights(model.tensors(), compute=compute, keep=options.weights)
        from headrace_plugins.checkpoint import load_weights

        return load_weights(
            self._facts.folder, model.tensors(), compute=compute, keep=options.weights, ignored=model.ignored,
            report=lambda fraction: self._build.report("load weights", fraction),
        )  # fmt: skip

    def _describe_model(self, model: Model) -> ModelSpec:
        tokenizer, facts = self.tokenizer, self._facts
        return ModelSpec(
            uri=self._uri,
            format="safetensors",
            architecture=facts.architecture,
            fingerprint=facts.fingerprint,
            vocab_size=model.vocab_size,
            context_tokens=self._context_tokens,
            eos_ids=tokenizer.eos_ids,
            bos_id=tokenizer.bos_id,
            chat_template=facts.chat_template,
            sampling_defaults=facts.sampling_defaults,
        )

    def close(self) -> None:
        self._pools = self._step = None
        self._forward = _closed
        if self._loaded:  # a model takes weights once, and holds them
            self._model, self._loaded = self._new_model(self._block_tokens), False

    # --- steps -------------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> _Step:
        """Raises StepFailed when interrupted: before the first op, or at a norm between two layers."""
        pools = self._pools
        if pools is None:
            raise StepFailed("the executor is closed")
        self._interrupted.clear()  # an interrupt is for the forward that is running, not for the next one
        self._step = None
        for op in plan.kv_ops:
            try:
                pools.apply(op)
            except (IndexError, ValueError) as error:
                raise Fatal(f"a KV operation can't be applied: {error}") from error
        wanted = wanted_positions(plan)
        if len(plan.tokens):
            first = pools.enter(plan.slot, plan.start)
            batch = make_batch(plan, wanted, first, self._block_tokens, history=self._history, keep=self._keep)
            with torch.inference_mode():
                logits: NDArray[np.float32] = self._forward(batch, pools.caches).numpy()
        else:
            logits = np.empty((0, self.model.vocab_size), np.float32)
        self._step = _Step(plan, wanted, logits)
        return self._step

    def sample(self, step: _Step, masks: MaskBatch | None) -> None:
        plan, wanted, logits = step.plan, step.wanted, step.logits
        # before sampling, which may change the rows in place
        spans = [(row, logits[a:b]) for row, a, b in wanted.spans]
        scored = [(row, rows) for row, rows in spans if plan.wants[row] & WANT_PROMPT_LOGPROBS]
        kept = [(row, rows) for row, rows in spans if plan.wants[row] & WANT_PROMPT_LOGITS]
        logprobs = prompt_logprobs(plan, scored) if scored else None
        whole = prompt_logits(kept) if kept else None
        if wanted.sampled is not None:
            logits = logits[wanted.sampled]
        result: StepResult = self._ops.sample.step(plan, logits, masks)
        result.prompt_logprobs = logprobs
        if whole is not None:
            result.arrays = {**result.arrays, "prompt_logits": whole}
        step.result = result

    def collect(self, step: _Step) -> StepResult:
        if step.result is None or step is not self._step:
            raise StepFailed("collect before sample, or of a step that is over")
        self._step = None
        return step.result

    def interrupt(self) -> None:
        self._interrupted.set()

    def describe(self) -> Mapping[str, str]:
        options = self._options
        described = {
            "compute": f"{options.compute}, weights {options.weights}, caches {options.cache}",
            "context": f"{self._context_tokens} tokens",
            "threads": str(options.threads or torch.get_num_threads()),
            **self._sizes.describe(),
        }
        if self._keep:
            described["replay"] = f"{options.replay}, the last {self._keep} prompt tokens"
        return described

    def bound(self) -> Seq[BoundOp]:
        return self._ops.bound


def _closed(*_: Any) -> Any:
    raise StepFailed("the executor is closed")


def _architecture(facts: ModelFacts, context: BuildContext) -> Any:
    """The factory of the model's architecture: ModelError HR-REFERENCE-04 where nobody can say."""
    if context.architecture is None:
        raise ModelError(
            "HR-REFERENCE-04", f"{facts.architecture} can't be looked up: this build knows no model plugins",
            "make the pipeline with headrace.pipeline.build",
        )  # fmt: skip
    return context.architecture(facts.architecture)


def _wrapped(ops: Ops, interrupted: threading.Event, compiled: bool) -> Ops:
    """The same ops, element-wise ones compiled if asked for; one that every layer calls raises StepFailed once
    `interrupted` is set."""
    kernels = {each.op: _kernel(ops, each.op) for each in ops.bound}
    if compiled:
        for name in COMPILED & kernels.keys():
            kernels[name] = torch.compile(kernels[name], dynamic=True)
    if WATCHED in kernels:
        real = kernels[WATCHED]

        @wraps(real)
        def watched(x: Any, weight: Any, eps: float) -> Any:
            if interrupted.is_set():
                raise StepFailed("interrupted")
            return real(x, weight, eps)

        kernels[WATCHED] = watched
    return Ops(kernels, ops.bound)


def _kernel(ops: Ops, name: str) -> Callable[..., Any]:
    group, _, verb = name.partition(".")
    kernel: Callable[..., Any] = getattr(getattr(ops, group), verb)
    return kernel
