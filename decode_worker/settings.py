"""Settings of a decode worker."""

from dataclasses import dataclass

from mesh.settings import setting
from mesh.worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """A worker's settings, and the size of its batch."""

    max_rolling_batch_size: int = setting(
        64, "most sequences running or waiting for KV", env=("MAX_BATCH_SIZE", "OPTION_MAX_ROLLING_BATCH_SIZE")
    )
    max_batch_total_tokens: int = setting(0, "tokens whose KV fits here; 0: by memory", env=("MAX_BATCH_TOTAL_TOKENS",))
    max_step_tokens: int = setting(
        256, "most tokens of one step when prompts are prefilled here: what remains beside running sequences is chunked"
    )
    kv_transports: str = setting("shm,grpc", "payload paths for KV that are accepted")
