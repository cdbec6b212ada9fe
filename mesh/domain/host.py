"""CPU cores and network addresses of a host."""

import ipaddress

Cores = tuple[int, ...]


def parse_cores(text: str) -> Cores:
    """Parse a list of core numbers such as "0,2-3". Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def is_loopback(host: str) -> bool:
    """True if a listener at `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
