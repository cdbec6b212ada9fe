"""Who may call, from where, and how much: before anything is done for a request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Mount, Route

from gateway.access import MAX_KEY_CHARS, Gate
from gateway.app import build_app
from router import tenants
from tests.evidence import Evidence
from tests.fakes.sdk_router import Script, running_router
from tests.service.gateway.http import gateway_at, running_gateway
from tests.service.security.keys import KEYS, write_keys

OPEN = {("GET", path) for path in ("/", "/mesh", "/health", "/ping", "/metrics")} | {("POST", "/ping")}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BAD_CREDENTIALS: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong-wrong-wrong-wrong"},
    {"authorization": "Bearer"},
    {"authorization": KEYS["alice"]},
    {"authorization": f"Basic {KEYS['alice']}"},
    {"authorization": "AWS4-HMAC-SHA256 Credential=wrong/20260101/us-east-1/sagemaker/aws4_request"},
    {"x-api-key": "wrong"},
    {"x-api-key": "a" * 12_000},
    {"authorization": "Bearer " + "a" * 12_000},
    {"x-api-key": "w\u00f6rng"},
]


@pytest.fixture
async def keyed(make_mesh: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A gateway for a real router that knows keys, and its backend."""
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    async with gateway_at(mesh.router.public.address) as (_, backend, http):
        yield backend, http


def endpoints(backend: Any) -> list[tuple[str, str]]:
    """All routes there are, as method and path."""
    routes = build_app(backend).routes
    assert all(isinstance(route, Route | Mount) for route in routes)
    return [
        (method, route.path.replace("{model:path}", "m").replace("{model}", "m").replace("{version}", "1"))
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    ]


async def test_every_route_requires_a_key(keyed: Any, evidence: Evidence) -> None:
    assert MAX_KEY_CHARS == tenants.MAX_KEY_CHARS
    backend, http = keyed
    wanted = [each for each in endpoints(backend) if each not in OPEN]
    assert len(wanted) > 15

    async def status(method: str, path: str, headers: dict[str, str]) -> int:
        content = b"not even JSON" if method == "POST" else None
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        return int((await http.request(method, path, content=content, headers=raw)).status_code)

    statuses = {
        (method, path, str(headers)): await status(method, path, headers)
        for method, path in wanted
        for headers in BAD_CREDENTIALS
    }
    assert {key: value for key, value in statuses.items() if value != 401} == {}
    tried = f"{len(wanted)} routes, {len(BAD_CREDENTIALS)} wrong credentials each"
    evidence("R15", "HTTP requests let in without the right key", f"0; {tried}", target="0", ok=True)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEYS['alice']}"},
        {"authorization": f"bearer  {KEYS['alice']}"},
        {"authorization": f"AWS4-HMAC-SHA256 Credential={KEYS['alice']}/20260101/us-east-1/sagemaker/aws4_request"},
        {"x-api-key": KEYS["alice"]},
    ],
)
async def test_the_callers_key_is_forwarded_to_the_router(keyed: Any, headers: dict[str, str]) -> None:
    _, http = keyed
    assert (await http.get("/v1/models", headers=headers)).json()["data"][0]["id"] == "tiny"
    tokens = await http.post("/tokenize", json={"inputs": "hello world"}, headers=headers)
    assert "".join(token["text"] for token in tokens.json()) == "hello world"


async def test_probes_need_no_key_and_report_missing_workers(keyed: Any) -> None:
    _, http = keyed
    assert (await http.get("/metrics")).status_code == 200
    for path in ("/ping", "/health"):
        assert (await http.get(path)).status_code == 503
    assert (await http.get("/", headers={"accept": "text/html"})).status_code == 200


async def test_ping_waits_for_a_prefill_and_a_decode_worker(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.backend._HEALTH_FRESH_S", 0.0)
    mesh = await make_mesh(expect_prefill=1)
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        await mesh.decode()
        assert (await http.get("/ping")).status_code == 503
        await mesh.prefill()
        assert (await http.get("/ping")).status_code == 200


@pytest.mark.parametrize("path", ["/ping", "/health"])
async def test_probes_answer_in_time_if_the_router_does_not(path: str) -> None:
    async with running_gateway() as gateway:
        gateway.router.health.hangs = True
        async with asyncio.timeout(20):  # 1 s on an idle machine; the router never answers
            assert (await gateway.http.get(path)).status_code == 503
        assert gateway.router.health.asked.is_set()


async def test_the_gate_asks_the_router_once_for_a_key() -> None:
    class Counting:
        calls: list[str | None]

        def __init__(self) -> None:
            self.calls = []

        def acting_for(self, key: str | None) -> Any:
            self.calls.append(key)
            return self

        async def models(self, timeout: float) -> tuple[()]:
            await asyncio.sleep(0)
            return ()

    client, now = Counting(), [0.0]
    gate = Gate(client, allow_anonymous=True, clock=lambda: now[0])  # type: ignore[arg-type]
    await asyncio.gather(*(gate.check("a") for _ in range(5)), gate.check("b"))
    assert client.calls == ["a", "b"]
    now[0] = 11.0
    await gate.check("a")
    assert client.calls == ["a", "b", "a"]


async def test_beyond_loopback_a_router_without_keys_is_not_exposed() -> None:
    async with running_router() as router:
        async with gateway_at(router.address, host="0.0.0.0") as (url, _, http):
            url = url.replace("0.0.0.0", "127.0.0.1")
            refused = await http.post(f"{url}/v1/chat/completions", json=CHAT)
            assert refused.status_code == 403
            assert "allow_anonymous" in refused.json()["error"]["message"]
        async with gateway_at(router.address, host="0.0.0.0", allow_anonymous=True) as (url, _, http):
            url = url.replace("0.0.0.0", "127.0.0.1")
            assert (await http.post(f"{url}/v1/chat/completions", json=CHAT)).status_code == 200


async def test_pages_of_other_sites_may_not_call() -> None:
    async with running_gateway() as gateway:
        own = {"origin": gateway.url}
        assert (await gateway.http.post("/v1/chat/completions", json=CHAT, headers=own)).status_code == 200
        foreign = {"origin": "https://evil.example"}
        assert (await gateway.http.post("/v1/chat/completions", json=CHAT, headers=foreign)).status_code == 403
    async with running_gateway(cors_allow_origin="https://good.example") as gateway:
        good = {"origin": "https://good.example"}
        response = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=good)
        assert response.headers["access-control-allow-origin"] == "https://good.example"
        shown = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id", "retry-after", "retry-after-ms", "x-queue-time"} <= set(shown)


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_are_capped(announced: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with running_gateway(max_body_bytes=1000) as gateway:
        content: Any = b"x" * 1001 if announced else pieces()
        response = await gateway.http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert (await gateway.http.post("/v1/completions", json={"prompt": "x" * 900})).status_code == 200


async def test_a_body_that_does_not_arrive_times_out() -> None:
    async with running_gateway(body_timeout_s=0.05) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        assert b'"error_type":"validation"' in await reader.read(), "and the connection is closed"
        writer.close()
        await writer.wait_closed()


async def test_open_requests_are_capped() -> None:
    script = Script(hold_after_messages=1)
    async with running_gateway(script, max_open_requests=1) as gateway:
        async with gateway.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}):
            await script.holding.wait()
            statuses = [
                (await gateway.post(path, body)).status_code
                for path, body in (("/v1/chat/completions", CHAT), ("/invocations", {"inputs": "x"}), ("/generate", {}))
            ]
            assert statuses == [429, 503, 429]
            assert (await gateway.http.get("/ping")).status_code == 200
        await script.cancelled.wait()
    assert gateway.backend.metrics.open_requests.collect()[0].samples[0].value == 0


async def test_headers_are_bounded() -> None:
    async with running_gateway() as gateway:
        try:
            response = await gateway.http.get("/v1/models", headers={"x-long": "x" * 200_000})
        except httpx2.TransportError:
            return  # it may close the connection before all is sent
        assert response.status_code in (400, 431)
