"""JSON-Schema-Test-Suite through the whole way: nothing invalid is ever accepted, and most of what is valid is.

Runs where HEADRACE_CASES names a folder with json_schema_test_suite/ (a checkout of the suite, or a part of it).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import schema_suite

SUITE = Path(os.environ.get("HEADRACE_CASES", "no-such-folder")) / "json_schema_test_suite"
LEAST = {"draft7": 0.90, "draft2020-12": 0.80}
"""Share of right answers; refusals are not right."""

pytestmark = pytest.mark.skipif(not SUITE.is_dir(), reason="HEADRACE_CASES names no folder with json_schema_test_suite")


@pytest.mark.parametrize("draft", LEAST)
def test_required_cases(draft: str) -> None:
    pytest.importorskip("llguidance", reason="needs headrace[constraints]")
    if not (SUITE / "tests" / draft).is_dir():
        pytest.skip(f"the suite there has no {draft}")
    documents = schema_suite.read_documents(SUITE)
    scored = list(schema_suite.score(schema_suite.read_cases(SUITE, draft), draft, documents))
    accepted = [f"{each.case.keyword}: {each.case.title}" for each in scored if each.outcome == "false accept"]
    assert not accepted, "\n".join(accepted)
    assert all(each.error.code and each.error.message for each in scored if each.error is not None)
    n_right = sum(each.outcome == "right" for each in scored)
    assert n_right >= LEAST[draft] * len(scored), schema_suite.table(scored)
