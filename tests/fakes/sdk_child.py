"""A service for the supervisor's tests: `python -m tests.fakes.sdk_child ROLE --flags`.

It does what services promise around their work and nothing else. FAKE_DIR is where it leaves its process id, its flags
and its place in the order of stopping; FAKE_PLAN says, by service name, how it should misbehave.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from mesh.process import ProcessSettings, take_secrets, tell_parent, until_stopped

FOLLOWING = ProcessSettings(follow_stdin=True)


def count_starts(name: str) -> int:
    """How often the service was started, this time included."""
    return [line.split()[0] for line in (Path(os.environ["FAKE_DIR"]) / "pids").read_text().splitlines()].count(name)


def misbehave(name: str, plan: str) -> None:
    """Act out the plan's fault before the process listens."""
    is_broken = plan == "broken at times" and (Path(os.environ["FAKE_DIR"]) / "broken").exists()
    if plan == "crash" or is_broken:
        sys.stderr.write('{"event": "loading weights", "level": "info"}\nTraceback ...\nOSError: disk on fire\n')
        sys.exit(1)
    if plan == "killed" or (plan == "killed once" and count_starts(name) == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if plan == "misconfigured" or (plan == "misconfigured later" and count_starts(name) == 2):
        sys.stderr.write("decode_worker: dtype must be float32\n")
        sys.exit(2)
    if plan == "talkative":
        sys.stderr.write(("x" * 200 + "\n") * 5_000)
        sys.stdout.write("not an announcement\n" * 5_000)
        sys.stderr.write('{"event": "low memory", "level": "warning", "free_mb": 7}\n')
        sys.stderr.flush()


async def router(flags: dict[str, str], plan: str) -> None:
    from tests.fakes.sdk_router import running_router

    async with running_router(port=int(flags["port"])) as running:
        registry_port = flags["registry-port"] if int(flags["registry-port"]) else "1"
        address = running.address.replace("127.0.0.1", flags.get("host", "127.0.0.1"))
        tell_parent("listening", address=address, registry_address=f"127.0.0.1:{registry_port}")
        tell_parent("ready")
        if plan == "dies later":
            await until_file("die")
            os._exit(3)
        await until_stopped(FOLLOWING)


async def worker(flags: dict[str, str], plan: str) -> None:
    tell_parent("loading", fraction=0.5)
    if plan == "compiles":
        tell_parent("compiling")
    tell_parent("listening", address=f"{flags.get('host', '127.0.0.1')}:2")
    if plan == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if plan != "never ready":
        tell_parent("ready")
    if plan == "stubborn":
        await asyncio.Event().wait()
    await until_stopped(FOLLOWING)


async def until_file(name: str) -> None:
    """Return when the test makes a file of this name in FAKE_DIR. A pipe, so that nobody polls."""
    path = Path(os.environ["FAKE_DIR"]) / name
    await asyncio.to_thread(path.read_bytes)


def main() -> None:
    role, *rest = sys.argv[1:]
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in rest)
    name = flags.get("worker-id", role)
    secrets = take_secrets(os.environ)
    if role == "router" and "metrics-port" in flags and secrets.get("TANDEM_REGISTRY_URL"):
        name = f"router-{flags['metrics-port']}"
    folder = Path(os.environ["FAKE_DIR"])
    (folder / f"{name}.flags").write_text(json.dumps(flags))
    with (folder / "pids").open("a") as pids:
        pids.write(f"{name} {os.getpid()}\n")
    (folder / f"{name}.secrets").write_text(json.dumps(secrets))
    plan = json.loads(os.environ.get("FAKE_PLAN", "{}")).get(name, "")
    misbehave(name, plan)
    asyncio.run((router if role == "router" else worker)(flags, plan))
    with (folder / "stopped").open("a") as stopped:
        stopped.write(f"{name}\n")


if __name__ == "__main__":
    main()
