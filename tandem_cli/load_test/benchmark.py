"""A benchmark: loads, lengths, number of runs, and the latency targets.

`PRESETS` are ready-made benchmarks, for `tandem bench --preset NAME`. docs/benchmarking.md shows their results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.figures import Slo
from tandem_cli.load_test.jobs import Job, Lengths, cycle_to, random_jobs, read_jobs, read_trace

_OPEN_LOOP_S = 30.0
_MIN_REQUESTS = 10
_MANY_CLIENTS = 8
_HIGH_LIMITS = ("--max-concurrent-requests=512", "--max-queued-requests=512")


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
class Benchmark:
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
            "streams": (self.burst.num_streams,),
            "stream_tokens": (self.burst.stream_tokens,),
            "burst_tokens": (self.burst.tokens,),
            "price_per_hour": () if self.price_per_hour is None else (self.price_per_hour,),
            "slo_ttft_ms": (self.slo.ttft_ms,),
            "slo_tpot_ms": (self.slo.tpot_ms,),
            "slo_share": (self.slo.share,),
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


_SEPARATED = Arm("separated")
_COLOCATED = Arm("colocated", ("--colocated",))


@dataclass(frozen=True, slots=True)
class Preset:
    """Meshes to measure with one benchmark. On machines with fewer than `min_cores` cores, workers only simulate
    `pace`.
    `with_degrees` adds meshes for each degree of tensor parallelism that fits: see `degree_arms`.
    """

    about: str
    arms: tuple[Arm, ...]
    benchmark: Benchmark
    min_cores: int = 1
    pace: str = ""
    with_degrees: bool = False

    def needs_pace(self, num_cores: int) -> bool:
        """True if a machine with `num_cores` cores is too small for real engines."""
        return num_cores < self.min_cores

    def arms_on(self, num_cores: int) -> tuple[Arm, ...]:
        """The meshes for a machine with `num_cores` cores: with the pace if it is too small for engines."""
        return tuple(replace(arm, pace=self.pace) for arm in self.arms) if self.needs_pace(num_cores) else self.arms


def degree_arms(degrees: Sequence[int]) -> tuple[Arm, ...]:
    """Two meshes per degree, on the same cores: one worker of that many ranks, and that many workers of one rank."""
    return tuple(
        arm
        for degree in degrees
        for arm in (
            Arm(f"1 worker of {degree} ranks", ("--colocated", f"--tensor-parallel={degree}")),
            Arm(f"{degree} workers", ("--colocated", f"--decode={degree}")),
        )
    )


PRESETS: Mapping[str, Preset] = {
    "concurrency": Preset(
        "latency and throughput by concurrency, 256 tokens in and out",
        (Arm("separated", _HIGH_LIMITS),),
        Benchmark(values=(1, 2, 4, 8, 16, 32, 64), output_tokens=256),
    ),
    "context": Preset(
        "latency and throughput by concurrency and context length, to the longest prompts",
        (Arm("separated", _HIGH_LIMITS),),
        Benchmark(values=(1, 4, 16), input_tokens=(256, 512, 1024, 1792)),
    ),
    "goodput": Preset(
        "the highest rate within the latency targets, separated against colocated on the same cores",
        (_SEPARATED, _COLOCATED),
        Benchmark(kind=Kind.RATE, values=(1, 2, 3, 4, 6, 8), input_tokens=(512,)),
    ),
    "burst": Preset(
        "a burst of long prompts into steady streams, separated against colocated on the same cores",
        (_SEPARATED, _COLOCATED),
        Benchmark(kind=Kind.BURST, values=(8,), output_tokens=32, burst=BurstShape(tokens=1536, lead_s=3.0)),
    ),
    "replicas": Preset(
        "throughput of one, two and three decode workers",
        tuple(Arm(f"{number} decode", (f"--decode={number}", "--max-rolling-batch-size=8")) for number in (1, 2, 3)),
        Benchmark(values=(48,), input_tokens=(64,), output_tokens=32, num_requests=96),
        min_cores=8,
        pace="40,0.05",
    ),
    "tensor-parallel": Preset(
        "ranks of one worker against as many workers on the same cores, for each degree that fits",
        (Arm("1 worker", ("--colocated",)),),
        Benchmark(values=(1, 8), input_tokens=(128,), output_tokens=32, repeats=2),
        with_degrees=True,
    ),
    "threads": Preset(
        "1,000 short payloads from 128 threads of the synchronous SDK",
        (Arm("separated", _HIGH_LIMITS),),
        Benchmark(kind=Kind.THREADS, values=(128,), input_tokens=(32,), output_tokens=16, num_requests=1000),
    ),
    "min-latency": Preset(
        "fastest answers for one user: every core in one worker, int8",
        (Arm("min-latency", ("--colocated", "--quantize=int8", "--max-rolling-batch-size=4")),),
        Benchmark(values=(1,), num_requests=8),
    ),
    "max-throughput": Preset(
        "most tokens per second: every core in one worker, int8, a large batch",
        (Arm("max-throughput", ("--colocated", "--quantize=int8", "--max-rolling-batch-size=128", *_HIGH_LIMITS)),),
        Benchmark(values=(128,), num_requests=256),
    ),
    "min-cost": Preset(
        "cheapest tokens within the latency targets, three tokens in for one out: prefill apart, int8",
        (Arm("min-cost", ("--quantize=int8", *_HIGH_LIMITS)),),
        Benchmark(kind=Kind.RATE, values=(1, 2, 4, 8, 12), input_tokens=(192,)),
    ),
}
