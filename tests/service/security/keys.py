"""A keys file and credentials for tests."""

from pathlib import Path

from router.tenants import digest_of

MESH_KEY = "a-mesh-key-for-tests"
KEYS = {name: f"the-key-of-{name}" for name in ("alice", "mallory", "ops")}
_RIGHTS = {"mallory": ", max_concurrent_requests = 3", "ops": ", operator = true"}


def write_keys(folder: Path) -> str:
    """Make the file; returns its path."""
    path = folder / "keys.toml"
    lines = [f'{digest_of(key)} = {{ tenant = "{name}"{_RIGHTS.get(name, "")} }}' for name, key in KEYS.items()]
    path.write_text("\n".join(lines))
    return str(path)


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    """What that tenant sends."""
    return (("authorization", f"Bearer {KEYS[name]}"),)
