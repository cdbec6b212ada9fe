"""The console that tables are printed on."""

from rich.console import Console

_FILE_COLUMNS = 200


def wide_console() -> Console:
    """A console on stdout. In a file or a pipe its width is fixed, so that no cell is cut to the width of a
    terminal.
    """
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)
