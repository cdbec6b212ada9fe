"""Network addresses."""

import ipaddress


def is_loopback(host: str) -> bool:
    """True if a listener at `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
