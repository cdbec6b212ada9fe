"""Tenants beside each other: caches, caps, turns, and where a router without keys may listen."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

import tandem
from mesh.domain.errors import ConfigurationError
from router.__main__ import RouterProcess
from router.settings import RouterSettings
from tests.evidence import Evidence
from tests.fakes.router_workers import expected_tokens
from tests.service.conftest import Mesh, Result, make_request
from tests.service.security.keys import KEYS, bearer, write_keys

PROMPT = list(range(65, 97))


async def generate_as(mesh: Mesh, tenant: str, **request: Any) -> Result:
    result = Result()
    await result.read(mesh.stub.Generate(make_request(**request), timeout=20, metadata=bearer(tenant)))
    return result


async def test_a_hostile_neighbour_changes_nothing(make_mesh: Any, tmp_path: Path, evidence: Evidence) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.prefill()
    await mesh.decode()
    alone = await generate_as(mesh, "alice", token_ids=PROMPT, max_new_tokens=20)
    noise = [
        asyncio.create_task(generate_as(mesh, "mallory", token_ids=PROMPT, max_new_tokens=20, temperature=5.0))
        for _ in range(3)
    ]
    beside = await generate_as(mesh, "alice", token_ids=PROMPT, max_new_tokens=20)
    await asyncio.gather(*noise)
    assert beside.ids() == alone.ids() == expected_tokens(PROMPT, 20)
    evidence("R21", "tokens changed by a hostile neighbour", 0, target="0", ok=True)
    mesh.assert_at_rest()


async def test_each_tenant_has_a_cache_namespace_of_its_own(make_mesh: Any, tmp_path: Path, evidence: Evidence) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    decode = await mesh.decode()
    for tenant in ("alice", "mallory", "alice"):
        await generate_as(mesh, tenant, token_ids=PROMPT, max_new_tokens=2)
    namespaces = [start.sequence.cache_namespace for start in decode.started.items]
    assert namespaces[0] == namespaces[2]
    assert len({"tiny", *namespaces}) == 3
    evidence("R21", "a foreign prefix", "as cold as one nobody has sent", target="not told from cold", ok=True)


async def test_a_tenants_cap(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    decode = await mesh.decode()
    decode.gate.close()
    running = asyncio.create_task(generate_as(mesh, "mallory", token_ids=PROMPT, max_new_tokens=2, num_choices=2))
    await mesh.until(lambda: mesh.model.limiter.num_held == 2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate_as(mesh, "mallory", token_ids=PROMPT, max_new_tokens=2, num_choices=2)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "your 3" in refused.value.details()
    decode.gate.open()
    await running
    await generate_as(mesh, "alice", token_ids=PROMPT, max_new_tokens=2, num_choices=4)
    await generate_as(mesh, "mallory", token_ids=PROMPT, max_new_tokens=2, num_choices=3)
    mesh.assert_at_rest()


@pytest.mark.parametrize(("counts", "name"), [({"num_choices": 4}, "num_choices"), ({"best_of": 4}, "best_of")])
async def test_more_choices_than_a_tenants_cap_are_never_served_and_no_client_asks_again(
    make_mesh: Any, tmp_path: Path, counts: dict[str, int], name: str
) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.decode()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate_as(mesh, "mallory", token_ids=PROMPT, max_new_tokens=2, **counts)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"{name} must be in [")
    assert refused.value.details().endswith("3], got 4")
    await generate_as(mesh, "alice", token_ids=PROMPT, max_new_tokens=2, **counts)
    mesh.assert_at_rest()


async def test_the_access_log_names_the_tenant(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.decode()
    with structlog.testing.capture_logs() as logs:
        await generate_as(mesh, "alice", token_ids=PROMPT, max_new_tokens=2)
    (line,) = (entry for entry in logs if entry["event"] == "finished")
    assert line["tenant"] == "alice"
    assert not any(key in str(logs) for key in KEYS.values())


async def test_the_sdk_sends_its_key(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.decode()
    address = mesh.router.public.address
    async with tandem.AsyncClient(address, api_key=KEYS["alice"]) as client:
        assert (await client.generate(token_ids=PROMPT, max_new_tokens=2)).finish_reason == "length"
        with pytest.raises(tandem.TandemError, match="operator"):
            await client.workers()
    async with tandem.AsyncClient(address) as client:
        with pytest.raises(tandem.Unauthenticated):
            await client.models()


async def test_listening_to_the_world_needs_keys_or_a_clear_word(model_dir: Path, tmp_path: Path) -> None:
    def settings(**more: Any) -> RouterSettings:
        return RouterSettings(model=str(model_dir), host="0.0.0.0", port=0, registry_port=0, **more)

    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0 without credentials: set TANDEM_API_KEYS_FILE"):
        RouterProcess(settings())
    with pytest.raises(ConfigurationError, match="cannot read the API keys file"):
        RouterProcess(settings(api_keys_file=str(tmp_path / "none")))
    for allowed in (settings(allow_anonymous=True), settings(api_keys_file=write_keys(tmp_path))):
        router = RouterProcess(allowed)
        await router.start()
        await router.stop(0)
