"""OUT: what `tandem up OUT` serves, and the report.

serving.properties   the settings of the choice, under LMI's names
the checkpoint       if the choice has one of its own; otherwise option.model_id names the original
report.json, report.md, plot.svg
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from javaproperties import join_key_value

from tandem_cli.configuration.low_code import WRITTEN_BY
from tandem_cli.load_test.figures import price_per_million
from tandem_cli.optimization.candidates import Candidate
from tandem_cli.optimization.choice import (
    GAP,
    MAX_OTHER_LOAD,
    OTHER_LOAD,
    SPEED,
    TTFT,
    CandidateResult,
    Choice,
    PrecisionQuality,
    coordinates,
    over_limits,
    pareto,
    why_not,
)
from tandem_cli.optimization.plot import Panel, Point, draw
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.terminal import optional_cell

PROPERTIES = "serving.properties"
_NUM_NEAREST = 5
_OPTIONS = {
    "quantize": "option.quantize",
    "dtype": "option.dtype",
    "prefill": "option.prefill_workers",
    "decode": "option.decode_workers",
    "colocated": "option.colocated",
    "tensor_parallel": "option.tensor_parallel_degree",
}
"""The keys of serving.properties for settings of `tandem up`; those of speculation are one key."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured candidate as the report shows it. `verdict`: why it cannot be chosen, or None."""

    number: int
    result: CandidateResult
    quality: PrecisionQuality | None
    is_on_front: bool
    is_chosen: bool
    verdict: str | None

    @property
    def figures(self) -> dict[str, float]:
        return self.result.figures


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """All that the report is made of. `untried`: names of candidates that were not measured, with the reasons."""

    model: str
    about: dict[str, Any]
    recipe: Recipe
    rows: Sequence[Row]
    base: CandidateResult
    choice: Choice | None
    untried: dict[str, str]


def rows_of(
    results: Sequence[CandidateResult], qualities: dict[str, PrecisionQuality], choice: Choice | None, recipe: Recipe
) -> list[Row]:
    """The measured results, those of the last round first, by speed; and those that failed."""
    measured = [result for result in results if result.rounds]
    measured.sort(key=lambda result: (-max(result.rounds), -result.figures[SPEED]))
    failed = [result for result in results if not result.rounds]
    front = pareto([coordinates(result, qualities.get(result.candidate.precision)) for result in measured])
    return [
        Row(
            number,
            result,
            quality := qualities.get(result.candidate.precision),
            is_on_front,
            choice is not None and result is choice.result,
            why_not(result, quality, recipe),
        )
        for number, (result, is_on_front) in enumerate(
            zip([*measured, *failed], [*front, *(False for _ in failed)], strict=True), start=1
        )
    ]


def properties_of(candidate: Candidate, model: str, draft_model: str) -> str:
    """The text of serving.properties. `model` is empty if the checkpoint lies beside the file."""
    settings = candidate.settings(draft_model)
    keys = {"option.model_id": model} if model else {}
    keys |= {_OPTIONS[name]: value for name, value in settings.items() if name in _OPTIONS}
    if candidate.speculation in ("ngram", "mtp"):
        keys["option.speculative_config"] = json.dumps({"method": candidate.speculation})
    if candidate.speculation == "draft":
        keys["option.speculative_draft_model"] = draft_model
    return "\n".join([WRITTEN_BY, *(join_key_value(key, value) for key, value in keys.items())]) + "\n"


def publish(checkpoint: Path | None, out: Path, published: list[str]) -> None:
    """Put the files of a checkpoint into OUT, without a copy where the disk allows it. Each name is added to
    `published` before its file is written. Raises OSError.

    config.json comes last: without it OUT is no model, should this process be killed meanwhile.
    """
    for path in sorted(checkpoint.iterdir(), key=_when_published) if checkpoint is not None else ():
        published.append(path.name)
        target = out / path.name
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            shutil.copyfile(path, target)


def _when_published(path: Path) -> tuple[bool, str]:
    return path.name == "config.json", path.name


def report_json(outcome: SearchOutcome) -> dict[str, Any]:
    """The report for programs: limits, choice, all figures of all candidates."""
    choice, recipe = outcome.choice, outcome.recipe
    return {
        "model": outcome.model,
        "about": outcome.about,
        "limits": {name: getattr(recipe, name) for name in ("slo_ttft", "slo_itl", "max_quality_loss")},
        "chosen": None if choice is None else choice.result.candidate.name,
        "equally_fast": [] if choice is None else list(choice.equal),
        "speedup": None if choice is None else choice.result.speedup(outcome.base),
        "candidates": [_row_json(row, recipe, outcome.base) for row in outcome.rows],
        "not_tried": outcome.untried,
    }


def _row_json(row: Row, recipe: Recipe, base: CandidateResult) -> dict[str, Any]:
    figures = row.figures
    loss = None if row.quality is None else row.quality.loss
    return {
        "number": row.number,
        "name": row.result.candidate.name,
        "settings": row.result.candidate.settings(recipe.draft_model),
        "rounds": len(row.result.rounds),
        "figures": figures,
        "speedup": row.result.speedup(base) if figures else None,
        "price_per_million": price_of(row, recipe),
        "quality": None if row.quality is None else asdict(row.quality) | {"loss": loss},
        "over_limits": over_limits(figures, recipe) if figures else {},
        "pareto": row.is_on_front,
        "chosen": row.is_chosen,
        "why_not": row.verdict,
    }


def price_of(row: Row, recipe: Recipe) -> float | None:
    """Dollars per million output tokens; None without a price or figures."""
    if recipe.price_per_hour is None or not row.figures:
        return None
    return price_per_million(recipe.price_per_hour, row.figures[SPEED])


def plot_svg(outcome: SearchOutcome) -> str:
    """The plot of all measured candidates."""
    points = [
        Point(
            row.number,
            row.result.candidate.name,
            row.result.candidate.precision,
            row.figures[SPEED],
            row.figures.get(TTFT),
            None if row.quality is None or row.quality.loss is None else 100 * row.quality.loss,
            row.is_on_front,
            row.is_chosen,
        )
        for row in outcome.rows
        if row.figures
    ]
    recipe = outcome.recipe
    panels = [
        Panel("time to first token, p99, ms", lambda point: point.ttft_ms, recipe.slo_ttft),
        Panel("loss of quality, %", lambda point: point.loss_percent, 100 * recipe.max_quality_loss),
    ]
    return draw(f"Ways to serve {outcome.model}", points, panels)


HEADINGS = ("#", "candidate", "tokens/s", "x base", "requests", "TTFT p50/p99", "gap p99", "memory", "load")
QUALITY_HEADINGS = ("same token", "KL", "perplexity", "score", "loss")


def cells(row: Row, outcome: SearchOutcome) -> list[str]:
    """The cells of a row, under HEADINGS, the price if there is one, QUALITY_HEADINGS, and the remark."""
    figures, quality = row.figures, row.quality or PrecisionQuality()
    remark = "chosen" if row.is_chosen else row.verdict or ""
    name = row.result.candidate.name
    if not figures:
        empty = len(HEADINGS) - 2 + len(QUALITY_HEADINGS) + (outcome.recipe.price_per_hour is not None)
        return [str(row.number), name, *[""] * empty, remark]
    price = price_of(row, outcome.recipe)
    return [
        f"{row.number}{'*' if row.is_on_front else ''}",
        name,
        f"{figures[SPEED]:,.0f}",
        f"{row.result.speedup(outcome.base):.2f}",
        f"{figures['num_ok']:.0f}",
        f"{figures.get('ttft_p50_ms', 0):,.0f} / {figures.get(TTFT, 0):,.0f} ms",
        f"{figures.get(GAP, 0):,.1f} ms",
        f"{figures['memory_bytes'] / 1e6:,.0f} MB",
        f"{figures['load_s']:.1f} s",
        *([] if price is None else [f"{price:.3f}"]),
        optional_cell(quality.top1_agreement, ".2%"),
        optional_cell(quality.mean_kl, ".4f"),
        optional_cell(quality.perplexity, ".4f"),
        optional_cell(quality.score, ".1%"),
        optional_cell(quality.loss, ".2%"),
        remark,
    ]


def headings(outcome: SearchOutcome) -> list[str]:
    price = [] if outcome.recipe.price_per_hour is None else ["$/M tokens"]
    return [*HEADINGS, *price, *QUALITY_HEADINGS, ""]


def report_markdown(outcome: SearchOutcome) -> str:
    """The report for people: summary, table, plot, and the candidates that were not tried."""
    titles = headings(outcome)
    table = [titles, ["---"] * len(titles), *(cells(row, outcome) for row in outcome.rows)]
    untried = [f"* {name}: {reason}" for name, reason in outcome.untried.items()]
    return "\n".join(
        [
            f"# Ways to serve {outcome.model}",
            "",
            *summary(outcome),
            "",
            *("| " + " | ".join(row) + " |" for row in table),
            "",
            "`*`: on the Pareto front of speed, time to first token, memory and quality. `x base`: beside "
            f"{outcome.base.candidate.name} in the same rounds. Figures are those of the round with the most requests.",
            "",
            "![plot](plot.svg)",
            *(["", "Not tried:", "", *untried] if untried else []),
            "",
        ]
    )


def summary(outcome: SearchOutcome) -> list[str]:
    """The choice, and why; or what comes nearest to the limits."""
    choice, base = outcome.choice, outcome.base
    if choice is None:
        return ["No candidate keeps all limits. The nearest ones:", *_nearest(outcome)]
    figures, result = choice.result.figures, choice.result
    lines = [
        f"Chosen: {result.candidate.name}: {figures[SPEED]:,.0f} output tokens/s, "
        f"{result.speedup(base):.2f} x those of {base.candidate.name}."
    ]
    if choice.equal:
        lines.append(f"Faster by less than 5 %, but with more processes, memory or parts: {'; '.join(choice.equal)}.")
    loads = [figures.get(OTHER_LOAD, 0.0) for row in outcome.rows for figures in row.result.rounds.values()]
    if median(loads) > MAX_OTHER_LOAD:
        lines.append(
            f"Other processes used {median(loads):.0%} of the cores meanwhile: another run may choose otherwise."
        )
    return lines


def _nearest(outcome: SearchOutcome) -> list[str]:
    """Lines on the candidates that come nearest to the limits, and by how much each misses them."""
    rows = [row for row in outcome.rows if row.figures]
    rows.sort(key=lambda row: (max(over_limits(row.figures, outcome.recipe).values(), default=1.0), row.number))
    return [f"* {row.result.candidate.name}: {row.verdict}" for row in rows[:_NUM_NEAREST]]
