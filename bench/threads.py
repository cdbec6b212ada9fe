"""Many threads that each wait for whole answers: the synchronous SDK, as programs without an event loop use it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import tandem
from bench.jobs import Job
from bench.records import Books, OnDone, Run
from bench.targets import arguments, as_failure, whole


def run_threads(client: tandem.Client, jobs: Sequence[Job], num_threads: int, on_done: OnDone) -> Run:
    """All jobs, by so many threads that share one client. `on_done` is called in those threads."""
    books = Books(on_done, is_streamed=False)

    def send(job: Job) -> None:
        with books.entry(job.max_tokens, books.now_s()) as record:
            try:
                result = client.generate(**arguments(job, None))
            except tandem.TandemError as error:
                raise as_failure(error) from error
            reply = whole(result.finish_reason, result.usage)
            record.num_tokens, record.input_tokens = reply.num_tokens, reply.input_tokens

    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(send, jobs):
            pass  # raises what a thread raised
    return books.close()
