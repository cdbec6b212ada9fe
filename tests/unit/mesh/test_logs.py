"""What a service's log shows, and what not."""

import asyncio
import json
import logging
import socket
import warnings
from typing import Any

import pytest
import structlog

from mesh.logs import LogLimit, escape_controls
from mesh.rpc.credentials import MeshKey
from mesh.settings import load_settings
from mesh.tracing import context_in
from router.settings import RouterSettings
from tests.captured_log import InstallLog, install_log
from tests.defects import Repaired

__all__ = ["install_log"]

KEY = "tandem-" + "Kx_9-" * 8 + "abc"
PASSWORD, PROMPT = "hunter2", "a private prompt"


def fail(headers: dict[str, str], prompt: str) -> None:
    unused = {"prompt": prompt, "db_password": PASSWORD}
    raise LookupError(f"no use for {len(headers)} headers and {len(unused)} more")


@pytest.mark.parametrize("json_lines", [True, False])
def test_tracebacks_show_no_variables(json_lines: bool, install_log: InstallLog, repaired: Repaired) -> None:
    read = install_log(json=json_lines)
    try:
        fail({"authorization": f"Bearer {KEY}"}, PROMPT)
    except LookupError:
        structlog.get_logger().exception("call failed")
        logging.getLogger("some.library").exception("it failed")
    shown = read()
    assert shown.count("LookupError") >= 2
    assert shown.count("test_logs.py") >= 4, "the frames are there"
    for secret in (KEY, PASSWORD, PROMPT):
        assert secret not in shown
    repaired("D7", "tracebacks have frames without variables, as JSON and for people")


def test_credentials_in_messages_are_struck_out(install_log: InstallLog) -> None:
    read = install_log()
    structlog.get_logger().info("refused", error=f"metadata was invalid: [('authorization', 'Bearer {KEY}')]")
    structlog.get_logger().info("refused", error=f"illegal header value b'{KEY}'", id="tandem-kv-0123456789abcdef")
    shown = read()
    assert KEY not in shown
    assert "Bearer ***" in shown
    assert "tandem-kv-0123456789abcdef" in shown


@pytest.mark.parametrize("json_lines", [True, False])
def test_fields_that_say_nothing_are_left_out(json_lines: bool, install_log: InstallLog) -> None:
    read = install_log(json=json_lines)
    structlog.get_logger().info("finished", adapter="", error=None, cached_tokens=0, is_last=False, ids=[])
    (line,) = read().splitlines()
    assert "adapter" not in line
    assert "error" not in line
    assert all(name in line for name in ("cached_tokens", "is_last", "ids"))


def test_lines_of_libraries_are_like_ones_own(install_log: InstallLog) -> None:
    read = install_log()
    logging.getLogger("grpc").warning("bad \x1b[2J %s", "news")
    logging.getLogger("grpc").info("not shown")
    logging.getLogger("grpc").warning("%d", "no number")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("old", stacklevel=1)
    first, broken, warning = read().splitlines()
    assert "\x1b" not in first
    entry = json.loads(first)
    del entry["timestamp"]
    assert entry == {"event": "bad \x1b[2J news", "service": "test", "level": "warning", "logger": "grpc"}
    assert broken == "WARNING grpc: a log record that cannot be formatted"
    assert json.loads(warning)["logger"] == "py.warnings"


def test_headers_of_clients_are_left_out(install_log: InstallLog) -> None:
    read = install_log()
    for tracestate in ("x" * 999, "=", ",".join(f"k{number}=v" for number in range(40))):
        context_in({"traceparent": f"00-{'4b' * 16}-{'00f0' * 4}-01", "tracestate": tracestate})
    assert read() == ""


def test_control_characters_are_written_out(install_log: InstallLog) -> None:
    read = install_log(json=False)
    structlog.get_logger().warning("e\x1b[2Jvent", text="\x9b1m")
    logging.getLogger("lib").error("\x07")
    assert all(char.isprintable() or char == "\n" for char in read())
    assert escape_controls("a\tb\n\x1b[2J\x9b\u202eé") == "a\tb\n\\x1b[2J\\x9b\\u202eé"


def test_one_cause_does_not_fill_the_log(install_log: InstallLog) -> None:
    read = install_log()
    log = structlog.get_logger()
    for number in range(1000):
        log.warning("redis is away", number=number)
        log.info("finished", number=number)
        logging.getLogger("lib").error("number %d", number)
    log.warning("redis is away", worker="other")
    lines = [json.loads(line) for line in read().splitlines()]
    of = [(line["event"].split(" 0")[0], line["level"]) for line in lines]
    assert of.count(("finished", "info")) == 1000, "a line for each request stays"
    assert 5 <= sum(line["level"] == "warning" and "worker" not in line for line in lines) <= 60
    assert 5 <= sum(line["level"] == "error" for line in lines) <= 60
    assert lines[-1]["worker"] == "other"


async def test_a_server_without_descriptors_logs_little(install_log: InstallLog, repaired: Repaired) -> None:
    """asyncio's own complaint, which it makes for each free place of the backlog, again and again."""
    read = install_log()
    loop = asyncio.get_running_loop()
    num_complaints = 26_000
    with socket.socket() as listener:
        for _ in range(num_complaints):
            loop.call_exception_handler(
                {
                    "message": "socket.accept() out of system resource",
                    "exception": OSError(24, "Too many open files"),
                    "socket": listener,
                }
            )
    lines = read().splitlines()
    assert 5 <= len(lines) <= 60
    assert "socket.accept() out of system resource" in lines[0]
    repaired("D6", f"{num_complaints:,} complaints of asyncio about descriptors: {len(lines)} log lines")


def test_settings_do_not_show_secrets(repaired: Repaired, tmp_path: Any) -> None:
    environ = {"TANDEM_MESH_KEY": "a-mesh-key-of-16-chars", "TANDEM_REGISTRY_URL": "redis://u:hunter2@localhost"}
    resolved = load_settings(RouterSettings, ["--model=/m"], prog="router", environ=environ)
    shown = f"{resolved!r} {resolved.values!r} {resolved.describe()} {MeshKey('a-mesh-key-of-16-chars')!r}"
    assert "a-mesh-key" not in shown
    assert "hunter2" not in shown
    assert resolved.values.mesh_key == "a-mesh-key-of-16-chars"
    repaired("D7", "settings show no secret in their repr")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_few_at_once_then_one_a_second() -> None:
    clock = Clock()
    limit = LogLimit(clock)
    assert [limit.admit("a") for _ in range(7)] == [0] * 5 + [None] * 2
    assert limit.admit("b") == 0, "each cause by itself"
    clock.now_s = 1.0
    assert [limit.admit("a") for _ in range(3)] == [2, None, None]
    clock.now_s = 101.0
    assert [limit.admit("a") for _ in range(6)] == [2, 0, 0, 0, 0, None]
    assert limit.num_suppressed == 5


def test_what_was_left_out_is_told_in_the_end() -> None:
    clock = Clock()
    limit = LogLimit(clock, burst=1)
    for cause in ("a", "a", "a", "b"):
        limit.admit(cause)
    assert limit.overdue() == []
    clock.now_s = 5.0
    assert limit.overdue() == [("a", 2)]
    assert limit.overdue() == []
    limit.admit("c")
    limit.admit("c")
    assert limit.all_suppressed() == [("c", 1)]


def test_causes_do_not_grow_without_end() -> None:
    limit = LogLimit(Clock())
    for number in range(5000):
        assert limit.admit(number) == 0
    assert len(limit._buckets) == 1000
