"""The load of a load test: random prompts, the user's files, benchmarks. Every token is counted, and the load is the
one that was asked for.
"""

import asyncio
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from bench.closed_loop import Workload, run_closed_loop
from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.benchmark import PRESETS, Benchmark, BurstShape, Case, Kind
from tandem_cli.load_test.figures import Failed, Outcome, Slo
from tandem_cli.load_test.jobs import Job, Lengths, random_jobs, read_jobs, read_trace
from tandem_cli.load_test.load_generator import LoadGenerator, OnToken, TokenCounts, poisson_arrivals

LENGTHS = Lengths(4, 9, vocab_size=100)
JOBS = random_jobs(Lengths(4, 3), 24, 0)


def write(folder: Path, *lines: object) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_random_prompts_are_the_same_for_a_seed_and_have_their_length() -> None:
    jobs = random_jobs(LENGTHS, 3, "seed")
    assert jobs == random_jobs(LENGTHS, 3, "seed")
    assert len({job.token_ids for job in jobs}) == 3
    assert all(job.token_ids and len(job.token_ids) == 4 and max(job.token_ids) < 100 for job in jobs)
    (words,) = random_jobs(Lengths(7, 9, as_text=True), 1, 0)
    assert (words.token_ids, len((words.prompt or "").split())) == (None, 7)


def test_poisson_arrivals_are_the_same_for_a_seed_and_keep_the_rate() -> None:
    arrivals = poisson_arrivals(20.0, 4000, 1)
    assert arrivals == poisson_arrivals(20.0, 4000, 1)
    assert arrivals != poisson_arrivals(20.0, 4000, 2)
    assert arrivals == sorted(arrivals)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # exponential: as wide as their mean


def test_a_file_of_requests(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, {"prompt": "a", "max_tokens": 3}, {"messages": turns}, "", {"token_ids": [1, 2]})
    assert read_jobs(path, LENGTHS) == [
        Job(3, prompt="a", ignore_eos=False),
        Job(9, messages=tuple(turns), ignore_eos=False),
        Job(9, token_ids=(1, 2), ignore_eos=False),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_what_unicode_calls_a_line_is_none_in_a_file_of_requests(tmp_path: Path, separator: str) -> None:
    line = json.dumps({"prompt": f"one{separator}two"}, ensure_ascii=False)
    assert [job.prompt for job in read_jobs(write(tmp_path, line, line), LENGTHS)] == [f"one{separator}two"] * 2


def test_a_trace_is_sorted_and_knows_the_names_of_published_ones(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"arrival_s": 2, "prompt": "b"},
        {"timestamp": 500, "input_length": 6, "output_length": 2, "hash_ids": [1]},
    )
    first, second = read_trace(path, LENGTHS)
    assert (first.arrival_s, len(first.token_ids or ()), first.max_tokens, first.ignore_eos) == (0.0, 6, 2, True)
    assert (second.arrival_s, second.prompt) == (1.5, "b")


def test_a_mark_at_the_beginning_and_line_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [job.prompt for job in read_jobs(path, LENGTHS)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: Expecting property name"),
        ("[" * 100_000, "line 2: nested too deeply"),
        ("7", "line 2: expected an object, got int"),
        (r'{"prompt": "\ud800"}', "line 2: 'utf-8' codec can't encode character"),
        ('{"max_tokens": 3}', "line 2: give exactly one of prompt, messages, token_ids, input_tokens; got none"),
        ('{"prompt": "a", "token_ids": [1]}', "got prompt, token_ids"),
        ('{"prompt": ""}', "line 2: prompt must be a text"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens must be a whole number >= 1, got 0"),
        ('{"token_ids": [1, true]}', "line 2: token_ids must be"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages must be"),
        ('{"prompt": "a", "arrival_s": -1}', "line 2: arrival_s must be a number >= 0"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, {"prompt": "a"}, line)
    with pytest.raises(ConfigurationError) as raised:
        read_jobs(path, LENGTHS)
    assert said in str(raised.value)


def test_files_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_jobs(tmp_path / "none", LENGTHS)
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ConfigurationError, match=r"byte 15 is not UTF-8 .* convert the file to UTF-8"):
        read_jobs(tmp_path / "latin", LENGTHS)
    with pytest.raises(ConfigurationError, match="has no lines"):
        read_jobs(write(tmp_path, ""), LENGTHS)
    with pytest.raises(ConfigurationError, match="1 of 2 lines have no arrival_s"):
        read_trace(write(tmp_path, {"prompt": "a"}, {"prompt": "a", "arrival_s": 1}), LENGTHS)


def test_runs_of_a_plan_share_no_prompt() -> None:
    benchmark = Benchmark(values=(1, 4), input_tokens=(8, 16))
    runs = [benchmark.jobs(case, Lengths(8, 4), repeat) for case in benchmark.cases() for repeat in range(2)]
    prompts = [job.token_ids for jobs in runs for job in jobs]
    assert len(set(prompts)) == len(prompts) == 2 * 2 * (2 + 8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"values": (0,)}, "concurrency must be > 0, got 0"),
        ({"kind": Kind.RATE, "values": (1, -2)}, "rate must be > 0"),
        ({"repeats": 0}, "repeats must be > 0"),
        ({"warmup": -1}, "warmup"),
        ({"burst": BurstShape(num_streams=0)}, "streams must be > 0, got 0$"),
        ({"slo": Slo(tpot_ms=0)}, "slo_tpot_ms must be > 0, got 0$"),
    ],
)
def test_wrong_plans(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Benchmark(**wrong)  # type: ignore[arg-type]


def test_a_preset_for_many_cores_keeps_a_pace_on_few() -> None:
    preset = PRESETS["replicas"]
    assert {arm.pace for arm in preset.arms_on(2)} == {preset.pace}
    assert {arm.pace for arm in preset.arms_on(preset.min_cores)} == {""}
    assert all(preset.benchmark.num_jobs(case) >= 1 for preset in PRESETS.values() for case in preset.benchmark.cases())


def test_an_open_loop_lasts_half_a_minute_unless_told_otherwise() -> None:
    case = Case(Kind.RATE, 4, 8, 8)
    assert Benchmark().num_jobs(case) == 120
    assert Benchmark(num_requests=7).num_jobs(case) == 7


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

    async def __call__(self, job: Job, on_token: OnToken) -> TokenCounts:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        await self._batch.wait()
        self._in_flight -= 1
        on_token()
        return TokenCounts(1, 4)


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
    async def send(job: Job, on_token: OnToken) -> TokenCounts:
        on_token()
        if job is JOBS[0]:
            raise Failed("gone")
        return TokenCounts(3, 4)

    done: list[Outcome] = []
    run = await LoadGenerator(send, lambda record: done.append(record.outcome)).closed_loop(JOBS, 2)
    assert run.errors() == {"gone": 1}
    assert (done.count(Outcome.ERROR), done.count(Outcome.OK)) == (1, 23)
