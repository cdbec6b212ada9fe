"""Commands on some cores only.

Not by `preexec_fn`: Python forks for it, and gRPC's threads of this process then begin anew in a child that has closed
their files, which ends it now and then.
"""

from collections.abc import Iterable


def on_cores(cores: Iterable[int], *command: str) -> tuple[str, ...]:
    """The command on these cores."""
    return ("taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *command)
