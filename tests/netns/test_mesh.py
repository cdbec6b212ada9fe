"""Router, prefill worker and decode worker on three machines, and what networks do to them (`make netns`).

Whatever the cables do, an answer has the tokens that it has on one machine, or it is refused in words.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import tandem
from bench.transfer import LAYOUT
from tests.chaos.cluster import ROOT
from tests.e2e.mesh_process import is_alive
from tests.evidence import Evidence
from tests.fakes.redis_server import RedisServer
from tests.netns.machines import Lan, Machine, machines
from tests.netns.mesh import (
    ANSWER_S,
    ROLES,
    Answer,
    Latency,
    ask,
    ask_all,
    measure_latency,
    mesh_on,
    requests,
    wait_whole,
    wide_checkpoint,
)
from tests.waiting import until

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(900),
    pytest.mark.skipif("TANDEM_NETNS" not in os.environ, reason="needs namespaces of its own: make netns"),
]

KV_TOKENS = 1024
HEAL_S = 8.0
"""Longer than a router waits for heartbeats, and shorter than requests wait for workers."""
PAIRS = (("router", "prefill"), ("router", "decode"), ("prefill", "decode"))


@dataclass(frozen=True, slots=True)
class OneHost:
    """The same mesh on one machine: what all the others are compared with."""

    model: Path
    latency: Latency
    token_ids: list[list[int]]
    later_token_ids: list[list[int]]
    """Of prompts that are asked while a machine is cut off."""

    def outcome(self, answers: Sequence[Answer], later: Sequence[Answer] = ()) -> str:
        """In words, how the answers ended. AssertionError if a token is wrong, missing or doubled."""
        expected = [*self.token_ids, *self.later_token_ids]
        errors = []
        for answer, token_ids in zip([*answers, *later], expected[: len(answers) + len(later)], strict=True):
            assert answer.token_ids == token_ids[: len(answer.token_ids)], "wrong tokens"
            if answer.error:
                errors.append(answer.error)
            else:
                assert len(answer.token_ids) == len(token_ids), "an answer ended early, without an error"
        total = len(answers) + len(later)
        return f"{total - len(errors)} of {total} exact" + "".join(f"; {error}" for error in sorted(set(errors)))


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> OneHost:
    folder = tmp_path_factory.mktemp("one-host")
    return asyncio.run(_on_one_host(wide_checkpoint(folder / "model"), folder))


async def _on_one_host(model: Path, log_dir: Path) -> OneHost:
    with machines("router") as lan:
        places, hosts = dict.fromkeys(ROLES, lan.machines["router"]), dict.fromkeys(ROLES, "127.0.0.1")
        async with mesh_on(places, hosts, model, log_dir) as client:
            answers, later = await ask_all(client, requests()), await ask_all(client, requests(first=4))
            assert not any(answer.error for answer in [*answers, *later]), answers
            latency = await measure_latency(client, salt=0)
    return OneHost(model, latency, *([answer.token_ids for answer in some] for some in (answers, later)))


@pytest.fixture
def lan() -> Iterator[Lan]:
    with machines(*ROLES) as found:
        yield found
        nobody_is_left(found)


@pytest.fixture
def wired() -> Iterator[Lan]:
    with machines(*ROLES, wired=True) as found:
        yield found
        nobody_is_left(found)


def nobody_is_left(lan: Lan) -> None:
    """Each machine's last process was its holder."""
    left = [process for machine in lan.machines.values() for process in machine.processes()]
    assert [process for process in left if is_alive(process)] == []


def ipv4(lan: Lan) -> dict[str, str]:
    return {role: machine.ipv4 for role, machine in lan.machines.items()}


async def kv_speed(lan: Lan, to: str, *, transport: str = "grpc", runs: int = 3) -> float:
    """Megabytes a second from the prefill worker's machine to the decode worker's, whose address is `to`."""
    flags = ["-m", "bench.transfer", f"--transports={transport}", f"--tokens={KV_TOKENS}", f"--runs={runs}"]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client", "OMP_NUM_THREADS": "1"}
    result = ROOT / "build" / f"kv-{os.getpid()}.json"
    result.parent.mkdir(exist_ok=True)

    async def start(machine: Machine, *more: str) -> asyncio.subprocess.Process:
        command = [*machine.prefix, sys.executable, *flags, *more]
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)

    receiver = await start(lan.machines["decode"], f"--receive={to}:50070")
    try:
        assert receiver.stdout is not None
        await asyncio.wait_for(receiver.stdout.readline(), ANSWER_S)
        sender = await start(lan.machines["prefill"], f"--send={to}:50070", f"--json={result}")
        await asyncio.wait_for(sender.communicate(), 3 * ANSWER_S)
        (milliseconds,) = json.loads(result.read_text()).values()
    finally:
        receiver.kill()
        await receiver.wait()
        result.unlink(missing_ok=True)
    return LAYOUT.num_blocks_for(KV_TOKENS) * LAYOUT.block_bytes / 1e3 / float(milliseconds)


class Scenarios:
    """What a mesh of three machines does in each of several conditions; states a figure for each."""

    def __init__(self, lan: Lan, client: tandem.AsyncClient, one_host: OneHost, evidence: Evidence) -> None:
        self._lan = lan
        self._client = client
        self._one_host = one_host
        self._evidence = evidence
        self._salt = 1

    async def run(self, name: str, *, to: str = "", link_mb_s: float = 0.0) -> None:
        """Streams, latency, and the speed of KV to the decode worker at `to`."""
        outcome = await self.undisturbed()
        latency = await self.latency()
        speed = await kv_speed(self._lan, to or self._lan.machines["decode"].ipv4)
        share = f" ({speed / link_mb_s:.0%} of the link)" if link_mb_s else ""
        self.state(name, outcome, f"{latency}; KV {speed:.0f} MB/s{share}")

    async def undisturbed(self) -> str:
        """Ask all, and have all answered."""
        answers = await ask_all(self._client, requests())
        outcome = self._one_host.outcome(answers)
        assert not any(answer.error for answer in answers), outcome
        return outcome

    async def latency(self) -> Latency:
        self._salt += 20
        return await measure_latency(self._client, self._salt)

    async def partition(self, one: str, other: str, *, heals: bool) -> None:
        """Cut a cable in the middle of streams, ask for more meanwhile, and mend it: soon, or when all is over."""
        wire = self._lan.wire(one, other)
        tasks = await self._streams_in_middle()
        wire.tell("cut")
        later = [asyncio.create_task(ask(self._client, request)) for request in requests(first=4)]
        if heals:
            await asyncio.sleep(HEAL_S)
            wire.mend()
        async with asyncio.timeout(ANSWER_S + 10):
            answers, more = await asyncio.gather(*tasks), await asyncio.gather(*later)
        wire.mend()
        outcome = self._one_host.outcome(answers, more)
        mended_s = time.monotonic()
        await wait_whole(self._client)
        whole_s = time.monotonic() - mended_s
        gap_s = max(answer.longest_gap_s for answer in [*answers, *more])
        kind = f"heals after {HEAL_S:g} s" if heals else "stays"
        speed = f"longest gap {gap_s:.1f} s; whole {whole_s:.1f} s after all answers"
        self.state(f"partition {one} | {other}, {kind}", outcome, speed)
        await self.undisturbed()

    async def _streams_in_middle(self) -> list["asyncio.Task[Answer]"]:
        """All have a few tokens, and none is at its end. On a busy machine one may end before another begins."""
        for _ in range(5):
            begun = [asyncio.Event() for _ in requests()]
            pairs = zip(requests(), begun, strict=True)
            tasks = [asyncio.create_task(ask(self._client, request, event)) for request, event in pairs]
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*(event.wait() for event in begun))
            if not any(task.done() for task in tasks):
                return tasks
            await asyncio.gather(*tasks)
        pytest.fail("a stream ended before all had begun, five times")

    def state(self, name: str, outcome: str, speed: object) -> None:
        """Two rows of the table."""
        self._evidence("R29", name, outcome, target="exact, or refused in words", ok=True)
        self._evidence("R29", f"{name}, speed", speed, target="none", ok=True)


@asynccontextmanager
async def scenarios(
    lan: Lan, hosts: Mapping[str, str], one_host: OneHost, evidence: Evidence, log_dir: Path
) -> AsyncIterator[Scenarios]:
    async with mesh_on(lan.machines, hosts, one_host.model, log_dir) as client:
        yield Scenarios(lan, client, one_host, evidence)
        computed = {worker.role: worker.load.computed_tokens for worker in await client.workers()}
        assert computed["prefill"] > 0, "the prefill worker was never used"


async def test_cables(lan: Lan, one_host: OneHost, evidence: Evidence, tmp_path: Path) -> None:
    async with scenarios(lan, ipv4(lan), one_host, evidence, tmp_path) as mesh:
        mesh.state("one machine", "4 of 4 exact", one_host.latency)
        await mesh.run("three machines, no fault")
        cable = lan.cable("prefill", "decode")
        for gbit in (1, 10):
            cable.limit_rate(gbit)
            await mesh.run(f"{gbit} Gbit/s", link_mb_s=gbit * 125.0)
        for num_bytes in (1280, 9000):
            lan.mend()
            for each in lan.cables.values():
                each.limit_packets(num_bytes)
            await mesh.run(f"MTU {num_bytes}")


async def test_slow_and_lossy_cables(wired: Lan, one_host: OneHost, evidence: Evidence, tmp_path: Path) -> None:
    async with scenarios(wired, ipv4(wired), one_host, evidence, tmp_path) as mesh:
        for name, command in (
            ("delay 0.2 ms", "delay 0.0002"),
            ("delay 20 ms", "delay 0.02"),
            ("loss 1 %", "loss 0.01"),
        ):
            wired.mend()
            for wire in wired.wires.values():
                wire.tell(command)
            await mesh.run(name)
        wired.mend()


async def test_partitions(wired: Lan, one_host: OneHost, evidence: Evidence, tmp_path: Path) -> None:
    async with scenarios(wired, ipv4(wired), one_host, evidence, tmp_path) as mesh:
        for one, other in PAIRS:
            for heals in (True, False):
                await mesh.partition(one, other, heals=heals)


async def test_ipv6_addresses(lan: Lan, one_host: OneHost, evidence: Evidence, tmp_path: Path) -> None:
    hosts = {role: machine.ipv6 for role, machine in lan.machines.items()}
    async with scenarios(lan, hosts, one_host, evidence, tmp_path) as mesh:
        await mesh.run("IPv6", to=f"[{hosts['decode']}]")


async def test_names(lan: Lan, one_host: OneHost, evidence: Evidence, tmp_path: Path) -> None:
    hosts = {role: machine.host for role, machine in lan.machines.items()}
    async with scenarios(lan, hosts, one_host, evidence, tmp_path) as mesh:
        await mesh.run("names in /etc/hosts", to=hosts["decode"])


@pytest.mark.parametrize("ahead_s", [5, -5, 60])
async def test_clocks_apart(lan: Lan, one_host: OneHost, evidence: Evidence, tmp_path: Path, ahead_s: int) -> None:
    """The decode worker's clock. With Redis, heartbeats carry the time at which they were signed."""
    redis = RedisServer(host=lan.machines["router"].ipv4)
    await redis.start()
    fits = abs(ahead_s) < 15
    try:
        async with mesh_on(
            lan.machines, ipv4(lan), one_host.model, tmp_path,
            registry_url=redis.url, decode_clock_s=ahead_s, wait=fits,
        ) as client:  # fmt: skip
            mesh = Scenarios(lan, client, one_host, evidence)
            if fits:
                outcome = await mesh.undisturbed()
                mesh.state(f"clocks {ahead_s:+d} s apart", outcome, await mesh.latency())
                return
            await refused_for_its_clock(mesh, client, one_host, tmp_path)
    finally:
        redis.stop()


async def refused_for_its_clock(mesh: Scenarios, client: tandem.AsyncClient, one_host: OneHost, log_dir: Path) -> None:
    """The router's log says why the worker is not used, and requests are refused."""
    log = log_dir / "router.log"
    await until(lambda: log.exists() and "the clocks of the machines differ" in log.read_text(), ANSWER_S)
    answers = await ask_all(client, requests())
    assert all(answer.error for answer in answers)
    mesh.state("clocks 60 s apart", one_host.outcome(answers), "none")
