"""`tandem keys`: API keys for the router's public port."""

import argparse
import sys

from mesh.domain.errors import ConfigurationError
from router.api_keys import digest_of, new_key
from router.tenants import Priority, Tenant

NAME = "keys"
ABOUT = "make API keys for tenants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`tandem keys new TENANT`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    about = "make a key: the key goes to stderr, once; its line for the keys file (TANDEM_API_KEYS_FILE) to stdout"
    new = actions.add_parser("new", help=about, description=about, allow_abbrev=False)
    new.add_argument("tenant", metavar="TENANT", help="whom the key is for")
    new.add_argument("--operator", action="store_true", help="may also look at the workers")
    new.add_argument("--max-concurrent-requests", type=int, metavar="N", help="choices in service at a time")
    names = [priority.name.lower() for priority in Priority]
    new.add_argument("--priority", choices=names, help="class of its requests in the queue, and the highest it may ask")


def run(args: argparse.Namespace) -> int:
    """`tandem keys new alice >> keys.toml` shows the key and files its digest. Raises ConfigurationError."""
    if not args.tenant:
        raise ConfigurationError("a tenant needs a name")
    priority = Priority[args.priority.upper()] if args.priority else Priority.STANDARD
    tenant = Tenant(args.tenant, args.operator, args.max_concurrent_requests, priority)
    key = new_key()
    sys.stderr.write(f"the key of {tenant.name}, not kept anywhere: {key}\n")
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
