"""Figures of the reliability and security requirements; docs/requirements.md says what R1 to R29 mean.

A test asks for the `evidence` fixture and states each figure it has measured beside its target:

    evidence("R6", "streams that ended token-exact", "48 of 48", target=">= 99 %", ok=True)

A figure that misses its target fails its test, unless the machine may be the cause (`is_reported_only=True`): times
and figures made of them, because machines that run tests are noisy, and the growth of processes in runs that are too
short to tell it from their warm-up. Such a figure is only printed as missed, and what must never happen is asserted
beside it with room to spare.
At the end of a run all figures are printed as one table, one row for each requirement (`make chaos` runs everything
that has figures).
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import pytest

_PROPERTY = "evidence"
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure of one requirement, such as "R6"."""

    requirement: str
    what: str
    measured: str
    target: str
    ok: bool

    @property
    def order(self) -> tuple[int, str]:
        """Requirements in the order of their numbers."""
        return int(self.requirement.removeprefix("R")), self.what


class Evidence:
    """Collects one test's figures; `properties` is pytest's list of what to tell the reporting process."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self._properties = properties
        self.missed: list[Figure] = []

    def __call__(
        self, requirement: str, what: str, measured: object, *, target: str, ok: bool, is_reported_only: bool = False
    ) -> None:
        figure = Figure(requirement, what, str(measured), target, bool(ok))
        self._properties.append((_PROPERTY, asdict(figure)))
        if not ok and not is_reported_only:
            self.missed.append(figure)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Iterator[Evidence]:
    """States figures; the test fails at its end if one has missed its target."""
    found = Evidence(request.node.user_properties)
    yield found
    assert not found.missed, found.missed


def table(reports: Iterable[Any]) -> list[str]:
    """One line for each figure in these test reports, in the order of requirements; empty without figures.

    Figures of the same name, as parametrised tests have them, share a line.
    """
    found = [Figure(**value) for report in reports for name, value in report.user_properties if name == _PROPERTY]
    lines, last = [], ""
    for (_, what), same in groupby(sorted(found, key=lambda figure: figure.order), key=lambda figure: figure.order):
        figures = list(same)
        shown = next((figure for figure in figures if not figure.ok), figures[0])
        measured = shown.measured if len(figures) == 1 else f"{shown.measured}, {len(figures)} times"
        name = "" if shown.requirement == last else shown.requirement
        last = shown.requirement
        lines.append(
            f"{name:4}{'ok    ' if shown.ok else 'MISSED'} {what}: {measured}  (target {shown.target})"[:_WIDTH]
        )
    return lines
