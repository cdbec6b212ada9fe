"""A worker's settings, as its node gets them.

`tandem up` has read flags, variables and settings files on its own machine. All that differs from a default goes along
as a flag, so a worker depends neither on that machine's files nor on its environment. The node adds its
address, and its folder of a bundled model. Settings that nobody has set may come from the environment of the
node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tandem
from checkpoint.source import ModelSource, split_models
from mesh.domain.errors import ConfigurationError
from mesh.settings import as_flags, env_name
from tandem_cli.local_mesh.deployment import Deployment, ModelDeployment, Service
from tandem_cli.model_files.model_folders import BUNDLED_MODELS, find_model
from tandem_cli.on_ray.resources import WorkerResources

_LEFT_OUT = (
    *("model", "revision", "draft_model", "model_cache"),  # named as nodes find them
    *("host", "advertise_host", "cpu_list", "core_table", "lent_cores"),  # of this machine
    *("num_threads", "device", "kv_memory_shares"),  # from what Ray gives
)
_DOWNLOAD_VARIABLES = (
    *("HF_TOKEN", "HF_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
)


@dataclass(frozen=True)
class Handover:
    """All that a node needs to start a worker. `models` has the settings `model` and `draft_model`: folders, names of
    bundled models, or remote names, which the worker downloads. `secrets` are environment variables, as in `environ`,
    for the worker only.
    """

    service: str
    role: str
    flags: tuple[str, ...]
    models: Mapping[str, str]
    environ: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    version: str = tandem.__version__

    def on_node(self, address: str) -> Service:
        """The service as the node at `address` starts it. Raises ConfigurationError."""
        if self.version != tandem.__version__:
            raise ConfigurationError(
                f"the Ray node {address} has tandem-serve {tandem.__version__}, and this machine has {self.version}: "
                "install the same on all"
            )
        models = {name: _find_on_node(model, address) for name, model in self.models.items()}
        addresses = {"host": address, "advertise_host": address}
        return Service(self.service, self.role, (*self.flags, *as_flags(**models | addresses), "--follow-stdin"))


def hand_over(
    service: Service, deployment: Deployment, environ: Mapping[str, str], resources: WorkerResources
) -> Handover:
    """The handover of the worker `service` to its node. Raises ConfigurationError."""
    settings, origins = deployment.resolve(service, environ), deployment.origins(service, environ)
    set_fields = [f for f in fields(settings) if origins[f.name] != "default" and f.name not in _LEFT_OUT]
    values = {f.name: getattr(settings, f.name) for f in set_fields if not f.metadata["secret"]}
    values |= {"num_threads": resources.cpus, "device": "cuda" if resources.num_gpus else "cpu"}
    if resources.num_gpus:
        values["kv_memory_shares"] = 1
    elif not getattr(settings, "max_batch_total_tokens", 0):
        values["kv_cache_bytes"] = resources.kv_bytes
    models, source = _models(settings, deployment)
    is_remote = any(ModelSource(name).is_remote for name in models.values())
    return Handover(
        service.name,
        service.role,
        as_flags(**values | source),
        models,
        {name: environ[name] for name in _DOWNLOAD_VARIABLES if is_remote and name in environ},
        {env_name(f.name): getattr(settings, f.name) for f in set_fields if f.metadata["secret"]},
    )


def _models(settings: Any, deployment: Deployment) -> tuple[dict[str, str], dict[str, str]]:
    """The models of a worker by setting, as nodes find them, and the settings for their download."""
    [served] = [model for model in deployment.models if model.name == settings.name]
    name = _named(served, deployment)
    source = {"model_cache": deployment.settings.model_cache}
    if ModelSource(name).is_remote and deployment.settings.revision:
        source["revision"] = deployment.settings.revision
    draft = getattr(settings, "draft_model", "")
    return {"model": name} | ({"draft_model": _portable(draft)} if draft else {}), source


def _named(model: ModelDeployment, deployment: Deployment) -> str:
    """A remote model's name, because `model.folder` is on this machine only; other models as `_portable`."""
    number = deployment.models.index(model)
    _, name = split_models(deployment.settings.model)[number]
    is_remote = ModelSource(name).is_remote and not deployment.settings.partition
    return name if is_remote else _portable(model.folder)


def _portable(model: str) -> str:
    """A bundled model by its name, because nodes may have it in another folder; other folders as absolute paths."""
    if ModelSource(model).is_remote:
        return model
    folder = Path(model).absolute()
    return folder.name if folder.parent == BUNDLED_MODELS else str(folder)


def _find_on_node(model: str, address: str) -> str:
    source = ModelSource(model)
    if source.is_remote:
        return model
    try:
        return str(find_model(source))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"on the Ray node {address}, {error}: put the model where all nodes see it under the same path, or give "
            "its name on the hub or in S3"
        ) from error
