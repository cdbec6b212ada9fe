"""Settings both kinds of worker have."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import structlog

from mesh.cores import ComputeCores, OwnCores, SharedCores, parse_cores
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, KV_DTYPE_BYTES
from mesh.model_settings import ModelSettings
from mesh.settings import setting

log = structlog.get_logger(__name__)

DTYPES = ("auto", *DTYPE_BYTES)
KV_DTYPES = ("auto", *KV_DTYPE_BYTES)
QUANTIZATIONS = ("none", "int8")
LOAD_FORMATS = ("auto", "dummy")
_KNOWN = {"dtype": DTYPES, "kv_dtype": KV_DTYPES, "load_format": LOAD_FORMATS, "quantize": QUANTIZATIONS}


def require_known(settings: object) -> None:
    """ConfigurationError if a setting of these names has a value that does not exist."""
    for name, known in _KNOWN.items():
        if (value := getattr(settings, name)) not in known:
            raise ConfigurationError(f"{name} must be one of {', '.join(known)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ModelSettings):
    """Identity, addresses, and the engine's limits."""

    worker_id: str = setting("", "stable name of this worker; default: host name and process id")
    registry_address: str = setting("", "host:port of the router's registry; not needed with registry_url")
    registry_url: str = setting("", "redis://... or rediss://...: register there, for all routers", secret=True)
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "port to listen on; 0 takes a free one")
    advertise_host: str = setting("", "host name others reach this worker by; default: host")
    device: str = setting("auto", "cpu, cuda, cuda:N, or auto")
    dtype: str = setting(
        "auto",
        f"type of weights and KV: {', '.join(DTYPES)}; auto: float32 on CPU, the checkpoint's on GPU",
        env=("DTYPE",),
    )
    kv_dtype: str = setting(
        "auto", f"type of KV: {', '.join(KV_DTYPES)}; auto: as dtype, or int8 with quantize=int8", env=("KV_DTYPE",)
    )
    enforce_eager: bool = setting(False, "never use the compiled decoder (CPU with AVX-512)", env=("ENFORCE_EAGER",))
    quantize: str = setting(
        "none", f"arithmetic of linear layers: {', '.join(QUANTIZATIONS)} (CPU only)", env=("QUANTIZE",)
    )
    load_format: str = setting("auto", "auto, or dummy: random weights, for benchmarks")
    model_loading_timeout: float = setting(
        240.0,
        "seconds until the model must be loaded, once it is on this machine",
        env=("OPTION_MODEL_LOADING_TIMEOUT",),
    )
    block_size: int = setting(16, "tokens per KV block")
    kv_cache_bytes: int = setting(0, "memory for KV; 0 takes a share of what is free")
    kv_memory_fraction: float = setting(0.3, "share of free memory for KV", env=("CUDA_MEMORY_FRACTION",))
    max_model_len: int = setting(0, "most tokens of a sequence; 0: the model's own limit")
    prefix_caching: bool = setting(True, "keep KV of finished sequences for prompts with the same beginning")
    layers_per_group: int = setting(8, "layers whose KV is shipped together while the next ones compute")
    layer_group_bytes: int = setting(2 << 20, "least KV that is shipped together: more layers, where prompts are short")
    num_threads: int = setting(0, "compute threads; 0: the number of cores allowed")
    lent_cores: str = setting("", "cores of another worker, to compute on while it has nothing to do; needs core_table")
    core_table: str = setting("", "file in which workers that lend each other cores say whether they are at work")
    drain_grace_s: float = setting(30.0, "time running work gets at a stop")
    stall_after_s: float = setting(
        12.0,
        "not ready once an engine step of up to 64 tokens has run for this long; larger steps get more in proportion",
    )
    wedged_exit_s: float = setting(300.0, "exit, to be restarted, once one engine step has run for this long; 0: never")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.registry_address and not self.registry_url:
            raise ConfigurationError("registry_address is not set: give --registry-address, or TANDEM_REGISTRY_URL")
        require_known(self)
        for name in ("stall_after_s", "model_loading_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be > 0, got {getattr(self, name)}")
        if not self.wedged_exit_s >= 0:
            raise ConfigurationError(f"wedged_exit_s must be >= 0, got {self.wedged_exit_s}")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigurationError(f"kv_memory_fraction must be in (0, 1], got {self.kv_memory_fraction}")

    @property
    def identity(self) -> str:
        """This worker's id."""
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    def compute_cores(self) -> ComputeCores:
        """The worker's cores, and those it may be lent. Raises ConfigurationError if the settings make no sense."""
        if not self.core_table:
            return OwnCores()
        try:
            return SharedCores(Path(self.core_table), parse_cores(self.cpu_list), parse_cores(self.lent_cores))
        except OSError as error:  # cleaners of temporary folders may have come by
            log.warning("no cores are lent", core_table=self.core_table, error=str(error))
            return OwnCores()
        except ValueError as error:
            raise ConfigurationError(f"core_table needs cpu_list and lent_cores: {error}") from error
