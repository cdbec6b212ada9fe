"""TLS on the router's public port, the SDK and the commands."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import tandem
from mesh import public_tls
from tandem._routers import SecureChannels
from tandem_cli.main import main
from tests.fakes.certificates import Authority, LivePair
from tests.waiting import until

PROMPT = [65, 66, 67]


@pytest.fixture
async def router(make_mesh: Any, authority: Authority) -> Any:
    """A router with TLS for clients only; its mesh has none."""
    files = authority.issue("router", names="DNS:llm.example.com,IP:127.0.0.1")
    mesh = await make_mesh(public_tls_cert=str(files.cert), public_tls_key=str(files.key))
    await mesh.decode()
    return mesh.router


def as_name(router: Any) -> str:
    """A loopback address that the certificate does not carry."""
    return str(router.public.address.replace("127.0.0.1", "localhost"))


async def test_a_client_that_knows_the_ca(router: Any, authority: Authority) -> None:
    async with tandem.AsyncClient(router.public.address, tls=tandem.Tls(authority.cert), timeout=20) as client:
        assert len((await client.generate(token_ids=PROMPT, max_new_tokens=3)).tokens) == 3
    named = tandem.Tls(str(authority.cert), name="llm.example.com")
    async with tandem.AsyncClient(as_name(router), tls=named, timeout=20) as client:
        assert (await client.model()).name == "tiny"


async def test_the_routers_own_certificate_will_do(router: Any, authority: Authority) -> None:
    tls = tandem.Tls(authority.folder / "router.pem")
    async with tandem.AsyncClient(router.public.address, tls=tls, timeout=20) as client:
        assert (await client.model()).name == "tiny"


@pytest.mark.parametrize("case", ["plaintext", "public CAs", "another CA", "another name"])
async def test_anything_else_is_refused_in_words(
    router: Any, authority: Authority, stranger: Authority, case: str
) -> None:
    tls: dict[str, tandem.Tls | bool] = {
        "plaintext": False,
        "public CAs": True,
        "another CA": tandem.Tls(stranger.cert),
        "another name": tandem.Tls(authority.cert),
    }
    address = as_name(router) if case == "another name" else router.public.address
    async with tandem.AsyncClient(address, tls=tls[case], timeout=20, max_retries=0) as client:
        with pytest.raises(tandem.ConnectionFailed, match="does the server speak TLS"):
            await client.models()


async def test_a_renewed_certificate_is_trusted_by_those_who_know_its_file(
    make_mesh: Any, authority: Authority, stranger: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the gateway of `tandem up` does. Another CA has signed the new one."""
    monkeypatch.setattr(public_tls, "_CHECK_INTERVAL_S", 0.01)
    before, after = authority.issue("router-before"), stranger.issue("router-after")
    live = LivePair(tmp_path, before)
    mesh = await make_mesh(**live.settings)
    await mesh.decode()
    address = mesh.router.public.address
    async with tandem.AsyncClient(address, tls=tandem.Tls(live.cert), timeout=20, max_retries=0) as client:
        stream = client.stream(token_ids=PROMPT, max_new_tokens=3)
        await anext(stream)
        with capture_logs() as logs:
            live.replace(after.cert, after.key)
            assert (await client.model()).name == "tiny"  # whichever the router shows
            await until(lambda: "certificate read again" in str(logs))
        assert (await client.model()).name == "tiny"
        assert len([event async for event in stream]) == 2
    for tls, is_welcome in ((tandem.Tls(stranger.cert), True), (tandem.Tls(authority.cert), False)):
        async with tandem.AsyncClient(address, tls=tls, timeout=20, max_retries=0) as client:
            with nullcontext() if is_welcome else pytest.raises(tandem.ConnectionFailed):
                await client.models()


def test_a_ca_file_that_is_written_in_place_keeps_what_is_shown(tmp_path: Path, authority: Authority) -> None:
    """The router may show its former certificate for seconds, whatever is read meanwhile."""
    before, after = (authority.issue(f"in-place-{name}").cert.read_bytes() for name in ("before", "after"))
    file = tmp_path / "ca.pem"
    file.write_bytes(before)
    channels = SecureChannels(tandem.Tls(file))
    for written in (b"", after[: len(after) // 2], after):
        file.write_bytes(written)
        assert before in (channels.roots() or b"")
    assert after in (channels.roots() or b"")


def test_several_replacements_that_a_router_cannot_use_leave_it_trusted(tmp_path: Path, authority: Authority) -> None:
    """As when certificates come without their keys: the router shows its first one all the time."""
    shown, *others = (authority.issue(f"replaced-{number}").cert.read_bytes() for number in range(4))
    file = tmp_path / "ca.pem"
    file.write_bytes(shown)
    channels = SecureChannels(tandem.Tls(file))
    for content in others:
        file.write_bytes(content)
        assert shown in (channels.roots() or b"")


def test_a_ca_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(tandem.InvalidRequest, match=r"cannot read .*nothing\.pem: No such file"):
        tandem.AsyncClient("localhost:1", tls=tandem.Tls(tmp_path / "nothing.pem"))


async def test_commands(
    router: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, ["models", *words])

    address, ca = router.public.address, str(authority.cert)
    assert await run("--address", address) == 1
    assert await run("--address", address, "--tls") == 1
    assert "does the server speak TLS" in capsys.readouterr().err
    assert await run("--address", address, "--tls-ca", ca) == 0
    monkeypatch.setenv("TANDEM_TLS_CA", ca)
    monkeypatch.setenv("TANDEM_ADDRESS", f"127.0.0.1:1,{address}")
    assert await run() == 0
    assert await run("--address", as_name(router), "--tls-name", "llm.example.com") == 0
