"""`tandem up` as a process of its own, with fake services."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tandem
from mesh.fork_server.client import can_fork
from tests.defects import Repaired
from tests.fakes.redis_server import RedisServer
from tests.waiting import LIMIT_S, until


class Up:
    """A started `tandem up`."""

    def __init__(self, folder: Path, *flags: str, plan: dict[str, str] | None = None) -> None:
        self.folder = folder
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        environ = os.environ | {"FAKE_DIR": str(folder), "FAKE_PLAN": json.dumps(plan or {})}
        default = ("--port=0", "--no-http", f"--model={model}", f"--log-dir={folder / 'logs'}")
        command = (sys.executable, "-m", "tests.fakes.sdk_up", "up", *default, *flags)
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, env=environ, text=True, start_new_session=True
            )

    def wait_ready(self) -> str:
        """The address of the ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.fullmatch(r"ready ((127\.0\.0\.1:\d+,?)+)\n", line)
        assert match, (line, self.stderr())
        return match[1]

    def end(self, number: int | None = None) -> int:
        """Wait for the end, after a signal if one is given; returns the status."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def flags(self, name: str) -> dict[str, str]:
        flags: dict[str, str] = json.loads((self.folder / f"{name}.flags").read_text())
        return flags

    def secrets(self, name: str) -> dict[str, str]:
        """What a child was handed besides its environment."""
        secrets: dict[str, str] = json.loads((self.folder / f"{name}.secrets").read_text())
        return secrets

    def pids(self) -> list[tuple[str, int]]:
        """Names and process ids of all children so far, oldest first."""
        lines = (self.folder / "pids").read_text().split("\n")
        return [(name, int(pid)) for name, _, pid in (line.partition(" ") for line in lines if line)]

    def stopped(self) -> list[str]:
        """Names of the children that stopped in order."""
        return (self.folder / "stopped").read_text().split()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def wait_gone(pids: list[tuple[str, int]]) -> None:
    """Children of a dead parent go to init, which may reap them late: a zombie is gone."""
    for _, pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                process.wait(LIMIT_S)
        except psutil.NoSuchProcess:
            continue


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Up]]:
    ups: list[Up] = []
    yield ups
    for up in ups:
        up.close()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.stop()


def test_it_serves_until_asked_to_stop(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--prefill=1", "--decode=2", "--name=small", "--block-size=8", "--set=decode.max-step-tokens=64")
    started.append(up)
    address = up.wait_ready()
    with tandem.Client(address, timeout=10) as client:
        assert client.generate(prompt="").finish_reason == "eos_token"
    assert sorted(name for name, _ in up.pids()) == ["decode-0", "decode-1", "prefill-0", "router"]
    assert (up.flags("router")["expect-prefill"], up.flags("router")["expect-decode"]) == ("1", "2")
    assert {up.flags(name)["name"] for name, _ in up.pids()} == {"small"}
    assert up.flags("decode-1")["registry-address"] == "127.0.0.1:1"
    assert (up.flags("decode-1")["block-size"], up.flags("decode-1")["max-step-tokens"]) == ("8", "64")
    assert "max-step-tokens" not in up.flags("prefill-0")
    assert up.end(signal.SIGTERM) == 0
    wait_gone(up.pids())
    assert up.stopped()[0] == "router"
    assert len(up.stopped()) == 4
    assert "decode-1" in up.stderr()


def test_a_gateway_starts_beside_the_mesh_and_stops_before_the_workers(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--http-port=0", "--max-body-bytes=1000")
    started.append(up)
    address = up.wait_ready()
    assert up.process.stdout is not None
    assert up.process.stdout.readline() == "chat http://127.0.0.1:2\n"
    assert up.flags("gateway")["router"] == address
    assert up.flags("gateway")["max-body-bytes"] == "1000"
    assert up.end(signal.SIGTERM) == 0
    assert sorted(up.stopped()[:2]) == ["gateway", "router"]


def test_addresses_of_all_interfaces_are_shown_as_this_machine_reaches_them(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--host=0.0.0.0", "--http-host=0.0.0.0", "--http-port=0", "--allow-anonymous")
    started.append(up)
    with tandem.Client(up.wait_ready(), timeout=10) as client:
        assert client.generate(prompt="").finish_reason == "eos_token"
    assert up.process.stdout is not None
    assert up.process.stdout.readline() == "chat http://127.0.0.1:2\n"
    assert "router, gateway: on all interfaces" in up.stderr()
    assert up.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("plan", [{}, {"decode-0": "compiles", "prefill-0": "compiles"}])
def test_only_a_start_that_compiles_says_so_and_once(tmp_path: Path, started: list[Up], plan: dict[str, str]) -> None:
    up = Up(tmp_path, plan=plan)
    started.append(up)
    up.wait_ready()
    assert up.stderr().count("compiles kernels for this CPU") == bool(plan)
    assert up.end(signal.SIGTERM) == 0


def test_a_serving_properties_file_is_enough(tmp_path: Path, started: list[Up]) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("option.max_rolling_batch_size=7\noption.tgi_compat=true\noption.odd=1\noption.block_size=4\n")
    up = Up(tmp_path, f"--serving-properties={file}", "--http-port=0", "--block-size=8")
    started.append(up)
    up.wait_ready()
    assert up.flags("decode-0")["max-rolling-batch-size"] == "7"
    assert up.flags("decode-0")["block-size"] == "8", "own flags win"
    assert up.flags("gateway")["tgi-compat"] == "true"
    assert "option.max_rolling_batch_size=7 (serving.properties)" in up.stderr()
    assert "option.odd (serving.properties) is not known here" in up.stderr()
    assert "max-queued-requests" not in up.flags("router"), "TGI's default stays with option.tgi_compat"
    assert up.end(signal.SIGINT) == 0


def test_lmis_queue_holds_where_nobody_says_otherwise(tmp_path: Path, started: list[Up]) -> None:
    file, config = tmp_path / "serving.properties", tmp_path / "tandem.toml"
    file.write_text("option.max_rolling_batch_size=7\n")
    config.write_text("[router]\nmax_queued_requests = 50\n")
    up = Up(tmp_path, f"--serving-properties={file}", "--http-port=0", f"--config={config}")
    started.append(up)
    up.wait_ready()
    assert up.flags("router")["max-concurrent-requests"] == "1000"
    assert "max-queued-requests" not in up.flags("router"), "the file's own stays"
    assert "job_queue_size=1000 (LMI's default): router.max_concurrent_requests = 1000" in up.stderr()
    assert up.end(signal.SIGINT) == 0


def test_keys_nobody_knows_are_for_the_handler(tmp_path: Path, started: list[Up]) -> None:
    file, handler = tmp_path / "serving.properties", tmp_path / "model.py"
    file.write_text("option.my_key=1\n")
    handler.write_text("def handle(inputs): ...\n")
    up = Up(tmp_path, f"--serving-properties={file}", "--http-port=0", f"--set=gateway.handler={handler}")
    started.append(up)
    up.wait_ready()
    assert "option.my_key (serving.properties) is for the handler" in up.stderr()
    properties = json.loads(up.secrets("gateway")["TANDEM_HANDLER_PROPERTIES"])
    assert properties == {"my_key": "1", "model_id": str(tmp_path / "model")}
    assert up.end(signal.SIGINT) == 0


def test_each_process_gets_its_own_secrets_and_not_in_its_environment(
    tmp_path: Path,
    started: list[Up],
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    repaired: Repaired,
) -> None:
    asyncio.run(redis_server.add_user("u", "hunter2"))
    given = {
        "TANDEM_MESH_KEY": "a-mesh-key-of-the-operator",
        "TANDEM_REGISTRY_URL": redis_server.url.replace("redis://", "redis://u:hunter2@"),
        "TANDEM_HANDLER_PROPERTIES": '{"db_password": "hunter3"}',
        # Of clients: no service needs them.
        **dict.fromkeys(("TANDEM_API_KEY", "TANDEM_OPENAI_API_KEY", "OPENAI_API_KEY", "OPTION_API_KEY"), "hunter4"),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    up = Up(tmp_path, "--http-port=0")
    started.append(up)
    up.wait_ready()
    for name, pid in up.pids():
        environ = "".join(psutil.Process(pid).environ().values())
        assert not re.search("a-mesh-key|hunter", environ), name
    names = {name: set(up.secrets(name)) for name, _ in up.pids()}
    member = {"TANDEM_MESH_KEY", "TANDEM_REGISTRY_URL"}
    assert names.pop("gateway") == {"TANDEM_HANDLER_PROPERTIES"}
    assert names.pop("router") == member | {"TANDEM_TRIAL_KEY_SHA256"}
    assert list(names.values()) == [member, member]
    assert up.secrets("router")["TANDEM_MESH_KEY"] == given["TANDEM_MESH_KEY"]
    assert up.end(signal.SIGINT) == 0
    repaired(
        "D17", "`tandem up`: no mesh key for the gateway, no handler properties for the mesh, none in environments"
    )


def test_ctrl_c_reaches_the_whole_group_and_children_stop_in_order(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path)
    started.append(up)
    up.wait_ready()
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.end() == 0
    wait_gone(up.pids())
    assert up.stopped()[0] == "router"


def test_children_go_when_the_supervisor_is_killed(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path)
    started.append(up)
    up.wait_ready()
    up.end(signal.SIGKILL)
    wait_gone(up.pids())
    assert len(up.stopped()) == 3


def fork_servers(up: Up) -> list[psutil.Process]:
    children = psutil.Process(up.process.pid).children()
    return [child for child in children if "mesh.fork_server" in child.cmdline()]


@pytest.mark.skipif(not can_fork(), reason="services are forked on Linux only")
def test_a_mesh_outlives_its_fork_server(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path)
    started.append(up)
    up.wait_ready()
    (fork_server,) = fork_servers(up)
    fork_server.kill()
    (victim,) = [pid for name, pid in up.pids() if name == "decode-0"]
    os.kill(victim, signal.SIGKILL)
    wait_for_text(up, "decode-0: ready again")
    assert up.stderr().count("the fork server has ended") == 1
    assert up.end(signal.SIGINT) == 0
    assert sorted(up.stopped()) == ["decode-0", "prefill-0", "router"]


@pytest.mark.skipif(not can_fork(), reason="services are forked on Linux only")
def test_a_fork_server_goes_with_the_mesh(tmp_path: Path, started: list[Up]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        up = Up(tmp_path)
        started.append(up)
        up.wait_ready()
        (fork_server,) = fork_servers(up)
        up.end(number)
        wait_gone([("fork server", fork_server.pid)])
    assert "fork server" not in up.stderr()


@pytest.mark.skipif(not can_fork(), reason="services are forked on Linux only")
async def test_ctrl_c_does_not_wait_for_imports(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path)
    started.append(up)
    await until(lambda: fork_servers(up))
    (fork_server,) = fork_servers(up)
    assert up.end(signal.SIGINT) in (0, 130)
    wait_gone([("fork server", fork_server.pid), *(up.pids() if (tmp_path / "pids").exists() else ())])
    assert "fork server" not in up.stderr()


def test_services_can_be_executed_instead_of_forked(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--no-fork")
    started.append(up)
    up.wait_ready()
    assert fork_servers(up) == []
    assert up.end(signal.SIGINT) == 0


def test_a_second_signal_kills(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"decode-0": "stubborn"})
    started.append(up)
    up.wait_ready()
    up.process.send_signal(signal.SIGINT)
    wait_for_text(up, "stopping")
    assert up.end(signal.SIGINT) == 0
    wait_gone(up.pids())


def test_colocated_has_no_prefill_workers(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--colocated")
    started.append(up)
    up.wait_ready()
    assert up.flags("router")["expect-prefill"] == "0"
    assert up.flags("decode-0")["cpu-list"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert up.end(signal.SIGINT) == 0
    assert sorted(up.stopped()) == ["decode-0", "router"]


def test_much_output_blocks_nobody_and_warnings_are_shown(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"decode-0": "talkative"})
    started.append(up)
    up.wait_ready()
    assert up.end(signal.SIGINT) == 0
    assert "decode-0: warning: low memory free_mb=7" in up.stderr()
    assert (tmp_path / "logs" / "decode-0.log").stat().st_size > 1_000_000


def test_a_service_that_dies_at_the_start(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"decode-0": "crash"})
    started.append(up)
    assert up.end() == 1
    assert "decode-0 exited with status 1 while starting" in up.stderr()
    assert "OSError: disk on fire" in up.stderr()
    wait_gone(up.pids())


def test_services_that_are_killed_at_the_start_are_started_again(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"router": "killed once", "decode-0": "killed once"})
    started.append(up)
    up.wait_ready()
    assert sorted(name for name, _ in up.pids()) == ["decode-0", "decode-0", "prefill-0", "router", "router"]
    for name in ("router", "decode-0"):
        assert f"{name}: was killed by SIGKILL while starting; restarting it in 0.5 s" in up.stderr()
    assert up.end(signal.SIGINT) == 0
    wait_gone(up.pids())


def test_a_service_that_is_killed_at_each_start(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"decode-0": "killed"})
    started.append(up)
    assert up.end() == 1
    assert [name for name, _ in up.pids()].count("decode-0") == 3
    assert (
        up.stderr()
        .splitlines()[-1]
        .startswith(
            "tandem: decode-0 was killed by SIGKILL while starting; the system does that when memory runs out; "
        )
    )
    wait_gone(up.pids())


def test_a_service_that_is_configured_wrongly(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"decode-0": "misconfigured"})
    started.append(up)
    assert up.end() == 2
    assert up.stderr().splitlines()[-1] == "tandem: decode_worker: dtype must be float32"
    wait_gone(up.pids())


def test_a_service_that_never_gets_ready(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--model-loading-timeout=8", plan={"prefill-0": "never ready"})
    started.append(up)
    assert up.end() == 1
    assert "not ready after 8 s: prefill-0" in up.stderr()
    wait_gone(up.pids())


def test_a_worker_that_dies_is_started_again(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path)
    started.append(up)
    up.wait_ready()
    (victim,) = [pid for name, pid in up.pids() if name == "decode-0"]
    os.kill(victim, signal.SIGKILL)
    wait_for_text(up, "decode-0: ready again")
    assert "decode-0: was killed by SIGKILL; restarting it in 0.5 s" in up.stderr()
    assert up.end(signal.SIGINT) == 0
    assert sorted(up.stopped()) == ["decode-0", "prefill-0", "router"]


def test_a_router_that_dies_is_started_again_where_it_was(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--http-port=0")
    started.append(up)
    address = up.wait_ready()
    before = up.flags("router")
    with tandem.Client(address, timeout=60) as client:
        assert client.generate(prompt="").finish_reason == "eos_token"
        for name in ("router", "gateway"):
            (victim,) = [pid for service, pid in up.pids() if service == name]
            os.kill(victim, signal.SIGKILL)
            wait_for_text(up, f"{name}: ready again")
        assert up.flags("router") == before | {"port": address.rpartition(":")[2], "registry-port": "1"}
        assert up.flags("gateway")["port"] == "2", "the address that was announced"
        client.wait_ready(60)
        assert client.generate(prompt="").finish_reason == "eos_token"
    assert [name for name, _ in up.pids()].count("decode-0") == 1, "the workers lived on"
    assert up.end(signal.SIGINT) == 0


def test_a_router_that_cannot_start_again_ends_nothing(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"router": "broken at times"})
    started.append(up)
    address = up.wait_ready()
    (tmp_path / "broken").touch()
    (victim,) = [pid for name, pid in up.pids() if name == "router"]
    os.kill(victim, signal.SIGKILL)
    wait_for_text(up, "router: exited with status 1; restarting it in 1 s")
    (tmp_path / "broken").unlink()
    wait_for_text(up, "router: ready again")
    with tandem.Client(address, timeout=60) as client:
        assert client.generate(prompt="").finish_reason == "eos_token"
    assert up.end(signal.SIGINT) == 0


def test_the_reason_is_shown_why_a_worker_cannot_start_again(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, plan={"decode-0": "misconfigured later"})
    started.append(up)
    up.wait_ready()
    (victim,) = [pid for name, pid in up.pids() if name == "decode-0"]
    os.kill(victim, signal.SIGKILL)
    wait_for_text(up, "decode-0: exited with status 2 (decode_worker: dtype must be float32); restarting it in 1 s")
    wait_for_text(up, "decode-0: ready again")
    assert up.end(signal.SIGINT) == 0


def test_several_routers_share_redis(tmp_path: Path, started: list[Up], redis_server: RedisServer) -> None:
    up = Up(tmp_path, "--routers=2", f"--registry-url={redis_server.url}", "--http-port=0", "--metrics-port=9464")
    started.append(up)
    addresses = up.wait_ready()
    assert len(set(addresses.split(","))) == 2
    assert up.flags("gateway")["router"] == addresses
    routers = ["router-9464", "router-9465"]
    assert up.flags("prefill-0")["metrics-port"] == "9466"
    assert sorted(name for name, _ in up.pids()) == ["decode-0", "gateway", "prefill-0", *routers]
    with tandem.Client(addresses, timeout=60) as client:
        (victim,) = [pid for name, pid in up.pids() if name == routers[0]]
        os.kill(victim, signal.SIGKILL)
        assert client.generate(prompt="").finish_reason == "eos_token"
        wait_for_text(up, "router-0: ready again")
    assert up.flags(routers[0])["port"] == addresses.split(",")[0].rpartition(":")[2]
    assert up.end(signal.SIGINT) == 0


def test_without_restarts_the_last_routers_end_is_the_end(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--no-restart", plan={"router": "dies later"})
    started.append(up)
    os.mkfifo(tmp_path / "die")
    up.wait_ready()
    (tmp_path / "die").write_bytes(b"now")
    assert up.end() == 1
    assert "the router exited with status 3" in up.stderr()
    wait_gone(up.pids())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model=m=/nowhere", "--model=n=/nowhere"], "there is no model folder /nowhere"),
        (["--model=/nowhere", "--model=n=/nowhere"], "several models need names"),
        (["--decode=0"], "decode must be >= 1"),
        (["--routers=2"], "--routers 2 needs --registry-url redis://HOST:PORT/0"),
        (["--registry-url=redis://127.0.0.1:9/0"], "the Redis of registry_url does not answer"),
        (["--registry-url=http://x"], "registry_url cannot be used"),
        (["--registry-url=redis://:secret@127.0.0.1:9/0"], "--registry-url contains a password"),
        (["--dtype=int3"], "dtype must be one of"),
        (["--bogus"], "tandem up: there is no option --bogus"),
        (["--set=router"], "ROLE.KEY=VALUE"),
        (["--set=router.dtype=float32"], "no setting dtype"),
    ],
)
def test_wrong_configurations_are_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tandem_cli.main import main

    (tmp_path / "config.json").write_text("{}")
    status: object
    try:
        own_model = [] if flags[0].startswith("--model") else [f"--model={tmp_path}"]
        status = main(["up", "--port=0", "--http-port=0", *own_model, *flags])  # the default ones may be taken
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_tgis_api_key_is_not_taken_for_protection(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem_cli.main import main

    monkeypatch.setenv("API_KEY", "tgi-secret")
    (tmp_path / "config.json").write_text("{}")
    assert main(["up", f"--model={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "set --api-keys-file" in said
    assert "tgi-secret" not in said


def test_tgis_api_key_beside_a_choice_of_ones_own(
    tmp_path: Path, started: list[Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "tgi-secret")
    up = Up(tmp_path, "--allow-anonymous")
    started.append(up)
    up.wait_ready()
    assert "API_KEY=*** (API_KEY) has no effect" in up.stderr()
    assert up.end(signal.SIGINT) == 0


def test_a_port_in_use_is_said_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tandem_cli.main import main

    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["up", f"--model={tmp_path}", f"--port={port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}, address already in use" in capsys.readouterr().err


def wait_for_text(up: Up, text: str) -> None:
    """Wait until `up` has said `text` on stderr."""
    with subprocess.Popen(
        ("tail", "-n", "+1", "-f", str(up.folder / "stderr")), stdout=subprocess.PIPE, text=True
    ) as tail:
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                if text in line:
                    break
        finally:
            tail.kill()  # the end of the block waits for it
