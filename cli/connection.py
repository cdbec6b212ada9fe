"""Arguments of the commands that talk to a running mesh."""

import argparse
from dataclasses import dataclass

import tandem
from mesh.settings import load_settings, setting


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Where the router is."""

    address: str = setting("127.0.0.1:50051", "the router's address")
    api_key: str | None = setting(None, "credential for the router", secret=True)


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """`--address`; the API key comes from the environment only, where other users cannot see it."""
    about = "the router (default 127.0.0.1:50051; env TANDEM_ADDRESS, TANDEM_API_KEY)"
    parser.add_argument("--address", metavar="HOST:PORT", help=about)


def open_client(args: argparse.Namespace) -> tandem.Client:
    """A client for the router that `args` name."""
    flags = [] if args.address is None else ["--address", args.address]
    settings = load_settings(ConnectionSettings, flags, prog="client").values
    return tandem.Client(settings.address, api_key=settings.api_key)
