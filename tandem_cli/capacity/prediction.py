"""Computes the result of `tandem plan`: predicted pass times, workers that a load needs, and the price of its tokens.

Pure, except for reading a file of results. Names of passes: `prefill_ms` is the prefill of one prompt, `decode_ms@B` a
decode step of B sequences. Measured times have the same names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json
from tandem_cli.capacity.roofline import QUANTIZED, Capacity, Precision
from tandem_cli.load_test.figures import BLENDED_RATIO, price_per_million

_DEFAULT_BATCHES = (1, 8, 32, 128)
PREFILL = "prefill_ms"


@dataclass(frozen=True, slots=True)
class Load:
    """A load: tokens per prompt, tokens per answer, and requests per second."""

    input_tokens: int
    output_tokens: int
    requests_per_s: float

    @property
    def mean_context_tokens(self) -> float:
        """Mean length of a sequence over its decode steps."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one prompt, and of one decode step of `batch` sequences, either predicted or measured."""

    prefill_s: float
    step_s: float
    batch: int


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The number of workers that a load keeps fully busy, as fractions."""

    prefill: float
    decode: float

    @property
    def decode_per_prefill(self) -> float:
        """Decode workers per prefill worker. The ratio is the same at every rate."""
        return self.decode / self.prefill

    @property
    def whole(self) -> tuple[int, int]:
        """Minimum number of prefill and decode workers to start. Queues stay short only with spare workers."""
        return max(1, ceil(self.prefill)), max(1, ceil(self.decode))


def largest_batch(capacity: Capacity, load: Load, batches: Iterable[int]) -> int | None:
    """The largest of `batches` whose sequences fit into memory at full length; None if none fits."""
    users = capacity.users(load.input_tokens + load.output_tokens)
    return max((batch for batch in batches if batch <= users), default=None)


def batches_to_plan(capacity: Capacity, load: Load, requested: Sequence[int] | None) -> list[int]:
    """`requested` batches, or those of 1, 8, 32 and 128 that fit. If one does not fit, the largest that fits is
    added.
    """
    users = capacity.users(load.input_tokens + load.output_tokens)
    candidates = set(requested or _DEFAULT_BATCHES)
    batches = candidates if requested else {batch for batch in candidates if batch <= users}
    if 0 < users < max(candidates):
        batches.add(users)
    return sorted(batches) or [1]


def predicted_times(capacity: Capacity, load: Load, batch: int) -> PassTimes:
    """Best-case times of a prompt, and of a decode step at the mean length of a sequence."""
    step_s = capacity.decode_step_s(batch, load.mean_context_tokens)
    return PassTimes(capacity.prefill_s(load.input_tokens), step_s, batch)


def workers_for(load: Load, times: PassTimes) -> WorkerCounts:
    """Workers by Little's law: work that arrives per second, over the work of one worker per second. Prefill makes the
    first token, decode all others."""
    decode_s = (load.output_tokens - 1) * times.step_s / times.batch
    return WorkerCounts(load.requests_per_s * times.prefill_s, load.requests_per_s * decode_s)


def rate_of_users(load: Load, times: PassTimes, users: int) -> float:
    """Requests per second of users who send their next request when the last one has ended, without queueing."""
    return users / (times.prefill_s + (load.output_tokens - 1) * times.step_s)


def blended_tokens_per_s(input_tokens_per_s: float, output_tokens_per_s: float) -> float:
    """Tokens per second of a load with BLENDED_RATIO input tokens per output token, which take their turns."""
    return (BLENDED_RATIO + 1) / (BLENDED_RATIO / input_tokens_per_s + 1 / output_tokens_per_s)


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
        points = parse_json(path.read_text())["points"]
        times_ms: dict[str, float] = {}
        for point in points:
            case, figures = point["case"], point["figures"]
            if case["kind"] != "concurrency" or case["input_tokens"] != input_tokens:
                continue
            if case["value"] == 1 and "ttft_p50_ms" in figures:
                times_ms.setdefault(PREFILL, float(figures["ttft_p50_ms"]["median"]))
            if "tpot_p50_ms" in figures:
                times_ms.setdefault(decode_name(round(case["value"])), float(figures["tpot_p50_ms"]["median"]))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} holds no results of tandem bench") from error
    if not times_ms:
        raise ConfigurationError(f"{path} has no closed loop with prompts of {input_tokens} tokens")
    return times_ms


PlanResult = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The load to plan for. `users` replaces the rate of `load`; without a price per hour, no prices are computed.
    `lengths`: of sequences whose KV is shown where it is freed behind windows.
    """

    load: Load
    batches: Sequence[int]
    users: int | None = None
    link_gbit_per_s: Sequence[float] = ()
    price_per_hour: float | None = None
    lengths: Sequence[int] = ()


def plan_capacity(
    capacity: Capacity,
    request: PlanRequest,
    measured_ms: Mapping[str, float],
    alternatives: Sequence[Precision] | None = None,
) -> PlanResult:
    """All figures of the plan, with units in their names. Keys of `measured_ms` are names of passes. `alternatives`:
    precisions whose memory is shown, too; None: those that some device may have.
    """
    load = request.load
    batch = largest_batch(capacity, load, request.batches)
    if batch is not None and request.users is not None:
        rate = rate_of_users(load, predicted_times(capacity, load, batch), request.users)
        load = replace(load, requests_per_s=rate)
    context_tokens = load.input_tokens + load.output_tokens
    predictions = predict(capacity, load, request.batches, measured_ms)
    chosen = capacity.precision
    others = _alternatives(chosen) if alternatives is None else alternatives
    return {
        "precision": asdict(chosen),
        "memory": [_memory(capacity, precision, context_tokens) for precision in dict.fromkeys((chosen, *others))],
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "context_tokens": context_tokens,
        "sequences": [_sequence(capacity, length) for length in request.lengths] if capacity.model.kv_windows else [],
        "critical_batch": capacity.critical_batch,
        "device_flops_per_byte": capacity.device.flops_per_s / capacity.device.bandwidth_bytes_per_s,
        "predictions": [_prediction(prediction, request.price_per_hour) for prediction in predictions],
        "blended_price_per_million": _blended(capacity, load, batch, request.price_per_hour),
        "transfer_ms": {
            f"{rate:g}": 1000 * capacity.transfer_s(load.input_tokens, rate * 1e9 / 8)
            for rate in request.link_gbit_per_s
        },
        "load": asdict(load),
        "batch": batch,
        "workers": {} if batch is None else _workers(load, predicted_times(capacity, load, batch), measured_ms),
    }


def _alternatives(chosen: Precision) -> list[Precision]:
    own_kv = "" if chosen.kv == chosen.other else chosen.kv  # as asked, or of a CPU, where narrow weights have wide KV
    alternatives = [Precision(name, name, own_kv) for name in ("float32", "bfloat16")]
    return alternatives + [Precision(name, chosen.other, own_kv) for name in QUANTIZED]


def _memory(capacity: Capacity, precision: Precision, context_tokens: int) -> PlanResult:
    alternative = replace(capacity, precision=precision)
    return asdict(precision) | {
        "weights_bytes": alternative.weights_bytes,
        "kv_bytes_per_token": alternative.kv_bytes_per_token,
        "kv_tokens": alternative.kv_tokens,
        "num_blocks": alternative.num_blocks,
        "state_blocks": alternative.state_blocks,
        "users": alternative.users(context_tokens),
    }


def _sequence(capacity: Capacity, num_tokens: int) -> PlanResult:
    """The KV of a sequence where it is freed behind windows."""
    return {
        "tokens": num_tokens,
        "kv_bytes": capacity.sequence_bytes(num_tokens),
        "all_kv_bytes": num_tokens * capacity.kv_bytes_per_token,
        "users": capacity.users(num_tokens),
    }


def _prediction(prediction: Prediction, price_per_hour: float | None) -> PlanResult:
    rate = prediction.tokens_per_s
    return asdict(prediction) | {
        "tokens_per_s": rate,
        "measured_tokens_per_s": prediction.measured_tokens_per_s,
        "ratio": prediction.ratio,
        "price_per_million": None if price_per_hour is None else price_per_million(price_per_hour, rate),
    }


def _blended(capacity: Capacity, load: Load, batch: int | None, price_per_hour: float | None) -> float | None:
    if batch is None or price_per_hour is None:
        return None
    prefill = capacity.prefill_tokens_per_s(load.input_tokens)
    decode = capacity.decode_tokens_per_s(batch, load.mean_context_tokens)
    return price_per_million(price_per_hour, blended_tokens_per_s(prefill, decode))


def _workers(load: Load, predicted: PassTimes, measured_ms: Mapping[str, float]) -> PlanResult:
    """Worker counts from predicted times, and also from measured times if both passes were measured."""
    times = {"predicted": predicted}
    prefill_ms, step_ms = measured_ms.get(PREFILL), measured_ms.get(decode_name(predicted.batch))
    if prefill_ms is not None and step_ms is not None:
        times["measured"] = PassTimes(prefill_ms / 1000, step_ms / 1000, predicted.batch)
    needs = {name: workers_for(load, pass_times) for name, pass_times in times.items()}
    return {
        name: asdict(need) | {"decode_per_prefill": need.decode_per_prefill, "whole": need.whole}
        for name, need in needs.items()
    }
