"""Computes the result of `tandem plan` as one dictionary. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tandem_cli.capacity.capacity import QUANTIZED, Capacity, Precision
from tandem_cli.capacity.fleet import (
    Load,
    PassTimes,
    blended_price,
    largest_batch,
    predicted_times,
    price_per_million_tokens,
    rate_of_users,
    workers_for,
)
from tandem_cli.capacity.predictions import PREFILL, Prediction, decode_name, predict

PlanResult = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The load to plan for. `users` replaces the rate of `load`; without a price per hour, no prices are computed."""

    load: Load
    batches: Sequence[int]
    users: int | None = None
    link_gbit_per_s: Sequence[float] = ()
    price_per_hour: float | None = None


def plan_capacity(capacity: Capacity, request: PlanRequest, measured_ms: Mapping[str, float]) -> PlanResult:
    """All figures of the plan, with units in their names. Keys of `measured_ms` are those of
    tandem_cli.capacity.predictions."""
    load = request.load
    batch = largest_batch(capacity, load, request.batches)
    if batch is not None and request.users is not None:
        rate = rate_of_users(load, predicted_times(capacity, load, batch), request.users)
        load = replace(load, requests_per_s=rate)
    context_tokens = load.input_tokens + load.output_tokens
    predictions = predict(capacity, load, request.batches, measured_ms)
    return {
        "precision": asdict(capacity.precision),
        "memory": [_memory(capacity, precision, context_tokens) for precision in _precisions(capacity.precision)],
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "context_tokens": context_tokens,
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


def _precisions(chosen: Precision) -> list[Precision]:
    """The chosen precision, followed by the alternatives to it."""
    alternatives = [Precision(name, name) for name in ("float32", "bfloat16")]
    alternatives += [Precision(name, chosen.other) for name in QUANTIZED]
    return [chosen, *(precision for precision in alternatives if precision != chosen)]


def _memory(capacity: Capacity, precision: Precision, context_tokens: int) -> PlanResult:
    alternative = replace(capacity, precision=precision)
    return asdict(precision) | {
        "weights_bytes": alternative.weights_bytes,
        "kv_bytes_per_token": alternative.kv_bytes_per_token,
        "kv_tokens": alternative.kv_tokens,
        "users": alternative.users(context_tokens),
    }


def _prediction(prediction: Prediction, price_per_hour: float | None) -> PlanResult:
    rate = prediction.tokens_per_s
    return asdict(prediction) | {
        "tokens_per_s": rate,
        "measured_tokens_per_s": prediction.measured_tokens_per_s,
        "ratio": prediction.ratio,
        "price_per_million": None if price_per_hour is None else price_per_million_tokens(price_per_hour, rate),
    }


def _blended(capacity: Capacity, load: Load, batch: int | None, price_per_hour: float | None) -> float | None:
    if batch is None or price_per_hour is None:
        return None
    rates = (
        capacity.prefill_tokens_per_s(load.input_tokens),
        capacity.decode_tokens_per_s(batch, load.mean_context_tokens),
    )
    return blended_price(*(price_per_million_tokens(price_per_hour, rate) for rate in rates))


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
