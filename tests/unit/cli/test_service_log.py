"""The log of a service while its disk is full, and in folders of others; its lines as the terminal shows them."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem_cli.local_mesh.service_log import LogEntry, LogFile, make_log_folder, read_log_line
from tests.defects import Repaired


@contextmanager
def no_space_beyond(num_bytes: int) -> Iterator[None]:
    """No file of this process may be longer: writing fails as on a full disk, where it is about to be."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_lines_are_dropped_until_there_is_space(tmp_path: Path, repaired: Repaired) -> None:
    said: list[str] = []
    log = LogFile(tmp_path / "a.log", said.append)
    log.write(b"first\n")
    with no_space_beyond(10):
        for number in range(100):
            log.write(b"line %d\n" % number)
    assert log.num_dropped == 100
    assert len(said) == 1
    assert "lines are dropped until this works again" in said[0]
    log.write(b"again\n")
    log.write(b"on\n")
    log.close()
    first, torn, gap, again, on = (tmp_path / "a.log").read_bytes().splitlines()
    assert (first, torn, again, on) == (b"first", b"line", b"again", b"on")
    assert json.loads(gap) == {"event": "log lines dropped", "level": "warning", "num_lines": 100}
    assert said[1:] == [f"{tmp_path / 'a.log'} is written again; 100 lines are missing"]
    repaired("D1", "a log file without space: 100 lines dropped, said once, the next line tells of them")


def test_space_that_comes_and_goes_is_not_said_again_and_again(tmp_path: Path) -> None:
    said: list[str] = []
    now_s = [0.0]
    log = LogFile(tmp_path / "a.log", said.append, lambda: now_s[0])
    for _ in range(10):
        with no_space_beyond(0):
            log.write(b"line\n")
        log.write(b"line\n")
    assert len(said) == 2
    now_s[0] = 61.0
    with no_space_beyond(0):
        log.write(b"line\n")
    assert len(said) == 3
    log.close()


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.log"
    path.mkdir(parents=True)
    said: list[str] = []
    log = LogFile(path, said.append)
    log.write(b"line\n")
    path.rmdir()
    path.parent.rmdir()
    log.write(b"on\n")
    log.close()
    assert [log.num_dropped, len(said)] == [1, 2]
    assert path.read_bytes().endswith(b"\non\n")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_others_put_there_is_not_written_to(kind: str, tmp_path: Path, repaired: Repaired) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a.log"
    victim.write_bytes(b"mine")
    if kind == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    said: list[str] = []
    log = LogFile(path, said.append)
    log.write(b"line\n")
    assert victim.read_bytes() == b"mine"
    assert log.num_dropped == 1
    assert "cannot write" in said[0]
    repaired("S5", f"a log file that is a {kind}: not written to, and said")


def test_a_folder_of_ones_own(tmp_path: Path, repaired: Repaired) -> None:
    make_log_folder(tmp_path / "a" / "logs")
    assert (tmp_path / "a" / "logs").stat().st_mode & 0o777 == 0o700
    make_log_folder(tmp_path / "a" / "logs")
    (tmp_path / "own").symlink_to(tmp_path / "a" / "logs")
    make_log_folder(tmp_path / "own")
    if os.geteuid() == 0:
        (tmp_path / "foreign").symlink_to(tmp_path / "a" / "logs")
        os.lchown(tmp_path / "foreign", 65534, 65534)
        with pytest.raises(PermissionError, match="symbolic link of another user"):
            make_log_folder(tmp_path / "foreign")
    repaired("S5", "a log folder that is made has mode 0700")


def test_log_lines_are_shortened() -> None:
    line = b'{"event": "worker left", "level": "warning", "timestamp": "t", "service": "r", "worker": "d-0"}\n'
    assert read_log_line(line) == LogEntry("warning: worker left worker=d-0", True, "t")
    assert read_log_line(b'{"event": "settings", "level": "info"}') == LogEntry("info: settings", False)


def test_an_exception_is_named() -> None:
    line = b'{"event": "call failed", "level": "error", "exception": [{"exc_type": "KeyError", "exc_value": "7"}]}'
    assert read_log_line(line) == LogEntry("error: call failed (KeyError: 7)", True)


def test_a_stack_is_left_to_the_file() -> None:
    line = b'{"event": "engine stalled", "level": "error", "for_s": 12.3, "stack": "  File a\\n    b()"}'
    assert read_log_line(line) == LogEntry("error: engine stalled for_s=12.3 (the log file has the stack)", True)


def test_other_peoples_lines_stay_as_they_are() -> None:
    plain = b"2026-11-29T13:34:17.098360Z [warning  ] worker left                    worker=d-0\n"
    assert read_log_line(plain) == LogEntry("warning: worker left worker=d-0", True, "2026-11-29T13:34:17.098360Z")
    assert not read_log_line(plain.replace(b"warning  ", b"info     ")).is_warning
    assert read_log_line(b"WARNING grpc something\n") == LogEntry("WARNING grpc something", True)
    assert read_log_line(b"I0000 noise\n") == LogEntry("I0000 noise", False)
    assert read_log_line(b"[1, 2]") == LogEntry("[1, 2]", False)
    assert not read_log_line(b"\xff\n").is_warning
