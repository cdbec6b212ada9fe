"""Files that are replaced as a whole, so that no reader and no process that dies meanwhile meets half of one."""

from pathlib import Path

PART = ".part"


def write_whole(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. A file has one writer at a time. If OSError is raised, the old file stays."""
    part = path.with_name(path.name + PART)
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
