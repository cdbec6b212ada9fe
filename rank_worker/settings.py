"""Settings of a rank that joins a worker with which it shares no memory."""

from dataclasses import dataclass

from checkpoint.source import ModelSource
from engine.settings import KVMemorySettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import host_and_port
from mesh.rpc.credentials import Credentials, MeshKey, require_trusted_fabric
from mesh.rpc.settings import MemberSettings
from mesh.setting_checks import require_at_least
from mesh.settings import setting

DEFAULT_PORT = 50060


@dataclass(frozen=True, kw_only=True)
class RankSettings(MemberSettings):
    """The rank's own settings. All else comes from the leader. A worker that starts ranks itself sets all of these."""

    leader: str = setting(
        ...,
        f"the worker's rank_listen address as this machine reaches it, host or host:port (port {DEFAULT_PORT})",
        env=("LWS_LEADER_ADDRESS",),
    )
    rank: int = setting(..., "number of this rank; the leader is 0", env=("LWS_WORKER_INDEX",))
    group_size: int = setting(0, "ranks that the worker must have; 0: any number", env=("LWS_GROUP_SIZE",))
    model: str = setting(
        ...,
        "this machine's copy of the leader's checkpoint: folder, org/name on the Hugging Face hub, or "
        "s3://bucket/prefix",
        env=("MODEL_ID", "HF_MODEL_ID"),
    )
    revision: str = setting("", "branch, tag or commit on the hub", env=("HF_MODEL_REVISION", "HF_REVISION"))
    model_cache: str = setting("~/.cache/tandem", "folder for models downloaded from S3")
    trust_fabric: bool = setting(
        False, "allow a leader on another machine: sums of ranks cross the network without credential or encryption"
    )
    leader_timeout_s: float = setting(600.0, "seconds to dial a leader that does not answer; then exit with status 1")
    device: str = setting("", "cpu, cuda or cuda:N; default: the first device of the leader's type")
    num_threads: int = setting(0, "compute threads; 0: the number of cores allowed")
    kv_memory_fraction: float = setting(0.6, "share of the free memory of this machine or GPU for KV, as for workers")
    memory_utilization: float = setting(
        0.0, "in place of kv_memory_fraction: share of all memory that may be in use, as for workers; 0: not used"
    )
    kv_memory_shares: int = setting(0, "number of ranks and workers that share this memory equally, as for workers")
    kv_memory_ledger: str = setting(
        "",
        "folder where processes of this machine record the memory they take; default: one of this user's in /dev/shm",
    )
    kv_host: str = setting("", "address at which a decode worker's rank takes KV; default: as the leader sees it")
    parent: int = setting(0, "process id of the worker, if it has started this rank; the rank ends with it")
    leader_key: str = setting(
        "", "key of the leader's port, if it has one of its own; default: the mesh's key and TLS", secret=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        host, _ = self.leader_address
        require_trusted_fabric(host, is_trusted=self.trust_fabric, name="leader")
        if self.rank < 1:
            raise ConfigurationError(f"rank must be at least 1, got {self.rank}: the leader is rank 0")
        require_at_least(self, 0, "num_threads")
        if not self.leader_timeout_s > 0:
            raise ConfigurationError(f"leader_timeout_s must be > 0, got {self.leader_timeout_s:g}")
        self.kv_memory()

    @property
    def leader_address(self) -> tuple[str, int]:
        """Host and port. Raises ConfigurationError."""
        return host_and_port(self.leader, DEFAULT_PORT, name="leader")

    @property
    def source(self) -> ModelSource:
        return ModelSource(self.model, self.revision, self.model_cache)

    def leader_credentials(self) -> Credentials:
        """The credentials for the leader's port. With a key of its own it is on loopback, without TLS, because the
        certificate of a worker need not name that address.
        """
        return Credentials(MeshKey(self.leader_key)) if self.leader_key else self.load_credentials()

    def kv_memory(self) -> KVMemorySettings:
        """The memory for KV of this process. Raises ConfigurationError."""
        return KVMemorySettings(
            self.kv_memory_fraction,
            self.memory_utilization,
            self.kv_memory_shares,
            self.kv_memory_ledger,
            owner=f"rank {self.rank} of {self.leader}",
        )
