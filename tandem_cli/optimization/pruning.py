"""Candidates that cannot run here, each with the reason: the device, the family, memory by formula."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.models.model_config import ModelConfig
from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.roofline import WEIGHT_BYTES, Capacity, DeviceRates, Precision, model_size
from tandem_cli.optimization.candidates import BASE, COMPUTED, STORED, Candidate

_AS_INT8 = ("int8", "w8a8", "smoothquant")
_AS_INT4 = ("int4", "w4a16", "awq", "gptq")
_SHARE = 0.9
"""The share of the memory for weights and KV, as `tandem plan` assumes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that candidates run on. `why_not_compiled`: the reason why the decoder is not compiled, or None."""

    device: str
    memory_bytes: float
    num_cores: int
    why_not_compiled: str | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """The load that has to fit: sequences at once, and tokens of the longest one."""

    sequences: int
    tokens: int


def why_not_here(precision: str, machine: Machine) -> str | None:
    """The reason why the device does not gain from a precision, or None."""
    if machine.device != "cpu" and precision in (*COMPUTED, *STORED):
        return f"quantised weights are computed on CPUs only, not on {machine.device}"
    if precision == "fp8":
        return "CPUs have no fp8 arithmetic: weights are widened as they are multiplied, and int8 is as small"
    if machine.why_not_compiled and precision in _AS_INT4:
        return f"int4 needs the compiled decoder: {machine.why_not_compiled}"
    return None


def prune(
    candidates: Sequence[Candidate],
    machine: Machine,
    demand: Demand,
    needed_bytes: Callable[[Candidate], float],
    why_unmade: Mapping[str, str],
) -> dict[Candidate, str]:
    """The candidates that are not tried, with the reasons. `why_unmade`: schemes that cannot be made of the model."""
    pruned: dict[Candidate, str] = {}
    for candidate in candidates:
        reason = why_not_here(candidate.precision, machine) or why_unmade.get(candidate.precision)
        num_bytes = needed_bytes(candidate)
        if reason is None and num_bytes > machine.memory_bytes * _SHARE:
            reason = (
                f"needs {num_bytes / 1e9:.1f} GB for weights and {demand.sequences} sequences of {demand.tokens} "
                f"tokens; {machine.memory_bytes * _SHARE / 1e9:.1f} GB are free"
            )
        if reason is None and candidate.layout.num_workers > machine.num_cores:
            reason = f"{candidate.layout.num_workers} workers on {machine.num_cores} cores"
        if reason is not None:
            pruned[candidate] = reason
    return pruned


def memory_needed(config: ModelConfig, base: Precision, demand: Demand) -> Callable[[Candidate], float]:
    """The memory of a candidate's workers, by formula: weights in each, and the KV of the load once on each side."""
    size, none = model_size(config), DeviceRates(0, 1, 1, 1)

    def needed(candidate: Candidate) -> float:
        capacity = Capacity(size, _precision(candidate.precision, base), none)
        layout = candidate.layout
        copies = 2 if layout.prefill else 1
        kv_bytes = demand.sequences * demand.tokens * capacity.kv_bytes_per_token * copies
        return capacity.weights_bytes * layout.num_workers + kv_bytes

    return needed


def _precision(name: str, base: Precision) -> Precision:
    if name == BASE:
        return base
    if name in WEIGHT_BYTES and name not in COMPUTED:
        return replace(base, weights=name)
    weights = "int8" if name in _AS_INT8 else "int4" if name in _AS_INT4 else "fp8"
    return Precision(weights, "float32", "int8")


def require_some(candidates: Sequence[Candidate], pruned: Mapping[Candidate, str]) -> list[Candidate]:
    """Those that are left, first the base, which all others are compared with. Raises ConfigurationError without it."""
    remaining = [candidate for candidate in candidates if candidate not in pruned]
    bases = [candidate for candidate in remaining if (candidate.precision, candidate.speculation) == (BASE, "none")]
    if not bases:
        first = candidates[0]
        raise ConfigurationError(
            f"{first.name}: {pruned[first]}. The base has to run, because all others are compared with it: "
            "use a machine with more memory, or name workers that fit in a recipe"
        )
    return sorted(remaining, key=lambda candidate: candidate != bases[0])
