"""By which names a gateway may be called, and who may see its figures."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access import is_known_host
from tests.defects import Repaired
from tests.fakes.sdk_router import Script, running_router
from tests.service.gateway.http import gateway_at, running_gateway
from tests.service.gateway.raw_http import answer_to
from tests.service.security.keys import KEYS, write_keys

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PAGES = ("/", "/mesh", "/mesh/state", "/pages/chat.js", "/metrics", "/v1/models", "/nothing")


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *[
            (host, True)
            for host in ("", "localhost", "LOCALHOST:80", "app.localhost:1", "localhost.", "127.0.0.1:8080")
        ],
        *[(host, True) for host in ("[::1]:8080", "10.1.2.3:8080", "gateway:8080", "GATEWAY")],
        *[(host, False) for host in ("evil.com", "evil.com:8080", "127.0.0.1.evil.com", "localhost.evil.com")],
        *[
            (host, False)
            for host in ("[x", "x@localhost@evil.com", "gateway.evil.com", "notlocalhost", "127.1", "0x7f.1")
        ],
    ],
)
def test_hosts(host: str, known: bool) -> None:
    assert is_known_host(host, {"gateway"}) is known


async def test_a_rebound_name_is_refused(repaired: Repaired) -> None:
    rebound = {"host": "evil.com:18080", "origin": "http://evil.com:18080", "authorization": "Bearer anything"}
    async with running_gateway() as gateway:
        statuses = {path: (await gateway.http.get(path, headers=rebound)).status_code for path in PAGES}
        refused = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=rebound)
        assert set(statuses.values()) == {403}, statuses
        assert refused.status_code == 403
        assert "allowed_hosts" in refused.json()["error"]["message"]
        assert gateway.script.requests == []
        assert (await gateway.http.get("/ping", headers=rebound)).status_code == 200, "load balancers use any name"
    async with running_gateway(allowed_hosts="evil.com") as gateway:
        assert (await gateway.http.post("/v1/chat/completions", json=CHAT, headers=rebound)).status_code == 200
    repaired("D11", f"403 from {len(PAGES) + 1} routes, pages among them; --allowed-hosts names others")


async def test_a_whole_url_is_a_target() -> None:
    """Proxies send it. Its host counts, not that of the header."""

    async def answer(target: str, host: str) -> tuple[int, bytes]:
        lines = (f"GET {target} HTTP/1.1", f"host: {host}", "connection: close", "", "")
        return await answer_to(str(gateway.http.base_url).rstrip("/"), "\r\n".join(lines).encode())

    async with running_gateway() as gateway:
        address = gateway.http.base_url.netloc.decode()
        plain = await answer("/v1/models", address)
        assert plain[0] == 200
        assert await answer(f"http://{address}/v1/models", address) == plain
        assert await answer(f"HTTP://{address}/v1/models?limit=9", "evil.com") == plain
        assert (await answer("http://evil.com/v1/models", address))[0] == 403
        assert (await answer(f"http://{address}/v1%2Fmodels", address))[0] == 200
        page = await answer("/", address)
        assert page[0] == 200
        assert await answer(f"http://{address}", address) == await answer(f"http://{address}/", address) == page


async def test_every_answer_has_the_id_of_its_request() -> None:
    """Redirects, pages, refusals of hosts and of routes among them."""
    async with running_gateway(cors_allow_origin="https://chat.example") as gateway:
        for path in ("/v1/files/", "/v1/models", "/nothing", "/", "/pages/chat.js", "/health", "/metrics"):
            mine = await gateway.http.get(path, headers={"x-request-id": "mine"})
            assert mine.headers.get_list("x-request-id") == ["mine"], path
            other = await gateway.http.get(path, headers={"host": "evil.com"})
            assert other.headers["x-request-id"] != "mine"
        redirect = await gateway.http.get("/v1/files/", headers={"x-request-id": "mine"})
        assert (redirect.status_code, redirect.headers["x-request-id"]) == (307, "mine")


async def test_requests_that_get_nowhere_are_counted() -> None:
    async with running_gateway() as gateway:
        await gateway.http.get("/mesh", headers={"host": "evil.com"})
        await gateway.http.get("/nothing")
        await gateway.http.get("/v1/chat/completions")
        lines = (await gateway.http.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith("tandem_http_requests_total{")]
    assert counted == [
        f'tandem_http_requests_total{{dialect="none",status="{status}"}} 1.0' for status in (403, 404, 405)
    ]


async def test_any_host_is_accepted_if_keys_are_required(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        public = {"host": "llm.example.com"}
        assert (await http.get("/v1/models", headers=public)).status_code == 401
        assert (await http.get("/v1/models", headers=public | {"x-api-key": KEYS["alice"]})).status_code == 200


async def test_an_invalid_origin_is_foreign(repaired: Repaired) -> None:
    async with running_gateway() as gateway:
        for origin in ("http://[x", "http://]", "null", "http://[::1"):
            answer = await gateway.http.get("/v1/models", headers={"origin": origin})
            assert answer.status_code == 403, origin
    repaired("D16", "a broken Origin: 403 in words")


async def scrape(url: str, key: str = "") -> int:
    async with httpx2.AsyncClient(timeout=30) as http:
        return (await http.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"} if key else {})).status_code


async def test_metrics_need_an_operators_key_beyond_loopback(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    async with gateway_at(mesh.router.public.address, host="0.0.0.0") as (url, _, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        statuses = [await scrape(url, key) for key in ("", "wrong", KEYS["alice"], KEYS["ops"])]
        assert statuses == [401, 401, 403, 200]
    async with gateway_at(mesh.router.public.address) as (url, _, _):
        assert await scrape(url) == 200, "a Prometheus of the same machine"


async def test_metrics_are_served_while_the_router_is_unreachable(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    async with gateway_at(mesh.router.public.address, host="0.0.0.0") as (url, backend, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert await scrape(url, KEYS["ops"]) == 200
        await mesh.stop()
        gate = backend.gate
        gate._operator_until_s = type(gate._operator_until_s)(
            (name, 0.0) for name in gate._operator_until_s
        )  # no longer fresh
        assert [await scrape(url, key) for key in (KEYS["ops"], KEYS["alice"])] == [200, 503]


@pytest.mark.parametrize(("anonymous", "status"), [(True, 200), (False, 403)])
async def test_metrics_without_keys(anonymous: bool, status: int) -> None:
    async with (
        running_router() as router,
        gateway_at(router.address, host="0.0.0.0", allow_anonymous=anonymous) as (url, _, _),
    ):
        assert await scrape(url.replace("0.0.0.0", "127.0.0.1")) == status


@pytest.mark.parametrize("encodes", [True, False], ids=["T5", "decoder only"])
async def test_tgi_reports_the_model(encodes: bool, repaired: Repaired) -> None:
    script = Script(is_encoder_decoder=encodes, max_concurrent_requests=7)
    async with running_gateway(script) as gateway:
        info = (await gateway.http.get("/info")).json()
        assert info["model_pipeline_tag"] == ("text2text-generation" if encodes else "text-generation")
        assert info["max_concurrent_requests"] == 7
        body = {"inputs": "One", "parameters": {"max_new_tokens": 2}}
        whole = (await gateway.http.post("/", json=body)).json()[0]["generated_text"]
        lines = await gateway.lines("/", body | {"stream": True})
        assert whole.startswith("One") is not encodes
        assert ('"generated_text":"One' in lines[-1]) is not encodes
    repaired("M11", "T5: the answer alone, text2text-generation; the router's cap of choices in /info")


async def test_a_router_reports_its_cap_and_model_kind(make_mesh: Any) -> None:
    mesh = await make_mesh(max_concurrent_requests=9)
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        info = (await http.get("/info")).json()
    assert (info["max_concurrent_requests"], info["model_pipeline_tag"]) == (9, "text-generation")
