"""A gateway on a real port, in front of the fake router of the SDK's tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import httpx2

import tandem
from gateway.app import build_app
from gateway.backend import Backend, build_backend
from gateway.server import serving
from gateway.settings import GatewaySettings
from tests.fakes.sdk_router import FakeRouter, Script, running_router


@dataclass
class RunningGateway:
    """`url` is for clients, `script` is what the router does."""

    url: str
    router: FakeRouter
    backend: Backend
    http: httpx2.AsyncClient

    @property
    def script(self) -> Script:
        return self.router.script

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def lines(self, path: str, body: Any) -> list[str]:
        """The lines of a stream that are not empty."""
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            return [line async for line in response.aiter_lines() if line]


@asynccontextmanager
async def running_gateway(script: Script | None = None, **settings: Any) -> AsyncIterator[RunningGateway]:
    """Router and gateway, until the block ends."""
    async with running_router(script) as router, gateway_at(router.address, **settings) as (url, backend, http):
        yield RunningGateway(url, router, backend, http)


@asynccontextmanager
async def gateway_at(address: str, **settings: Any) -> AsyncIterator[tuple[str, Backend, httpx2.AsyncClient]]:
    """A gateway for the router at an address: its URL, its inside, and a client."""
    chosen = GatewaySettings(router=address, **({"port": 0} | settings))
    async with tandem.AsyncClient(chosen.router, max_retries=0) as client:
        backend = build_backend(chosen, client)
        batches = nullcontext() if backend.batches is None else backend.batches.running()
        async with batches, serving(build_app(backend), chosen) as http_address:
            url = f"{'https' if chosen.public_tls_cert else 'http'}://{http_address}"
            async with httpx2.AsyncClient(base_url=url, timeout=30, verify=False) as http:  # the list of CAs is long
                yield url, backend, http
