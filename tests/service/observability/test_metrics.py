"""Every documented metric is there, and changes when that happens which it tells of."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from engine.kv.disk import DiskCounts
from mesh.domain.errors import ConfigurationError
from mesh.domain.tokens import SequenceFailure
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.metrics import serving_metrics
from mesh.process import MetricsSettings
from router.advice import RoleLoad, Sample
from tandem.v1 import mesh_pb2, mesh_pb2_grpc
from tests.evidence import Evidence
from tests.exposition import Samples, changed, documented, documented_labels, fetch, metrics, names_of, parse, scrape
from tests.fakes.requests import make_request as make_sequence
from tests.fakes.router_workers import DecodeScript, FakeDecodeWorker, PrefillScript
from tests.fakes.runner import FAKE_LAYOUT
from tests.fakes.sdk_router import Refusal, Script
from tests.service.conftest import make_request
from tests.service.fake_router import fake_router
from tests.service.gateway.http import running_gateway
from tests.service.worker_rig import EngineRig, WorkerRig, until, worker_rig
from worker.metrics import WorkerMetrics

CONSTANT = {"tandem_max_requests", "tandem_engine_max_num_seqs", "tandem_engine_kv_blocks"}
CONSTANT |= {"tandem_engine_ranks", "tandem_engine_stages"}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


async def test_metrics_of_a_router(make_mesh: Any, evidence: Evidence) -> None:
    mesh = await make_mesh(no_worker_timeout_s=0.05, max_concurrent_requests=4, traffic="chat=tiny:3")
    registry = mesh.router.metrics.registry
    scrapes = [await scrape(registry)]
    prefill = await mesh.prefill()
    decode = await mesh.decode(max_num_seqs=1)
    await answered_and_replayed(mesh, prefill, decode)
    scrapes.append(await scrape(registry))
    last = scrapes[-1]
    assert value(last, "tandem_request_success_total", finished_reason="length") == 1
    assert value(last, "tandem_replays_total", cause="SequencePreempted") == 1
    assert value(last, "tandem_prefix_cache_hits_total") == 4
    assert value(last, "tandem_inter_token_latency_seconds_count") == 7
    assert value(last, "tandem_request_event_seconds_count", event="transfer_finished") == 1
    assert value(last, "tandem_workers_serving", role="decode") == 1
    assert value(last, "tandem_traffic_requests_total", model="chat", revision="tiny") == 1
    mesh.router.traffic.share_out("other", {"tiny": 2.0})
    scrapes.append(await while_one_waits(mesh, registry, prefill, decode))
    assert value(scrapes[-1], "tandem_num_requests_waiting") == 1
    assert value(scrapes[-1], "tandem_prompt_tokens_waiting", role="decode") == 8
    assert value(scrapes[-1], "tandem_prompt_tokens_waiting", role="prefill") == 0
    assert value(scrapes[-1], "tandem_kv_transfers_open") == 1
    assert value(scrapes[-1], "tandem_traffic_share", model="other", revision="tiny") == 1
    await advised(mesh)
    scrapes.append(await scrape(registry))
    assert value(scrapes[-1], "tandem_router_advice", action="add", role="decode") == 1
    await refused_and_failed(mesh, decode)
    scrapes.append(await scrape(registry))
    last = scrapes[-1]
    assert value(last, "tandem_request_refused_total", error="TooLarge") == 1
    assert value(last, "tandem_request_failure_total", error="NoWorkers") == 1
    assert value(last, "tandem_incidents_total", kind="lost") == 1
    require_all("Router", scrapes, evidence)


async def answered_and_replayed(mesh: Any, prefill: Any, decode: FakeDecodeWorker) -> None:
    prefill.scripts = [PrefillScript(cached_tokens=4)]
    decode.pace_s = 0.02  # so that the answer cannot be complete before the transfer is heard to be
    decode.scripts = [DecodeScript(fail_after=(3, SequenceFailure.PREEMPTED))]
    await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)
    decode.pace_s = 0.0


async def while_one_waits(mesh: Any, registry: CollectorRegistry, prefill: Any, decode: Any) -> Samples:
    """Two choices for one seat, scraped while the first one's KV is on its way; then their clients leave."""
    hold = asyncio.Event()
    prefill.scripts = [PrefillScript(hold=hold)]
    request = make_request(token_ids=[70] * 8, max_new_tokens=4)
    calls = [mesh.stub.Generate(request, timeout=20) for _ in range(2)]
    await mesh.until(lambda: mesh.model.queue.num_queued == 1 and mesh.model.in_flight.num_transferring == 1)
    samples = await scrape(registry)
    for call in calls:
        call.cancel()
    await mesh.until(lambda: mesh.model.limiter.num_held == 0)
    hold.set()
    return samples


async def advised(mesh: Any) -> None:
    """A minute in which the decode worker is full, which the operators' call tells, too."""
    adviser, now_s = mesh.model.adviser, asyncio.get_running_loop().time()
    for second in range(60):
        adviser.add(Sample(now_s + second, RoleLoad(1, 0.0), RoleLoad(1, 0.95)))
    adviser.form()
    listed = await mesh_pb2_grpc.MeshStub(mesh.channel).ListWorkers(mesh_pb2.ListWorkersRequest(), timeout=10)
    [advice] = listed.advice
    assert (advice.action, advice.role) == (mesh_pb2.ADVICE_ACTION_ADD, mesh_pb2.WORKER_ROLE_DECODE)
    assert advice.reason == "95% of their KV or slots are in use"


async def refused_and_failed(mesh: Any, decode: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.generate(token_ids=[70] * 8, max_new_tokens=1000)
    await decode.kill()
    await mesh.until(lambda: not mesh.model.mesh.has_path)
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)


def require_all(service: str, scrapes: list[Samples], evidence: Evidence) -> None:
    told = documented(service).keys()
    moved = changed(*scrapes) | {name for name in CONSTANT if value_of(scrapes[-1], name) > 0}
    figure = f"{len(told & moved)} of {len(told)}"
    evidence("R25", f"documented metrics that change: {service.lower()}", figure, target="all", ok=told <= moved)
    assert told - moved == set()
    assert {name for samples in scrapes for name in names_of(samples)} - documented(service).keys() == set()
    there = {sample for samples in scrapes for sample in samples}
    labels = {(*metrics([name]), label) for name, pairs in there for label, _ in pairs if label != "le"}
    assert labels == {(name, label) for name, each in documented_labels(service).items() for label in each}


def value_of(samples: Samples, name: str) -> float:
    return max((each for (sample, _), each in samples.items() if sample == name), default=0.0)


async def test_metrics_of_workers(evidence: Evidence) -> None:
    decode_rig = EngineRig.make(num_blocks=8)
    async with worker_rig(decode=decode_rig) as rig, fake_router(rig) as router:
        workers = [
            (rig.prefill_metrics, WorkerRole.PREFILL, rig.prefill),
            (rig.decode_metrics, WorkerRole.DECODE, rig.decode),
        ]
        states = dict.fromkeys(WorkerRole, WorkerState.READY)
        loads = {role: WorkerLoad(free_blocks=8) for role in WorkerRole}
        for metrics, role, engine in workers:
            watch(metrics, role, engine, loads, states)
        scrapes = {role: [await scrape(metrics.registry)] for metrics, role, _ in workers}
        for metrics, *_ in workers:
            metrics.loaded({"read": 1.5, "other": 0.5})
            metrics.watch_ranks([os.getppid()])
            metrics.watch_kv_disk(DiskCounts(written=2))
        for number in range(2):  # the second one finds the first one's prefix
            await router.run(make_sequence(f"a{number}", range(1, 13), max_new_tokens=3))
        await router.start(make_sequence("local", range(1, 10), max_new_tokens=2))
        await router.collect(make_sequence("local", range(1, 10), max_new_tokens=2))
        await preempt(rig, router)
        for _, role, engine in workers:
            load = replace(engine.scheduler.load(), drafted_tokens=2, accepted_tokens=1)
            loads[role] = replace(load, num_running=1, num_waiting=1, pending_tokens=1, free_blocks=7)
            states[role] = WorkerState.STALLED
        for metrics, role, _ in workers:
            scrapes[role].append(await scrape(metrics.registry))
        decode, prefill = scrapes[WorkerRole.DECODE], scrapes[WorkerRole.PREFILL]
        assert value(decode[-1], "tandem_engine_ranks", role="decode") == 6
        assert value(decode[-1], "tandem_engine_stages", role="decode") == 3
        assert value(decode[-1], "tandem_decode_sequences_total", kv="transferred") >= 2
        assert value(decode[-1], "tandem_engine_load_seconds", role="decode", phase="read") == 1.5
        assert value(decode[-1], "tandem_engine_rank_cpu_seconds_total", role="decode", rank="0") > 0
        assert value(decode[-1], "tandem_engine_kv_disk_blocks_total", role="decode", event="written") == 2
        assert value(decode[-1], "tandem_engine_preemptions_total", role="decode") == 1
        assert value(prefill[-1], "tandem_kv_sent_bytes_total", transport="grpc") > 0
        assert value(prefill[-1], "tandem_engine_prefix_cache_hits_total", role="prefill") > 0
        require_all("Workers", [prefill[0] | decode[0], prefill[1] | decode[1]], evidence)


def watch(metrics: WorkerMetrics, role: WorkerRole, rig: EngineRig, loads: Any, states: Any) -> None:
    config = rig.scheduler.config
    limits = config.max_batch_tokens, config.max_num_seqs, 8, config.max_model_len
    info = WorkerInfo("w", "1", role, "", "m", "", FAKE_LAYOUT, *limits, tensor_parallel=2, pipeline_parallel=3)
    metrics.watch(info, lambda: loads[role], lambda: states[role])


async def preempt(rig: WorkerRig, router: Any) -> None:
    """Two sequences, which begin together, grow in 8 blocks until one has to go."""
    rig.begin_together(2)
    for name in ("x", "y"):
        await router.start(make_sequence(name, range(1, 9), max_new_tokens=20))
    assert await router.failure("y")


async def test_metrics_of_a_gateway(evidence: Evidence) -> None:
    script = Script(hold_after_messages=3)
    async with running_gateway(script) as gateway:
        scrapes = [await fetch(f"{gateway.url}/metrics")]
        body = {"messages": [{"role": "user", "content": "One fine"}], "max_tokens": 6}
        call = asyncio.create_task(gateway.post("/v1/chat/completions", body))
        await script.holding.wait()
        await until(lambda: gateway.backend.metrics.num_running == 1)
        scrapes.append(await fetch(f"{gateway.url}/metrics"))
        script.release.set()
        assert (await call).status_code == 200
        script.hold_after_messages = 0
        script.release.clear()
        script.holding.clear()
        call = asyncio.create_task(gateway.post("/v1/chat/completions", body))
        await script.holding.wait()
        scrapes.append(await fetch(f"{gateway.url}/metrics"))
        assert value(scrapes[-1], "tgi_queue_size") == 1
        script.release.set()
        await call
        script.refusals.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED))
        assert (await gateway.post("/v1/chat/completions", body)).status_code == 429
        scrapes.append(await fetch(f"{gateway.url}/metrics"))
    assert value(scrapes[-1], "tgi_queue_size") == value(scrapes[-1], "tgi_batch_current_size") == 0
    assert value(scrapes[-1], "tgi_request_failure", err="overloaded") == 1
    assert value(scrapes[-1], "tgi_request_queue_duration_sum") == pytest.approx(0.002)
    require_all("Gateway", scrapes, evidence)


async def test_the_port_for_figures(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving_metrics(CollectorRegistry(), MetricsSettings()):
        assert capsys.readouterr().out == "", "off unless asked for"
    async with serving_metrics(WorkerMetrics(WorkerRole.DECODE).registry, MetricsSettings(metrics_port=0)):
        announced = capsys.readouterr().out
        address = announced.split('"address": "')[1].split('"')[0]
        assert address.startswith("127.0.0.1:")
        assert "tandem_engine_step_seconds" in names_of(await fetch(f"http://{address}/metrics"))
        taken = MetricsSettings(metrics_port=int(address.rpartition(":")[2]))
        with pytest.raises(ConfigurationError, match="in use"):
            async with serving_metrics(CollectorRegistry(), taken):
                pass


def test_what_is_parsed() -> None:
    text = '# TYPE a_total counter\na_total 1\n# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_count 2\nh_sum 3\n'
    assert names_of(parse(text)) == {"a_total", "h"}
