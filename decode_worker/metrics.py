"""Metrics of a decode worker: those of all workers, and the origin of its sequences' KV."""

from prometheus_client import Counter

from mesh.domain.tokens import SequenceFailure
from mesh.domain.worker import WorkerRole
from worker.metrics import WorkerMetrics


class DecodeMetrics(WorkerMetrics):
    def __init__(self) -> None:
        super().__init__(WorkerRole.DECODE)
        self._started = Counter(
            "tandem_decode_sequences",
            "Sequences, by where their KV comes from",
            ["kv"],
            registry=self.registry,
        )

        for kv in ("transferred", "computed", "shared"):
            self._started.labels(kv)
        for reason in SequenceFailure:  # Prometheus sees no increase where a series begins with 1
            self._failures.labels(self._role, reason.value)

    def started(self, num_tokens: int, kv: str) -> None:
        """Record a new sequence. Its KV is "transferred", "computed" here, or "shared" with another choice."""
        self.looked_up(num_tokens)
        self._started.labels(kv).inc()
