"""Figures of a prefill worker: those of all workers, and what it sends."""

from prometheus_client import Counter

from mesh.domain.worker import WorkerRole
from mesh.worker.metrics import WorkerMetrics


class PrefillMetrics(WorkerMetrics):
    """One for each prefill worker."""

    def __init__(self) -> None:
        super().__init__(WorkerRole.PREFILL)
        self._sent = Counter("tandem_kv_sent_bytes", "KV handed over, verified", ["transport"], registry=self.registry)

    def sent(self, num_bytes: int, transport: str, seconds: float) -> None:
        """A prompt's KV has been handed over."""
        self._sent.labels(transport).inc(num_bytes)
        self.transferred(seconds)
