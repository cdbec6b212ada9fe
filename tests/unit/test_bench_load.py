"""The load generator: every token is counted, and the load is the one that was asked for."""

import asyncio

import pytest

from bench.closed_loop import Workload, run_closed_loop
from tandem_cli.load_test.figures import Failed, Outcome
from tandem_cli.load_test.jobs import Job, Lengths, random_jobs
from tandem_cli.load_test.load import LoadGenerator, OnToken, Reply

JOBS = random_jobs(Lengths(4, 3), 24, 0)


async def test_tokens_of_concurrent_clients_add_up() -> None:
    async def send(prompt: list[int], max_new_tokens: int, on_token: OnToken) -> int:
        for _ in range(max_new_tokens):
            await asyncio.sleep(0)
            on_token()
        return max_new_tokens

    measured = await run_closed_loop(Workload(num_clients=8, requests_per_client=3, output_tokens=5), send)
    assert measured.num_tokens == 8 * 3 * 5
    assert (len(measured.ttft_s), len(measured.gaps_s)) == (24, 24 * 4)


async def test_what_a_sender_raises_ends_the_run_as_it_is() -> None:
    async def send(prompt: list[int], max_new_tokens: int, on_token: OnToken) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_closed_loop(Workload(num_clients=3), send)


def test_no_workload_finds_its_prompts_in_a_cache_that_another_has_filled() -> None:
    loads = [Workload(2, 1, 256, 8), Workload(1), Workload(8), Workload(32), Workload(32, 1)]
    beginnings = [tuple(prompt[:16]) for load in loads for prompt in load.prompts()]
    assert len(set(beginnings)) == len(beginnings)
    assert Workload(8).prompts() == Workload(8).prompts()


class Server:
    """Answers when it has as many requests as it waits for."""

    def __init__(self, batch: int) -> None:
        self._batch = asyncio.Barrier(batch)
        self.most_in_flight = self._in_flight = 0

    async def __call__(self, job: Job, on_token: OnToken) -> Reply:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        await self._batch.wait()
        self._in_flight -= 1
        on_token()
        return Reply(1, 4)


async def test_a_closed_loop_keeps_its_number_of_requests_in_flight() -> None:
    server = Server(batch=6)
    run = await LoadGenerator(server).closed_loop(JOBS, 6)
    assert server.most_in_flight == 6
    assert len(run.of(Outcome.OK)) == 24


async def test_an_open_loop_does_not_wait_for_answers_and_counts_from_when_requests_were_due() -> None:
    server = Server(batch=24)  # nobody is answered until all are there
    arrivals = [place / 1000 for place in range(24)]
    run = await LoadGenerator(server).open_loop(JOBS, arrivals)
    assert server.most_in_flight == 24
    assert sorted(record.arrival_s for record in run.records) == arrivals
    assert all(record.ttft_s and record.ttft_s >= arrivals[-1] - record.arrival_s for record in run.records)


async def test_a_failure_is_a_record_and_the_others_go_on() -> None:
    async def send(job: Job, on_token: OnToken) -> Reply:
        on_token()
        if job is JOBS[0]:
            raise Failed("gone")
        return Reply(3, 4)

    done: list[Outcome] = []
    run = await LoadGenerator(send, lambda record: done.append(record.outcome)).closed_loop(JOBS, 2)
    assert run.errors() == {"gone": 1}
    assert (done.count(Outcome.ERROR), done.count(Outcome.OK)) == (1, 23)
