"""Faults that users of other engines reported, restated for ours: where each one is tested.

With HEADRACE_CASES set, the list is checked against the case files, so that a new report does not go unnoticed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from engine_harness import Setup, drain, ngram, output, plain, request, run

from headrace import kvspace
from headrace.errors import RequestError
from headrace.types import SamplingParams

DRAFTS = "../plugins/constraints/test_with_drafts.py::"
CALLS = "../plugins/test_reported_calls.py::"
LATER = "needs a part that does not exist yet: "

REPORTS = {
    "prefix_cache-01": "test_adapters_are_refused_until_there_are_any",
    "prefix_cache-02": "test_scheduler.py::test_cold_warm_and_flushed_are_equal_and_the_cache_is_used",
    "prefix_cache-03": "test_scheduler.py::test_cold_warm_and_flushed_are_equal_and_the_cache_is_used",
    "prefix_cache-04": "test_scheduler.py::test_the_pool_balances_when_idle",
    "prefix_cache-05": LATER + "state checkpoints of recurrent models",
    "prefix_cache-06": "test_scheduler.py::test_turns_of_a_chat_find_all_of_the_last_turn",
    "determinism-01": "test_scheduler.py::test_company_does_not_change_a_request",
    "determinism-02": "test_company_of_forty_five",
    "determinism-03": "test_a_seed_is_honoured_under_speculation",
    "determinism-04": LATER + "an NPU backend; `config check` refuses the mode where a backend lacks it",
    "determinism-05": "test_many_copies_of_one_prompt_agree",
    "determinism-06": "test_logits_are_bit_equal_in_any_company",
    "scheduler-01": "test_scheduler.py::test_a_big_head_does_not_block_small_ones_and_still_runs",
    "scheduler-02": "test_scheduler.py::test_random_schedules_keep_every_invariant",
    "scheduler-03": "test_scheduler.py::test_preemption_does_not_redo_prompts_forever",
    "scheduler-04": "test_nothing_leaks_when_admission_fails_half_way",
    "scheduler-05": "test_scheduler.py::test_a_request_that_can_never_fit_is_refused_at_once",
    "scheduler-06": "test_scheduler.py::test_a_missing_block_preempts_one_sequence",
    "scheduler-07": "test_scheduler.py::test_thirty_requests_with_room_for_three",
    "stream_unicode_stop-01": "test_outputs.py::test_partial_stop_never_leaks",
    "stream_unicode_stop-02": "test_stop_strings_work_without_text",
    "stream_unicode_stop-03": "test_outputs.py::test_two_stops_repeat_no_text",
    "stream_unicode_stop-04": "test_outputs.py::test_broken_utf8_becomes_a_replacement",
    "stream_unicode_stop-05": "test_outputs.py::test_ending_inside_an_emoji",
    "stream_unicode_stop-06": "test_outputs.py::test_stop_across_tokens_and_characters",
    "stream_unicode_stop-07": "test_odd_stops",
    "structured_x_spec-01": DRAFTS + "test_thirty_threads_and_a_drafter_that_is_always_wrong",
    "structured_x_spec-02": DRAFTS + "test_drafts_behind_the_end",
    "structured_x_spec-03": DRAFTS + "test_the_end_of_reasoning_inside_a_window",
    "structured_x_spec-04": DRAFTS + "test_a_grammar_that_completes_inside_a_window",
    "structured_x_spec-05": DRAFTS + "test_compiles_that_time_out_leave_nothing",
    "structured_x_spec-06": DRAFTS + "test_a_draft_that_is_refused_again_and_again",
    "tool_calls-01": CALLS + "test_arguments_that_end_with_a_number_a_boolean_or_an_object",
    "tool_calls-02": CALLS + "test_arguments_that_end_with_a_number_a_boolean_or_an_object",
    "tool_calls-03": CALLS + "test_a_mark_without_a_call_is_content",
    "tool_calls-04": CALLS + "test_braces_in_arguments",
    "tool_calls-05": "test_chat_tools.py::test_calls_without_a_function_go_to_the_caller",
    "tool_calls-06": "test_chat_tools.py::test_a_call_that_is_cut_off_is_not_run",
    "tool_calls-07": "../plugins/test_tools_random_logits.py::test_many_tools",
    "tool_calls-08": "test_chat_tools.py::test_names_are_sent_once",
}


def test_every_report_of_the_case_file_is_answered() -> None:
    folder = os.environ.get("HEADRACE_CASES")
    if not folder:
        pytest.skip("HEADRACE_CASES names no folder of cases")
    text = (Path(folder) / "public_bugs.jsonl").read_text(encoding="utf-8")
    topics = "determinism|scheduler|stream_unicode_stop|prefix_cache|structured_x_spec|tool_calls"
    assert set(re.findall(rf'"id": "((?:{topics})-\d+)"', text)) == set(REPORTS)


def test_the_named_tests_exist() -> None:
    for place in REPORTS.values():
        if place.startswith(LATER):
            continue
        file, _, name = place.rpartition("::")
        source = (Path(__file__).parent / (file or Path(__file__).name)).read_text(encoding="utf-8")
        assert f"def {name}(" in source, place


def test_adapters_are_refused_until_there_are_any() -> None:
    """prefix_cache-01: no silent run of the base model. Adapters are part of the prefix key already."""
    with pytest.raises(RequestError, match="adapter 'a'"):
        Setup().engine().add(request("r", "x", adapter=("a", 1.0)))
    one, two = request("1", "x", adapter=("a", 1.0)), request("2", "x", adapter=("a", 0.5))
    assert kvspace.root_of(one) != kvspace.root_of(two)


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_company_of_forty_five(kv: str) -> None:
    """determinism-02"""
    me = request("me", "Name three primary colours.", SamplingParams(max_tokens=8, temperature=0))
    setup = Setup(kv=kv, n_slots=46, n_blocks=2000, options={"max_sequences": 46})
    others = [request(f"o{i}", f"{i} unrelated words " * 12, SamplingParams(max_tokens=4)) for i in range(45)]
    assert output(run(setup.engine(), [*others[:20], me, *others[20:]])["me"]) == plain(me)


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_logits_are_bit_equal_in_any_company(kv: str) -> None:
    """determinism-06: logprobs are a function of the logits, compared without tolerance."""
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=20, prompt_logprobs=20)
    seen = []
    for n in (1, 2, 3, 5, 8, 13):
        engine = Setup(kv=kv, n_slots=13, n_blocks=600).engine()
        found = run(engine, [request(f"r{i}", "the same prompt", params) for i in range(n)])
        seen += [(seqs[0].logprobs, seqs[0].prompt_logprobs) for seqs in found.values()]
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_many_copies_of_one_prompt_agree(kv: str) -> None:
    """determinism-05"""
    engine = Setup(kv=kv, n_slots=16, options={"max_sequences": 16}).engine()
    copies = [request(f"c{i}", "the same prompt", SamplingParams(max_tokens=10, temperature=0)) for i in range(64)]
    found = run(engine, copies)
    assert {tuple(output(seqs)) for seqs in found.values()} == {tuple(plain(copies[0]))}


def test_a_seed_is_honoured_under_speculation() -> None:
    """determinism-03"""
    params = SamplingParams(max_tokens=10, temperature=2.0, seed=42)
    engine = Setup(drafter=ngram()).engine()
    seen = {tuple(output(run(engine, [request(f"r{i}", "abcabcabcabc", params)])[f"r{i}"])) for i in range(20)}
    assert seen == {tuple(plain(request("r", "abcabcabcabc", params)))}
    other = SamplingParams(max_tokens=10, temperature=2.0, seed=43)
    assert tuple(output(run(engine, [request("o", "abcabcabcabc", other)])["o"])) not in seen


def test_nothing_leaks_when_admission_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """scheduler-04: every attempt to get blocks may be the one that finds none."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for failing in range(12):
        engine = Setup(n_blocks=40).engine()
        calls = iter(range(10**6))
        reserve = engine.kv.reserve

        def refuse(seq, upto, ops, calls=calls, reserve=reserve, failing=failing):  # type: ignore[no-untyped-def]
            admission = upto <= seq.n_prompt and seq.computed == 0
            return reserve(seq, upto, ops) and (admission or next(calls) != failing)

        monkeypatch.setattr(engine.kv, "reserve", refuse)
        engine.scheduler.kv = engine.kv
        reqs = [request(f"r{i}", f"prompt {i}", params) for i in range(3)]
        found = run(engine, reqs)
        assert all(output(found[req.id]) == plain(req) for req in reqs)
        engine.kv.check([])
        assert engine.kv.used_ratio() == 0


def test_stop_strings_work_without_text() -> None:
    """stream_unicode_stop-02"""
    free = plain(request("r", "count: ", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)))
    stop = bytes(free[7:9]).decode()
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=(stop,), logprobs=1)
    seq = run(Setup().engine(), [request("r", "count: ", params, want_text=False)])["r"][0]
    assert seq.finish_reason == "stop"
    assert output([seq]) == free[: bytes(free).index(stop.encode()) + 2]


def test_odd_stops() -> None:
    """stream_unicode_stop-07"""
    for stop in ([], None, ()):
        engine = Setup().engine()
        engine.add(request("r", "x", SamplingParams(max_tokens=3, stop=stop)))  # type: ignore[arg-type]
        drain(engine)
    for bad in ([""], "", ["x"] * 17):
        with pytest.raises(RequestError, match="HR-REQUEST-01"):
            SamplingParams(stop=bad)  # type: ignore[arg-type]
