"""`python -m tandem_cli.on_ray.bound_to_actor PID MODULE FLAGS...`: a service that dies with process PID, its parent.

An actor may end at any moment, and Ray then starts the worker elsewhere, so the old process must not live on. Its
standard input is closed, too (`--follow-stdin`), but then a worker first finishes its work.
"""

import runpy
import signal
import sys

from mesh.parent import end_with


def main() -> None:
    """Replace this program by the service."""
    parent, module, *flags = sys.argv[1:]
    end_with(int(parent), signal.SIGKILL)
    sys.argv[1:] = flags
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
