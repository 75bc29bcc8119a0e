"""Published faults of other engines that need no server: where each one is tested, and the one that lies between parts.

With HEADRACE_CASES set, the list is checked against the case file, so that a new report does not go unnoticed.
"""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from headrace import Chat
from headrace.llm import LLM
from headrace_plugins.dialects.formats import TemplateFormat
from headrace_plugins.templates import ChatTemplate

LATER = "needs a part that does not exist yet: "
TESTS = Path(__file__).resolve().parents[1]

REPORTS = {
    1: "core/test_layout.py::test_tree_keeps",  # the rule nothing_unsafe: no pickle
    2: LATER + "a server",
    3: LATER + "a store with a network interface",
    4: LATER + "a server",
    5: "plugins/test_templates.py::test_hostile_template",
    6: "core/test_security_reports.py::test_a_slow_template_holds_nobody_else_up",
    7: "plugins/test_templates.py::test_template_variables",
    8: "plugins/test_run_grammars.py::test_hostile_grammars_end_their_request_alone",
    9: "plugins/test_run_grammars.py::test_hostile_grammars_end_their_request_alone",
    10: "plugins/test_tools_random_logits.py::test_a_tool_whose_schema_can_not_be_read",
    11: "plugins/constraints/test_hostile_grammars.py::test_grammars_without_end_stay_within_the_caches_memory",
    12: "plugins/constraints/test_hostile_grammars.py::test_refused",
    13: "plugins/constraints/test_with_drafts.py::test_empty_grammars",
    14: "core/test_scheduler.py::test_salts_keep_tenants_apart",
    15: "core/test_equivalence.py::test_a_crafted_collision_is_refused",
    16: "core/test_scheduler.py::test_salts_keep_tenants_apart",
    17: LATER + "media",
    18: LATER + "a server",
    19: LATER + "a server",
    20: "core/test_llm.py::test_integers_out_of_range_name_the_field",
    21: "core/test_llm.py::test_logprob_and_bias_bounds",
    22: "core/test_chat.py::test_special_names_of_users_are_text",
    23: "backends/gguf/test_cases.py::test_hostile_files_from_outside",
    24: "backends/gguf/test_ggufcheck.py::test_hostile_sizes_cost_neither_memory_nor_time",
    25: LATER + "a server",
    26: "core/test_security_reports.py::test_streams_closed_after_their_first_chunk_leave_nothing",
    27: LATER + "a server",
}


def test_every_report_of_the_case_file_is_answered() -> None:
    folder = os.environ.get("HEADRACE_CASES")
    if not folder:
        pytest.skip("HEADRACE_CASES names no folder of cases")
    text = (Path(folder) / "security.jsonl").read_text(encoding="utf-8")
    assert {int(number) for number in re.findall(r'^\{"n": (\d+)', text, re.MULTILINE)} == set(REPORTS)


def test_the_named_tests_exist() -> None:
    for place in REPORTS.values():
        if not place.startswith(LATER):
            file, _, name = place.partition("::")
            assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), place


def test_a_slow_template_holds_nobody_else_up() -> None:
    """6: that it ends, and is bounded, is in plugins/test_templates.py."""
    begun, go = threading.Event(), threading.Event()

    def now() -> datetime:
        begun.set()
        assert go.wait(60)
        return datetime(2026, 1, 1)

    with LLM("toy://vocab=300", engine={"max_sequences": 2}) as llm, ThreadPoolExecutor(1) as pool:
        chat = Chat(llm, template="{{ messages[0].content }}")
        template = ChatTemplate("{{ messages[0].content }}{{ strftime_now('%Y') }}", now=now)
        chat._format = TemplateFormat(template, llm.tokenizer)
        slow = pool.submit(chat.ask, "hello", {"max_tokens": 3})
        try:
            assert begun.wait(60)
            assert llm.generate("hello", {"max_tokens": 6}).usage.completion_tokens == 6
            assert Chat(llm, template="{{ messages[0].content }}").ask("hello", {"max_tokens": 3}).text
            assert not slow.done()
        finally:
            go.set()
        assert slow.result(60).finish_reason == "length"


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_streams_closed_after_their_first_chunk_leave_nothing(kv: str) -> None:
    """26: what a thousand clients that went away had is back."""
    fds = Path("/proc/self/fd")
    with LLM("toy://vocab=300,eos_rate=0.0", backend={"use": "toy", "kv": kv}, engine={"max_sequences": 4}) as llm:
        expected = llm.generate("hello", {"max_tokens": 6}).token_ids
        before = len(list(fds.iterdir())) if fds.is_dir() else 0
        for i in range(500):
            stream = llm.stream(f"client {i}", {"max_tokens": 200})
            next(stream)
            if i % 2:
                stream.cancel()
            del stream
        assert llm.generate("hello", {"max_tokens": 6}).token_ids == expected
        engine = llm._runner.engine
        assert not engine.has_work()
        assert not engine._by_id
        assert not llm._runner._live
        assert engine.kv.used_ratio() == 0
        engine.kv.check([])
        assert (len(list(fds.iterdir())) if fds.is_dir() else 0) == before
