"""The setting kv_transports of both kinds of worker."""

import pytest

from decode_worker.settings import DecodeSettings
from kvtransfer import TransferSettings
from kvtransfer.transports import open_receive_transports
from mesh.domain.errors import ConfigurationError
from prefill_worker.settings import PrefillSettings
from worker.settings import KV_TRANSPORTS

ROLES = [PrefillSettings, DecodeSettings]


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
