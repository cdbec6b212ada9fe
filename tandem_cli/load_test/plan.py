"""The plan of a benchmark: loads, lengths, number of runs, and the targets for good answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.figures import Slo
from tandem_cli.load_test.jobs import Job, Lengths, cycle_to, random_jobs, read_jobs, read_trace

_OPEN_LOOP_S = 30.0
_MIN_REQUESTS = 10
_MANY_CLIENTS = 8


class Kind(StrEnum):
    """Kinds of load. The comments say what a value of the load means."""

    CONCURRENCY = "concurrency"  # closed loop: requests in flight
    RATE = "rate"  # open loop: requests per second, Poisson arrivals
    TRACE = "trace"  # open loop: the mean rate of a file's arrivals
    THREADS = "threads"  # closed loop: threads that wait for complete answers
    BURST = "burst"  # long prompts at once, beside steady streams


@dataclass(frozen=True, slots=True)
class Arm:
    """One mesh to measure: flags of `tandem up`. With a pace, its workers simulate the model
    (tandem_cli/load_test/paced.py)."""

    name: str
    up: tuple[str, ...] = ()
    pace: str = ""


@dataclass(frozen=True, slots=True)
class BurstShape:
    """Size of a burst and of the steady streams, which must be long enough to outlast the burst."""

    num_streams: int = 4
    stream_tokens: int = 2000
    tokens: int = 1024
    lead_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a sweep."""

    kind: Kind
    value: float
    input_tokens: int
    output_tokens: int

    @property
    def label(self) -> str:
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A benchmark: all points to measure, each `repeats` times. The constructor raises ConfigurationError.

    The file `data` replaces random prompts; a trace also provides the arrival times.
    """

    kind: Kind = Kind.CONCURRENCY
    values: tuple[float, ...] = (1, 8, 32)
    input_tokens: tuple[int, ...] = (256,)
    output_tokens: int = 64
    num_requests: int | None = None
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    data: str = ""
    burst: BurstShape = field(default_factory=BurstShape)
    slo: Slo = field(default_factory=Slo)
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        limits: Mapping[str, tuple[float, ...]] = {
            str(self.kind): self.values,
            "input_tokens": self.input_tokens,
            "output_tokens": (self.output_tokens,),
            "repeats": (self.repeats,),
            "num_requests": () if self.num_requests is None else (self.num_requests,),
            "streams": (self.burst.num_streams, self.burst.stream_tokens),
            "burst_tokens": (self.burst.tokens,),
            "price_per_hour": () if self.price_per_hour is None else (self.price_per_hour,),
            "slo": (self.slo.ttft_ms, self.slo.tpot_ms, self.slo.share),
        }
        for name, values in limits.items():
            if not all(0 < value < float("inf") for value in values):
                raise ConfigurationError(f"{name} must be > 0, got {' '.join(f'{value:g}' for value in values)}")
        if self.slo.share > 1:
            raise ConfigurationError(f"slo_share must be in (0, 1], got {self.slo.share:g}")
        if self.warmup < 0 or self.burst.lead_s < 0:
            raise ConfigurationError("warmup and burst_lead must be >= 0")

    def cases(self) -> list[Case]:
        """All points of the sweep: for each prompt length, all values of the load."""
        if self.kind is Kind.TRACE:
            jobs = read_trace(Path(self.data), Lengths())
            duration_s = jobs[-1].arrival_s
            mean_rate = (len(jobs) - 1) / duration_s if duration_s else len(jobs)
            return [Case(self.kind, round(mean_rate, 3), 0, 0)]
        lengths = (0,) if self.data else self.input_tokens
        output = 0 if self.data else self.output_tokens
        return [Case(self.kind, value, length, output) for length in lengths for value in self.values]

    def num_jobs(self, case: Case) -> int:
        """The number of requests that a run of `case` sends.

        Default: all of `data`; else two per client (one for many clients), or 30 s at a rate.
        """
        if case.kind is Kind.BURST:
            return int(case.value)
        if case.kind is Kind.TRACE:
            return len(read_trace(Path(self.data), Lengths()))
        if self.num_requests is not None:
            return self.num_requests
        if self.data:
            return len(read_jobs(Path(self.data), Lengths()))
        if case.kind is Kind.RATE:
            return max(_MIN_REQUESTS, round(_OPEN_LOOP_S * case.value))
        return int(case.value) * (2 if case.value <= _MANY_CLIENTS else 1)

    def jobs(self, case: Case, lengths: Lengths, repeat: int) -> list[Job]:
        """The requests of one run. Runs do not share prompts, which a later run would find in the prefix cache."""
        seed = f"{self.seed}/{case.label}/{case.input_tokens}/{repeat}"
        if case.kind is Kind.TRACE:
            return read_trace(Path(self.data), lengths, seed)
        if self.data:
            return list(cycle_to(read_jobs(Path(self.data), lengths, seed), self.num_jobs(case)))
        return random_jobs(lengths, self.num_jobs(case), seed)
