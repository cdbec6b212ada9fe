"""The load generator against servers: what is counted as success, as refusal and as error."""

import asyncio
from collections import deque

import grpc
import pytest

import tandem
from tandem_cli.load_test.benchmark import Benchmark, Kind
from tandem_cli.load_test.endpoints import mesh_endpoint, openai_endpoint
from tandem_cli.load_test.figures import (
    ARRIVED,
    BURST,
    OVER,
    STEADY,
    Failed,
    Outcome,
    Refused,
    RunFailed,
    Slo,
    burst_figures,
    figures,
)
from tandem_cli.load_test.jobs import Job
from tandem_cli.load_test.load_generator import LoadGenerator, run_burst, run_threads
from tandem_cli.load_test.openai_target import OpenAITarget
from tandem_cli.load_test.report import Report
from tandem_cli.load_test.sweep import Sweep, Watcher
from tests.fakes.openai_server import (
    BROKEN_OFF,
    ERROR_EVENT,
    GARBAGE,
    NO_FINISH,
    OpenAIScript,
    running_openai_server,
)
from tests.fakes.sdk_router import Refusal, Script, running_router

JOBS = [Job(4, token_ids=(5, 6, 7))] * 6


async def test_a_mesh_is_counted_token_by_token() -> None:
    async with running_router() as router, mesh_endpoint(router.address, None, {}) as endpoint:
        run = await LoadGenerator(endpoint.target).closed_loop(JOBS, 3)
    found = figures(run, Slo(ttft_ms=1e6, tpot_ms=1e6))
    assert (found["num_ok"], found["num_short"], found["slo_share"]) == (6, 0, 1)
    assert {(len(record.token_s), record.num_tokens, record.input_tokens) for record in run.records} == {(4, 4, 3)}
    assert all(request.sampling.ignore_eos for request in router.script.requests)
    assert endpoint.vocab_size == 257


async def test_refusals_and_broken_streams_of_a_mesh_are_no_answers() -> None:
    refused = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)
    broken = Refusal(grpc.StatusCode.UNAVAILABLE, after_messages=2)
    async with (
        running_router(Script(refusals=deque([refused, broken]))) as router,
        mesh_endpoint(router.address, None, {}) as endpoint,
    ):
        run = await LoadGenerator(endpoint.target).closed_loop(JOBS, 1)
        router.script.omit_finish = True
        cut = await LoadGenerator(endpoint.target).closed_loop(JOBS[:1], 1)
    assert [record.outcome for record in run.records] == [Outcome.REFUSED, Outcome.ERROR, *[Outcome.OK] * 4]
    assert figures(run, Slo())["slo_share"] <= 4 / 6
    assert [record.outcome for record in cut.records] == [Outcome.ERROR]


async def test_openai_completions_and_chats() -> None:
    script = OpenAIScript()
    messages = ({"role": "user", "content": "hi"},)
    jobs = [JOBS[0], Job(3, prompt="hi", ignore_eos=False), Job(2, messages=messages)]
    async with running_openai_server(script) as url, OpenAITarget(f"{url}/v1", "m", api_key="key") as target:
        run = await LoadGenerator(target).closed_loop(jobs, 1)
    assert [(len(each.token_s), each.num_tokens, each.input_tokens) for each in run.records] == [
        (4, 4, 7),
        (3, 3, 7),
        (2, 2, 7),
    ]
    (first, ids), (_, text), (chat, talk) = script.asked
    assert (first, chat) == ("/v1/completions", "/v1/chat/completions")
    assert (ids["prompt"], text["prompt"], talk["messages"]) == ([5, 6, 7], "hi", list(messages))
    assert (ids["ignore_eos"], "ignore_eos" in text, ids["stream"], ids["max_tokens"]) == (True, False, True, 4)
    assert "authorization: bearer key" in script.headers[0].lower()


async def test_without_usage_messages_are_counted() -> None:
    script = OpenAIScript(with_usage=False)
    async with running_openai_server(script) as url, OpenAITarget(url, "m") as target:
        reply = await target(JOBS[0], lambda: None)
    assert (reply.num_tokens, reply.input_tokens) == (4, 0)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (429, Refused),
        (500, Failed),
        (BROKEN_OFF, Failed),
        (NO_FINISH, Failed),
        (ERROR_EVENT, Failed),
        (GARBAGE, Failed),
    ],
)
async def test_half_an_openai_answer_is_an_error(fault: str | int, expected: type[Exception]) -> None:
    script = OpenAIScript(faults=deque([fault]))
    async with running_openai_server(script) as url, OpenAITarget(url, "m") as target:
        with pytest.raises(expected):
            await target(JOBS[0], lambda: None)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with OpenAITarget("http://127.0.0.1:1", "m") as target:
        with pytest.raises(Failed, match="ConnectError"):
            await target(JOBS[0], lambda: None)


async def test_threads_share_a_client() -> None:
    refused = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)
    async with running_router(Script(refusals=deque([refused]))) as router:
        with tandem.Client(router.address, max_retries=0) as client:
            run = await asyncio.to_thread(run_threads, client, [Job(4, token_ids=(1,))] * 40, 8, lambda _: None)
    found = figures(run, Slo())
    assert (found["num_ok"], found["num_refused"], found["num_errors"]) == (39, 1, 0)
    assert "slo_share" not in found
    assert "latency_p50_ms" in found


async def test_a_burst_is_measured_beside_streams_that_do_not_end() -> None:
    story = "x" * 400
    async with (
        running_router(Script(story=story, max_total_tokens=10_000)) as router,
        mesh_endpoint(router.address, None, {}) as endpoint,
    ):
        steady = iter(lambda: Job(10_000, token_ids=(1,)), None)
        run = await run_burst(LoadGenerator(endpoint.target), steady=steady, num_streams=2, burst=JOBS, lead_s=0.0)
    assert run.marks[ARRIVED] <= run.marks[OVER] <= run.duration_s
    assert sum(record.group == BURST for record in run.records) == len(JOBS)
    assert {record.outcome for record in run.records if record.group == STEADY} <= {Outcome.OK, Outcome.STOPPED}
    assert burst_figures(run, Slo())["num_ok"] == len(JOBS)


async def test_a_burst_without_streams_is_no_measurement() -> None:
    broken = Refusal(grpc.StatusCode.UNAVAILABLE)
    async with (
        running_router(Script(refusals=deque([broken]))) as router,
        mesh_endpoint(router.address, None, {}) as endpoint,
    ):
        generator = LoadGenerator(endpoint.target)
        with pytest.raises(RunFailed, match="a steady stream failed"):
            await run_burst(generator, steady=iter(JOBS), num_streams=1, burst=JOBS, lead_s=0.0)


async def test_a_sweep_measures_every_case_in_every_round() -> None:
    script = OpenAIScript()
    benchmark = Benchmark(
        kind=Kind.RATE, values=(1000, 2000), input_tokens=(3, 5), output_tokens=2, num_requests=4, repeats=2
    )
    async with running_openai_server(script) as url:
        report = Report({}, {}, benchmark.slo)
        await Sweep(benchmark, {"server": lambda: openai_endpoint(url, "m")}, report, Watcher()).run()
    assert [(point.case.value, point.case.input_tokens, len(point.runs)) for point in report.points] == [
        (1000, 3, 2),
        (2000, 3, 2),
        (1000, 5, 2),
        (2000, 5, 2),
    ]
    prompts = [tuple(body["prompt"]) for _, body in script.asked]
    assert len(set(prompts)) == len(prompts) == benchmark.warmup + 2 * 2 * 2 * 4
