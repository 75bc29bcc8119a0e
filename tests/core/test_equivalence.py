"""The spine: whatever the engine does to be fast, the tokens are those of plain one-by-one decoding.

KV kind x drafter x chunk size x preemption x constraint x forced tokens x temperature x batch mates, for rings that are
kept and rings that are rebuilt too, and then mutants: small faults put into the engine on purpose, each of which the
same comparison must catch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from engine_harness import MODEL, Setup, ngram, oracle, output, plain, request, run

from headrace import engine as engine_module
from headrace import kvspace, planning, sampling
from headrace.contracts import Matcher
from headrace.errors import StepFailed
from headrace.scheduler import Rows
from headrace.testing.toy_parts import _ToyMatcher
from headrace.types import Begin, Grammar, Request, Restore, SamplingParams, Sequence, Snapshot, StepPlan

CHARSET = Grammar("charset", "abcdefg{3,14}")
RINGS = {
    "kept": {"window": 7, "slack": 4, "n_snapshots": 32, "history_tokens": 3},
    "kept, few": {"window": 5, "slack": 4, "n_snapshots": 2, "rerun_tokens": 6},
    "rebuilt": {"window": 7, "slack": 5, "replay_tokens": 6, "history_tokens": 2},
    "rebuilt, rerun": {"window": 4, "slack": 4, "replay_tokens": 9, "rerun_tokens": 5},
    "lost": {"window": 6, "slack": 4},
}
"""Ways to have windows beside the blocks. Blocks of 8 tokens: more than the slack, so that chunks must be cut."""
LONG_CHOICE = Grammar("choice", '["abcabcabcabcabcabc", "abcabcabcabx", "defdefdef"]')
FORCED = Grammar("choice", '["it was one and the same thing", "it was another one in the end", "it was"]')
"""Begins with a text that is forced, goes on with a choice, and then is forced to the end."""


@cache
def requests_for(temperature: float, constrained: bool, mates: int) -> tuple[Request, ...]:
    """A subject and its batch mates, some with a shared prefix, and two whose prompts hold the same block of tokens
    after a different first block."""
    grammar = CHARSET if constrained else None
    params = SamplingParams(max_tokens=14, temperature=temperature, top_p=0.95, constraint=grammar)
    subject = request("subject", "once upon a time there was", params)
    others = [
        request("same-prefix", "once upon a time there is", params),
        request("block-1", "AAAAcommon block here", params),
        request("block-2", "BBBBcommon block here", params),
        request("short", "x", params),
        request("seeded", "once upon a time there was", SamplingParams(max_tokens=9, temperature=1.0, seed=7)),
        request("choice", "pick: ", SamplingParams(max_tokens=30, temperature=temperature, constraint=LONG_CHOICE)),
        request("forced", "what? ", SamplingParams(max_tokens=40, temperature=temperature, constraint=FORCED)),
        request(
            "long", "the quick brown fox jumps over the lazy dog " * 3, SamplingParams(max_tokens=6, temperature=0)
        ),
    ]
    return (subject, *others[:mates])


@cache
def reference(temperature: float, constrained: bool, mates: int) -> dict[str, list[int]]:
    return {req.id: plain(req) for req in requests_for(temperature, constrained, mates)}


def mismatches(setup: Setup, temperature: float, constrained: bool, mates: int, preempt: bool, draft: str) -> list[str]:
    """Ids whose tokens differ from plain decoding."""
    requests, wanted = requests_for(temperature, constrained, mates), reference(temperature, constrained, mates)
    setup.drafter = {"none": None, "ngram": ngram(), "oracle": oracle(wanted, requests)}[draft]
    engine = setup.engine()
    found = run(engine, requests, preempt_every=5 if preempt else 0)
    assert not engine.n_failed_steps, "the executor refused a plan, and the engine only healed it"
    if draft == "oracle" and setup.chunk > 1:
        assert engine.n_drafted
    return [id for id, seqs in found.items() if seqs[0].error or output(seqs) != wanted[id]]


MATRIX = list(
    itertools.product(
        ("paged", "slots"), ("none", "ngram", "oracle"), (1, 5, 64), (False, True), ("no", "masked", "jumps"),
        (0.0, 0.8), (0, 8)
    )
)  # fmt: skip
"""... x unconstrained | every token through the model | forced ones appended x temperature x batch mates."""


@pytest.mark.parametrize(("kv", "draft"), list(itertools.product(("paged", "slots"), ("none", "ngram", "oracle"))))
def test_tokens_are_those_of_plain_decoding(kv: str, draft: str) -> None:
    cases = [case[2:] for case in MATRIX if case[:2] == (kv, draft)]
    assert len(cases) == 72
    for chunk, preempt, constraint, temperature, mates in cases:
        setup = Setup(kv=kv, chunk=chunk, n_slots=3, jumps=constraint != "masked")
        wrong = mismatches(setup, temperature, constraint != "no", mates, preempt, draft)
        assert not wrong, (kv, draft, chunk, preempt, constraint, temperature, mates, wrong)


@pytest.mark.parametrize(("name", "draft"), list(itertools.product(RINGS, ("none", "ngram", "oracle"))))
def test_tokens_with_rings_are_those_of_plain_decoding(name: str, draft: str) -> None:
    for chunk, preempt, constrained, mates in itertools.product((1, 5, 64), (False, True), (False, True), (0, 8)):
        setup = Setup(rings=RINGS[name], block_tokens=8, n_blocks=128, chunk=chunk)
        wrong = mismatches(setup, 0.8, constrained, mates, preempt, draft)
        assert not wrong, (name, draft, chunk, preempt, constrained, mates, wrong)


TEXT = "a preface of some length that both have, and then more"


def turns(name: str, n: int, params: SamplingParams) -> dict[str, list[Sequence]]:
    """A prompt of n tokens, then two at once that begin with it."""
    engine = Setup(rings=RINGS[name], block_tokens=8, n_blocks=128).engine()
    first, second, third = (
        request(id, TEXT[:n] + more, params) for id, more in zip("abc", ("", " else", "!"), strict=True)
    )
    found = run(engine, [first]) | run(engine, [second, third])
    for req in (first, second, third):
        got = [output(found[req.id], i) for i in range(params.n)]
        assert got == [plain(req, sample_index=i) for i in range(params.n)], req.id
    assert not engine.n_failed_steps
    return found


@pytest.mark.parametrize(
    ("name", "cached"), [("kept", 48), ("kept, few", 48), ("rebuilt", 42), ("rebuilt, rerun", 39), ("lost", 0)]
)
def test_a_prefix_hit_saves_what_need_not_run(name: str, cached: int) -> None:
    found = turns(name, 50, SamplingParams(max_tokens=10, temperature=0.8))
    assert found["a"][0].cached == 0
    assert found["b"][0].cached == cached


@pytest.mark.parametrize("name", RINGS)
def test_turns_of_any_length(name: str) -> None:
    for n in range(38, 50):
        turns(name, n, SamplingParams(max_tokens=6, temperature=0.8))


@pytest.mark.parametrize("name", RINGS)
def test_samples_share_a_prompt_with_rings(name: str) -> None:
    found = turns(name, 49, SamplingParams(max_tokens=9, temperature=1.0, n=3, ignore_eos=True))
    assert all((seq.cached > 0) == (name != "lost") for seq in found["a"][1:])


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("fail_at", ["forward", "sample", "collect"])
def test_failed_steps_leave_no_trace_in_rings(name: str, fail_at: str) -> None:
    """Every third step (at first) fails after it wrote garbage over what came before its rows."""
    requests, wanted = requests_for(0.8, False, 8), reference(0.8, False, 8)
    n_steps = itertools.count(1)

    def fail(plan: StepPlan) -> StepFailed | None:
        n = next(n_steps)
        return StepFailed("every third") if n % 3 == 0 and n < 40 else None

    setup = Setup(rings=RINGS[name], block_tokens=8, chunk=17, faults={"fail": fail, "fail_at": fail_at})
    setup.drafter = oracle(wanted, requests)
    engine = setup.engine()
    real = engine._failed

    def interrupted(error: BaseException, rows: Rows) -> None:  # which blames nobody
        assert isinstance(error, StepFailed), error
        engine._interrupted = True
        real(error, rows)

    engine._failed = interrupted  # type: ignore[method-assign]
    found = run(engine, requests)
    assert engine.n_failed_steps > 3
    assert {id: output(seqs) for id, seqs in found.items()} == wanted


@pytest.mark.parametrize("name", RINGS)
def test_a_tight_pool_with_rings(name: str) -> None:
    requests, wanted = requests_for(0.8, False, 8), reference(0.8, False, 8)
    engine = Setup(rings=RINGS[name], n_blocks=19, block_tokens=8, chunk=16).engine()
    found = run(engine, requests)
    assert engine.scheduler.n_preemptions > 0
    assert not engine.n_failed_steps
    assert {id: output(seqs) for id, seqs in found.items()} == wanted


def test_drafts_save_steps() -> None:
    wanted, requests = reference(0.8, False, 0), requests_for(0.8, False, 0)
    steps = {}
    for name, drafter in (("none", None), ("oracle", oracle(wanted, requests, p=0.9))):
        engine = Setup(drafter=drafter).engine()
        run(engine, requests)
        steps[name] = engine.n_steps
    assert steps["oracle"] < 0.6 * steps["none"]


def test_a_tight_pool_preempts_and_changes_nothing() -> None:
    requests, wanted = requests_for(0.8, False, 8), reference(0.8, False, 8)
    setup = Setup(n_blocks=44, block_tokens=4, prefix_cache=False)
    engine = setup.engine()
    found = run(engine, requests)
    assert engine.scheduler.n_preemptions > 0
    assert {id: output(seqs) for id, seqs in found.items()} == wanted


def test_slots_that_refuse_trims() -> None:
    """Recurrent memory: no partial trim, so no drafts, and a prefix counts only when it is the slot's whole content."""
    for preempt in (False, True):
        setup = Setup(kv="slots", partial_trim=False, n_slots=3)
        requests, wanted = requests_for(0.8, True, 8), reference(0.8, True, 8)
        found = run(setup.engine(), requests, preempt_every=4 if preempt else 0)
        assert {id: output(seqs) for id, seqs in found.items()} == wanted


def test_samples_of_one_request_differ_and_repeat() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=4, ignore_eos=True)
    req = request("n", "tell me something about the sea", params)
    wanted = [plain(req, sample_index=i) for i in range(4)]
    assert len({tuple(tokens) for tokens in wanted}) == 4
    for kv in ("paged", "slots"):
        for draft in (None, ngram()):
            engine = Setup(kv=kv, drafter=draft).engine()
            seqs = run(engine, [req])["n"]
            assert [output(seqs, i) for i in range(4)] == wanted
            assert seqs[1].cached > 0, "later samples share the prompt's KV"


# --- mutants ---------------------------------------------------------------------------------------------------------


class _Tangled(kvspace.PagedSpace):
    """Trusts a block's tokens without what came before them."""

    def _proven(self, block: int, parent: bytes, tokens: list[int], root: kvspace.Root) -> bool:
        proof = self._proof[block]
        return proof is not None and proof[1:] == (tokens, root)


def _mutant_no_trim(patch: pytest.MonkeyPatch) -> None:
    real = kvspace.SlotSpace.commit

    def commit(self: kvspace.SlotSpace, seq: Sequence, keep: int, ops: list) -> None:
        real(self, seq, keep, [])

    patch.setattr(kvspace.SlotSpace, "commit", commit)


def _mutant_no_trim_on_admit(patch: pytest.MonkeyPatch) -> None:
    real = kvspace.SlotSpace.admit

    def admit(self: kvspace.SlotSpace, seq: Sequence, ops: list, use_prefix: bool = True) -> bool:
        return real(self, seq, [], use_prefix)

    patch.setattr(kvspace.SlotSpace, "admit", admit)


def _mutant_noise_by_row(patch: pytest.MonkeyPatch) -> None:
    """The noise is keyed by where the row stands in the batch instead of where the token stands in the text."""
    real = sampling.sample_step

    def sample_step(plan, logits, masks):  # type: ignore[no-untyped-def]
        kept = plan.start
        plan.start = (np.arange(len(plan.start)) - plan.length).astype(np.int32)
        try:
            return real(plan, logits, masks)
        finally:
            plan.start = kept

    patch.setattr(sampling, "sample_step", sample_step)


def _mutant_matcher_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    def fill_path(self: Matcher, drafts: list[int], bits: np.ndarray) -> int:
        n = 0
        for j in range(len(drafts) + 1):
            if self.done():
                break
            self.fill(bits[j])
            n += 1
            if j == len(drafts) or not self.accept(drafts[j]):
                break
        return n

    patch.setattr(Matcher, "fill_path", fill_path)


def _mutant_keeps_rejected_kv(patch: pytest.MonkeyPatch) -> None:
    """Positions of rejected drafts count as computed."""
    for space in (kvspace.PagedSpace, kvspace.SlotSpace):
        reserve, commit = space.reserve, space.commit

        def remember(self, seq, upto, ops, reserve=reserve):  # type: ignore[no-untyped-def]
            self.__dict__.setdefault("upto", {})[seq.slot] = upto
            return reserve(self, seq, upto, ops)

        def keep_rejected(self, seq, keep, ops, commit=commit):  # type: ignore[no-untyped-def]
            commit(self, seq, keep, ops)
            seq.computed = self.upto[seq.slot]

        patch.setattr(space, "reserve", remember)
        patch.setattr(space, "commit", keep_rejected)


def _mutant_hash_not_chained(patch: pytest.MonkeyPatch) -> None:
    chained = kvspace._chained
    patch.setattr(kvspace, "_chained", lambda parent, tokens: chained(b"", tokens))
    patch.setattr(kvspace.PagedSpace, "_proven", _Tangled._proven)


def _without(*kinds: type) -> Callable[[pytest.MonkeyPatch], None]:
    """Operations of these kinds get lost on their way into the plan."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        real = engine_module.build_plan

        def build_plan(step, rows, table, ops, kv, **more):  # type: ignore[no-untyped-def]
            return real(step, rows, table, tuple(op for op in ops if not isinstance(op, kinds)), kv, **more)

        patch.setattr(engine_module, "build_plan", build_plan)

    return mutate


def _mutant_late_snapshots(patch: pytest.MonkeyPatch) -> None:
    """Snapshots are taken however much was written since, and no chunk ends early for them."""
    patch.setattr(kvspace.PagedSpace, "chunk_end", lambda self, seq, end: end)
    real = kvspace.PagedSpace._passes

    def passes(self: kvspace.PagedSpace, seq: Sequence, keep: int, ops: list) -> None:
        high, self._high[seq.slot] = self._high[seq.slot], keep - keep % self.block_tokens
        real(self, seq, keep, ops)
        self._high[seq.slot] = high

    patch.setattr(kvspace.PagedSpace, "_passes", passes)


def _mutant_snapshot_of_another_block(patch: pytest.MonkeyPatch) -> None:
    real = kvspace.PagedSpace._indexed
    patch.setattr(kvspace.PagedSpace, "_indexed", lambda self, seq, n: real(self, seq, max(1, n - 1)))


def _mutant_rings_survive_failures(patch: pytest.MonkeyPatch) -> None:
    def rollback(self: kvspace.PagedSpace, seq: Sequence, ops: list) -> None:
        self._high[seq.slot] = seq.computed

    patch.setattr(kvspace.PagedSpace, "rollback", rollback)


def _mutant_no_replay(patch: pytest.MonkeyPatch) -> None:
    real = kvspace.PagedSpace._begin

    def begin(self: kvspace.PagedSpace, row: int, start: int, valid: int, block: int | None, ops: list) -> None:
        real(self, row, start, valid, block, ops)
        self._skip = valid - start

    patch.setattr(kvspace.PagedSpace, "_begin", begin)
    admit = kvspace.PagedSpace.admit

    def skipping(self: kvspace.PagedSpace, seq: Sequence, ops: list, use_prefix: bool = True) -> bool:
        admitted = admit(self, seq, ops, use_prefix)
        if admitted:
            seq.computed += self._skip
        return admitted

    patch.setattr(kvspace.PagedSpace, "admit", skipping)


def _mutant_rerun_counts_from_the_end(patch: pytest.MonkeyPatch) -> None:
    """The end of all tokens must run again instead of the prompt's."""
    patch.setattr(
        kvspace.PagedSpace, "_limit", lambda self, seq: min(len(seq.tokens) - 1, len(seq.tokens) - self.rerun_tokens)
    )


RING_MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no restore": ("kept", _without(Restore)),
    "no begin": ("rebuilt", _without(Begin)),
    "no snapshot": ("kept", _without(Snapshot)),
    "late snapshots": ("kept", _mutant_late_snapshots),
    "snapshot of another block": ("kept", _mutant_snapshot_of_another_block),
    "write_from ignored": (
        "rebuilt",
        lambda patch: patch.setattr(kvspace.PagedSpace, "write_from", lambda self, slots: None),
    ),
    "no replay": ("rebuilt", _mutant_no_replay),
    "rerun counts from the end": ("kept, few", _mutant_rerun_counts_from_the_end),
    "wrong history": (
        "kept",
        lambda patch: patch.setattr(planning, "tokens_before", lambda seqs, n: np.full((len(seqs), n), -1, np.int32)),
    ),
}


def ring_cases(name: str) -> None:
    """The part of the cases above that must kill each mutant."""
    test_turns_of_any_length(name)
    for draft, chunk in itertools.product(("none", "oracle"), (5, 64)):
        setup = Setup(rings=RINGS[name], block_tokens=8, n_blocks=128, chunk=chunk)
        assert not mismatches(setup, 0.8, False, 8, True, draft)


@pytest.mark.parametrize("name", RING_MUTANTS)
def test_the_matrix_kills_mutants_of_rings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference(0.8, False, 8)  # from healthy code
    rings, mutate = RING_MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        ring_cases(rings)


def test_the_failures_kill_a_mutant_of_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    reference(0.8, False, 8)
    _mutant_rings_survive_failures(monkeypatch)
    with pytest.raises(AssertionError):
        test_failed_steps_leave_no_trace_in_rings("kept", "collect")


def _mutant_forced_tokens_not_accepted(patch: pytest.MonkeyPatch) -> None:
    """The matcher does not hear of the tokens that it forced."""
    real = engine_module.Engine._jump

    def jump(self: engine_module.Engine, seq: Sequence) -> object:
        n_before, matcher = len(seq.tokens), seq.matcher
        reason = real(self, seq)
        if matcher is not None and not matcher.done():
            matcher.rollback(len(seq.tokens) - n_before)
        return reason

    patch.setattr(engine_module.Engine, "_jump", jump)


def _mutant_forced_tokens_twice(patch: pytest.MonkeyPatch) -> None:
    real = engine_module.forced

    def forced(seq: Sequence) -> list[int]:
        tokens = real(seq)
        seq.tokens += tokens
        return tokens

    patch.setattr(engine_module, "forced", forced)


def _mutant_forced_tokens_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    real = engine_module.Engine._jump

    def jump(self: engine_module.Engine, seq: Sequence) -> object:
        reason = real(self, seq)
        if seq.status == "running":
            seq.computed = max(seq.computed, len(seq.tokens) - 1)
        return reason

    patch.setattr(engine_module.Engine, "_jump", jump)


def _mutant_forced_tokens_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """After a rollback, what was forced at the later state still is."""
    real = _ToyMatcher.rollback

    def rollback(self: _ToyMatcher, n: int) -> None:
        queue = self._states[-1][1]
        real(self, n)
        if n:
            self._states[-1] = (self._states[-1][0], queue)

    patch.setattr(_ToyMatcher, "rollback", rollback)


MUTANTS = {
    "no trim": _mutant_no_trim,
    "no trim on admit": _mutant_no_trim_on_admit,
    "noise by row": _mutant_noise_by_row,
    "matcher not rolled back": _mutant_matcher_not_rolled_back,
    "commit keeps rejected KV": _mutant_keeps_rejected_kv,
    "hash not chained": _mutant_hash_not_chained,
    "forced tokens not accepted": _mutant_forced_tokens_not_accepted,
    "forced tokens twice": _mutant_forced_tokens_twice,
    "forced tokens count as computed": _mutant_forced_tokens_count_as_computed,
    "forced tokens not rolled back": _mutant_forced_tokens_not_rolled_back,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_matrix_kills_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constrained in (False, True):
        reference(0.8, constrained, 8)  # from healthy code
    MUTANTS[name](monkeypatch)
    killed = False
    for kv, draft, constrained in itertools.product(("paged", "slots"), ("none", "oracle"), (False, True)):
        try:
            killed = killed or bool(mismatches(Setup(kv=kv, chunk=5, n_slots=3), 0.8, constrained, 8, True, draft))
        except (AssertionError, IndexError):
            killed = True
    assert killed, f"the suite does not notice: {name}"


def test_equal_block_after_another_prefix() -> None:
    """B,X must not be served from A,X: the block tokens of X are equal, what came before them is not."""
    params = SamplingParams(max_tokens=8, temperature=0)
    prompts = {"AX": "AAAAsame block!!", "BZ": "BBBBother block!", "BX": "BBBBsame block!!"}
    engine = Setup(block_tokens=4).engine()
    for id, prompt in prompts.items():
        req = request(id, prompt, params)
        assert output(run(engine, [req])[id]) == plain(req)


@pytest.mark.parametrize("rings", ["none", *RINGS])
def test_a_crafted_collision_is_refused(monkeypatch: pytest.MonkeyPatch, rings: str) -> None:
    """With a hash that collides on everything, equality alone keeps prefixes apart."""
    requests, wanted = requests_for(0.8, False, 8), reference(0.8, False, 8)
    monkeypatch.setattr(kvspace, "_chained", lambda parent, tokens: bytes(32))
    engine = Setup(rings=RINGS.get(rings, {})).engine()
    for req in requests:
        assert output(run(engine, [req])[req.id]) == wanted[req.id]


def test_prompts_are_the_toy_models_own() -> None:
    assert MODEL.generate(list(b"x"), 3) == plain(
        request("x", "x", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    )
