"""Defects found by attacking a running mesh and by accepting it against its documentation, and what became of each.

`tests/defects.toml` has a row for each: what was tried, and what happened. A test that shows a repair asks for the
`repaired` fixture and states what happens now:

    repaired("D1", "3,900 requests while the log's disk is full: all answered")

`make defects` runs these tests and prints the table: tried, before, after. A defect that was not repaired has `kept`,
the reason, in its row. One whose test only `make chaos` runs has `shown_by`, that test's file.
"""

import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROWS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_PROPERTY = "repaired"
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Repaired:
    """States what one test saw of a defect's repair."""

    properties: list[tuple[str, object]]

    def __call__(self, defect: str, after: str) -> None:
        """`defect` is a row of defects.toml; `after` is what was measured, in words and figures."""
        assert defect in ROWS, f"{defect} is not a row of tests/defects.toml"
        self.properties.append((_PROPERTY, (defect, after)))


@pytest.fixture
def repaired(request: pytest.FixtureRequest) -> Repaired:
    """Call it at the end of a test that failed before the repair."""
    return Repaired(request.node.user_properties)


def table(reports: Iterable[Any]) -> list[str]:
    """The repairs that these test reports state, a paragraph for each row of defects.toml; empty if they state none."""
    after: defaultdict[str, list[str]] = defaultdict(list)
    for report in reports:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                mark = "" if report.passed else "FAILED: "
                after[value[0]].append(mark + value[1])
    if not after:
        return []
    lines = []
    for defect, row in ROWS.items():
        ending = "; ".join(dict.fromkeys(after[defect])) or _without_report(row)
        lines.append(f"{defect:4} {row['tried']}")
        for name, text in (("before", row["before"]), ("after", ending)):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=f"     {name:7}", subsequent_indent=" " * 12)
    return lines


def _without_report(row: dict[str, str]) -> str:
    if "kept" in row:
        return f"kept: {row['kept']}"
    return f"shown by make chaos: {row['shown_by']}" if "shown_by" in row else "NOT SHOWN"
