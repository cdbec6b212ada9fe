"""Output of `tandem up` on stderr: loading progress, the table of services, warnings."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import TaskID, TaskProgressColumn
from rich.table import Table
from rich.text import Text

from mesh.domain.host import format_cores
from tandem_cli.local_mesh.launcher import RunningService
from tandem_cli.terminal import FittingTable, progress_bar

_REPORTED_STEP = 0.25


class Display:
    """Shows progress bars on a terminal, and plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = progress_bar(console, TaskProgressColumn()) if console.is_terminal else None
        self._bars: dict[str, TaskID] = {}
        self._reported: dict[str, float] = {}
        self.has_warned = False

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def warning(self, name: str, text: str) -> None:
        """Print a warning of the service `name`, and remember that there was one."""
        self.has_warned = True
        self.line(f"{name}: {text}", "yellow")

    def loading(self, name: str, fraction: float) -> None:
        """Show that the service `name` has loaded `fraction` (0 to 1) of its model."""
        if self._progress is None:
            self._report(name, fraction)
            return
        if name not in self._bars:
            self._progress.start()
            self._bars[name] = self._progress.add_task(name, total=1.0)
        self._progress.update(self._bars[name], completed=fraction)

    def loaded(self) -> None:
        """Remove the progress bars. May be called twice."""
        if self._progress is not None:
            self._progress.stop()

    def table(self, services: Iterable[RunningService]) -> None:
        """Print the table of services: role, name, process id, address, cores and log file of each."""
        rows = [_row(service) for service in services]
        if not self._console.is_terminal:
            for row in rows:
                self.line("  ".join(row))
            return
        table = Table("role", "name", "pid", "address", "cores", "log", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        self._console.print(FittingTable(table))

    def _report(self, name: str, fraction: float) -> None:
        """Print the progress in steps of a quarter, for output that is not a terminal."""
        step = int(fraction / _REPORTED_STEP) * _REPORTED_STEP
        if step > self._reported.get(name, -1.0):
            self._reported[name] = step
            self.line(f"{name}: loading {step:.0%}")


def _row(child: RunningService) -> tuple[str, ...]:
    service = child.service
    cores = format_cores(service.cores) or "all"
    return (service.role, service.name, str(child.pid), child.address, cores, str(child.log_path))
