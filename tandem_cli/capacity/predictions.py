"""Predicted pass times beside measured ones, under the same names. Pure, except for reading a file of results.

Names: `prefill_ms` is the prefill of one prompt, `decode_ms@B` a decode step of B sequences.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.capacity import Capacity
from tandem_cli.capacity.fleet import Load

PREFILL = "prefill_ms"


def decode_name(batch: int) -> str:
    """The name of the time of a decode step with `batch` sequences."""
    return f"decode_ms@{batch}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One pass: tokens, time, arithmetic intensity, and whether the weights and its KV fit into memory."""

    name: str
    tokens: int
    predicted_ms: float
    flops_per_byte: float
    measured_ms: float | None = None
    fits: bool = True

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.predicted_ms

    @property
    def measured_tokens_per_s(self) -> float | None:
        return None if self.measured_ms is None else 1000 * self.tokens / self.measured_ms

    @property
    def ratio(self) -> float | None:
        """Measured time divided by predicted time."""
        return None if self.measured_ms is None else self.measured_ms / self.predicted_ms


def predict(
    capacity: Capacity, load: Load, batches: Sequence[int], measured_ms: Mapping[str, float]
) -> list[Prediction]:
    """Predict the prefill of one prompt and the decode step of each batch. A batch fits if it fits at full length."""
    length, context = load.input_tokens, load.mean_context_tokens
    prefill = Prediction(
        PREFILL,
        length,
        1000 * capacity.prefill_s(length),
        capacity.prefill_intensity(length),
        measured_ms.get(PREFILL),
        capacity.fits(1, length),
    )
    steps = [
        Prediction(
            decode_name(batch),
            batch,
            1000 * capacity.decode_step_s(batch, context),
            capacity.decode_intensity(batch, context),
            measured_ms.get(decode_name(batch)),
            capacity.fits(batch, length + load.output_tokens),
        )
        for batch in batches
    ]
    return [prefill, *steps]


def read_measured(path: Path, input_tokens: int) -> dict[str, float]:
    """Read measured times from the closed loops with prompts of this length in a file of `tandem bench`.

    TTFT with one client stands for a prefill, time per output token with N clients for a decode step of N. Both contain
    the overhead of the mesh. If there are several arms, the first one is used. Raises ConfigurationError.
    """
    try:
        points = json.loads(path.read_text())["points"]
        times_ms: dict[str, float] = {}
        for point in points:
            case, figures = point["case"], point["figures"]
            if case["kind"] != "concurrency" or case["input_tokens"] != input_tokens:
                continue
            if case["value"] == 1 and "ttft_p50_ms" in figures:
                times_ms.setdefault(PREFILL, float(figures["ttft_p50_ms"]["median"]))
            if "tpot_p50_ms" in figures:
                times_ms.setdefault(decode_name(round(case["value"])), float(figures["tpot_p50_ms"]["median"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} holds no results of tandem bench: {error!r}") from error
    if not times_ms:
        raise ConfigurationError(f"{path} has no closed loop with prompts of {input_tokens} tokens")
    return times_ms
