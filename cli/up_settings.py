"""Settings of `tandem up`, and the model folder they mean."""

from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from mesh.settings import setting

BUNDLED_MODELS = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Checked on construction."""

    model: str = setting("tandem-small", "model folder, or name of a bundled model", env=("MODEL_ID", "HF_MODEL_ID"))
    name: str = setting("", "served model name; default: the folder's name")
    prefill: int = setting(1, "number of prefill workers")
    decode: int = setting(1, "number of decode workers")
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
        240.0, "seconds until everything must serve", env=("OPTION_MODEL_LOADING_TIMEOUT",)
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


def find_model(model: str, bundled: Path = BUNDLED_MODELS) -> Path:
    """The folder of `model`. Raises ConfigurationError if it is neither bundled nor a model folder."""
    names = sorted(config.parent.name for config in bundled.glob("*/config.json"))
    if model in names:
        return bundled / model
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    known = f"; bundled are: {', '.join(names)}" if names else ""
    if folder.is_dir():
        raise ConfigurationError(f"the folder {model} holds no model: it has no config.json{known}")
    raise ConfigurationError(f"there is no model folder {model}{known}")
