"""Settings of workers that are checked before anything is loaded, and limits that must fit those of the router."""

from pathlib import Path

import pytest

from decode_worker.settings import DecodeSettings
from kvtransfer import TransferSettings
from kvtransfer.transports import open_receive_transports
from mesh.domain.errors import ConfigurationError
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from worker.settings import KV_TRANSPORTS, WorkerSettings

ROLES = [PrefillSettings, DecodeSettings]


@pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_transports_without_protection_leave_the_machine_only_if_the_network_is_trusted(
    role: type[WorkerSettings], transport: str
) -> None:
    def settings(host: str, *, trust_fabric: bool, transports: str) -> WorkerSettings:
        return role(
            model="m",
            registry_address="none",
            host=host,
            kv_transports=transports,  # type: ignore[call-arg]
            trust_fabric=trust_fabric,
        )

    named = f"shm,{transport},grpc"
    with pytest.raises(ConfigurationError, match=f"names {transport}, .* host is 10.0.0.1: set trust_fabric"):
        settings("10.0.0.1", trust_fabric=False, transports=named)
    settings("10.0.0.1", trust_fabric=True, transports=named)
    settings("127.0.0.1", trust_fabric=False, transports=named)
    settings("10.0.0.1", trust_fabric=False, transports="shm,grpc")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_others_cannot_reach_every_address(host: str) -> None:
    def settings(registry: str, **more: str) -> WorkerSettings:
        return DecodeSettings(model="m", registry_address=registry, host=host, **more)

    for registry in ("10.0.0.1:50052", "router:50052", "[fd00::1]:50052"):
        with pytest.raises(ConfigurationError, match=r"means every address of this machine, .* set advertise_host"):
            settings(registry)
        settings(registry, advertise_host="10.0.0.2")
    for registry in ("127.0.0.1:50052", "[::1]:50052", "0.0.0.0:50052"):
        settings(registry)
    with pytest.raises(ConfigurationError, match="set advertise_host"):
        settings("", registry_url="redis://:p@redis:6379/0")
    settings("", registry_url="redis://:p@127.0.0.1:6379/0")
    with pytest.raises(ConfigurationError, match="registry_url is not a URL: Invalid IPv6 URL"):
        settings("", registry_url="redis://[::1:6379/0")


@pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_transports_that_listen_everywhere_need_a_trusted_network_also_on_loopback(
    role: type[WorkerSettings], transport: str
) -> None:
    named = {"model": "m", "registry_address": "none", "kv_transports": f"{transport},grpc"}
    with pytest.raises(ConfigurationError, match=f"names {transport}, .* host is 127.0.0.1: set trust_fabric"):
        role(**named)  # type: ignore[arg-type]
    role(**named, trust_fabric=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "named"), [("127.0.0.1", "nixl"), ("10.0.0.1", "gloo and nixl")], ids=["loopback", "beyond"]
)
def test_exactly_the_transports_that_are_in_the_way_are_named(host: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"names {named}, .* or leave {named} out"):
        DecodeSettings(model="m", registry_address="none", host=host, kv_transports="shm,gloo,nixl")


@pytest.mark.parametrize("role", ROLES)
def test_names_may_have_spaces_around_them(role: type[PrefillSettings | DecodeSettings]) -> None:
    settings = role(model="m", registry_address="none", kv_transports=" grpc , shm")
    assert settings.transports == ("grpc", "shm")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("wrong", ["rdma", "shm,", ""])
def test_wrong_names_are_refused_before_a_model_is_loaded(
    role: type[PrefillSettings | DecodeSettings], wrong: str
) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"kv_transports must be some of {', '.join(KV_TRANSPORTS)}, got '(rdma)?'"
    ):
        role(model="m", registry_address="none", kv_transports=wrong)


def test_settings_accept_what_transfers_have() -> None:
    with pytest.raises(ConfigurationError, match=f"choose from {', '.join(KV_TRANSPORTS)}$"):
        open_receive_transports(TransferSettings(("none",)))


def test_a_reservation_lasts_as_long_as_the_router_waits_for_its_prefill(tmp_path: Path) -> None:
    """A shorter lease would take the blocks from a prompt that still waits on the prefill worker."""
    assert TransferSettings().opening_lease_s >= RouterSettings(model=str(tmp_path)).prefill_timeout_s


@pytest.mark.parametrize("gib", [0.0, -1.0, float("inf"), float("nan")])
def test_kv_on_disk_has_a_size(gib: float) -> None:
    with pytest.raises(ConfigurationError, match="kv_disk_gib must be > 0 and finite"):
        DecodeSettings(model="m", registry_address="none", kv_disk="/tmp/kv", kv_disk_gib=gib)
