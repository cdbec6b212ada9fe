"""CPU core numbers, in ascending order."""

Cores = tuple[int, ...]


def parse_cores(text: str) -> Cores:
    """Parse a list of core numbers such as "0,2-3". Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))
