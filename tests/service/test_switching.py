"""Workers that change their roles in a mesh of real workers, which run in this process: no stream notices."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import switchable_worker.__main__
import tandem
from engine.batch import ScheduledBatch
from engine.loading.load_runner import load_model_runner
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.runner import FinishBatch, LayerHook
from engine.runner_settings import RunnerSettings
from mesh.domain.worker import WorkerRole
from router import advice, role_switching
from router.__main__ import RouterProcess
from router.advice import RoleLoad, Sample
from router.settings import RouterSettings
from router.workers.coordination import SILENT_S
from switchable_worker.settings import SwitchableSettings
from tests.chaos.cluster import free_ports
from tests.component.checkpoints import build_checkpoint
from tests.exposition import fetch
from tests.made_once import made_once
from tests.waiting import until, until_told

STEP_S = 0.01
NUM_TOKENS = 150
REQUESTS: list[dict[str, Any]] = [
    {"token_ids": list(range(10, 50)), "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    {"token_ids": list(range(60, 93)), "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    {"token_ids": list(range(30, 80)), "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 7},
    {"token_ids": list(range(5, 26)), "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.7, "seed": 8},
]
NUM_LOADS = 4
READY = "tandem_engine_ready"


class Loader:
    """Loads slow models, and counts them."""

    def __init__(self) -> None:
        self.num_loaded = 0
        self.runners: list[ModelRunner] = []

    def __call__(self, settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
        self.num_loaded += 1
        runner = load_model_runner(settings, on_progress)
        begin = runner.begin

        def slow(batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
            time.sleep(STEP_S)
            return begin(batch, on_layers)

        runner.begin = slow  # type: ignore[method-assign]
        self.runners.append(runner)
        return runner


class Mesh:
    """A router in this process, and its client."""

    def __init__(self, router: RouterProcess, client: tandem.AsyncClient, loader: Loader) -> None:
        self.router = router
        self.client = client
        self.loader = loader

    async def worker(self, worker_id: str) -> tandem.Worker:
        return next(each for each in await self.client.workers() if each.worker_id == worker_id)

    async def serves(self, worker_id: str, role: str) -> tandem.Worker:
        """The worker, once it serves in this role."""
        return await until_told(lambda: self.worker(worker_id), lambda now: now.role == role and now.serving)

    async def all_whole(self) -> None:
        """Return when no worker holds blocks that are not cached."""
        await until_told(self.client.workers, lambda now: all(each.load.free_blocks == each.num_blocks for each in now))

    async def answers(self, on_token: Callable[[int], None] = lambda _: None) -> list[list[int]]:
        """Token ids of all requests at once."""

        async def read(request: dict[str, Any]) -> list[int]:
            ids: list[int] = []
            async for event in self.client.stream(**request):
                ids.append(event.token.id)
                on_token(len(ids))
            return ids

        return await asyncio.gather(*map(read, REQUESTS))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "llama", partial(build_checkpoint, "llama"))


@asynccontextmanager
async def mesh(
    model_dir: Path, router_settings: dict[str, Any] | None = None, of_one: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[Mesh]:
    """Two workers of each role, all of them switchable. `of_one` are settings of prefill-0 only."""
    router = RouterProcess(RouterSettings(model=str(model_dir), port=0, registry_port=0, **(router_settings or {})))
    await router.start()
    loader = Loader()
    own: dict[str, Any] = {"model": str(model_dir), "registry_address": router.coordination.address, "device": "cpu"}
    own |= {"num_threads": 1, "kv_cache_bytes": 2**23, "enforce_eager": True, **changes}
    settings = [
        SwitchableSettings(
            worker_id=f"{role}-{number}",
            role=role,
            **own,
            **((of_one or {}) if (role, number) == ("prefill", 0) else {}),
        )
        for role in ("prefill", "decode")
        for number in range(2)
    ]
    workers = [asyncio.create_task(switchable_worker.__main__.serve(each, loader)) for each in settings]
    try:
        async with tandem.AsyncClient(router.public.address) as client:
            running = Mesh(router, client, loader)
            await until_told(client.workers, lambda now: [each.serving for each in now] == [True] * NUM_LOADS)
            yield running
            for worker in workers:
                assert not worker.done(), worker
    finally:
        await router.stop(0)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


@pytest.mark.parametrize("grace_s", [30.0, 0.05], ids=["streams end", "streams move"])
async def test_no_stream_notices_that_workers_change_their_roles(model_dir: Path, grace_s: float) -> None:
    async with mesh(model_dir, drain_grace_s=grace_s) as running:
        with capture_logs() as logs:
            await change_roles_and_back(running, grace_s)
        incidents = [each.kind for each in (await running.client.mesh()).incidents if each.worker_id == "decode-1"]
        assert incidents.count("switched") == 2
        assert [line["state"] for line in logs if line["event"] == "worker left"] == ["switching"] * 4
        assert not [line for line in logs if line["event"] == "worker lost"], "they left in order"


async def change_roles_and_back(running: Mesh, grace_s: float) -> None:
    """Two workers change their roles while streams run, and change back: all answers stay the same."""
    client = running.client
    undisturbed = await running.answers()
    before = {each.worker_id: each for each in await client.workers()}
    begun = asyncio.Event()
    answers = asyncio.create_task(running.answers(lambda count: begun.set() if count == 20 else None))
    await begun.wait()
    await client.switch_role("decode-1", "prefill")
    await client.switch_role("prefill-0", "decode")
    changed = [await running.serves("decode-1", "prefill"), await running.serves("prefill-0", "decode")]
    assert await answers == undisturbed
    replays = (await client.mesh()).replays
    assert (replays > 0) is (grace_s < 1)
    for now in changed:
        assert now.incarnation != before[now.worker_id].incarnation
        assert now.pid == before[now.worker_id].pid
    assert await running.answers() == undisturbed
    await client.switch_role("decode-1", "decode")
    await client.switch_role("prefill-0", "prefill")
    await running.serves("decode-1", "decode")
    await running.serves("prefill-0", "prefill")
    assert await running.answers() == undisturbed
    assert running.loader.num_loaded == NUM_LOADS
    await running.all_whole()


async def test_limits_are_those_of_the_role_and_the_prefix_cache_stays(model_dir: Path) -> None:
    async with mesh(model_dir, max_batch_prefill_tokens=96, max_num_prompts=5, max_rolling_batch_size=7) as running:
        views = running.router.membership
        await running.answers()
        prefill, decode = views.find("prefill-0"), views.find("decode-0")
        assert prefill is not None
        assert decode is not None
        assert (prefill.info.max_batch_tokens, prefill.info.max_num_seqs) == (96, 5)
        assert (decode.info.max_batch_tokens, decode.info.max_num_seqs) == (256, 7)
        await until(lambda: len(views.find("prefill-0").cached) > 0)  # type: ignore[union-attr]
        cached = set(views.find("prefill-0").cached)  # type: ignore[union-attr]
        await running.client.switch_role("prefill-0", "decode")
        await running.serves("prefill-0", "decode")
        await until(lambda: cached <= set(views.find("prefill-0").cached))  # type: ignore[union-attr]
        switched = views.find("prefill-0")
        assert switched is not None
        assert (switched.info.max_batch_tokens, switched.info.max_num_seqs) == (256, 7)
        assert switched.load.computed_tokens < 60, "its counters have begun anew: canaries only"


async def test_ports_of_its_own_stay_and_figures_are_those_of_the_role(model_dir: Path) -> None:
    port, metrics_port = free_ports(2)
    async with mesh(model_dir, of_one={"port": port, "metrics_port": metrics_port}) as running:
        for role in ("decode", "prefill"):
            await running.client.switch_role("prefill-0", role)
            assert (await running.serves("prefill-0", role)).address == f"127.0.0.1:{port}"
            samples = await fetch(f"http://127.0.0.1:{metrics_port}/metrics")
            ready = {dict(labels)["role"]: value for (name, labels), value in samples.items() if name == READY}
            assert ready == {role: 1.0}
        assert [len(ids) for ids in await running.answers()] == [NUM_TOKENS] * len(REQUESTS)


async def test_a_switch_is_taken_back(model_dir: Path) -> None:
    async with mesh(model_dir) as running:
        begun = asyncio.Event()
        answers = asyncio.create_task(running.answers(lambda count: begun.set() if count == 5 else None))
        await begun.wait()
        incarnation = (await running.worker("decode-0")).incarnation
        await running.client.switch_role("decode-0", "prefill")
        await until_told(lambda: running.worker("decode-0"), lambda now: now.state == "draining")
        await running.client.switch_role("decode-0", "decode")
        assert (await running.serves("decode-0", "decode")).incarnation == incarnation
        assert [len(ids) for ids in await answers] == [NUM_TOKENS] * len(REQUESTS)
        assert (await running.client.mesh()).replays == 0


async def test_the_rule_switches_one_worker_and_says_why(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_switching, "_LOOK_S", 0.05)
    monkeypatch.setattr(advice, "STEP_S", 3600.0)  # so all samples but the first, without workers, are those below
    # In this pause a worker that has agreed to switch says so, or is lost: the rule does not ask it again.
    rule = {"switch_roles": True, "switch_after_s": 0.2, "switch_pause_s": SILENT_S}
    async with mesh(model_dir, rule) as running:
        adviser, now_s = running.router.model_routers[0].adviser, asyncio.get_running_loop().time()
        with capture_logs() as logs:
            for second in range(60):
                adviser.add(Sample(now_s - 60 + second, RoleLoad(2, 0.1), RoleLoad(2, 0.95)))
            adviser.form()
            roles = await _until_roles(running, {"prefill": 1, "decode": 3})
            # The last worker of a role stays, although the advice stands.
            await until(lambda: [line for line in logs if "is the last prefill worker" in line.get("cause", "")])
        assert roles["decode-0"] == roles["decode-1"] == "decode"
        (decision,) = [line for line in logs if line["event"] == "a worker changes its role by rule"]
        assert decision["next_role"] == "decode"
        assert decision["cause"] == "95% of their KV or slots are in use"
        assert (decision["prefill_workers"], decision["decode_workers"]) == (2, 2)
        assert decision["used_without"] == 0.2
        assert WorkerRole.DECODE.value in decision["wanted"]
        assert (await _until_roles(running, {"prefill": 1, "decode": 3})) == roles


async def _until_roles(running: Mesh, wanted: dict[str, int]) -> dict[str, str]:
    """The role of each worker, once so many serve in each."""

    async def roles() -> dict[str, str]:
        return {each.worker_id: each.role for each in await running.client.workers() if each.serving}

    return await until_told(roles, lambda now: Counter(now.values()) == wanted)


@pytest.fixture
def stdin_that_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stdin that epoll cannot watch."""
    with open("/dev/null") as null:
        monkeypatch.setattr("sys.stdin", null)
        yield


@pytest.mark.usefixtures("stdin_that_cannot_be_followed")
async def test_a_worker_that_cannot_follow_its_stdin_does_not_end_in_order(model_dir: Path) -> None:
    settings = SwitchableSettings(
        model=str(model_dir),
        device="cpu",
        num_threads=1,
        kv_cache_bytes=2**23,
        enforce_eager=True,
        registry_address="127.0.0.1:1",
        follow_stdin=True,
    )
    with pytest.raises(PermissionError):
        await switchable_worker.__main__.serve(settings, load_model_runner)
