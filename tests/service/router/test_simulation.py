"""The real router in virtual time: what it does with modelled workers whose times are known."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import structlog

from decode_worker.settings import DecodeSettings
from mesh.domain.worker import WorkerRole
from mesh.logs import quiet_logs
from router.settings import RouterSettings
from tandem_cli.load_test.figures import Outcome, Slo
from tandem_cli.simulation import trace
from tandem_cli.simulation.autoscaler import scaling
from tandem_cli.simulation.figures import by_hour, figures
from tandem_cli.simulation.mesh import simulated_mesh, write_model
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.run import simulate
from tandem_cli.simulation.scaling_rules import ScaleLimits
from tandem_cli.simulation.switching import switching
from tandem_cli.simulation.trace import Arrival, LengthMix
from tandem_cli.simulation.virtual_time import run_in_virtual_time
from tests.unit.simulation.profiles import profile, worker

SLO = Slo(ttft_ms=1000, tpot_ms=50)
MIX = LengthMix(200, 40, spread=0.5, max_total_tokens=2000)
NO_CONTEXT = replace(worker(), times=replace(worker().times, prompt_context_s=0.0, decode_context_s=0.0))
PLAIN = profile(NO_CONTEXT, NO_CONTEXT)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_logs(logging.ERROR):
        yield


def run(arrivals: list[Arrival], *num_workers: int, **settings: int) -> Observed:
    return simulate(PLAIN, RouterSettings(model="simulated", **settings), arrivals, (num_workers[0], num_workers[1]))


def test_one_request_takes_what_its_parts_take() -> None:
    [record] = run([Arrival(0.0, 100, 11)], 1, 1).records
    # Five messages, and the prompt.
    assert record.ttft_s == pytest.approx(5 * 0.001 + 0.1)
    # From the first token on: the KV's way, ten steps, less the first token's message, more the last one's.
    assert record.token_s[-1] - record.token_s[0] == pytest.approx(0.003 + 10 * 0.01)
    assert (record.num_tokens, record.outcome) == (11, Outcome.OK)


def test_messages_take_longer_while_decode_workers_compute() -> None:
    arrivals = [Arrival(0.0, 100, 200), Arrival(1.0, 100, 1)]  # the second while the first answer runs
    first_tokens = [
        [record.ttft_s for record in simulate(each, RouterSettings(model="simulated"), arrivals, (1, 1)).records]
        for each in (PLAIN, replace(PLAIN, overhead_stretch=3.0))
    ]
    (alone_s, beside_s), (slowed_alone_s, slowed_beside_s) = first_tokens
    assert slowed_alone_s == alone_s
    assert slowed_beside_s == pytest.approx(beside_s + 2 * 0.005)


def test_the_first_token_takes_longer_to_come_while_the_next_prompt_is_computed() -> None:
    arrivals = [Arrival(0.0, 100, 1), Arrival(0.05, 100, 1)]  # the second one's step begins when the first one's ends
    (plain, _), (slowed, _) = (
        simulate(each, RouterSettings(model="simulated"), arrivals, (1, 1)).records
        for each in (PLAIN, replace(PLAIN, overhead_stretch=3.0))
    )
    assert plain.ttft_s is not None
    assert slowed.ttft_s == pytest.approx(plain.ttft_s + 2 * 0.001)


def test_a_prompt_takes_longer_as_soon_as_the_one_before_it_is_answered() -> None:
    """The second prompt waits for the first. When its step begins, the decode worker has not got the first one's KV."""
    arrivals = [Arrival(0.0, 100, 200), Arrival(0.05, 100, 1)]
    stretched = profile(replace(NO_CONTEXT, stretch=3.0), NO_CONTEXT)
    (_, alone), (_, beside) = (
        simulate(each, RouterSettings(model="simulated"), arrivals, (1, 1)).records for each in (PLAIN, stretched)
    )
    assert alone.ttft_s is not None
    assert beside.ttft_s == pytest.approx(alone.ttft_s + 2 * 0.1, abs=0.02)


def test_equal_arguments_have_equal_results() -> None:
    arrivals = trace.steady(6, 5, MIX, seed=3)
    once, again = (run(arrivals, 2, 2) for _ in range(2))
    assert figures(once, SLO) == figures(again, SLO)
    assert [record.token_s for record in once.records] == [record.token_s for record in again.records]


def test_a_prefill_worker_too_few_shows_in_the_queue_and_in_goodput() -> None:
    arrivals = trace.steady(8, 20, MIX, seed=0)  # 1.6 workers' worth of prompts
    few, enough = (figures(run(arrivals, count, 2, prefill_overflow=0), SLO) for count in (1, 3))
    assert few["prefill_busy"] > 0.9 > enough["prefill_busy"]
    assert few["queued_max"] > enough["queued_max"]
    assert few["slo_share"] < 0.5 < 0.95 < enough["slo_share"]


def test_decode_workers_take_prompts_while_prefill_workers_are_full() -> None:
    arrivals = [Arrival(0.0, 500, 5) for _ in range(8)]
    prompt_tokens = {
        overflow: run(arrivals, 1, 1, prefill_overflow=overflow).samples[-1].roles[WorkerRole.DECODE].prompt_tokens
        for overflow in (0, 512)
    }
    # The canary of a new decode worker has a prompt, too.
    assert prompt_tokens[0] < 100 < 500 <= prompt_tokens[512]


def test_hundreds_of_decode_workers_that_join_at_once_are_proven_in_time() -> None:
    """By one prefill worker. All at once, they would wait for it for 6 s, twice the timeout of a canary."""

    async def seconds_until_proven() -> tuple[float, set[str]]:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), 2048)
            async with simulated_mesh(PLAIN, RouterSettings(model=folder, canary_timeout_s=3.0), 1, 300) as mesh:
                health, workers = mesh.router.health, [worker.info for worker in mesh.workers]
                return loop.time(), {health.canary_error(info) for info in workers}

    with structlog.testing.capture_logs() as logs:
        proven_s, errors = run_in_virtual_time(seconds_until_proven())
    assert errors == {""}
    assert [line for line in logs if line["event"] == "canary failed"] == []
    assert proven_s < 60


def test_requests_over_the_cap_are_refused() -> None:
    observed = run([Arrival(0.0, 100, 5) for _ in range(6)], 1, 1, max_concurrent_requests=4)
    outcomes = [record.outcome for record in observed.records]
    assert (outcomes.count(Outcome.OK), outcomes.count(Outcome.REFUSED)) == (4, 2)


def test_workers_come_with_the_load_and_go_after_it() -> None:
    busy = [Arrival(float(second), 1000, 2) for second in range(400)]  # 1 worker's worth of prompts
    quiet = [Arrival(400.0 + 60 * minute, 100, 2) for minute in range(30)]
    limits = ScaleLimits(min_workers=1, max_workers=4, start_s=30, drain_s=20)
    settings = RouterSettings(model="simulated", max_concurrent_requests=1000, max_queued_requests=1000)
    observed = simulate(PLAIN, settings, busy + quiet, (1, 1), watch=scaling(limits))
    counts = [sample.roles[WorkerRole.PREFILL].num_workers for sample in observed.samples]
    assert counts[0] == 1
    assert max(counts) >= 2
    assert counts[-1] == 1
    assert {record.outcome for record in observed.records} == {Outcome.OK}
    assert 1 < by_hour(observed, SLO)[0]["prefill_workers"] < 2
    assert 1 < observed.paid_worker_s[WorkerRole.PREFILL] / observed.duration_s < 2


def test_a_mesh_that_follows_its_own_advice_grows_and_shrinks() -> None:
    crowd = [Arrival(second / 4, 300, 20) for second in range(4 * 400)]  # 1.2 workers' worth of prompts
    quiet = [Arrival(400.0 + 20 * third, 100, 2) for third in range(100)]
    limits = ScaleLimits(min_workers=1, max_workers=4, start_s=30, drain_s=20)
    settings = RouterSettings(
        model="simulated", max_concurrent_requests=1000, max_queued_requests=1000, prefill_overflow=0
    )
    observed = simulate(PLAIN, settings, crowd + quiet, (1, 1), watch=scaling(limits, "advice"))
    counts = [sample.roles[WorkerRole.PREFILL].num_workers for sample in observed.samples]
    assert (counts[0], max(counts), counts[-1]) == (1, 2, 1)
    assert {record.outcome for record in observed.records} == {Outcome.OK}
    last_minute = [record for record in observed.records if 340 <= record.arrival_s < 400]
    assert all(record.ttft_s is not None and record.ttft_s < 2.0 for record in last_minute)


def test_streams_of_a_worker_that_cannot_drain_in_time_go_on_elsewhere() -> None:
    # Scaling in begins after ten minutes. 800 steps take 8 s, more than the 1 s that the second worker may drain.
    arrivals = [Arrival(592.0 + second, 50, 800) for second in range(16)]
    limits = ScaleLimits(min_workers=1, max_workers=2, start_s=30, drain_s=1)
    observed = simulate(PLAIN, RouterSettings(model="simulated"), arrivals, (1, 2), watch=scaling(limits))
    assert [(record.num_tokens, record.outcome) for record in observed.records] == [(800, Outcome.OK)] * 16
    assert observed.num_replays > 0


def test_an_error_of_what_watches_a_simulation_is_raised() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    settings = RouterSettings(model="simulated")
    with pytest.raises(ZeroDivisionError):
        simulate(PLAIN, settings, [Arrival(0.0, 100, 11)], (1, 1), watch=lambda *_: asyncio.create_task(fail()))


def test_modelled_decode_workers_take_prompts_as_real_ones_do_by_default() -> None:
    [default] = (field.default for field in fields(DecodeSettings) if field.name == "max_step_stretch")

    async def main() -> float:
        async with simulated_mesh(PLAIN, RouterSettings(model=model_dir), 0, 1) as mesh:
            [modelled] = mesh.of_role(WorkerRole.DECODE)
            return modelled.engine.scheduler.config.max_step_stretch

    with tempfile.TemporaryDirectory() as model_dir:
        write_model(Path(model_dir), 2048)
        assert run_in_virtual_time(main()) == default


def test_roles_that_change_serve_a_load_that_changes() -> None:
    """First prompts are long and answers short, 2.4 prefill workers' worth; then the other way, 1.3 decode workers'."""
    prompts = [Arrival(number / 2, 1200, 5) for number in range(2 * 500)]
    answers = [Arrival(500 + number, 40, 1000) for number in range(250)]
    settings = RouterSettings(
        model="simulated", max_concurrent_requests=1000, max_queued_requests=1000, prefill_overflow=0, switch_roles=True
    )
    slo = Slo(ttft_ms=3000, tpot_ms=50)
    fixed = simulate(PLAIN, settings, prompts + answers, (2, 2))
    changing = simulate(PLAIN, settings, prompts + answers, (2, 2), watch=switching(settings, drain_s=30))
    counts = [
        tuple(sample.roles[role].num_workers for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
        for sample in changing.samples
    ]
    assert counts[0] == (2, 2)
    assert (3, 1) in counts
    assert counts[-1][1] >= 2
    assert min(min(each) for each in counts) >= 1
    assert changing.num_switches >= 2
    assert {record.outcome for record in changing.records} == {Outcome.OK}
    shares = [figures(each, slo)["slo_share"] for each in (fixed, changing)]
    assert shares[1] > shares[0] + 0.1
    paid = sum(changing.paid_worker_s.values()) / changing.duration_s
    assert paid == pytest.approx(4, rel=0.05)
