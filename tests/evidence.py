"""What the reliability and security requirements come to, in figures.

A test asks for the `evidence` fixture and states each figure it has measured beside its target:

    evidence("R6", "streams that ended token-exact", "48 of 48", target=">= 99 %", ok=True)

A figure that misses its target fails its test, unless it is a time (`is_time=True`): machines that run tests are
noisy, so a late figure is only printed as missed, and what must never happen is asserted beside it with room to spare.
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
        self, requirement: str, what: str, measured: object, *, target: str, ok: bool, is_time: bool = False
    ) -> None:
        figure = Figure(requirement, what, str(measured), target, bool(ok))
        self._properties.append((_PROPERTY, asdict(figure)))
        if not ok and not is_time:
            self.missed.append(figure)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Iterator[Evidence]:
    """States figures; the test fails at its end if one has missed its target."""
    found = Evidence(request.node.user_properties)
    yield found
    assert not found.missed, found.missed


def table(reports: Iterable[Any]) -> list[str]:
    """One line for each figure in these test reports, in the order of requirements; empty without figures."""
    figures = sorted(
        {Figure(**value) for report in reports for name, value in report.user_properties if name == _PROPERTY},
        key=lambda figure: figure.order,
    )
    lines = []
    for requirement, group in groupby(figures, key=lambda figure: figure.requirement):
        for number, figure in enumerate(group):
            verdict = "ok    " if figure.ok else "MISSED"
            name = "" if number else requirement
            lines.append(f"{name:4}{verdict} {figure.what}: {figure.measured}  (target {figure.target})"[:_WIDTH])
    return lines
