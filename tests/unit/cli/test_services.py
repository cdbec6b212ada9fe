"""Which processes a mesh has, and with which flags."""

import os
from pathlib import Path

import pytest

from checkpoint.source import ModelSource
from mesh.domain.errors import ConfigurationError
from tandem_cli.configuration.up_settings import UpSettings, passed_on, split_by_role
from tandem_cli.local_mesh.deployment import Deployment, ModelDeployment, Overrides, Service, prepare_models
from tandem_cli.local_mesh.hardware import CoreAssignment, assign_cores
from tandem_cli.local_mesh.preparation import with_switchable
from tandem_cli.model_files.model_folders import find_model


def flags_of(service: Service) -> dict[str, str]:
    return dict(flag.removeprefix("--").partition("=")[::2] for flag in service.flags)


def deployment_of(settings: UpSettings, model: str, **values: dict[str, str]) -> Deployment:
    models = (ModelDeployment(settings.name or "m", model, CoreAssignment(((0,),), ((1, 2),))),)
    return Deployment(settings, models, values=values)


def test_flags_of_all_services(tmp_path: Path) -> None:
    deployment = deployment_of(UpSettings(name="n", port=7), str(tmp_path), decode={"block_size": "8"})
    router = flags_of(deployment.router())
    assert router == {
        "model": str(tmp_path),
        "revision": "",
        "name": "n",
        "host": "127.0.0.1",
        "port": "7",
        "registry-port": "0",
        "expect-prefill": "1",
        "expect-decode": "1",
        "follow-stdin": "",
    }
    prefill, decode = deployment.workers("127.0.0.1:9")
    assert (prefill.name, decode.name) == ("prefill-0", "decode-0")
    assert (prefill.cores, decode.cores) == ((0,), (1, 2))
    assert flags_of(decode) == {
        "model": str(tmp_path),
        "revision": "",
        "name": "n",
        "worker-id": "decode-0",
        "registry-address": "127.0.0.1:9",
        "host": "127.0.0.1",
        "port": "0",
        "block-size": "8",
        "num-threads": "2",
        "cpu-list": "1,2",
        "follow-stdin": "",
    }


def test_workers_and_router_hear_of_their_cores(tmp_path: Path) -> None:
    cores = CoreAssignment(((0,),), ((1, 2),), router=(0,))
    deployment = Deployment(UpSettings(), (ModelDeployment("m", str(tmp_path), cores),), core_table=tmp_path / "table")
    prefill, decode = map(flags_of, deployment.workers("127.0.0.1:9"))
    assert (prefill["lent-cores"], decode["lent-cores"]) == ("1,2", "0")
    assert prefill["core-table"] == decode["core-table"] == str(tmp_path / "table")
    assert flags_of(deployment.router())["cpu-list"] == "0"


@pytest.mark.parametrize(("first", "ports"), [(None, [None] * 3), (0, ["0"] * 3), (9464, ["9464", "9465", "9466"])])
def test_each_service_has_a_port_for_its_figures(tmp_path: Path, first: int | None, ports: list[str | None]) -> None:
    deployment = deployment_of(UpSettings(metrics_port=first), str(tmp_path))
    services = [deployment.router(), *deployment.workers("127.0.0.1:9")]
    assert [flags_of(service).get("metrics-port") for service in services] == ports


def test_services_accept_their_flags(tmp_path: Path) -> None:
    deployment = deployment_of(UpSettings(), str(tmp_path))
    environ = {"TANDEM_PREFILL_THRESHOLD": "5", "TANDEM_MESH_KEY": "k" * 32}
    assert deployment.resolve(deployment.router(), environ).prefill_threshold == 5
    for worker in deployment.workers("127.0.0.1:9"):
        settings = deployment.resolve(worker, environ)
        assert (settings.worker_id, settings.follow_stdin) == (worker.name, True)


def test_the_gateway_knows_where_its_router_is(tmp_path: Path) -> None:
    deployment = deployment_of(UpSettings(http_port=0), str(tmp_path), gateway={"grace_s": "3"})
    router = deployment.resolve(deployment.router(), {})
    gateway = deployment.gateway(["0.0.0.0:7"], router)
    assert gateway is not None
    settings = deployment.resolve(gateway, {"PORT": "9"})
    assert (settings.router, settings.host, settings.port, settings.grace_s) == ("127.0.0.1:7", "127.0.0.1", 0, 3.0)
    assert deployment_of(UpSettings(), str(tmp_path)).gateway(["0.0.0.0:7"], router) is None


def test_services_are_not_killed_while_running_work_may_still_end(tmp_path: Path) -> None:
    settings = {"router": {"grace_s": "100"}, "gateway": {"grace_s": "200"}, "decode": {"drain_grace_s": "300"}}
    deployment = deployment_of(UpSettings(http_port=0), str(tmp_path), **settings)
    gateway = deployment.gateway(["h:7"], deployment.resolve(deployment.router(), {}))
    assert gateway is not None
    services = [deployment.router(), gateway, deployment.workers("h:1")[-1]]
    assert [
        deployment.stop_limit_s(service, {}) - grace_s
        for service, grace_s in zip(services, (100, 200, 300), strict=True)
    ] == [50] * 3


def test_where_cores_cannot_be_had_workers_are_not_pinned(tmp_path: Path) -> None:
    deployment = Deployment(
        UpSettings(), (ModelDeployment("m", str(tmp_path), CoreAssignment(((0,),), ((1,),))),), pin=False
    )
    for worker in deployment.workers("h:1"):
        assert worker.cores == ()
        assert "cpu-list" not in flags_of(worker)


def test_settings_go_to_the_roles_that_have_them() -> None:
    values = split_by_role({"block_size": "8", "max_queued_requests": "3"}, ["decode.block-size=4", "router.grace_s=2"])
    assert values == {
        "router": {"max_queued_requests": "3", "grace_s": "2"},
        "prefill": {"block_size": "8"},
        "decode": {"block_size": "4"},
        "gateway": {},
    }


@pytest.mark.parametrize(
    "name", ["worker_id", "registry_address", "mesh_key", "cpu_list", "core_table", "lent_cores", "model", "port"]
)
def test_what_the_supervisor_decides_is_not_passed_on(name: str) -> None:
    assert name not in passed_on()


@pytest.mark.parametrize("override", ["decode", "decode.block_size", "nobody.block_size=1", "router.block_size=1"])
def test_wrong_overrides(override: str) -> None:
    with pytest.raises(ConfigurationError, match="--set"):
        split_by_role({}, [override])


def test_models_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("bundled/small", "mine"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    bundled = tmp_path / "bundled"
    monkeypatch.setattr("tandem_cli.model_files.model_folders.BUNDLED_MODELS", bundled)
    assert find_model(ModelSource("small")) == bundled / "small"
    assert find_model(ModelSource(str(tmp_path / "mine"))) == tmp_path / "mine"
    with pytest.raises(ConfigurationError, match=r"holds no model.*bundled are: small"):
        find_model(ModelSource(str(tmp_path)))
    with pytest.raises(ConfigurationError, match="no model folder"):
        find_model(ModelSource("other"))


def test_colocated_starts_no_prefill_workers() -> None:
    assert UpSettings(colocated=True, prefill=3).num_prefill == 0
    assert UpSettings(prefill=0).num_prefill == 0


def test_each_model_has_workers_and_cores_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_cli.local_mesh.deployment.available_cores", lambda: range(8))
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    settings = UpSettings(model=f"a={tmp_path}/x,b={tmp_path}/y")
    overrides = Overrides.read(["b/up.decode=2", "b/decode.device=cuda:1", "router.grace-s=3"])
    assert overrides.for_all == ["router.grace-s=3"]
    deployment = Deployment(settings, prepare_models(settings, overrides, lambda name: lambda fraction: None))
    router = flags_of(deployment.router())
    assert (router["model"], router["name"]) == (f"a={tmp_path}/x,b={tmp_path}/y", "")
    assert (router["expect-prefill"], router["expect-decode"]) == ("2", "3")
    workers = {worker.name: worker for worker in deployment.workers("127.0.0.1:9")}
    assert list(workers) == ["a-prefill-0", "a-decode-0", "b-prefill-0", "b-decode-0", "b-decode-1"]
    assert flags_of(workers["b-decode-1"])["model"] == f"{tmp_path}/y"
    assert [flags_of(worker)["name"] for worker in workers.values()] == ["a", "a", "b", "b", "b"]
    assert {name: flags_of(worker).get("device") for name, worker in workers.items()}["b-decode-0"] == "cuda:1"
    assert "device" not in flags_of(workers["a-decode-0"])
    cores = [core for worker in workers.values() for core in worker.cores]
    assert sorted(cores) == sorted(set(cores))


def test_models_that_share_cores_lend_none() -> None:
    assigned = assign_cores(range(2), num_prefill=2, num_decode=2).split([(1, 1), (1, 1)])
    assert [cores.lent_to("prefill", 0) for cores in assigned] == [(), ()]
    alone = assign_cores(range(4), num_prefill=2, num_decode=2).split([(1, 1), (1, 1)])
    assert [cores.lent_to("prefill", 0) for cores in alone] == [alone[0].decode[0], alone[1].decode[0]]


@pytest.mark.parametrize(
    ("settings", "override", "said"),
    [
        ({"model": "a=x,b=y", "name": "c"}, [], "--name works with one model only"),
        ({"model": "a=x,b=y"}, ["c/decode.device=cpu"], "no model has this name; there are a, b"),
        ({"model": "a=x,b=y"}, ["a/router.grace-s=1"], "the router serves all models"),
        ({"model": "a=x,b=y"}, ["a/up.host=1"], "expected one of prefill, decode, colocated"),
        ({"model": "a=x,b=y"}, ["a/up.decode=0"], "decode must be >= 1"),
        ({"model": "a=x,b=y"}, ["a/up.colocated=yess"], "up.colocated=yess: expected true or false"),
    ],
)
def test_wrong_settings_of_models(settings: dict[str, str], override: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        prepare_models(UpSettings(**settings), Overrides.read(override), lambda name: lambda fraction: None)  # type: ignore[arg-type]


def test_a_folder_that_was_deleted_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ConfigurationError, match="the current folder has been deleted"):
        _ = ModelSource("model").short_name


def test_a_path_that_services_cannot_use_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigurationError, match="loop cannot be followed: "):
        _ = ModelSource(str(loop)).short_name
    no_text = os.fsencode(tmp_path) + b"/model\xff"
    try:
        os.mkdir(no_text)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    with pytest.raises(ConfigurationError, match=r"model\\xff' is not UTF-8: rename it"):
        _ = ModelSource(os.fsdecode(no_text)).short_name


def test_switchable_workers_have_the_settings_of_both_roles(tmp_path: Path) -> None:
    settings = UpSettings(name="n", port=7, switchable=True)
    values = {"prefill": {"max_batch_prefill_tokens": "96"}, "decode": {"block_size": "8", "max_step_tokens": "64"}}
    deployment = deployment_of(settings, str(tmp_path), **values)
    prefill, decode = deployment.workers("127.0.0.1:9")
    assert [(each.name, each.role, each.program) for each in (prefill, decode)] == [
        ("prefill-0", "prefill", "switchable"),
        ("decode-0", "decode", "switchable"),
    ]
    assert deployment.programs == ["router", "switchable"]
    first, second = (deployment.resolve(each, {}) for each in (prefill, decode))
    assert (first.role, second.role) == ("prefill", "decode")
    for each in (first, second):
        assert (each.max_batch_prefill_tokens, each.block_size, each.step_tokens) == (96, 8, 64)
    values["prefill"]["block_size"] = "16"
    with pytest.raises(ConfigurationError, match="block_size is 16 for prefill workers and 8 for decode workers"):
        deployment_of(settings, str(tmp_path), **values).workers("127.0.0.1:9")


def test_a_router_that_switches_roles_makes_workers_switchable(tmp_path: Path) -> None:
    plain = deployment_of(UpSettings(), str(tmp_path))
    assert not with_switchable(plain, {}).settings.switchable
    ruled = deployment_of(UpSettings(), str(tmp_path), router={"switch_roles": "true"})
    assert with_switchable(ruled, {}).settings.switchable
    on_ray = deployment_of(UpSettings(on="ray"), str(tmp_path), router={"switch_roles": "true"})
    with pytest.raises(ConfigurationError, match="switch_roles and on=ray do not fit"):
        with_switchable(on_ray, {})
