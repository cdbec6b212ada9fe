"""What a node gets of a worker's settings, and what it does not."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from decode_worker.settings import DecodeSettings
from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings
from tandem_cli.configuration.up_settings import UpSettings
from tandem_cli.local_mesh.deployment import Deployment, ModelDeployment
from tandem_cli.local_mesh.hardware import CoreAssignment
from tandem_cli.model_files.model_folders import BUNDLED, BUNDLED_MODELS
from tandem_cli.on_ray.handover import Handover, hand_over
from tandem_cli.on_ray.resources import WorkerResources

KEY = "0123456789abcdef-mesh-key"
REDIS = "redis://user:password@redis:6379/0"
RESOURCES = WorkerResources("decode-0", 2, 3, 9e9, 5_000_000)
NODE = "10.0.0.7"


def deployment(model: str = "tandem-small", folder: str | None = None, **values: str) -> Deployment:
    """A mesh with one model in `folder`, whose decode worker has these settings."""
    served = ModelDeployment("m", folder or str(BUNDLED_MODELS / model), CoreAssignment(((),), ((),)))
    settings = UpSettings(model=model, on="ray", revision="main" if model == "org/model" else "")
    return Deployment(settings, (served,), pin=False, values={"decode": values}, registry_host="10.0.0.1")


def handed_over(mesh: Deployment, environ: Mapping[str, str] | None = None, **resources: int) -> Handover:
    _, worker = mesh.workers("10.0.0.1:50052")
    return hand_over(worker, mesh, {"TANDEM_MESH_KEY": KEY, **(environ or {})}, replace(RESOURCES, **resources))


def settings_on_node(handover: Handover, node: str = NODE) -> DecodeSettings:
    """The settings that the worker on the node loads."""
    service = handover.on_node(node)
    return load_settings(DecodeSettings, service.flags, prog="decode_worker", environ=handover.secrets).values


def test_the_router_listens_where_nodes_reach_it() -> None:
    assert "--registry-host=10.0.0.1" in deployment().router().flags
    assert not any("registry-host" in flag for flag in replace(deployment(), registry_host="").router().flags)


def test_a_node_gets_settings_addresses_and_resources() -> None:
    mesh = deployment(tensor_parallel="2", quantize="int8")
    settings = settings_on_node(handed_over(mesh, {"TANDEM_BLOCK_SIZE": "32"}))
    assert (settings.worker_id, settings.name) == ("decode-0", "m")
    assert settings.registry_address == "10.0.0.1:50052"
    assert (settings.host, settings.advertise_host) == (NODE, NODE)
    assert (settings.tensor_parallel, settings.quantize) == ("2", "int8")
    assert settings.block_size == 32, "a variable of this machine"
    assert (settings.num_threads, settings.kv_cache_bytes, settings.device) == (6, 5_000_000, "cpu")
    assert not settings.cpu_list
    assert settings.follow_stdin


def test_settings_files_stay_here(tmp_path: Path) -> None:
    config = tmp_path / "tandem.toml"
    config.write_text("[decode]\nmax_rolling_batch_size = 7\nprefix_caching = false\n")
    handover = handed_over(replace(deployment(), config=str(config)))
    assert not any(str(tmp_path) in flag for flag in handover.flags)
    settings = settings_on_node(handover)
    assert (settings.max_rolling_batch_size, settings.prefix_caching) == (7, False)


def test_secrets_are_in_no_flag_variable_or_text() -> None:
    handover = handed_over(deployment(), {"TANDEM_REGISTRY_URL": REDIS, "TANDEM_API_KEY": "k-client", "HF_TOKEN": "hf"})
    assert handover.secrets == {"TANDEM_MESH_KEY": KEY, "TANDEM_REGISTRY_URL": REDIS}
    for text in (repr(handover), repr(handover.on_node(NODE)), str(handover.flags), str(handover.environ)):
        assert KEY not in text
        assert "password" not in text
    assert not {"k-client", "hf"} & {*handover.environ.values(), *handover.secrets.values()}
    assert (settings_on_node(handover).mesh_key, settings_on_node(handover).registry_url) == (KEY, REDIS)


def test_a_bundled_model_is_found_where_the_node_has_it() -> None:
    handover = handed_over(deployment(draft_model=str(BUNDLED_MODELS / "tandem-draft")))
    assert handover.models == {"model": "tandem-small", "draft_model": "tandem-draft"}
    settings = settings_on_node(handover)
    assert (settings.model, settings.draft_model) == (
        str(BUNDLED),
        str(BUNDLED_MODELS / "tandem-draft"),
    )


@pytest.mark.parametrize("model", ["org/model", "s3://bucket/model"])
def test_a_remote_model_is_downloaded_by_the_node(model: str, tmp_path: Path) -> None:
    mesh = deployment(model, str(tmp_path))
    credentials = {"HF_TOKEN": "hf", "AWS_SECRET_ACCESS_KEY": "aws"}
    handover = handed_over(mesh, credentials | {"HF_HOME": "/home/me"})
    assert handover.environ == credentials
    settings = settings_on_node(handover)
    assert (settings.model, settings.model_cache) == (model, mesh.settings.model_cache)
    assert settings.revision == ("main" if model == "org/model" else "")


def test_a_partition_is_served_from_its_folder(tmp_path: Path) -> None:
    mesh = deployment("org/model", str(tmp_path))
    mesh = replace(mesh, settings=replace(mesh.settings, partition=str(tmp_path)))
    assert handed_over(mesh).models == {"model": str(tmp_path)}


def test_a_folder_that_a_node_does_not_see_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    handover = handed_over(deployment(str(folder), str(folder)))
    assert settings_on_node(handover).model == str(folder)
    (folder / "config.json").unlink()
    folder.rmdir()
    with pytest.raises(ConfigurationError, match=f"Ray node {NODE}, there is no model folder {folder}.*in S3"):
        handover.on_node(NODE)


def test_another_version_on_a_node_is_refused() -> None:
    handover = replace(handed_over(deployment()), version="0.0.9")
    with pytest.raises(ConfigurationError, match=f"{NODE} has tandem-serve .*, and this machine has 0.0.9"):
        pickle.loads(pickle.dumps(handover)).on_node(NODE)


def test_a_worker_with_a_gpu_has_it_for_itself() -> None:
    settings = settings_on_node(handed_over(deployment(), num_gpus=1))
    assert (settings.device, settings.kv_memory_shares, settings.kv_cache_bytes) == ("cuda", 1, 0)


def test_max_batch_total_tokens_stay_the_measure_of_kv() -> None:
    assert settings_on_node(handed_over(deployment(max_batch_total_tokens="4096"))).kv_cache_bytes == 0
