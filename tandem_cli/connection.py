"""Command-line arguments and settings of commands that connect to a running mesh."""

import argparse
from dataclasses import dataclass

import tandem
from mesh.settings import load_settings, setting


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Address, credential and TLS options of the router."""

    address: str = setting("127.0.0.1:50051", "address of the router, or of several, separated by commas")
    api_key: str | None = setting(None, "credential for the router", secret=True)
    tls: bool = setting(False, "the router has a certificate of a public CA")
    tls_ca: str = setting("", "PEM file: the CA of the router's certificate, or the certificate itself")
    tls_name: str = setting("", "name in the router's certificate; default: its address")

    @property
    def client_tls(self) -> tandem.Tls | bool:
        """The `tls` argument of the SDK's clients."""
        if self.tls_ca or self.tls_name:
            return tandem.Tls(self.tls_ca or None, self.tls_name or None)
        return self.tls


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--address` and the TLS flags. The API key is read from the environment only, which other users
    cannot see.
    """
    about = (
        "address of the router, or several with commas (default 127.0.0.1:50051; env TANDEM_ADDRESS, TANDEM_API_KEY)"
    )
    parser.add_argument("--address", metavar="HOST:PORT", help=about)
    about = "the router has a certificate of a public CA (env TANDEM_TLS)"
    parser.add_argument("--tls", action="store_const", const="true", help=about)
    about = "PEM file: the CA of the router's certificate, or the certificate itself (env TANDEM_TLS_CA)"
    parser.add_argument("--tls-ca", metavar="FILE", help=about)
    about = "name in the router's certificate, if not its address (env TANDEM_TLS_NAME)"
    parser.add_argument("--tls-name", metavar="NAME", help=about)


def connection_settings(args: argparse.Namespace) -> ConnectionSettings:
    """The settings from the flags in `args` and from the environment."""
    options = {name: getattr(args, name) for name in ("address", "tls", "tls_ca", "tls_name")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return load_settings(ConnectionSettings, flags, prog="client").values


def open_client(args: argparse.Namespace) -> tandem.Client:
    """A client for the router of `args`. The caller closes it."""
    settings = connection_settings(args)
    return tandem.Client(settings.address, api_key=settings.api_key, tls=settings.client_tls)


def open_async_client(args: argparse.Namespace) -> tandem.AsyncClient:
    """As `open_client`, with a client for asyncio."""
    settings = connection_settings(args)
    return tandem.AsyncClient(settings.address, api_key=settings.api_key, tls=settings.client_tls)
