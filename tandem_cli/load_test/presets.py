"""The presets of `tandem bench --preset NAME`, as one table. docs/benchmarking.md shows their results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem_cli.load_test.plan import Arm, BurstShape, Kind, Plan

_SEPARATED = Arm("separated")
_COLOCATED = Arm("colocated", ("--colocated",))
_HIGH_LIMITS = ("--max-concurrent-requests=512", "--max-queued-requests=512")


@dataclass(frozen=True, slots=True)
class Preset:
    """Meshes to measure with one plan. On machines with fewer than `min_cores` cores, workers only simulate `pace`."""

    about: str
    arms: tuple[Arm, ...]
    plan: Plan
    min_cores: int = 1
    pace: str = ""

    def needs_pace(self, num_cores: int) -> bool:
        """Whether a machine with `num_cores` cores is too small for real engines."""
        return num_cores < self.min_cores

    def arms_on(self, num_cores: int) -> tuple[Arm, ...]:
        """The meshes for a machine with `num_cores` cores: with the pace if it is too small for engines."""
        return tuple(replace(arm, pace=self.pace) for arm in self.arms) if self.needs_pace(num_cores) else self.arms


PRESETS: Mapping[str, Preset] = {
    "concurrency": Preset(
        "latency and throughput by concurrency, 256 tokens in and out",
        (Arm("separated", _HIGH_LIMITS),),
        Plan(values=(1, 2, 4, 8, 16, 32, 64), output_tokens=256),
    ),
    "context": Preset(
        "latency and throughput by concurrency and context length, to the longest prompts",
        (Arm("separated", _HIGH_LIMITS),),
        Plan(values=(1, 4, 16), input_tokens=(256, 512, 1024, 1792)),
    ),
    "goodput": Preset(
        "the highest rate within the latency targets, separated against colocated on the same cores",
        (_SEPARATED, _COLOCATED),
        Plan(kind=Kind.RATE, values=(1, 2, 3, 4, 6, 8), input_tokens=(512,)),
    ),
    "burst": Preset(
        "a burst of long prompts into steady streams, separated against colocated on the same cores",
        (_SEPARATED, _COLOCATED),
        Plan(kind=Kind.BURST, values=(8,), output_tokens=32, burst=BurstShape(tokens=1536, lead_s=3.0)),
    ),
    "replicas": Preset(
        "throughput of one, two and three decode workers",
        tuple(Arm(f"{number} decode", (f"--decode={number}", "--max-rolling-batch-size=8")) for number in (1, 2, 3)),
        Plan(values=(48,), input_tokens=(64,), output_tokens=32, num_requests=96),
        min_cores=8,
        pace="40,0.05",
    ),
    "threads": Preset(
        "1,000 short payloads from 128 threads of the synchronous SDK",
        (Arm("separated", _HIGH_LIMITS),),
        Plan(kind=Kind.THREADS, values=(128,), input_tokens=(32,), output_tokens=16, num_requests=1000),
    ),
    "min-latency": Preset(
        "fastest answers for one user: every core in one worker, int8",
        (Arm("min-latency", ("--colocated", "--quantize=int8", "--max-rolling-batch-size=4")),),
        Plan(values=(1,), num_requests=8),
    ),
    "max-throughput": Preset(
        "most tokens per second: every core in one worker, int8, a large batch",
        (Arm("max-throughput", ("--colocated", "--quantize=int8", "--max-rolling-batch-size=128", *_HIGH_LIMITS)),),
        Plan(values=(128,), num_requests=256),
    ),
    "min-cost": Preset(
        "cheapest tokens within the latency targets, three tokens in for one out: prefill apart, int8",
        (Arm("min-cost", ("--quantize=int8", *_HIGH_LIMITS)),),
        Plan(kind=Kind.RATE, values=(1, 2, 4, 8, 12), input_tokens=(192,)),
    ),
}
