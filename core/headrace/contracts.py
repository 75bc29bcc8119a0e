"""Contracts between core and plugins: what core calls, when, from which thread, and what may be raised.

Subclass the contract you implement. The class is checked when it is defined: a public method that core never calls
(a misspelt or renamed one) or a method whose parameters don't match raises TypeError at once, with did-you-mean.
Helpers start with an underscore.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.errors import HeadraceError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.ops import BoundOp
    from headrace.types import (
        Capabilities,
        DeviceInfo,
        DraftView,
        Grammar,
        KVLayout,
        KVOp,
        MaskBatch,
        ModelSpec,
        Proposal,
        RequestStats,
        Sequence,
        StepPlan,
        StepResult,
        StepStats,
    )


class Contract(ABC):  # noqa: B024 - its subclasses have the methods
    """Base of all contracts: checks subclasses when they are defined."""

    contract: ClassVar[type[Contract] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Contract in cls.__bases__:
            cls.contract = cls
        elif cls.contract is not None:
            _check_class(cls, cls.contract)


def _check_class(cls: type, contract: type) -> None:
    known = {name for name in dir(contract) if not name.startswith("_")}
    for name, value in vars(cls).items():
        if name.startswith("_") or not inspect.isroutine(value):
            continue
        if name not in known:
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__}.{name} is not part of {contract.__name__}, core never calls it: "
                f"{did_you_mean(name, known)}Helpers start with an underscore."
            )
        wanted = getattr(contract, name)
        if inspect.isroutine(wanted):
            problem = signature_problem(inspect.signature(wanted), inspect.signature(value))
            if problem:
                raise TypeError(
                    f"{cls.__module__}.{cls.__qualname__}.{name}{inspect.signature(value)} does not match "
                    f"{contract.__name__}.{name}{inspect.signature(wanted)}: {problem}"
                )


def signature_problem(wanted: inspect.Signature, got: inspect.Signature) -> str:
    """Why a call written for `wanted` would fail on `got`; empty when it works."""
    params = list(got.parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in params) and any(p.kind is p.VAR_KEYWORD for p in params):
        return ""
    for name in wanted.parameters:
        if name not in got.parameters:
            return f"parameter '{name}' is missing. {did_you_mean(name, got.parameters)}"
    for name, param in got.parameters.items():
        if name not in wanted.parameters and param.default is param.empty and param.kind not in (2, 4):
            return f"parameter '{name}' has no default and core does not pass it"
    shared = [name for name in got.parameters if name in wanted.parameters]
    if shared != list(wanted.parameters):
        return "parameters are in another order"
    for name, param in wanted.parameters.items():
        mine = got.parameters[name]
        if param.default is not param.empty and mine.default is mine.empty:
            return f"parameter '{name}' has no default"
        if mine.kind not in (param.kind, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            return f"parameter '{name}' is {mine.kind.description}"
    return ""


class Tokenizer(Contract):
    """Text to ids and back. Called from front-door and engine threads at once; must be thread-safe."""

    n_vocab: int
    bos_id: int | None
    eos_ids: frozenset[int]

    @abstractmethod
    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`. add_bos: put BOS first where the model wants one (never twice). parse_special: texts such as
        "<|im_end|>" become their special id, else they are plain text."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special token its name's bytes. Raises IndexError outside vocab."""

    @abstractmethod
    def is_special(self, token: int) -> bool:
        """Control tokens, hidden from text unless asked for."""


class Executor(Contract):
    """Runs steps on a device. Owned by the engine thread: every method but `interrupt` is called from there.

    Order: open, (forward, sample, collect)*, close. At most caps.overlap + 1 steps are between forward and collect. A
    step in which something was raised is over: the next call is a forward.
    After `Fatal` the engine calls close and open again.
    """

    caps: Capabilities
    """Valid after construction: hopeful about what only open() can tell, as `config check` refuses by it. Final after
    open()."""
    model: ModelSpec
    """Valid after open()."""
    tokenizer: Tokenizer
    """Valid after open()."""
    layout: KVLayout
    """Valid after open()."""

    @abstractmethod
    def open(self) -> None:
        """Load the model and allocate KV. May take minutes. Raises HeadraceError."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice and after a failed open."""

    @abstractmethod
    def forward(self, plan: StepPlan) -> Any:
        """Apply plan.kv_ops in order, start the rows, return a step handle. May block (caps.blocking_forward).

        Raises StepFailed: kv_ops were applied, but nothing else of the step counts, and the KV of its rows from `start`
        on is undefined. Raises Fatal when the device is lost, or kv_ops could not be applied."""

    @abstractmethod
    def sample(self, step: Any, masks: MaskBatch | None) -> None:
        """Sample every row with plan.sample: transforms and noise as `headrace.sampling` defines, verify drafts by
        match. masks is None when no row of the step is constrained."""

    @abstractmethod
    def collect(self, step: Any) -> StepResult:
        """Wait for the step and return what it produced. Raises StepFailed or Fatal."""

    def interrupt(self) -> None:
        """Called from any thread: make a running forward end soon by raising StepFailed. Default: not supported."""

    def step_cost(self) -> Seq[tuple[int, float]]:
        """Increasing (tokens in the step, milliseconds), measured; empty = unknown."""
        return ()

    def describe(self) -> Mapping[str, str]:
        """Facts for `config explain`: threads, KV type, kernels, ..."""
        return {}

    def bound(self) -> Seq[BoundOp]:
        """Which kernel serves which op, for `config explain`; valid after construction."""
        return ()


class KVSpace(Contract):
    """Who owns which KV: core's bookkeeping for one executor. Engine thread only; never blocks.

    `ops` is the list of operations that the next plan will carry; methods append to it. A sequence holds KV from a
    successful `admit` until `release`.
    """

    @abstractmethod
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that can run, alone."""

    @abstractmethod
    def admit(self, seq: Sequence, ops: list[KVOp], use_prefix: bool = True) -> bool:
        """Give seq a slot and room for all its tokens, reusing a cached prefix: sets seq.slot and seq.computed
        (at most len(tokens) - 1), the tokens that need not be computed. False: no room now; nothing changed."""

    @abstractmethod
    def reserve(self, seq: Sequence, upto: int, ops: list[KVOp]) -> bool:
        """Make sure positions [0, upto) can be written. False: no room, nothing changed."""

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Where a part of seq's tokens that would end at `end` had better end, in (seq.computed, end]: a place at which
        something can be kept for later prefixes. Default: `end`."""
        return end

    @abstractmethod
    def commit(self, seq: Sequence, keep: int, ops: list[KVOp]) -> None:
        """The step wrote KV up to somewhere; positions [0, keep) are valid and belong to seq.tokens. Drops the rest
        (rejected drafts). Full blocks may now be shared."""

    @abstractmethod
    def rollback(self, seq: Sequence, ops: list[KVOp]) -> None:
        """A step failed: only [0, seq.computed) is trusted. May lower seq.computed (to 0 where trims are refused, to
        where rings can be had again)."""

    @abstractmethod
    def release(self, seq: Sequence, ops: list[KVOp], reuse: bool = True) -> None:
        """seq stops (finished or preempted); sets seq.slot = -1. reuse: its content may serve later prefixes."""

    @abstractmethod
    def reset(self, ops: list[KVOp]) -> None:
        """Forget everything; nobody holds anything. ops empty the executor too, whatever it held before."""

    @abstractmethod
    def table(self, slots: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Block table of the given slots for the plan, [R, B] int32, or None."""

    def write_from(self, slots: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """For the plan: [R] int32, paged writes below this position are suppressed, or None: write all."""
        return None

    def restorable(self, seq: Sequence) -> int:
        """Where `admit` could let seq start now, with all of its state exact; 0: nowhere, or not known."""
        return 0

    @abstractmethod
    def used_ratio(self) -> float:
        """Share of KV held by running sequences, 0..1."""

    @abstractmethod
    def check(self, running: Iterable[Sequence]) -> None:
        """Assert every invariant, between steps (tests call it after each)."""


class Drafter(Contract):
    """Proposes tokens for verification. Engine thread, between steps; must not block. Losing it loses only speed."""

    max_draft: int = 4
    """Most tokens that one proposal may hold; the engine asks for fewer near the end of a sequence."""

    @abstractmethod
    def propose(self, views: Seq[DraftView]) -> Seq[Proposal]:
        """One proposal per view, each of at most view.max_draft tokens (more are cut off)."""

    def observe(self, index: int, proposed: int, accepted: int) -> None:
        """How many of the last proposal's tokens were accepted."""

    def forget(self, index: int) -> None:
        """The sequence at this index ended; the index will be used again."""


class ConstraintEngine(Contract):
    """Compiles grammars. `compile` runs on a worker thread, several at once; it must not hold global locks for long."""

    @abstractmethod
    def compile(self, grammar: Grammar, cancelled: Callable[[], bool] = lambda: False) -> Compiled:
        """Raises HeadraceError for a grammar it can't enforce in full; never ignores a part of it.

        Must end by itself in a bounded time. cancelled: nobody waits for the result any more; work that takes long asks
        now and then, and raises RequestError HR-CONSTRAINT-06 to free the thread."""

    def close(self) -> None:
        """The engine stops: end child processes. Safe to call twice, from any thread. A later `compile` works."""


class Compiled(Contract):
    """A compiled grammar: immutable and shared between requests."""

    @abstractmethod
    def start(self) -> Matcher:
        """A fresh matcher at the start state. Engine thread; must be cheap."""

    def size_bytes(self) -> int:
        """Memory held, for the compile cache."""
        return 0


class Matcher(Contract):
    """State of one constrained sequence. Engine thread, or a helper thread while forward runs; never both at once."""

    @abstractmethod
    def fill(self, bits: NDArray[np.int32]) -> None:
        """Write the mask of the next token: [ceil(vocab / 32)] int32, bit 1 = allowed. EOS is allowed iff the text so
        far is complete. Not called once done() is true."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token; False (state unchanged) if the grammar does not allow it."""

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Undo the last n accepted tokens."""

    @abstractmethod
    def done(self) -> bool:
        """Nothing but the end can follow; the sequence finishes with "stop"."""

    def forced(self) -> Seq[int]:
        """Tokens that must come next, in order; empty where there is a choice, or at the end. They are appended without
        a model step. `fill` at such a state allows the first of them alone, so output does not depend on whether it is
        used. The state is as before when it returns."""
        return ()

    def verdict(self) -> HeadraceError | None:
        """Called once when the sequence stops by itself: what is wrong with the finished text beyond what masks can
        enforce, None = nothing. The request then ends with this error, and keeps its text."""
        return None

    def fill_path(self, drafts: Seq[int], bits: NDArray[np.int32]) -> int:
        """Masks for verifying `drafts`: row j allows what may follow drafts[:j]. bits: [1 + len(drafts), W].

        Returns the number of rows written; it stops early after a draft that the grammar refuses or completes. The
        state is as before when it returns. The default accepts, fills and rolls back.
        """
        if not drafts:
            if self.done():
                return 0
            self.fill(bits[0])
            return 1
        n_rows = n_accepted = 0
        while not self.done():
            self.fill(bits[n_rows])
            n_rows += 1
            if n_accepted == len(drafts) or not self.accept(drafts[n_accepted]):
                break
            n_accepted += 1
        self.rollback(n_accepted)
        return n_rows


class Store(Contract):
    """Keeps KV bytes beyond the device. Called from a store thread, never inside a step; safe to lose."""

    @abstractmethod
    def probe(self, keys: Seq[bytes]) -> int:
        """Length of the run of leading keys that are present now."""

    @abstractmethod
    def get(self, keys: Seq[bytes]) -> Seq[bytes | None]:
        """Values in order; None for those missing, expired or corrupt."""

    @abstractmethod
    def put(self, items: Seq[tuple[bytes, bytes]], ttl_s: float) -> int:
        """Store (key, value) pairs; returns how many were kept. May drop any."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release. Safe to call twice."""


class Strategy(Contract):
    """Splits work over ranks: pure functions of plans and statistics, engine thread."""

    @abstractmethod
    def mesh(self, devices: Seq[DeviceInfo]) -> Seq[Seq[int]]:
        """Groups of device indices along this axis."""

    @abstractmethod
    def split(self, plan: StepPlan) -> Seq[NDArray[np.int32]]:
        """Row indices per rank; each row exactly once, ranks without rows get an empty array."""

    def after_step(self, stats: StepStats) -> Mapping[str, Any] | None:
        """A rebalance order (placement), or None."""
        return None


class Observer(Contract):
    """Sees steps and requests, for metrics and traces. Engine thread: must be quick. One that raises is removed with
    a logged warning; requests are not touched."""

    def on_step(self, stats: StepStats) -> None:
        """After each step."""

    def on_finish(self, stats: RequestStats) -> None:
        """After each finished sequence."""

    def close(self) -> None:
        """The engine stops."""


CONTRACTS: Mapping[str, type[Contract]] = {
    cls.__name__: cls
    for cls in (Executor, KVSpace, Drafter, ConstraintEngine, Compiled, Matcher, Store, Strategy, Observer, Tokenizer)
}
