"""The program that takes the place of a process which read pages that a file has lost; see `engine/bus_errors.py`.

It imports the standard library only. Its argument is a JSON list of [path, device, inode, bytes, time of the last
change in ns], as the files were when the process mapped them.
"""

import json
import os
import signal
import sys

_WRONG_CONFIGURATION = 2


def culprit(files: list[tuple[str, int, int, int, int]]) -> str | None:
    """Name the file that was cut off, or has changed, and say how; None if none has. A file that replaced another under
    its name has not: the pages of the one before are still there.
    """
    changed: list[str] = []
    for path, device, inode, num_bytes, changed_ns in files:
        try:
            status = os.stat(path)
        except OSError:
            changed.append(f"{path} has gone")
            continue
        if (status.st_dev, status.st_ino) != (device, inode):
            continue
        if status.st_size < num_bytes:
            return f"{path} was cut off, from {num_bytes} to {status.st_size} bytes,"
        if status.st_mtime_ns != changed_ns:
            changed.insert(0, f"{path} has changed")
    return changed[0] if changed else None


def _main() -> None:
    if what := culprit(json.loads(sys.argv[1])):
        message = f"tandem: {what} while it was in use: start again once it is whole and stays as it is\n"
        os.write(2, message.encode(errors="backslashreplace"))
        sys.exit(_WRONG_CONFIGURATION)
    os.write(
        2,
        b"tandem: a page of memory could not be read, though no file of the model was cut off: a disk fails, or "
        b"/dev/shm is full\n",
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGBUS])  # which was blocked when this program was executed
    os.kill(os.getpid(), signal.SIGBUS)


if __name__ == "__main__":
    _main()
