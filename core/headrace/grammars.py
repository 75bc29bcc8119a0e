"""What the engine asks of a constraint engine, and the threads for it: grammars compile on a small pool, and masks are
filled on a helper thread when forward blocks. Whatever a matcher raises ends its own request."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from itertools import accumulate

import numpy as np

from headrace.contracts import ConstraintEngine
from headrace.errors import FAULTS, HeadraceError, RequestError
from headrace.scheduler import Rows
from headrace.types import WANT_ALL_POSITIONS, WANT_TOKEN, Grammar, MaskBatch, Sequence
from headrace.workers import Workers

log = logging.getLogger(__name__)


class Grammars:
    """Owned by the engine thread."""

    def __init__(self, constraints: ConstraintEngine, vocab_size: int) -> None:
        self._constraints = constraints
        self._compilers = Workers(2, "headrace-compile")
        self._masker = Workers(1, "headrace-mask")
        self._bits = np.zeros((0, -(-vocab_size // 32)), np.int32)
        self._count = np.zeros(1, np.int32)

    def compile(self, grammar: Grammar, seqs: list[Sequence]) -> None:
        """Start to compile for these sequences; it is given up when all of them have ended."""
        future = self._compilers.submit(partial(self._constraints.compile, grammar, partial(_all_ended, seqs)))
        for seq in seqs:
            seq.compiled, seq.status = future, "compiling"

    def start(self, seq: Sequence) -> bool:
        """Give seq a matcher of its compiled grammar. True: it is over, nothing but the empty text is allowed.
        HeadraceError: the grammar was refused."""
        try:
            seq.matcher = seq.compiled.result().start()
            return seq.matcher.done()
        except FAULTS as error:
            if isinstance(error, HeadraceError):
                raise
            what = f"the constraint engine failed: {error!r}"
            raise RequestError("HR-CONSTRAINT-02", what, "report it to the plugin's author") from error

    def close(self) -> None:
        """Drop what waits to compile; what compiles is given up, since its sequences have ended."""
        self._compilers.close()
        self._masker.close()
        try:
            self._constraints.close()
        except FAULTS as error:  # acceptable: nobody uses it any more
            log.warning("the constraint engine failed to close: %r", error)

    # --- masks -----------------------------------------------------------------------------------------------------

    def fill_aside(self, constrained: list[int], rows: Rows) -> Future[MaskBatch]:
        """`fill` on the helper thread. No matcher may be used until it is done."""
        return self._masker.submit(partial(self.fill, constrained, rows))

    def fill(self, constrained: list[int], rows: Rows) -> MaskBatch:
        """Mask rows for every sampled position of constrained rows. A matcher that raises sets its sequence's error."""
        need = len(constrained) + sum(rows.drafts)
        if len(self._bits) < need:
            self._bits = np.zeros((2 * need, self._bits.shape[1]), np.int32)
            self._count = np.arange(2 * need + 1, dtype=np.int32)
        bits, seqs, drafts = self._bits, rows.seqs, rows.drafts
        starts, used = [0] * (len(seqs) + 1), 0
        for r in constrained:
            seq, n_draft = seqs[r], drafts[r]
            assert seq.matcher is not None
            try:
                n = seq.matcher.fill_path(seq.draft[:n_draft] if n_draft else (), bits[used:])
                if n not in range(1, n_draft + 2):
                    raise ValueError(f"fill_path wrote {n} masks for {n_draft} drafts")
            except FAULTS as error:
                # the row is sampled without a mask and thrown away: the engine ends the request first
                seq.error = plugin_failure("constraint engine", error)
                bits[used] = -1
                n = 1
            used += n
            starts[r + 1] = n
        if used == len(seqs) == len(constrained):  # one each
            return MaskBatch(starts=self._count[: used + 1], bits=bits[:used])
        return MaskBatch(starts=np.array(list(accumulate(starts)), np.int32), bits=bits[:used])


def forced(seq: Sequence) -> list[int]:
    """Tokens that can follow seq's without a model step, since the grammar allows no others. A failing matcher sets
    seq.error.

    None where the model must see each token alone: for log-probabilities, and where bans might exclude what is forced.
    Nor before a prompt was read whose positions are reported."""
    if seq.matcher is None or seq.logprobs is not None or seq.extras is not None:
        return []
    if not seq.wants & WANT_TOKEN or seq.wants & WANT_ALL_POSITIONS:
        return []
    try:
        return [int(token) for token in seq.matcher.forced()]
    except FAULTS as error:
        seq.error = plugin_failure("constraint engine", error)
        return []


def verdict(seq: Sequence, eos_ids: frozenset[int]) -> Exception | None:
    """What its matcher finds wrong with a text that ended by itself; of one that a stop cut there is nothing to say."""
    if seq.matcher is None or (seq.stop_reason is not None and seq.stop_reason not in eos_ids):
        return None
    try:
        return seq.matcher.verdict()
    except FAULTS as error:
        return plugin_failure("constraint engine", error)


def nothing_allowed(seq: Sequence) -> RequestError:
    """A constrained sequence whose every token is excluded."""
    what = f"request {seq.request.id!r}: no token may follow its {seq.n_generated} generated ones"
    if seq.extras is None:
        why, help = "the vocabulary has none that the grammar allows", "the grammar asks for text that it can't spell"
    else:
        why = "logit_bias, bad_words or min_tokens exclude all that the grammar allows"
        help = "leave these out, or loosen the grammar"
    return RequestError("HR-CONSTRAINT-07", f"{what}: {why}", help)


def plugin_failure(what: str, error: BaseException) -> HeadraceError:
    """The error of a request that a plugin's part could not serve: its own, if it is one of ours."""
    if isinstance(error, HeadraceError):
        return error
    failure = RequestError("HR-STEP-03", f"the {what} failed: {error!r}", "report it to the plugin's author")
    failure.__cause__ = error
    return failure


def _all_ended(seqs: list[Sequence]) -> bool:
    return all(seq.finish_reason is not None for seq in seqs)
