"""Settings of `tandem up`, and the lookup of model folders."""

from dataclasses import dataclass
from pathlib import Path

from checkpoint.source import ModelSource, Progress
from mesh.domain.errors import ConfigurationError
from mesh.settings import setting

BUNDLED_MODELS = Path(__file__).resolve().parent.parent / "demo_model"


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of `tandem up` itself. The constructor raises ConfigurationError for values out of range."""

    model: str = setting(
        "tandem-small",
        "model folder, org/name on the Hugging Face hub, s3://bucket/prefix, or name of a bundled model; repeat "
        "NAME=MODEL for several models",
        env=("MODEL_ID", "HF_MODEL_ID"),
    )
    name: str = setting("", "served model name; default: name of the model without path or organisation")
    revision: str = setting("", "branch, tag or commit on the hub", env=("HF_MODEL_REVISION", "HF_REVISION"))
    model_cache: str = setting("~/.cache/tandem", "folder for copies of models from S3")
    prefill: int = setting(1, "number of prefill workers of each model")
    decode: int = setting(1, "number of decode workers of each model")
    colocated: bool = setting(False, "start no prefill workers: decode workers compute prompts too")
    host: str = setting("127.0.0.1", "address that clients connect to")
    port: int = setting(50051, "port that clients connect to; 0 picks a free port", env=("PORT",))
    routers: int = setting(1, "number of routers, on consecutive ports; several routers need registry_url")
    registry_url: str = setting(
        "",
        "redis://... or rediss://...: Redis through which several routers share workers and permits; set a URL with a "
        "password in the environment, because flags are visible to other users",
    )
    http_host: str = setting("127.0.0.1", "address that HTTP clients connect to")
    http_port: int | None = setting(None, "port of the HTTP gateway; 0 picks a free port; default: no gateway")
    metrics_port: int | None = setting(
        None,
        "metrics port of the first router; other routers and workers use the next ports; 0 picks free ports; default: "
        "no metrics",
    )
    threads_per_worker: int | None = setting(
        None, "maximum number of cores of a worker; default: an equal share of all cores"
    )
    model_loading_timeout: float = setting(
        240.0,
        "seconds within which all services must be ready, not counting downloads; also applies to restarted workers",
        env=("OPTION_MODEL_LOADING_TIMEOUT",),
    )
    log_dir: str = setting(
        "", "folder for the logs of services; default: a temporary folder, which is kept after failures and warnings"
    )
    no_restart: bool = setting(False, "do not restart services that exit; stop when no router is left")
    mesh_key: str = setting("", "secret that all services of the mesh share; default: a new random secret", secret=True)

    def __post_init__(self) -> None:
        for name, low in (("prefill", 0), ("decode", 1), ("threads_per_worker", 1), ("routers", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigurationError(f"{name} must be >= {low}, got {value}")
        for name in ("port", "http_port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigurationError(f"{name} must be in [0, 65535], got {getattr(self, name)}")
        if not 0 < self.model_loading_timeout < float("inf"):
            raise ConfigurationError(f"model_loading_timeout must be > 0, got {self.model_loading_timeout:g}")

    @property
    def num_prefill(self) -> int:
        return 0 if self.colocated else self.prefill


@dataclass(frozen=True, kw_only=True)
class HandlerChoice:
    """The gateway setting `handler`. If it is set, unknown keys of serving.properties belong to the handler."""

    handler: str = setting("", "your own model.py")


def find_model(
    source: ModelSource, on_progress: Progress = lambda fraction: None, bundled: Path = BUNDLED_MODELS
) -> Path:
    """The folder of a model: bundled, local or downloaded. Raises ConfigurationError if the model cannot be found."""
    names = sorted(config.parent.name for config in bundled.glob("*/config.json"))
    if source.name in names:
        return bundled / source.name
    try:
        return source.locate(on_progress)
    except ConfigurationError as error:
        hint = f"; bundled are: {', '.join(names)}" if names and not source.is_remote else ""
        raise ConfigurationError(f"{error}{hint}") from error
