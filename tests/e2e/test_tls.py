"""A whole mesh of processes with TLS on both planes."""

import ssl
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

import tandem
from tests.e2e.mesh_process import mesh, pools_are_whole
from tests.e2e.reference import Reference
from tests.fakes.certificates import Authority


async def test_a_mesh_with_tls_on_both_planes(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    inside, outside = Authority(tmp_path / "mesh-ca"), Authority(tmp_path / "public-ca")
    # The trial request of `tandem up` must find its way though the certificate does not name the address.
    public = outside.issue("router", names="DNS:*.example.com")
    flags = (
        *inside.issue("all").flags,
        f"--public-tls-cert={public.cert}",
        f"--public-tls-key={public.key}",
        "--http-port=0",
        "--kv-transports=grpc",
        "--log-level=debug",
    )
    prompts = [[(11 * i + j) % 256 for j in range(40)] for i in range(4)]
    async with mesh(checkpoint("llama-tied"), tmp_path / "logs", *flags) as running:
        tls = tandem.Tls(outside.cert, name="llm.example.com")
        async with tandem.AsyncClient(running.address, tls=tls, timeout=60) as client:
            for prompt in prompts:
                result = await client.generate(token_ids=prompt, max_new_tokens=8, ignore_eos=True)
                reference("llama-tied").check_greedy(prompt, result.tokens)
            await pools_are_whole(client)
        assert running.http.startswith("https://")
        trust = ssl.create_default_context(cafile=str(outside.cert))
        async with httpx2.AsyncClient(verify=trust, base_url=running.http, timeout=60) as http:
            asked = http.build_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3})
            asked.extensions["sni_hostname"] = "llm.example.com"
            assert (await http.send(asked)).status_code == 200
        async with tandem.AsyncClient(running.address, max_retries=0) as client:
            with pytest.raises(tandem.ConnectionFailed, match="speak TLS"):
                await client.models()
    logs = "".join(path.read_text() for path in running.log_dir.glob("*.log"))
    assert '"transport": "grpc"' in logs
    for trouble in ("link broken", "prefill failed", '"event": "replay"'):
        assert trouble not in logs, trouble
