"""Scores constraint engines on a checkout of JSON-Schema-Test-Suite: what is accepted, beside what is valid.

The text of an instance is `json.dumps(data)`: what a program would write. Run as a program it prints, or writes into a
page, the table by keyword:

    python tests/support/schema_suite.py SUITE_FOLDER [--engine auto] [--write docs/schema-keywords.md]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.testing import constraint_accepts

DRAFTS = {"draft7": "7", "draft2020-12": "2020-12"}
"""Folder below tests/ -> the draft's name for `constraint_accepts`."""
REMOTE = "http://localhost:1234/"
"""Where the suite says that its remotes are."""
OUTCOMES = ("right", "refused", "false reject", "false accept")
_BEGIN, _END = "<!-- scores: begin -->", "<!-- scores: end -->"


@dataclass(frozen=True, slots=True)
class Case:
    keyword: str
    """Name of the suite's file."""
    title: str
    schema: object
    data: object
    valid: bool


@dataclass(frozen=True, slots=True)
class Scored:
    case: Case
    outcome: str
    error: HeadraceError | None = None


def read_cases(suite: Path, draft: str) -> Iterator[Case]:
    """The required cases of a draft."""
    for path in sorted((suite / "tests" / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            for test in group["tests"]:
                title = f"{group['description']}: {test['description']}"
                yield Case(path.stem, title, group["schema"], test["data"], test["valid"])


def read_documents(suite: Path) -> dict[str, object]:
    root = suite / "remotes"
    return {
        REMOTE + path.relative_to(root).as_posix(): json.loads(path.read_text(encoding="utf-8"))
        for path in root.rglob("*.json")
    }


def score(cases: Iterable[Case], draft: str, documents: Mapping[str, object], engine: str = "auto") -> Iterator[Scored]:
    """One outcome per case. An error that is no HeadraceError passes through: every refusal must be typed."""
    for case in cases:
        text, data = json.dumps(case.schema), json.dumps(case.data).encode()
        try:
            accepted = constraint_accepts(
                "json_schema", text, data, engine=engine, draft=DRAFTS[draft], documents=documents
            )
        except HeadraceError as error:
            yield Scored(case, "refused", error)
            continue
        wrong = "false accept" if accepted else "false reject"
        yield Scored(case, "right" if accepted == case.valid else wrong)


def table(scored: Iterable[Scored]) -> str:
    """Markdown, one line per file of the suite and one for all."""
    by_keyword: dict[str, Counter[str]] = {}
    for each in scored:
        by_keyword.setdefault(each.case.keyword, Counter())[each.outcome] += 1
    lines = ["| keyword | cases | " + " | ".join(OUTCOMES) + " |", "|---" * (2 + len(OUTCOMES)) + "|"]
    total = sum(by_keyword.values(), Counter[str]())
    for name, found in [*sorted(by_keyword.items()), ("**all**", total)]:
        shown = " | ".join(str(found[outcome] or "") for outcome in OUTCOMES)
        lines.append(f"| {name} | {found.total()} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables in this page")
    parser.add_argument("--wrong", action="store_true", help="list what is not right")
    args = parser.parse_args()
    documents, parts = read_documents(args.suite), []
    for draft, name in DRAFTS.items():
        scored = list(score(read_cases(args.suite, draft), draft, documents, args.engine))
        if not scored:
            continue
        n_right = sum(each.outcome == "right" for each in scored)
        parts.append(f"### Draft {name}\n\n{n_right} of {len(scored)} right.\n\n{table(scored)}\n")
        for each in scored if args.wrong else ():
            if each.outcome != "right":
                why = f"{each.error.code} {each.error.message}" if each.error else ""
                print(f"{draft} {each.case.keyword}: {each.case.title}: {each.outcome} {why:.200}")
    text = "\n".join(parts)
    if args.write is None:
        print(text)
        return
    page = args.write.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    args.write.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
