"""CPU cores and network addresses of a host."""

import ipaddress

from mesh.domain.errors import ConfigurationError

Cores = tuple[int, ...]


def parse_cores(text: str) -> Cores:
    """Parse a list of core numbers such as "0,2-3". Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def format_cores(cores: Cores) -> str:
    """The cores as a list with commas, as the setting `cpu_list` takes them."""
    return ",".join(map(str, cores))


def is_loopback(host: str) -> bool:
    """True if a listener at `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """True for 0.0.0.0 and ::, which a listener may have and a caller cannot reach from another machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def local_address(address: str) -> str:
    """The HOST:PORT at which this machine reaches a listener: with loopback in place of 0.0.0.0 and ::."""
    host, _, port = address.rpartition(":")
    if not is_unspecified(host):
        return address
    return f"{'[::1]' if ':' in host else '127.0.0.1'}:{port}"


def join_host(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets, which `host` may have or not."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def host_and_port(text: str, default_port: int, *, name: str) -> tuple[str, int]:
    """Parse HOST, HOST:PORT or [IPV6]:PORT. Raises ConfigurationError, which names the setting `name`."""
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(default_port)
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    if not host or is_bare_ipv6 or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigurationError(f"{name} must be host:port, with IPv6 addresses in brackets, got {text!r}")
    return host, int(port)
