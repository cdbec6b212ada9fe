"""Progress of a benchmark: a bar on a terminal, one line per run elsewhere."""

from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

from tandem_cli.load_test.burst import BURST
from tandem_cli.load_test.plan import Case, Plan
from tandem_cli.load_test.records import Record
from tandem_cli.load_test.sweep import Watcher


class Progress(Watcher):
    """Shows the progress of one sweep. Use it as a context manager."""

    def __init__(self, plan: Plan, num_arms: int, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._total = plan.repeats * num_arms * sum(map(plan.num_jobs, plan.cases()))
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        self._bar = progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=self._total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def opening(self, arm: str) -> None:
        self._say(f"{arm}: starting")

    def begins(self, arm: str, case: Case, repeat: int) -> None:
        self._say(f"{arm}: {case.label}, {repeat + 1} of {self._plan.repeats}")

    def request_done(self, record: Record) -> None:
        """Advance the bar. Steady streams of a burst do not count, because their number is not known in advance."""
        if not record.group or record.group == BURST:
            self._bar.advance(self._task)

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(text, soft_wrap=True, highlight=False)
