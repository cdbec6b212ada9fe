"""Mutual TLS inside the mesh: who is let in, who is not, and that everybody is told in words, soon."""

import ast
import asyncio
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from kvtransfer import KVSender, TransferSettings
from kvtransfer.outgoing_conversation import TransferSpec
from mesh.domain.errors import ConfigurationError, MeshError
from mesh.domain.tokens import SampledToken
from mesh.domain.worker import WorkerRole
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials, TlsIdentity
from mesh.rpc.probe import main as probe
from mesh.rpc.server import Listen, Server
from mesh.rpc.status import error_from_rpc
from mesh.v1 import worker_pb2_grpc
from router.settings import RouterSettings
from router.workers.membership import Membership
from router.workers.redis_registry import DirectChecks
from tests.evidence import Evidence
from tests.fakes.certificates import Authority
from tests.fakes.kv_store import TINY, FakeKVStore
from tests.fakes.requests import make_request
from tests.fakes.router_workers import expected_tokens
from tests.fakes.runner import fake_continuation
from tests.service.fake_router import fake_router
from tests.service.mesh.test_registry import FakeEngine
from tests.service.worker_rig import MESH_KEY, worker_rig
from tests.unit.router.test_membership import INFO
from worker.registration import Registration
from worker.servicer import WorkerServicer

SOON_S = 5.0
PROMPT = [65, 66, 67]
ROOT = Path(__file__).resolve().parents[3]


class WithoutCertificate(TlsIdentity):
    """Believes the CA and shows nothing."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca)


Caller = Callable[[Authority, Authority], TlsIdentity | None]
BAD_CALLERS: dict[str, Caller] = {
    "plaintext": lambda ours, theirs: None,
    "no certificate": lambda ours, theirs: WithoutCertificate(b"", b"", ours.cert.read_bytes()),
    "expired": lambda ours, theirs: ours.issue("late", days=0).identity,
    "certificate of another CA": lambda ours, theirs: replace(
        theirs.issue("alien").identity, ca=ours.cert.read_bytes()
    ),
    "believes another CA": lambda ours, theirs: replace(ours.issue("misled").identity, ca=theirs.cert.read_bytes()),
    "expects another name": lambda ours, theirs: replace(ours.issue("picky").identity, peer_name="somebody.else"),
}


async def ask(server: Server, tls: TlsIdentity | None) -> None:
    """One call. Raises the MeshError it ends with."""
    async with open_channel(server.address, tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2 * SOON_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


@pytest.mark.parametrize("make_caller", BAD_CALLERS.values(), ids=BAD_CALLERS.keys())
async def test_bad_callers_are_refused_and_told_in_words(
    make_caller: Caller, authority: Authority, stranger: Authority, evidence: Evidence, request: Any
) -> None:
    member = authority.issue("member").identity
    server = Server(Listen("127.0.0.1", 0, tls=member))
    await server.start([])
    await ask(server, member)
    started_s = time.monotonic()
    with pytest.raises(MeshError, match=r"do both sides use TLS, with certificates of the same CA"):
        await ask(server, make_caller(authority, stranger))
    took_s = time.monotonic() - started_s
    await server.stop(0)
    what = f"mutual TLS, {request.node.callspec.id}: refused in words after"
    evidence("R15", what, f"{took_s:.2f} s", target=f"<= {SOON_S:g} s", ok=took_s <= SOON_S, is_reported_only=True)
    assert took_s < 2 * SOON_S


async def test_tls_to_a_server_without_it_is_refused(authority: Authority) -> None:
    server = Server(Listen("127.0.0.1", 0))
    await server.start([])
    with pytest.raises(MeshError, match="do both sides use TLS"):
        await ask(server, authority.issue("member").identity)
    await server.stop(0)


async def test_a_router_and_its_workers_over_tls_alone(make_mesh: Any, authority: Authority) -> None:
    mesh = await make_mesh(**authority.issue("all").settings)
    await mesh.prefill()
    await mesh.decode()
    assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=3)).ids() == expected_tokens(PROMPT, 3)
    with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
        await mesh.decode("without-tls", tls=None)


async def test_kv_moves_between_workers_over_tls(authority: Authority) -> None:
    tls = authority.issue("member").identity
    async with worker_rig(tls=tls) as rig, fake_router(rig) as router:
        prompt = list(range(3, 53))
        assert await router.run(make_request("a", prompt, max_new_tokens=8)) == fake_continuation(prompt, 8)
        sender = KVSender(
            FakeKVStore(seed=1), "stranger", Credentials(MESH_KEY), TransferSettings(transports=("grpc",))
        )
        transfer = sender.open(TransferSpec("t", 0, rig.decode_address, "first-life", (0, 1), TINY.whole))
        with pytest.raises(MeshError, match="do both sides use TLS"):
            async with asyncio.timeout(2 * SOON_S):
                await transfer.commit(5, SampledToken(1, 0.0))
        await sender.close()


async def test_a_worker_without_the_right_certificate_says_why_it_is_not_in(
    make_mesh: Any, authority: Authority, stranger: Authority
) -> None:
    mesh = await make_mesh(**authority.issue("router").settings)
    registration = Registration(INFO, FakeEngine(), Credentials(None, stranger.issue("alien").identity))
    with capture_logs() as logs:
        task = asyncio.create_task(registration.run(mesh.router.coordination.address))
        await mesh.until(lambda: logs, timeout_s=2 * SOON_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert logs[0]["event"] == "registry lost"
    assert "CERTIFICATE_VERIFY_FAILED" in logs[0]["error"]
    assert mesh.router.membership.views() == []


async def never_drained(draining: bool) -> None:
    pytest.fail("nobody drains this worker")


async def never_switched(role: WorkerRole) -> None:
    pytest.fail("nobody changes this worker's role")


async def test_silent_workers_are_asked_over_tls(authority: Authority) -> None:
    tls = authority.issue("member").identity
    server = Server(Listen("127.0.0.1", 0, tls=tls))
    info = replace(INFO, address=server.address)
    worker_pb2_grpc.add_WorkerServicer_to_server(
        WorkerServicer(info, FakeEngine(), never_drained, never_switched), server.grpc
    )
    await server.start([])
    server.set_serving(True)
    membership = Membership(time.monotonic)
    membership.join(info)
    heard = [view.last_seen_s for view in membership.views()]
    await DirectChecks(membership, Credentials(MESH_KEY)).check(membership.views())
    assert [view.last_seen_s for view in membership.views()] == heard
    await DirectChecks(membership, Credentials(MESH_KEY, tls)).check(membership.views())
    assert [view.last_seen_s for view in membership.views()] > heard
    await server.stop(0)


async def test_certificates_may_carry_a_common_name_instead_of_addresses(authority: Authority, make_mesh: Any) -> None:
    files = authority.issue("shared", names="DNS:mesh.internal").settings
    mesh = await make_mesh(**files, mesh_tls_name="mesh.internal")
    await mesh.decode()
    assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=3)).ids() == expected_tokens(PROMPT, 3)
    with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification"):
        await mesh.decode("by-address", tls=authority.issue("by-address").identity)


@pytest.mark.parametrize("names", ["DNS:*.mesh.internal", "IP:10.1.2.3", "IP:2001:db8::1"])
async def test_health_probes_use_the_settings_of_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    files = authority.issue("somewhere", names=names)
    inside = Server(Listen("127.0.0.1", 0, tls=files.identity))
    public = Server(Listen("127.0.0.1", 0, public=True, tls=replace(files.identity, ca=None)))
    for server in (inside, public):
        await server.start([])
        server.set_serving(True)
        assert await asyncio.to_thread(probe, [server.address]) == 1
    for name, value in files.settings.items():
        monkeypatch.setenv(f"TANDEM_{name.upper()}", value)
    assert await asyncio.to_thread(probe, [inside.address]) == 0
    monkeypatch.setenv("TANDEM_PUBLIC_TLS_CERT", str(files.cert))
    monkeypatch.setenv("TANDEM_PUBLIC_TLS_KEY", str(files.key))
    assert [await asyncio.to_thread(probe, [each.address]) for each in (inside, public)] == [0, 0]
    monkeypatch.setenv("TANDEM_MESH_TLS_CA", "")
    assert await asyncio.to_thread(probe, [inside.address]) == 2
    for server in (inside, public):
        await server.stop(0)


async def test_mutual_tls_alone_is_enough_to_listen_everywhere(authority: Authority) -> None:
    identity = authority.issue("member").identity
    await Server(Listen("0.0.0.0", 0, tls=identity)).stop(0)
    with pytest.raises(ConfigurationError, match="without credentials"):
        Server(Listen("0.0.0.0", 0, tls=replace(identity, ca=None)))
    with pytest.raises(ConfigurationError, match="TANDEM_API_KEYS_FILE"):
        Server(Listen("0.0.0.0", 0, public=True, tls=replace(identity, ca=None)))


def test_wrong_files_are_one_clear_line(authority: Authority, stranger: Authority, model_dir: Path) -> None:
    good, other = authority.issue("good").settings, authority.issue("other").settings
    late, nameless = authority.issue("late", days=0).settings, authority.issue("nameless", names="").settings
    alien = stranger.issue("alien").settings
    servers_only = authority.issue("servers-only", usage="serverAuth").settings
    encrypted = authority.issue("encrypted").settings
    command = ("openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", encrypted["mesh_tls_key"])
    secret = authority.folder / "secret.key"
    subprocess.run([*command, "-out", str(secret)], check=True, capture_output=True)
    encrypted = encrypted | {"mesh_tls_key": str(secret)}
    ed25519 = authority.issue("ed25519", algorithm="ed25519").settings
    garbage = authority.folder / "garbage.pem"
    garbage.write_text("no PEM")
    for wrong, message in (
        ({"mesh_tls_ca": ""}, "mesh_tls_ca is not set"),
        ({"mesh_tls_cert": "", "mesh_tls_key": "", "mesh_tls_ca": "", "mesh_tls_name": "x"}, "mesh_tls_cert is not"),
        ({"mesh_tls_cert": "/nowhere.pem"}, r"cannot read /nowhere\.pem: No such file"),
        ({"mesh_tls_key": other["mesh_tls_key"]}, "cannot be used together for TLS: KEY_VALUES_MISMATCH"),
        ({"mesh_tls_ca": str(garbage)}, "cannot be used together for TLS: NO_CERTIFICATE_OR_CRL_FOUND"),
        ({"mesh_tls_cert": str(garbage)}, r"garbage\.pem.* cannot be used together for TLS"),
        ({"mesh_tls_ca": alien["mesh_tls_ca"]}, "no valid certificate of .*another-ca"),
        (late, "certificate has expired"),
        (servers_only, "no valid certificate of .*unsuitable certificate purpose"),
        (encrypted, r"secret\.key is encrypted: write it without a passphrase"),
        (ed25519, "is an Ed25519 key, which gRPC cannot use"),
        ({"mesh_tls_name": "elsewhere"}, "certificate is not valid for 'elsewhere'"),
        (nameless, "names no host: .*subjectAltName"),
    ):
        with pytest.raises(ConfigurationError, match=message) as raised:
            RouterSettings(model=str(model_dir), **(good | wrong))
        assert "\n" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="belong together"):
        RouterSettings(model=str(model_dir), public_tls_cert=good["mesh_tls_cert"])
    settings = RouterSettings(model=str(model_dir), **good)
    assert settings.load_credentials().tls.name == "localhost"
    assert "PRIVATE" not in repr(settings.load_credentials())


def test_the_documents_tell_how_to_make_certificates(tmp_path: Path, authority: Authority) -> None:
    section = (ROOT / "docs" / "security.md").read_text().partition("## TLS")[2]
    block = section.partition("```sh")[2].partition("```")[0]
    subprocess.run(["sh", "-e", "-c", block], cwd=tmp_path, check=True, capture_output=True)
    files = [str(tmp_path / name) for name in ("decode-0.pem", "decode-0.key", "mesh-ca.pem")]
    assert TlsIdentity.load(*files).name == "decode-0"
    assert (tmp_path / "decode-0.key").stat().st_mode & 0o077 == 0


def test_every_channel_of_the_mesh_takes_part() -> None:
    found = []
    for package in ("mesh", "router", "kvtransfer", "prefill_worker", "decode_worker", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            names = [(ast.unparse(call.func), [ast.unparse(each) for each in call.args]) for call in calls]
            found += [args for name, args in names if name == "open_channel"]
            if path.parent.name != "rpc":
                assert not [name for name, _ in names if name.endswith(("insecure_channel", "secure_channel"))], path
    assert len(found) == 4
    assert all("tls" in args[1] for args in found)
