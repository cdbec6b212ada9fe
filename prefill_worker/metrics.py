"""Metrics of a prefill worker: those of all workers, and the KV that it sends."""

from prometheus_client import Counter

from mesh.domain.worker import WorkerRole
from worker.metrics import WorkerMetrics


class PrefillMetrics(WorkerMetrics):
    def __init__(self) -> None:
        super().__init__(WorkerRole.PREFILL)
        self._sent = Counter("tandem_kv_sent_bytes", "KV sent and verified", ["transport"], registry=self.registry)

    def sent(self, num_bytes: int, transport: str, seconds: float) -> None:
        """Record a finished transfer of one prompt's KV."""
        self._sent.labels(transport).inc(num_bytes)
        self.transferred(seconds)
