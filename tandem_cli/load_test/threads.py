"""Load from threads that wait for complete answers through the synchronous SDK."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import tandem
from tandem_cli.load_test.jobs import Job
from tandem_cli.load_test.records import OnDone, Run, RunRecorder
from tandem_cli.load_test.targets import arguments, as_failure, complete_reply


def run_threads(client: tandem.Client, jobs: Sequence[Job], num_threads: int, on_done: OnDone) -> Run:
    """Run all jobs with `num_threads` threads that share one client. `on_done` is called in those threads."""
    recorder = RunRecorder(on_done, is_streamed=False)

    def send(job: Job) -> None:
        with recorder.entry(job.max_tokens, recorder.now_s()) as record:
            try:
                result = client.generate(**arguments(job, None))
            except tandem.TandemError as error:
                raise as_failure(error) from error
            reply = complete_reply(result.finish_reason, result.usage)
            record.num_tokens, record.input_tokens = reply.num_tokens, reply.input_tokens

    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(send, jobs):
            pass  # raises the error of a thread
    return recorder.close()
