"""Serves one candidate with `tandem up` in a child process, loads it with questions, and keeps its answers.

Meanwhile the use of the cores by other processes is counted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil

import tandem
from tandem_cli.load_test.endpoints import memory_of, own_mesh
from tandem_cli.load_test.figures import Outcome, RunFailed, Slo, figures
from tandem_cli.load_test.jobs import Job
from tandem_cli.load_test.load_generator import LoadGenerator, mesh_target
from tandem_cli.local_mesh.hardware import available_cores
from tandem_cli.optimization.choice import OTHER_LOAD

_NUM_WARM_UP = 2


@dataclass(slots=True)
class Answer:
    """A greedy answer, as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of one run, by name, and the answers to the jobs."""

    figures: dict[str, float]
    answers: list[Answer]


async def serve(
    up_flags: Sequence[str],
    jobs: Sequence[Job],
    num_timed: int,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> Served:
    """Start a mesh with these flags, send it the first `num_timed` jobs in a closed loop, then the others, which are
    not timed, and stop it. With more timed requests than jobs, these begin again.

    Raises RunFailed if the mesh does not start, or does not answer everything.
    """
    begun_s = time.monotonic()
    async with own_mesh(up_flags) as address:
        load_s = time.monotonic() - begun_s
        async with tandem.AsyncClient(address, max_retries=0, resume_timeout=0.0) as client:
            # Each request is an object of its own, by which its answer is found.
            timed = [replace(jobs[number % len(jobs)]) for number in range(num_timed)]
            untimed = [replace(job) for job in jobs[num_timed:]]
            answers = {id(job): Answer() for job in [*timed, *untimed]}

            def keep(job: Job, event: tandem.TokenEvent) -> None:
                if (answer := answers.get(id(job))) is not None:
                    answer.text += event.text
                    if event.token is not None:
                        answer.token_ids.append(event.token.id)

            target = mesh_target(client, on_event=keep)
            await LoadGenerator(target).closed_loop([replace(job) for job in jobs[-_NUM_WARM_UP:]], 1)
            generator = LoadGenerator(target, lambda record: on_done())
            others = OtherLoad()
            run = await generator.closed_loop(timed, concurrency)
            other_load = others.share()
            unanswered = [record.error for record in run.records if record.outcome is not Outcome.OK]
            if untimed:
                untimed_run = await LoadGenerator(target).closed_loop(untimed, concurrency)
                unanswered += [record.error for record in untimed_run.records if record.outcome is not Outcome.OK]
            if unanswered:
                raise RunFailed(f"{len(unanswered)} requests were not answered: {unanswered[0]}")
            memory = [memory_of(worker.pid) or 0 for worker in await client.workers()]
    measured = figures(run, Slo()) | {"load_s": load_s, "memory_bytes": float(sum(memory)), OTHER_LOAD: other_load}
    return Served(measured, list(answers.values())[: len(jobs)])


class OtherLoad:
    """Counts from its construction on what other processes than this one and its descendants use of its cores. Time
    that a host gives to other virtual machines counts, too.
    """

    def __init__(self) -> None:
        self._cores = available_cores()
        self._begun_s, self._busy_s, self._own_s = time.monotonic(), self._all_busy_s(), _own_s()

    def share(self) -> float:
        """The others' part of the time of all cores so far, from 0 to 1."""
        others_s = (self._all_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        whole_s = (time.monotonic() - self._begun_s) * len(self._cores)
        return min(1.0, max(0.0, others_s / whole_s))

    def _all_busy_s(self) -> float:
        by_core = psutil.cpu_times(percpu=True)
        times = [by_core[core] for core in self._cores if core < len(by_core)]
        return sum(each.user + each.nice + each.system + each.irq + each.softirq + each.steal for each in times)


def _own_s() -> float:
    own, total_s = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += used.user + used.system
    return total_s
