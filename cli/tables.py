"""Where tables go."""

from rich.console import Console

_FILE_COLUMNS = 200


def wide_console() -> Console:
    """Stdout; in a file or a pipe nothing is cut to the width of a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)
