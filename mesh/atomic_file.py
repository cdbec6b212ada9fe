"""Files that are replaced atomically: neither a reader nor a crash in the middle of a write leaves half of one."""

from pathlib import Path

PART = ".part"


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. A file has one writer at a time. If OSError is raised, the old file stays."""
    part = path.with_name(path.name + PART)
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
