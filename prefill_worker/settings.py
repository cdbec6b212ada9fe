"""Settings of a prefill worker."""

from dataclasses import dataclass

from mesh.settings import setting
from mesh.worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """A worker's settings, and how much a pass computes."""

    max_batch_prefill_tokens: int = setting(
        512,
        "most prompt tokens of one pass; longer prompts are computed in chunks",
        env=("MAX_BATCH_PREFILL_TOKENS",),
    )
    max_num_seqs: int = setting(64, "most prompts in computation at a time")
    kv_transports: str = setting("shm,grpc", "payload paths for KV, most wanted first")
