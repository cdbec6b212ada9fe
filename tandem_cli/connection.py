"""Command-line arguments and settings of commands that connect to a running mesh."""

import argparse
from dataclasses import dataclass, fields
from typing import TypeVar

import tandem
from mesh.domain.errors import ConfigurationError
from mesh.settings import as_flags, env_name, load_settings, setting
from tandem_cli.parser import CommandParser, given

C = TypeVar("C", tandem.Client, tandem.AsyncClient)


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


def add_connection_arguments(parser: CommandParser) -> None:
    """Add `--address` and the TLS flags. The API key is read from the environment only, which other users
    cannot see.
    """
    group = parser.add_argument_group("the router", description="An API key comes from the variable TANDEM_API_KEY.")
    for field in fields(ConnectionSettings):
        if not field.metadata["secret"]:
            parser.add_setting(field, group=group, note=f"env {env_name(field.name)}")


def add_sampling_arguments(parser: CommandParser) -> None:
    """Add what `tandem generate` and `tandem chat` let users say of answers."""
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, metavar="N", help="draws the same answer again")


def connection_settings(args: argparse.Namespace) -> ConnectionSettings:
    """The settings from the flags in `args` and from the environment."""
    values = given(args, (field.name for field in fields(ConnectionSettings)))
    return load_settings(ConnectionSettings, as_flags(**values), prog="client").values


def open_client(args: argparse.Namespace) -> tandem.Client:
    """A client for the router of `args`, which the caller closes. Raises ConfigurationError."""
    return _opened(tandem.Client, args)


def open_async_client(args: argparse.Namespace) -> tandem.AsyncClient:
    """As `open_client`, with a client for asyncio."""
    return _opened(tandem.AsyncClient, args)


def _opened(client_class: type[C], args: argparse.Namespace) -> C:
    settings = connection_settings(args)
    try:
        return client_class(settings.address, api_key=settings.api_key, tls=settings.client_tls)
    except tandem.InvalidRequest as error:
        raise ConfigurationError(str(error)) from error
