"""Settings that both kinds of worker share."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import structlog

from checkpoint.adapters import AdapterFiles, find_adapters, read_adapter
from checkpoint.partition_manifest import read_partition
from checkpoint.settings import ModelSettings
from engine.cores import ComputeCores, SharedCores, num_numa_nodes
from engine.settings import (
    ATTENTION_BACKENDS,
    DTYPES,
    KV_DTYPES,
    LAYERS_PER_GROUP,
    QUANTIZATIONS,
    STORED_ENCODING,
    KVMemorySettings,
    require_known,
)
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import host_and_port, is_loopback, is_unspecified, parse_cores
from mesh.domain.kv import Degrees
from mesh.rpc.credentials import require_trusted_fabric
from mesh.rpc.server import Listen
from mesh.setting_checks import require_at_least
from mesh.settings import setting

log = structlog.get_logger(__name__)

_NOT_NEGATIVE = (
    *("kv_cache_bytes", "max_model_len", "layer_group_bytes", "num_threads"),
    *("drain_grace_s", "wedged_exit_s", "max_loaded_adapters"),
)
RANK_MEMORIES = ("auto", "shared", "own")
KV_TRANSPORTS = MappingProxyType(
    {"shm": True, "grpc": True, "gloo": False, "nccl": False, "nixl": False, "mooncake": False}
)
"""The transports of kvtransfer by name. True: the mesh's credentials and TLS, or the machine itself, protect KV there.
The names are not imported from kvtransfer, because its import would take long in every program that reads settings."""
DEFAULT_KV_TRANSPORTS = "shm,grpc"
_LISTENING_EVERYWHERE = frozenset({"nixl", "mooncake"})


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ModelSettings):
    """Identity, addresses and engine limits of a worker."""

    worker_id: str = setting("", "stable name of this worker; default: host name and process id")
    registry_address: str = setting("", "host:port of the router's registry; not needed with registry_url")
    registry_url: str = setting("", "redis://... or rediss://...: register in Redis, for all routers", secret=True)
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "port to listen on; 0 takes a free port")
    advertise_host: str = setting("", "host name under which others reach this worker; default: host")
    device: str = setting(
        "auto",
        "cpu, cuda, cuda:N, or auto; several ranks take the GPUs from cuda:N on, or those of a list, as in "
        "cuda:0,cuda:2",
    )
    dtype: str = setting(
        "auto",
        f"type of weights: {', '.join(DTYPES)}; auto: the checkpoint's, but float32 on CPU where the compiled decoder "
        "would have to round or cannot run",
        env=("DTYPE",),
    )
    kv_dtype: str = setting(
        "auto",
        f"type of KV: {', '.join(KV_DTYPES)}; auto: as dtype, but in the compiled decoder (CPU with AVX2) float32, "
        "float16 where the CPU multiplies bf16, and int8 with quantize=int8 or int4, or a checkpoint in these; "
        "bfloat16 and fp8 are for the eager decoder",
        env=("KV_DTYPE",),
    )
    enforce_eager: bool = setting(
        False, "never use the compiled decoder (CPU with AVX2), nor CUDA graphs", env=("ENFORCE_EAGER",)
    )
    attention: str = setting(
        "auto",
        f"attention backend: {', '.join(ATTENTION_BACKENDS)}; auto: the fastest that can run. Any other name turns the "
        "compiled decoder (CPU with AVX2) off",
    )
    quantize: str = setting(
        "none",
        f"arithmetic of linear layers: {', '.join(QUANTIZATIONS)}, or {STORED_ENCODING} for a checkpoint in it (CPU "
        f"only); none: int8 for a W8A8 checkpoint, int4 for one in 4 bits, {STORED_ENCODING} for one in that",
        env=("QUANTIZE",),
    )
    tensor_parallel: str = setting(
        "1",
        "ranks: processes that compute each step of the worker together (on several machines with rank_listen); "
        "max: one per NUMA node or GPU, or as many as the model allows",
    )
    pipeline_parallel: str = setting(
        "1",
        "stages: groups of tensor_parallel ranks, each with a part of the model's layers; max: one, "
        "because stages on one machine are no faster than as many ranks",
    )
    rank_memory: str = setting(
        "auto",
        f"memory of several ranks on this machine: {', '.join(RANK_MEMORIES)}; shared: they compute in memory that all "
        "have (CPU only); own: each sends what others need and moves its KV itself; auto: shared on CPU, own on GPUs",
    )
    adapter: str = setting(
        "",
        "LoRA adapters in PEFT's format, as NAME=FOLDER,...; or a folder with a folder for each; all workers of a "
        "model need the same",
        env=("LORA_ADAPTERS",),
    )
    max_lora_rank: int = setting(64, "highest rank of an adapter")
    max_loaded_adapters: int = setting(
        0,
        "adapters in memory at once; others are read when requests need them, in place of an unused one (0: all)",
    )
    rank_listen: str = setting(
        "",
        "host:port at which ranks from other machines dial in (python -m rank_worker --leader); then all ranks but the "
        "first do; default: the worker starts its ranks itself",
    )
    rank_timeout_s: float = setting(600.0, "seconds to wait until all ranks have dialled in; then exit with status 1")
    load_format: str = setting("auto", "auto, or dummy: random weights, for benchmarks")
    model_loading_timeout: float | None = setting(
        None,
        "seconds that loading the model may take, after any download; default: as long as it makes progress",
        env=("OPTION_MODEL_LOADING_TIMEOUT",),
    )
    block_size: int = setting(16, "tokens per KV block")
    kv_cache_bytes: int = setting(0, "memory for KV; 0: a share of what is free")
    kv_memory_fraction: float = setting(
        0.6, "share of the free memory of this machine, container or GPU for the KV of all workers there together"
    )
    memory_utilization: float = setting(
        0.0,
        "in place of kv_memory_fraction: share of all memory that may be in use, with weights and KV of all workers "
        "there; 0: not used",
        env=("CUDA_MEMORY_FRACTION",),
    )
    kv_memory_shares: int = setting(
        0, "number of workers that share this memory equally; 0: take half of the memory that is left"
    )
    kv_memory_ledger: str = setting(
        "", "folder where workers of this machine record the memory they take; default: one of this user's in /dev/shm"
    )
    max_model_len: int = setting(0, "maximum tokens of a sequence; 0: the model's limit")
    prefix_caching: bool = setting(True, "keep KV of finished sequences for prompts with the same beginning")
    kv_disk: str = setting(
        "",
        "folder on a local disk for KV that does not fit in memory, found again by prompts with the same beginning; "
        "all workers of this machine may share it; default: none",
    )
    kv_disk_gib: float = setting(16.0, "most GiB of kv_disk; the least recently used KV goes first")
    trust_fabric: bool = setting(
        False, "nobody else can use the network between workers: let gloo and NCCL (KV, ranks) go beyond this machine"
    )
    kv_transports: str = setting(
        DEFAULT_KV_TRANSPORTS,
        f"transports for KV: {', '.join(KV_TRANSPORTS)}; a prefill worker prefers the first that both workers name",
    )
    layers_per_group: int = setting(LAYERS_PER_GROUP, "layers whose KV is sent together while the next ones compute")
    layer_group_bytes: int = setting(
        2 << 20, "minimum KV that is sent together: short prompts send more layers at once"
    )
    num_threads: int = setting(0, "compute threads; 0: the number of cores allowed")
    lent_cores: str = setting("", "cores of another worker, used while that worker is idle; needs core_table")
    core_table: str = setting("", "file in which workers that share cores record whether they are busy")
    drain_grace_s: float = setting(30.0, "seconds that running work may take to finish at a stop")
    stall_after_s: float = setting(
        12.0,
        "report STALLED, and get no new work, once an engine step of up to 64 tokens has run for this long; larger "
        "steps in proportion; ready again when the step ends",
    )
    wedged_exit_s: float = setting(
        300.0,
        "exit, to be restarted, once an engine step of up to 64 tokens has run for this long; larger steps in "
        "proportion; 0: never; stuck_exit_s is the same for the event loop",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.registry_address and not self.registry_url:
            raise ConfigurationError("registry_address is not set: give --registry-address, or TANDEM_REGISTRY_URL")
        self._check_advertised()
        require_known(self)
        for name in ("stall_after_s", "model_loading_timeout", "rank_timeout_s"):
            if (seconds := getattr(self, name)) is not None and not seconds > 0:
                raise ConfigurationError(f"{name} must be > 0, got {getattr(self, name)}")
        require_at_least(self, 1, "block_size", "layers_per_group", "max_lora_rank")
        find_adapters(self.adapter)
        self.degrees()
        if self.rank_memory not in RANK_MEMORIES:
            raise ConfigurationError(f"rank_memory must be {', '.join(RANK_MEMORIES)}, got {self.rank_memory!r}")
        self._check_rank_listen()
        require_at_least(self, 0, *_NOT_NEGATIVE)
        self._check_kv_disk()
        self._check_transports()
        self.kv_memory()

    def _check_advertised(self) -> None:
        try:
            registry_host = urlsplit(self.registry_url).hostname or self.registry_address.rpartition(":")[0]
        except ValueError as error:
            raise ConfigurationError(f"registry_url is not a URL: {error}") from None
        is_local = not registry_host or is_loopback(registry_host) or is_unspecified(registry_host)
        if is_unspecified(self.host) and not self.advertise_host and not is_local:
            raise ConfigurationError(
                f"host {self.host} means every address of this machine, and no other machine reaches the worker there: "
                "set advertise_host to the name or address that others use"
            )

    def _check_transports(self) -> None:
        """Refuse transports whose KV could cross the network without authentication and encryption, unasked."""
        unprotected = [name for name in self.transports if not KV_TRANSPORTS[name]]
        if is_loopback(self.host):
            unprotected = [name for name in unprotected if name in _LISTENING_EVERYWHERE]
        if unprotected and not self.trust_fabric:
            named = " and ".join(unprotected)
            raise ConfigurationError(
                f"kv_transports names {named}, without authentication and encryption, and host is {self.host}: "
                f"set trust_fabric if nobody else can use that network, or leave {named} out"
            )

    def _check_kv_disk(self) -> None:
        if not 0 < self.kv_disk_gib < float("inf"):
            raise ConfigurationError(f"kv_disk_gib must be > 0 and finite, got {self.kv_disk_gib:g}")
        if self.kv_disk and not self.prefix_caching:
            raise ConfigurationError("kv_disk keeps what the prefix cache evicts: it needs prefix_caching")
        if self.kv_disk and (self.rank_listen or self.rank_memory == "own"):
            name = "rank_listen" if self.rank_listen else "rank_memory own"
            raise ConfigurationError(f"kv_disk does not work with {name}: the KV lies in several processes")

    @property
    def identity(self) -> str:
        """The worker id; by default host name and process id."""
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def transports(self) -> tuple[str, ...]:
        """The names in kv_transports. Raises ConfigurationError."""
        transports = tuple(name.strip() for name in self.kv_transports.split(","))
        for name in transports:
            if name not in KV_TRANSPORTS:
                raise ConfigurationError(f"kv_transports must be some of {', '.join(KV_TRANSPORTS)}, got {name!r}")
        return transports

    def adapters(self) -> tuple[AdapterFiles, ...]:
        """Read the headers of the adapters. Raises ConfigurationError."""
        folders = find_adapters(self.adapter)
        if self.served_name in folders:
            raise ConfigurationError(f"adapter {self.served_name} has the name of the model: give it another")
        return tuple(read_adapter(name, folder, self.max_lora_rank) for name, folder in folders.items())

    def kv_memory(self) -> KVMemorySettings:
        """The worker's share of the memory for KV. Raises ConfigurationError."""
        return KVMemorySettings(
            self.kv_memory_fraction,
            self.memory_utilization,
            self.kv_memory_shares,
            self.kv_memory_ledger,
            self.identity,
        )

    def degrees(self) -> Degrees:
        """Return the parallel degrees as numbers. With "max" these are those of a partitioned model; another may have
        fewer tensor ranks. Raises ConfigurationError.
        """
        most = Degrees()
        if "max" in (self.tensor_parallel, self.pipeline_parallel):
            partition = read_partition(Path(self.model))
            # Stages on one machine are no faster than as many tensor ranks, so there is never a reason to have more.
            most = Degrees(num_numa_nodes()) if partition is None else partition.degrees
        return Degrees(self._degree("tensor_parallel", most.tensor), self._degree("pipeline_parallel", most.pipeline))

    def _degree(self, name: str, most: int) -> int:
        value: str = getattr(self, name)
        if value == "max":
            return most
        if not value.isdecimal() or int(value) < 1:
            raise ConfigurationError(f"{name} must be at least 1, or max, got {value!r}")
        return int(value)

    @property
    def num_local_ranks(self) -> int:
        """Ranks that run on this machine, with cores of this worker."""
        return 1 if self.rank_listen else self.degrees().num_ranks

    def listen_for_ranks(self) -> Listen:
        """Where ranks from other machines dial in. Raises ConfigurationError."""
        host, port = host_and_port(self.rank_listen, -1, name="rank_listen")
        credentials = self.load_credentials()
        return Listen(host, port, credentials.key, tls=credentials.tls)

    def _check_rank_listen(self) -> None:
        if not self.rank_listen:
            return
        if "max" in (self.tensor_parallel, self.pipeline_parallel) or self.degrees().num_ranks < 2:
            raise ConfigurationError(
                "rank_listen needs 2 ranks or more: tensor_parallel or pipeline_parallel of 2 or more, as numbers, got "
                f"{self.tensor_parallel} and {self.pipeline_parallel}"
            )
        if self.rank_memory == "shared" or "," in self.device:
            raise ConfigurationError(
                "rank_listen does not fit rank_memory shared, nor a list of devices: each rank has its own there"
            )
        host = self.listen_for_ranks().host
        require_trusted_fabric(host, is_trusted=self.trust_fabric, name="rank_listen")

    def compute_cores(self) -> ComputeCores:
        """Return the cores of this worker and those it may borrow. Raises ConfigurationError for bad settings."""
        if not self.core_table:
            return ComputeCores()
        try:
            return SharedCores(Path(self.core_table), parse_cores(self.cpu_list), parse_cores(self.lent_cores))
        except OSError as error:  # a cleaner of temporary folders may have removed the file
            log.warning("no cores are lent", core_table=self.core_table, error=str(error))
            return ComputeCores()
        except ValueError as error:
            raise ConfigurationError(f"core_table needs cpu_list and lent_cores: {error}") from error
