"""What the logs of all services show of a request that ends in an internal error: no key, no secret, no prompt."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

import gateway.exchange
import mesh.rpc.server
from mesh.rpc.channel import open_channel
from tests.captured_log import InstallLog, install_log
from tests.defects import Repaired
from tests.service import worker_rig
from tests.service.gateway.http import running_gateway
from tests.service.security.keys import KEYS, MESH_KEY
from tests.service.security.test_credentials import all_services, own_methods, status_of

__all__ = ["install_log"]

PROMPT = "a private prompt"
PASSWORD = "hunter2"
RIG_KEY = worker_rig.MESH_KEY.secret
SECRETS = (PROMPT, PASSWORD, MESH_KEY, RIG_KEY, *KEYS.values())
PUBLIC = ("tandem.v1.Generation", "tandem.v1.Mesh")
OF_THE_RIG = ("mesh.v1.Prefill", "mesh.v1.Decode", "mesh.v1.KvTransfer")


class Broken:
    """A request that no servicer can use."""

    def __getattr__(self, name: str) -> Any:
        prompt = PROMPT
        raise RuntimeError(f"{name} of {len(prompt)}")


async def test_internal_errors_of_the_mesh(
    make_mesh: Any,
    tmp_path: Path,
    model_dir: Path,
    install_log: InstallLog,
    monkeypatch: pytest.MonkeyPatch,
    repaired: Repaired,
) -> None:
    monkeypatch.setattr(mesh.rpc.server, "_parse", lambda handler, raw: Broken())
    read = install_log()
    failed = set()
    async with all_services(make_mesh, tmp_path, model_dir) as addresses:
        for method in own_methods():
            service = method.containing_service.full_name
            key = KEYS["ops"] if service in PUBLIC else RIG_KEY if service in OF_THE_RIG else MESH_KEY
            async with open_channel(addresses[service]) as channel:
                code = await status_of(channel, method, (("authorization", f"Bearer {key}"),))
            if code is grpc.StatusCode.INTERNAL:
                failed.add(service)
    assert {"tandem.v1.Generation", "mesh.v1.Prefill", "mesh.v1.Decode", "mesh.v1.Worker"} <= failed
    shown = read()
    assert shown.count('"call failed"') >= len(failed)
    assert [secret for secret in SECRETS if secret in shown] == []
    repaired("D7", f"internal errors of {len(failed)} gRPC services with keys: none of {len(SECRETS)} secrets in a log")


async def test_internal_errors_of_the_gateway(
    tmp_path: Path, install_log: InstallLog, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    def broken(headers: Any, origins: Any) -> bool:
        raise RuntimeError(f"no use for {len(headers)} headers")

    file = tmp_path / "model.py"
    file.write_text("def handle(inputs):\n    key = inputs.get_properties()\n    if key.get('fail'): 1 / 0\n")
    read = install_log()
    properties = f'{{"db_password": "{PASSWORD}"}}'
    async with running_gateway(handler=str(file), handler_properties=properties) as running:
        assert running.backend.handler is not None
        async with running.backend.handler.running():
            headers = {"authorization": f"Bearer {KEYS['alice']}", "fail": "yes"}
            handled = await running.post("/invocations", {"inputs": PROMPT}, **headers)
            assert handled.status_code == 424
            monkeypatch.setattr(gateway.exchange, "is_foreign_page", broken)
            failed = await running.post("/v1/completions", {"prompt": PROMPT}, **headers)
            assert failed.status_code == 500
    shown = await asyncio.to_thread(read)
    assert "a request failed" in shown
    assert [secret for secret in SECRETS if secret in shown] == []
    repaired("D7", "internal errors of the gateway, before and in a handler: none in the log")
