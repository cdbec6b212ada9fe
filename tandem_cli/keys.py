"""`tandem keys`: creates API keys for the router's public port."""

import argparse
import sys

from mesh.domain.errors import ConfigurationError
from router.tenants import Priority, Tenant, digest_of, new_key
from tandem_cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    about = (
        "create a key: print the key on stderr, once, and its line for the keys file (TANDEM_API_KEYS_FILE) on stdout"
    )
    new = actions.add_parser("new", help=about, description=about)
    new.add_argument("tenant", metavar="TENANT", help="name of the tenant that gets the key")
    new.add_argument(
        "--operator",
        action="store_true",
        help="let the tenant see and drain workers, switch their roles, share out traffic, and read all metrics",
    )
    new.add_argument(
        "--max-concurrent-requests", type=int, metavar="N", help="limit on choices that are served at a time"
    )
    names = [priority.name.lower() for priority in Priority]
    new.add_argument("--priority", choices=names, help="default and highest priority of its requests")


def run(args: argparse.Namespace) -> int:
    """Print the key on stderr and its digest on stdout: `tandem keys new alice >> keys.toml`."""
    if not args.tenant:
        raise ConfigurationError("a tenant needs a name")
    priority = Priority[args.priority.upper()] if args.priority else Priority.STANDARD
    tenant = Tenant(args.tenant, args.operator, args.max_concurrent_requests, priority)
    key = new_key()
    sys.stderr.write(f"the key of {tenant.name}, which is stored nowhere: {key}\n")
    sys.stdout.write(f"{digest_of(key)} = {{ {_fields(tenant)} }}\n")
    return 0


def _fields(tenant: Tenant) -> str:
    fields = [f'tenant = "{tenant.name}"']
    if tenant.operator:
        fields.append("operator = true")
    if tenant.max_concurrent_requests is not None:
        fields.append(f"max_concurrent_requests = {tenant.max_concurrent_requests}")
    if tenant.priority is not Priority.STANDARD:
        fields.append(f'priority = "{tenant.priority.name.lower()}"')
    return ", ".join(fields)
