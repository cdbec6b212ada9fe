"""The time limit of a download, which is part of `model_loading_timeout` where that is set."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from checkpoint.source import Progress
from tandem_cli.display import Display


@contextmanager
def limited_download(limit_s: float | None, display: Display) -> Iterator[Callable[[str], Progress]]:
    """Yield the callback for `prepare_models`, which shows the progress. Ends the process after `limit_s`."""
    fractions: dict[str, float] = {}

    def show(name: str, fraction: float) -> None:
        fractions[name] = fraction
        display.loading(f"download {name}", fraction)

    def give_up() -> None:
        display.loaded()
        done = ", ".join(f"{fraction:.0%} of {name}" for name, fraction in fractions.items()) or "nothing"
        sys.stderr.write(f"tandem: {done} downloaded after {limit_s:g} s: raise model_loading_timeout, or try again\n")
        sys.stderr.flush()
        # An orderly exit is impossible: threads of the download are in the middle of a read.
        os._exit(1)

    timer = threading.Timer(threading.TIMEOUT_MAX if limit_s is None else limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield lambda name: partial(show, name)
    finally:
        timer.cancel()
        display.loaded()
