"""Settings of `tandem up`, and the model folder they mean."""

from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from mesh.model_source import ModelSource, Progress
from mesh.settings import setting

BUNDLED_MODELS = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Checked on construction."""

    model: str = setting(
        "tandem-small",
        "model folder, org/name on the Hugging Face hub, s3://bucket/prefix, or name of a bundled model; for several "
        "models NAME=MODEL, repeated",
        env=("MODEL_ID", "HF_MODEL_ID"),
    )
    name: str = setting("", "served model name; default: the model's own, without path or organisation")
    revision: str = setting("", "branch, tag or commit on the hub", env=("HF_MODEL_REVISION", "HF_REVISION"))
    model_cache: str = setting("~/.cache/tandem", "folder for copies of models from S3")
    prefill: int = setting(1, "number of prefill workers of each model")
    decode: int = setting(1, "number of decode workers of each model")
    colocated: bool = setting(False, "no prefill workers: decode workers do both")
    host: str = setting("127.0.0.1", "address clients reach")
    port: int = setting(50051, "port clients reach; 0 takes a free one", env=("PORT",))
    http_host: str = setting("127.0.0.1", "address HTTP clients reach")
    http_port: int | None = setting(None, "port of the HTTP gateway; 0 takes a free one; default: no gateway")
    metrics_port: int | None = setting(
        None, "port for the router's figures, the next ones for the workers'; 0 takes free ones; default: no figures"
    )
    threads_per_worker: int | None = setting(None, "most cores of a worker; default: a fair share of all")
    model_loading_timeout: float = setting(
        240.0,
        "seconds until everything must serve, once the model is on this machine; also for workers started again",
        env=("OPTION_MODEL_LOADING_TIMEOUT",),
    )
    log_dir: str = setting("", "folder for the services' logs; default: a new temporary one")
    no_restart: bool = setting(False, "leave workers that die dead")
    mesh_key: str = setting("", "secret of the mesh; default: a new one", secret=True)

    def __post_init__(self) -> None:
        for name, low in (("prefill", 0), ("decode", 1), ("threads_per_worker", 1)):
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
        """Prefill workers to start."""
        return 0 if self.colocated else self.prefill


@dataclass(frozen=True, kw_only=True)
class HandlerChoice:
    """The one of the gateway's settings that says whose unknown keys of serving.properties are."""

    handler: str = setting("", "model.py of your own")


def find_model(
    source: ModelSource, on_progress: Progress = lambda fraction: None, bundled: Path = BUNDLED_MODELS
) -> Path:
    """The folder of a model, bundled or downloaded if need be. Raises ConfigurationError if it is not to be had."""
    names = sorted(config.parent.name for config in bundled.glob("*/config.json"))
    if source.name in names:
        return bundled / source.name
    try:
        return source.locate(on_progress)
    except ConfigurationError as error:
        known = f"; bundled are: {', '.join(names)}" if names and not source.is_remote else ""
        raise ConfigurationError(f"{error}{known}") from error
