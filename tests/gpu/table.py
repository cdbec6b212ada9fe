"""The table of docs/gpu.md, made of the results of `make test-gpu`."""

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results of make test-gpu -->", "<!-- end of results -->"
NOTHING = "**Not verified on hardware.** No results of `make test-gpu` are recorded."


def render(found: dict[str, Any] | None) -> str:
    """The results in Markdown. A stage without results is missing; one that failed says so."""
    if found is None or not found["stages"]:
        return NOTHING
    rows = [
        f"| {name} | {outcome['status']} | {_figures(outcome['figures'])} | {outcome['date']} |"
        for name, outcome in found["stages"].items()
    ]
    head = f"On {found['device']} with torch {found['torch']}:"
    return "\n".join([head, "", "| stage | result | figures | date |", "|---|---|---|---|", *rows])


def write_table(page: Path, found: dict[str, Any] | None) -> None:
    """Put the results between the marks of the page."""
    text = page.read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n{render(found)}\n{END}{after}")


def _figures(figures: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in figures.items())
