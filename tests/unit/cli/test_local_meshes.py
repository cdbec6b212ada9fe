"""Meshes that run on this machine: `tandem ps`, `tandem stop` and `tandem logs`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tandem_cli.local_meshes import RunningMesh, registered, running_meshes, write_mesh
from tandem_cli.main import main


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that end when they are asked to."""
    waiting = [subprocess.Popen((sys.executable, "-c", "import signal; signal.pause()")) for _ in range(2)]
    yield waiting
    for process in waiting:
        process.kill()
        process.wait()


def register(pid: int, tmp_path: Path, *, model: str = "small", address: str = "127.0.0.1:50051") -> RunningMesh:
    mesh = replace(RunningMesh.of_process(pid, (model,), tmp_path / "logs"), address=address)
    write_mesh(mesh)
    return mesh


def files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "run" / "tandem" / "meshes").iterdir())


def test_a_mesh_is_listed_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with registered(RunningMesh.of_process(os.getpid(), ("small", "large"), tmp_path), pytest.fail) as add_addresses:
        assert main(["ps"]) == 0
        assert f"{os.getpid()} small large starting" in " ".join(capsys.readouterr().out.split())
        add_addresses("127.0.0.1:50051", "http://127.0.0.1:8080")
        assert main(["ps"]) == 0
        assert "127.0.0.1:50051 http://127.0.0.1:8080 " in " ".join(capsys.readouterr().out.split())
    assert files(tmp_path) == []
    assert main(["ps"]) == 0
    assert capsys.readouterr() == ("", "no mesh runs here; start one with: tandem up\n")


def test_meshes_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--json"]) == 0
    assert capsys.readouterr() == ('{"meshes": []}\n', "")
    mesh = register(os.getpid(), tmp_path, model="kl\u00e9in\x85")
    assert main(["ps", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"meshes": [asdict(mesh) | {"models": [*mesh.models]}]}
    assert ("kl\u00e9in\\u0085" in out, err) == (True, "")


def test_only_this_user_can_read_the_files(tmp_path: Path) -> None:
    register(os.getpid(), tmp_path)
    assert (tmp_path / "run" / "tandem" / "meshes").stat().st_mode & 0o77 == 0


def test_stale_files_are_removed(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    ended, reused = (register(process.pid, tmp_path) for process in processes)
    write_mesh(replace(reused, process_start="0"))
    processes[0].kill()
    processes[0].wait()
    files(tmp_path)[0].with_name(f"{os.uname().nodename}-1.json").write_text("{")
    others = ["another-host-1.json", f"{os.uname().nodename}-1-1.json"]
    for name in others:
        files(tmp_path)[0].with_name(name).write_text("{}")
    assert not ended.is_running
    assert running_meshes() == []
    assert sorted(path.name for path in files(tmp_path)) == sorted(others), "of machines with the same home"


@pytest.mark.parametrize("name", ["", "50052", "127.0.0.1:50052", "large"])
def test_the_mesh_that_is_named_is_stopped(
    name: str, tmp_path: Path, processes: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = processes
    if name:
        register(first.pid, tmp_path)
    register(second.pid, tmp_path, model="large", address="127.0.0.1:50052")
    assert main(["stop", *filter(None, [name])]) == 0
    assert second.wait(60) == -signal.SIGTERM
    assert first.poll() is None
    assert capsys.readouterr().err == f"stopping {second.pid} (large)\n"


def test_a_mesh_that_is_suspended_is_stopped(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """As Ctrl-Z suspends it: it would see the signal only once it goes on."""
    register(processes[0].pid, tmp_path)
    processes[0].send_signal(signal.SIGSTOP)
    assert main(["stop", "--timeout", "60"]) == 0
    assert processes[0].wait(60) == -signal.SIGTERM


def test_a_choice_that_is_not_clear_stops_nothing(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop"]) == 2
    assert "no mesh of this user runs on this machine" in capsys.readouterr().err
    for process in processes:
        register(process.pid, tmp_path)
    assert main(["stop"]) == 2
    for command in ("stop", "logs --mesh"):
        status, said = main(command.split()[:1]), capsys.readouterr().err
        assert status == 2
        assert (
            f"several meshes run here; name one by its process id, as in `tandem {command} {processes[0].pid}`" in said
        )
        assert f"{processes[1].pid} (small at 127.0.0.1:50051)" in said
    assert main(["stop", "big"]) == 2
    assert "no mesh is called 'big'" in capsys.readouterr().err
    assert [process.poll() for process in processes] == [None, None]
    assert main(["stop", "--all"]) == 0
    assert [process.wait(60) for process in processes] == [-signal.SIGTERM] * 2


def test_waiting_for_the_end_has_a_limit_if_one_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen((sys.executable, "-c", stubborn), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        register(process.pid, tmp_path)
        assert main(["stop", "--timeout", "0"]) == 1
        assert f"{process.pid} has not ended after 0 s" in capsys.readouterr().err
        process.kill()


def log_line(second: int, event: str) -> str:
    entry = {"event": event, "level": "info", "timestamp": f"2026-01-01T00:00:{second:02}Z"}
    return json.dumps(entry) + "\n"


def test_logs_are_told_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = register(os.getpid(), tmp_path)
    folder = Path(mesh.log_dir)
    folder.mkdir()
    (folder / "router.log").write_text(log_line(1, "listening") + log_line(3, "worker joined") + "half a li")
    (folder / "decode-0.log").write_text(log_line(2, "model loaded") + "a line of a library\n")
    assert main(["logs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "router   00:00:01 info: listening",
        "decode-0 00:00:02 info: model loaded",
        "decode-0 00:00:02 a line of a library",
        "router   00:00:03 info: worker joined",
    ]
    assert main(["logs", "router", "-n", "1"]) == 0
    assert capsys.readouterr().out == "router 00:00:03 info: worker joined\n"
    assert main(["logs", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="2"):
        main(["logs", "-n", "-1"])
    assert "must be >= 0, got -1" in capsys.readouterr().err
    assert main(["logs", "decode0"]) == 2
    assert "has no log of decode0; did you mean decode-0?" in capsys.readouterr().err


def test_logs_are_followed_until_the_mesh_ends(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    process = processes[0]
    mesh = register(process.pid, tmp_path)
    folder = Path(mesh.log_dir)
    folder.mkdir()
    (folder / "router.log").write_text(log_line(1, "listening"))
    arguments = (sys.executable, "-m", "tandem_cli", "logs", "--follow")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "router 00:00:01 info: listening\n"
        with (folder / "router.log").open("a") as log:
            log.write(log_line(2, "stopping"))
        assert following.stdout.readline() == "router 00:00:02 info: stopping\n"
        (folder / "decode-1.log").write_text(log_line(3, "listening"))
        assert following.stdout.readline() == "decode-1 00:00:03 info: listening\n"
        shutil.rmtree(folder)  # as a mesh does that ends without a warning, before its process ends
        process.kill()
        process.wait()
        assert following.wait(60) == 0


@pytest.mark.parametrize("command", [("completion", "bash"), ("--version",)])
def test_a_full_disk_is_a_sentence(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        arguments = [sys.executable, "-m", "tandem_cli", *command]
        ended = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "tandem: No space left on device\n")


def test_a_start_whose_messages_cannot_be_written_goes_on(tmp_path: Path) -> None:
    """Here to its end, which a missing folder is; the first message is that nothing reads the variable."""
    arguments = [sys.executable, "-m", "tandem_cli", "up", str(tmp_path / "missing")]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(arguments, stderr=full, env={**os.environ, "TANDEM_NOTHING_READS_THIS": "1"})
    assert ended.returncode == 2


def test_without_a_temporary_folder_a_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert main(["up", "--port", "0"]) == 1
    assert "in ['/nowhere']: set TMPDIR to a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    arguments = f"{sys.executable} -m tandem_cli --version {closed}"
    ended = subprocess.run(["sh", "-c", arguments], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_an_interval_that_is_no_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workers", "--watch", f"--interval={seconds}"]) == 2
    assert "--interval must be in [0, 86400]" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_wait_that_is_no_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["switch", "decode-0", "prefill", f"--wait={seconds}"]) == 2
    assert "--wait must be in [0, 86400]" in capsys.readouterr().err
