"""Predictions beside what was measured, under the same names. Pure, but for reading a file of results.

Names: `prefill_ms` of one prompt, `decode_ms@B` of a step of B sequences.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.capacity import Capacity
from bench.fleet import Load
from mesh.domain.errors import ConfigurationError

PREFILL = "prefill_ms"


def decode_name(batch: int) -> str:
    """Of a decode step of `batch` sequences."""
    return f"decode_ms@{batch}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One pass: its tokens, its time, and its intensity."""

    name: str
    tokens: int
    predicted_ms: float
    flops_per_byte: float
    measured_ms: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """As predicted."""
        return 1000 * self.tokens / self.predicted_ms

    @property
    def measured_tokens_per_s(self) -> float | None:
        """As measured."""
        return None if self.measured_ms is None else 1000 * self.tokens / self.measured_ms

    @property
    def ratio(self) -> float | None:
        """Measured time over predicted time."""
        return None if self.measured_ms is None else self.measured_ms / self.predicted_ms


def predict(
    capacity: Capacity, load: Load, batches: Sequence[int], measured_ms: Mapping[str, float]
) -> list[Prediction]:
    """The prefill of one prompt, then decode steps of each batch."""
    length, context = load.input_tokens, load.mean_context_tokens
    prefill = Prediction(
        PREFILL,
        length,
        1000 * capacity.prefill_s(length),
        capacity.prefill_intensity(length),
        measured_ms.get(PREFILL),
    )
    steps = [
        Prediction(
            decode_name(batch),
            batch,
            1000 * capacity.decode_step_s(batch, context),
            capacity.decode_intensity(batch, context),
            measured_ms.get(decode_name(batch)),
        )
        for batch in batches
    ]
    return [prefill, *steps]


def read_measured(path: Path, input_tokens: int) -> dict[str, float]:
    """Times of a file that `tandem bench` has written: its closed loops with prompts of this length. One client's time
    to the first token is that of a prefill, N clients' time per output token that of a decode step of N; both with what
    the mesh adds. Of several arms the first counts. Raises ConfigurationError."""
    try:
        points = json.loads(path.read_text())["points"]
        found: dict[str, float] = {}
        for point in points:
            case, figures = point["case"], point["figures"]
            if case["kind"] != "concurrency" or case["input_tokens"] != input_tokens:
                continue
            if case["value"] == 1 and "ttft_p50_ms" in figures:
                found.setdefault(PREFILL, float(figures["ttft_p50_ms"]["median"]))
            if "tpot_p50_ms" in figures:
                found.setdefault(decode_name(round(case["value"])), float(figures["tpot_p50_ms"]["median"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} holds no results of tandem bench: {error!r}") from error
    if not found:
        raise ConfigurationError(f"{path} has no closed loop with prompts of {input_tokens} tokens")
    return found
