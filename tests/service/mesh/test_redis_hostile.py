"""Redis as operators run it, and as it fails them: users with few rights, TLS, a failover that loses all writes."""

import asyncio
import contextlib
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError
from structlog.testing import capture_logs

from mesh.domain.errors import LayoutMismatch, Overloaded
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.redis_connection import open_redis
from mesh.rpc.credentials import Credentials
from router.admission.shared_limiter import SharedLimiter
from router.settings import RouterSettings
from router.tenants import Tenant
from router.workers.connections import RouterIdentity
from router.workers.membership import Membership
from router.workers.redis_registry import RedisCoordination
from tests.evidence import Evidence
from tests.fakes.certificates import Authority
from tests.fakes.redis_server import RedisServer, num_leased
from tests.fakes.router_views import no_traffic
from tests.service.mesh.test_redis_registry import Router, Worker
from tests.service.mesh.test_registry import KEY
from tests.waiting import until, until_told

ROOT = Path(__file__).resolve().parents[3]
SECURITY = ROOT / "docs" / "security.md"
CAP = 6


@asynccontextmanager
async def following(url: str, require_fits: Callable[[WorkerInfo], None] = lambda info: None) -> AsyncIterator[Router]:
    router = Router(url, require_fits)
    try:
        yield router
    finally:
        router.task.cancel()
        await asyncio.gather(router.task, return_exceptions=True)


@asynccontextmanager
async def sharing(url: str, name: str) -> AsyncIterator[SharedLimiter]:
    permits = SharedLimiter(url, name, CAP)
    task = asyncio.create_task(permits.run())
    try:
        yield permits
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await permits.leave()


async def set_users(redis_server: RedisServer, *lines: str) -> None:
    """Lines of an ACL file, by an administrator."""
    async with open_redis(redis_server.url.replace("//", "//admin:admin@")) as redis:
        for line in lines:
            await redis.execute_command("ACL", "SETUSER", *line.split()[1:])


@pytest.fixture
async def urls(redis_server: RedisServer) -> dict[str, str]:
    """URLs of the users that docs/security.md advises, of a Redis that has no others but an administrator."""
    async with redis_server.client() as redis:
        await redis.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
    lines = re.findall(r"^user .*$", SECURITY.read_text(), re.MULTILINE)
    await set_users(redis_server, *lines)
    found = [re.match(r"user tandem-(\w+) on >(\S+) ", line) for line in lines]
    return {user[1]: redis_server.url.replace("//", f"//tandem-{user[1]}:{user[2]}@") for user in found if user}


async def test_a_mesh_with_the_users_of_the_documents(redis_server: RedisServer, urls: dict[str, str]) -> None:
    with capture_logs() as logs:
        worker = Worker(urls["worker"], "decode-0")
        await worker.start()
        async with following(urls["router"]) as router, sharing(urls["router"], "router-0") as permits:
            await router.until(lambda view: view.load.num_running == 3 and view.cached, "decode-0")
            # A router that comes late asks for a snapshot.
            async with following(urls["router"]) as late:
                await late.until(lambda view: bool(view.cached), "decode-0")
            await asyncio.wait_for(permits.connected.wait(), 60)
            await permits.acquire(CAP, Tenant("alice", max_concurrent_requests=CAP))
            with pytest.raises(Overloaded):
                await permits.acquire(1, Tenant("bob"))
            permits.release("alice")
            await worker.kill()
            await router.until(lambda view: view.state is WorkerState.LOST, "decode-0")
    assert [line for line in logs if line["event"] in ("redis is away", "registry message refused")] == []
    async with open_redis(redis_server.url.replace("//", "//admin:admin@")) as redis:
        denied = [
            dict(zip(entry[::2], entry[1::2], strict=True)) for entry in await redis.execute_command("ACL", "LOG")
        ]
    # The client library tells its name with CLIENT SETINFO, and does not mind the answer.
    assert {entry[b"object"].split(b"|")[0] for entry in denied} <= {b"client"}


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("router", "GET secrets"),
        ("router", "SET secrets x"),
        ("router", "PUBLISH elsewhere x"),
        ("router", "DEL tandem:workers"),
        ("router", "FLUSHALL"),
        ("router", "KEYS *"),
        ("router", "CONFIG GET *"),
        ("router", "ACL LIST"),
        ("router", "SCRIPT FLUSH"),
        ("worker", "ZADD tandem:held 1 x"),
        ("worker", "ZADD tandem:routers 1 x"),
        ("worker", "SET tandem:settling 1"),
        ("worker", "EVAL return(1) 0"),
        ("worker", "MGET tandem:worker:decode-0"),
        ("worker", "SUBSCRIBE elsewhere"),
        ("worker", "FLUSHALL"),
    ],
)
async def test_those_users_may_do_nothing_else(urls: dict[str, str], user: str, command: str) -> None:
    async with open_redis(urls[user]) as redis:
        await redis.ping()
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command.split())


async def test_nobody_comes_in_without_a_password(redis_server: RedisServer, urls: dict[str, str]) -> None:
    for url in (redis_server.url, urls["router"].replace("ROUTER_PASSWORD", "guessed-wrong")):
        with capture_logs() as logs:
            async with following(url) as router:
                await until(lambda: any(line["event"] == "redis is away" for line in logs))
                assert not router.registry.connected.is_set()
        assert "guessed" not in str(logs)


async def test_rights_taken_away_and_given_back(redis_server: RedisServer, urls: dict[str, str]) -> None:
    worker = Worker(urls["worker"], "decode-0")
    await worker.start()
    async with following(urls["router"]) as router, sharing(urls["router"], "router-0") as permits:
        await router.until(lambda view: view.load.num_running == 3, "decode-0")
        await until(permits.connected.is_set)
        await set_users(redis_server, "user tandem-worker off", "user tandem-router -@all")
        await until(lambda: not permits.connected.is_set())
        await permits.acquire(1)
        # Asked directly, the worker answers that nothing runs.
        await router.until(lambda view: view.load.num_running == 0, "decode-0")
        lines = re.findall(r"^user tandem.*$", SECURITY.read_text(), re.MULTILINE)
        await set_users(redis_server, *lines)
        await router.until(lambda view: view.load.num_running == 3, "decode-0")
        await until(permits.connected.is_set)
        assert not worker.task.done()
    await worker.kill()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def tls_in_front(redis_server: RedisServer, authority: Authority) -> AsyncIterator[str]:
    """An address that speaks TLS for a Redis that cannot (the bundled one is built without)."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", redis_server.port)
        tasks.add(asyncio.create_task(relay(reader, inner_writer)))
        tasks.add(asyncio.create_task(relay(inner_reader, writer)))

    files = authority.issue("redis")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_redis_over_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    async with tls_in_front(redis_server, authority) as address:
        url = f"rediss://{address}/0?ssl_ca_certs={authority.cert}"
        worker = Worker(url, "decode-0")
        await worker.start()
        async with following(url) as router, sharing(url, "router-0") as permits:
            # All ends of all connections are in this one process, and handshakes have a second.
            await router.until(lambda view: view.load.num_running == 3 and view.cached, "decode-0", within_s=40)
            await until(permits.connected.is_set)
            await permits.acquire(1)
        await worker.kill()
        with capture_logs() as logs:
            async with following(f"rediss://{address}/0") as router:
                await until(lambda: "certificate verify failed" in str(logs).lower())
                assert not router.registry.connected.is_set()


async def test_a_failover_that_loses_all_writes(redis_server: RedisServer, evidence: Evidence) -> None:
    worker = Worker(redis_server.url, "decode-0")
    await worker.start()
    async with (
        following(redis_server.url) as router,
        sharing(redis_server.url, "router-0") as first,
        sharing(redis_server.url, "router-1") as second,
    ):
        await router.until(lambda view: view.load.num_running == 3, "decode-0")
        await until(lambda: first.share == second.share == CAP // 2)
        await first.acquire(2)
        await second.acquire(3)
        router.states.clear()
        redis_server.stop()
        await until(lambda: not first.connected.is_set() and not second.connected.is_set())
        await redis_server.start()  # empty
        back_s = time.monotonic()
        # The registry is whole once beats arrive again and their records are back for routers to come.
        await router.until(lambda view: view.last_seen_s > back_s and view.load.num_running == 3, "decode-0")
        async with following(redis_server.url) as late:
            await late.until(lambda view: bool(view.cached), "decode-0")
        registry_s = time.monotonic() - back_s
        over_cap = 0
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(Overloaded):
                    await first.acquire(2)
                    over_cap += 1
                if await _num_leased(redis_server) == 5 and not await _is_settling(redis_server):
                    break
                await asyncio.sleep(0.02)
        permits_s = time.monotonic() - back_s
        await second.acquire(1)
        with pytest.raises(Overloaded):
            await first.acquire(1)
        assert WorkerState.LOST not in router.states
    await worker.kill()
    what = "failover without any data: {} whole again after"
    for name, took_s in (("registry", registry_s), ("permits", permits_s)):
        evidence("R9", what.format(name), f"{took_s:.1f} s", target="<= 5 s", ok=took_s <= 5, is_reported_only=True)
    evidence("R9", "failover without any data: permits above the cap", over_cap, target="0", ok=over_cap == 0)


async def _num_leased(redis_server: RedisServer) -> int:
    async with redis_server.client() as redis:
        return await num_leased(redis)


async def _is_settling(redis_server: RedisServer) -> bool:
    async with redis_server.client() as redis:
        return bool(await redis.exists("tandem:settling"))


async def test_a_worker_that_does_not_fit_hears_of_it(redis_server: RedisServer, evidence: Evidence) -> None:
    def require_fits(info: WorkerInfo) -> None:
        if info.tokenizer_fingerprint != "ours":
            raise LayoutMismatch(f"tokenizers differ: ours at this router, {info.tokenizer_fingerprint} at the worker")

    worker = Worker(redis_server.url, "misfit", tokenizer_fingerprint="theirs")
    await worker.server.start([])
    with capture_logs() as logs:
        async with following(redis_server.url, require_fits) as router:
            await asyncio.wait_for(router.registry.connected.wait(), 60)
            started_s = time.monotonic()
            worker.task = asyncio.create_task(worker.run())
            await until(lambda: any(line["event"] == "a router refuses this worker" for line in logs))
            took_s = time.monotonic() - started_s
            # Forged, and for another run: no effect.
            async with redis_server.client() as redis:
                signer = router.registry._signer
                await redis.publish("tandem:asks:misfit", b"noise")
                await redis.publish("tandem:asks:misfit", signer.sign_refusal("former-run", "old news"))
            await asyncio.sleep(1.2)  # two more beats: it is said once
            assert router.membership.views() == []
    assert not worker.task.done()
    await worker.kill()
    [line] = [line for line in logs if line["event"] == "a router refuses this worker"]
    assert line["log_level"] == "error"
    names_both = "ours at this router, theirs at the worker" in line["error"]
    what = "misfit over Redis: in the worker's own log, both values named, after"
    evidence("R14", what, f"{took_s:.2f} s", target="<= 1 s", ok=took_s <= 1 and names_both, is_reported_only=True)
    assert names_both


async def test_one_router_acts_at_a_time(redis_server: RedisServer, urls: dict[str, str]) -> None:
    """With the rights that the documents give a router; none acts while Redis is away."""
    settings = RouterSettings(model="m", registry_url=urls["router"], mesh_key=KEY.secret)
    first, second = (
        RedisCoordination(settings, Membership(time.monotonic), RouterIdentity(name, Credentials(KEY)), no_traffic())
        for name in ("a", "b")
    )
    assert await first.may_act("switch-roles@m", 3600)
    assert not await second.may_act("switch-roles@m", 3600)
    assert await second.may_act("switch-roles@other", 3600)
    assert await first.may_act("switch-roles@m", 0.05)  # its time is over after that, and no later
    await until_told(lambda: second.may_act("switch-roles@m", 3600), bool)
    assert not await first.may_act("switch-roles@m", 60)
    redis_server.stop()
    with capture_logs() as logs:
        assert not await second.may_act("switch-roles@m", 60)
    assert [line["event"] for line in logs] == ["redis is away"]
    await redis_server.start()
