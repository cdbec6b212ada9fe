"""Keys that can be read on their way are warned of at start."""

from typing import Any

import pytest
from structlog.testing import capture_logs

import gateway.__main__
import router.__main__
from gateway.settings import GatewaySettings
from router.settings import RouterSettings
from tests.defects import Repaired

WARNING = "API keys and prompts are sent unencrypted"


class WithTls(RouterSettings):
    """As if its certificate had been read."""

    def load_public_tls(self) -> None:
        """No file is there."""


def warnings_of(module: Any, settings: Any) -> list[str]:
    with capture_logs() as lines:
        module._warn_of_open_keys(settings)
    return [line["event"] for line in lines if line["log_level"] == "warning"]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "box.example"])
def test_a_public_listener_with_keys_and_without_tls_says_so(host: str, repaired: Repaired) -> None:
    keys = RouterSettings(model=".", host=host, api_keys_file="keys.toml")
    (of_router,) = warnings_of(router.__main__, keys)
    assert of_router.startswith(WARNING)
    assert "public_tls_cert" in of_router
    (of_gateway,) = warnings_of(gateway.__main__, GatewaySettings(host=host))
    assert of_gateway.startswith(WARNING)
    assert "a proxy that terminates TLS" in of_gateway
    repaired("S3", "router and gateway warn at start, and say what to do")


@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(model=".", host="127.0.0.1", api_keys_file="keys.toml"),
        RouterSettings(model=".", host="0.0.0.0", allow_anonymous=True),
        WithTls(
            model=".", host="0.0.0.0", api_keys_file="keys.toml", public_tls_cert="cert.pem", public_tls_key="key.pem"
        ),
    ],
)
def test_otherwise_the_router_is_silent(settings: RouterSettings) -> None:
    assert warnings_of(router.__main__, settings) == []


@pytest.mark.parametrize("settings", [GatewaySettings(), GatewaySettings(host="0.0.0.0", allow_anonymous=True)])
def test_otherwise_the_gateway_is_silent(settings: GatewaySettings) -> None:
    assert warnings_of(gateway.__main__, settings) == []
