"""Candidates: a precision, a kind of speculation and a set of workers, which together are flags of `tandem up`.

Some cannot run here, each for a reason: the device, the family, memory by formula.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.models.model_config import ModelConfig
from engine.quantizer import SCHEMES
from engine.settings import DTYPES, QUANTIZATIONS
from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.model_size import model_size
from tandem_cli.capacity.roofline import WEIGHT_BYTES, Capacity, DeviceRates, Precision

BASE = "base"
COMPUTED = tuple(name for name in QUANTIZATIONS if name != "none")
"""Precisions that workers make of any checkpoint when they load it."""
STORED = tuple(SCHEMES)
"""Precisions that `tandem quantize` makes."""
_DTYPES = tuple(name for name in DTYPES if name != "auto")
PRECISIONS = (BASE, *COMPUTED, *STORED, *_DTYPES)
SPECULATIONS = ("none", "ngram", "mtp", "draft")
_LAYOUT_KEYS = ("prefill", "decode", "tensor_parallel")
_AS_INT8 = ("int8", "w8a8", "smoothquant")
_AS_INT4 = ("int4", "w4a16", "awq", "gptq")
_MEMORY_SHARE = 0.9
"""The share of the memory for weights and KV, as `tandem plan` assumes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of a mesh. Without prefill workers, decode workers compute prompts too."""

    prefill: int
    decode: int
    tensor_parallel: int = 1

    @property
    def name(self) -> str:
        ranks = f" x {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        if self.prefill:
            return f"{self.prefill} prefill + {self.decode} decode{ranks}"
        return f"{self.decode} colocated{ranks}"

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    @property
    def num_processes(self) -> int:
        """Processes that compute."""
        return self.num_workers * self.tensor_parallel

    def settings(self) -> dict[str, str]:
        """The settings of `tandem up` for these workers, by name."""
        workers = {"prefill": str(self.prefill)} if self.prefill else {"colocated": "true"}
        ranks = {"tensor_parallel": str(self.tensor_parallel)} if self.tensor_parallel > 1 else {}
        return {**workers, "decode": str(self.decode), **ranks}

    @classmethod
    def parse(cls, entry: object) -> "Layout":
        """Read a table of a recipe. Raises ConfigurationError."""
        if not isinstance(entry, dict) or not entry.keys() <= set(_LAYOUT_KEYS) or "decode" not in entry:
            raise ConfigurationError(f"workers need decode, and may have prefill and tensor_parallel; got {entry!r}")
        counts: dict[str, Any] = {"prefill": 0, **entry}
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < (name != "prefill"):
                raise ConfigurationError(f"workers: {name} must be a whole number, got {count!r}")
        return cls(**counts)


USUAL = Layout(1, 1)
"""The workers of `tandem up` without options."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the model."""

    precision: str
    speculation: str
    layout: Layout

    @property
    def name(self) -> str:
        """Unique; the state file and the report use it."""
        drafts = "" if self.speculation == "none" else f", {self.speculation}"
        return f"{self.precision}{drafts}, {self.layout.name}"

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Candidates that are equally fast and take as much are ordered by it: the simpler one has less to go wrong."""
        precision = 0 if self.precision == BASE else 2 if self.precision in STORED else 1
        speculation = SPECULATIONS.index(self.speculation)
        return precision, speculation, self.layout.num_workers, self.layout.tensor_parallel

    @property
    def twin(self) -> "Candidate":
        """The same candidate without speculation, whose answers must be equal."""
        return Candidate(self.precision, "none", self.layout)

    def settings(self, draft_model: str) -> dict[str, str]:
        """The settings of `tandem up` for this candidate, by name, without the model."""
        arithmetic = {"quantize": self.precision} if self.precision in COMPUTED else {}
        if self.precision in _DTYPES:
            arithmetic = {"dtype": self.precision}
        drafts = {} if self.speculation == "none" else {"speculative": self.speculation}
        if self.speculation == "draft":
            drafts["draft_model"] = draft_model
        return {**arithmetic, **drafts, **self.layout.settings()}


def combine(precisions: Sequence[str], speculations: Sequence[str], layouts: Sequence[Layout]) -> list[Candidate]:
    """All candidates, and those that they are compared with: the base without speculation, and each one's twin. The
    candidates of a precision follow each other, the first without speculation.
    """
    precisions = list(dict.fromkeys((BASE, *precisions)))
    kinds = sorted({"none", *speculations}, key=SPECULATIONS.index)
    combined = [Candidate(precision, kind, layout) for precision in precisions for kind in kinds for layout in layouts]
    first = Candidate(BASE, "none", layouts[0])
    return sorted(combined, key=lambda candidate: candidate != first)


def usual_layouts(num_cores: int, num_numa_nodes: int) -> list[Layout]:
    """Layouts worth trying: separated, colocated on all cores, several colocated workers. Ranks of one worker pay
    between NUMA nodes only.
    """
    layouts = [USUAL, Layout(0, 1)]
    layouts += [Layout(0, count) for count in (2, 4, 8) if count <= num_cores]
    if num_cores >= 4:
        layouts += [Layout(1, 2), Layout(1, 3)]
    if num_numa_nodes > 1:
        layouts.append(Layout(0, 1, num_numa_nodes))
    return layouts


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
    why_not: Mapping[str, str],
) -> dict[Candidate, str]:
    """The candidates that are not tried, with the reasons. `why_not`: what the model cannot have, precisions and kinds
    of speculation.
    """
    pruned: dict[Candidate, str] = {}
    for candidate in candidates:
        reason = why_not_here(candidate.precision, machine)
        reason = reason or why_not.get(candidate.precision) or why_not.get(candidate.speculation)
        num_bytes = needed_bytes(candidate)
        if reason is None and num_bytes > machine.memory_bytes * _MEMORY_SHARE:
            reason = (
                f"needs {num_bytes / 1e9:.1f} GB for weights and {demand.sequences} sequences of {demand.tokens} "
                f"tokens; {machine.memory_bytes * _MEMORY_SHARE / 1e9:.1f} GB are free"
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
        kv_bytes = demand.sequences * capacity.sequence_bytes(demand.tokens) * copies
        return capacity.weights_bytes * layout.num_workers + kv_bytes

    return needed


def _precision(name: str, base: Precision) -> Precision:
    if name == BASE:
        return base
    if name in WEIGHT_BYTES and name not in COMPUTED:
        return replace(base, weights=name)
    weights = "int8" if name in _AS_INT8 else "int4" if name in _AS_INT4 else "fp8"
    embedding, inputs = base.embedding if base.is_packed else "", "" if base.is_packed else base.inputs
    return Precision(weights, "float32", "int8", embedding, base.is_packed, inputs=inputs)


def require_some(candidates: Sequence[Candidate], pruned: Mapping[Candidate, str]) -> list[Candidate]:
    """The remaining candidates, first the base, with which all are compared. Raises ConfigurationError without it."""
    remaining = [candidate for candidate in candidates if candidate not in pruned]
    bases = [candidate for candidate in remaining if (candidate.precision, candidate.speculation) == (BASE, "none")]
    if not bases:
        first = candidates[0]
        raise ConfigurationError(
            f"{first.name}: {pruned[first]}. The base has to run, because all others are compared with it: "
            "use a machine with more memory, or name workers that fit in a recipe"
        )
    return sorted(remaining, key=lambda candidate: candidate != bases[0])
