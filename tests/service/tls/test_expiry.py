"""Certificates that expire while they are in use: the log names the file in time, and again when it has expired."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mesh import certificate_expiry, public_tls
from mesh.certificate_expiry import watch_mesh_certificates
from mesh.certificates import read_validities
from mesh.domain.errors import ConfigurationError
from router.settings import RouterSettings
from tandem_cli.model_files.model_folders import BUNDLED
from tests.fakes.certificates import Authority
from tests.waiting import until

DAY_S = 86_400


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the watch sees, which looks at it all the time."""
    now = [time.time()]
    monkeypatch.setattr(certificate_expiry, "_CHECK_S", 0.001)
    monkeypatch.setattr(certificate_expiry.time, "time", lambda: now[0])
    return now


def test_dates_are_read_also_of_an_expired_certificate(authority: Authority) -> None:
    late, now_s = authority.issue("expired-dates", days=0), time.time()
    own, of_ca = read_validities(str(late.cert), str(late.key), str(late.ca))
    assert (own.path, of_ca.path) == (str(late.cert), str(late.ca))
    assert own.begins_s <= own.ends_s <= now_s < of_ca.ends_s <= now_s + 2 * DAY_S
    with pytest.raises(ConfigurationError, match=r"the dates of /nowhere\.pem cannot be read"):
        read_validities("/nowhere.pem", str(late.key))


async def test_a_mesh_certificate_is_named_in_time_and_when_it_has_expired(
    authority: Authority, clock: list[float]
) -> None:
    """And so is its CA, which ends before it."""
    issued = authority.issue("short", days=40)
    settings = RouterSettings(model="none", registry_port=0, **issued.settings)
    [own, _] = read_validities(str(issued.cert), str(issued.key), str(issued.ca))
    watching = asyncio.create_task(settings.watch_certificates())
    try:
        with capture_logs() as logs:

            def of_own() -> list[Any]:
                return [line for line in logs if line["event"].startswith(f"{issued.cert} expire")]

            await asyncio.sleep(0.02)
            assert of_own() == []
            clock[0] = own.ends_s - 3 * DAY_S - 60
            await until(lambda: len(of_own()) == 1)
            clock[0] = own.ends_s - 2 * DAY_S - 60
            await until(lambda: len(of_own()) == 2)
            clock[0] = own.ends_s + 60
            await until(lambda: len(of_own()) == 3)
            await asyncio.sleep(0.02)
            assert [(line["log_level"], line.get("days_left")) for line in of_own()] == [
                ("warning", 3),
                ("warning", 2),
                ("error", None),
            ]
            first, _, last = (line["event"] for line in of_own())
            assert f"{issued.cert} expires on {own.end}: replace the file and restart this service before" in first
            assert f"{issued.cert} expired on {own.end}: services refuse connections with it" in last
            assert [line["event"] for line in logs if str(issued.ca) in line["event"]][-1].startswith(
                f"{issued.ca} expired on "
            )
    finally:
        watching.cancel()


ROUTER = """
import runpy, sys
from mesh import certificate_expiry
certificate_expiry._WARN_SHARE = 2.0
runpy.run_module("router", run_name="__main__", alter_sys=True)
"""


def test_a_router_warns_of_its_certificate(authority: Authority) -> None:
    """Of one with two days, where a warning is due all the time."""
    issued = authority.issue("of-a-router")
    flags = [f"--model={BUNDLED}", "--port=0", "--registry-port=0", *issued.flags]
    command = [sys.executable, "-c", ROUTER, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as router:
        assert router.stderr is not None
        limit = threading.Timer(60, router.kill)
        limit.start()
        try:
            warning = next((line for line in router.stderr if "expires on" in line), "{}")
        finally:
            limit.cancel()
            router.kill()
    assert json.loads(warning)["event"].startswith(f"{issued.cert} expires on ")


async def test_nothing_is_said_without_certificates(clock: list[float]) -> None:
    watching = asyncio.create_task(watch_mesh_certificates(()))
    with capture_logs() as logs:
        await asyncio.sleep(0.02)
    assert (logs, watching.done()) == ([], False)
    watching.cancel()


async def test_the_public_certificate_is_named_in_time(
    authority: Authority, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_tls, "_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(public_tls, "_EXPIRY_TURNS", 1)
    issued = authority.issue("public-short", days=40)
    [own] = read_validities(str(issued.cert), str(issued.key))
    clock[0] = own.ends_s - 2 * DAY_S - 60
    used = public_tls.CertificateReloader((str(issued.cert), str(issued.key)), lambda cert, _: Path(cert).read_text())
    with capture_logs() as logs:
        following = asyncio.create_task(used.follow())
        await until(lambda: bool(logs))
        await asyncio.sleep(0.05)
    following.cancel()
    [line] = logs
    assert (line["log_level"], line["days_left"]) == ("warning", 2)
    assert line["event"].startswith(f"{issued.cert} expires on {own.end}: replace its files before")
