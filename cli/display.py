"""What `tandem up` shows on stderr: progress while loading, who runs where, and what goes wrong."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from cli.child import Child

_REPORTED_STEP = 0.25


class Display:
    """Bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._bars: dict[str, TaskID] = {}
        self._reported: dict[str, float] = {}

    def line(self, text: str, style: str = "") -> None:
        """One line."""
        self._console.print(Text(text, style), soft_wrap=True)

    def warning(self, name: str, text: str) -> None:
        """Something that a service complains about."""
        self.line(f"{name}: {text}", "yellow")

    def loading(self, name: str, fraction: float) -> None:
        """A service has loaded `fraction` of its model."""
        if self._progress is None:
            self._report(name, fraction)
            return
        if name not in self._bars:
            self._progress.start()
            self._bars[name] = self._progress.add_task(name, total=1.0)
        self._progress.update(self._bars[name], completed=fraction)

    def loaded(self) -> None:
        """Take the bars away. May be called twice."""
        if self._progress is not None:
            self._progress.stop()

    def table(self, children: Iterable[Child]) -> None:
        """Who runs where."""
        children = list(children)
        self._table(children)
        figures = [
            f"{child.service.name} http://{child.metrics_address}/metrics"
            for child in children
            if child.metrics_address
        ]
        if figures:
            self.line(f"figures: {', '.join(figures)}")

    def _table(self, children: list[Child]) -> None:
        if not self._console.is_terminal:
            for row in map(_row, children):
                self.line("  ".join(row))
            return
        table = Table("role", "name", "pid", "address", "cores", "log", box=None, pad_edge=False)
        for row in map(_row, children):
            table.add_row(*row)
        self._console.print(table)

    def _report(self, name: str, fraction: float) -> None:
        """Whole quarters only."""
        step = int(fraction / _REPORTED_STEP) * _REPORTED_STEP
        if step > self._reported.get(name, -1.0):
            self._reported[name] = step
            self.line(f"{name}: loading {step:.0%}")


def _row(child: Child) -> tuple[str, ...]:
    service = child.service
    cores = ",".join(map(str, service.cores)) or "all"
    return (service.role, service.name, str(child.pid), child.address, cores, str(child.log_path))
