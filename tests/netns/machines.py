"""Machines of one's own on one machine: namespaces, and cables between them whose faults are real.

    with machines("router", "prefill", "decode") as lan:            # a cable between each two
        lan.cable("prefill", "decode").limit_rate(1)
    with machines("router", "prefill", "decode", wired=True) as lan:  # cables that delay, lose and cut
        lan.wire("router", "decode").tell("cut")

The first machine shares the network of this process, so that a test is a client on it. Each machine has /dev/shm,
/etc/hosts and a host name of its own; files are shared. Needs the privileges that `make netns` gives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount", "hostname")
_SETUP = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
echo ready
exec cat
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Namespaces, held by a process that ends with this one. `number` is the last part of its addresses."""

    name: str
    number: int
    holder: "subprocess.Popen[bytes]"

    @property
    def ipv4(self) -> str:
        return f"10.99.0.{self.number}"

    @property
    def ipv6(self) -> str:
        return f"fd99::{self.number}"

    @property
    def host(self) -> str:
        """Its name in /etc/hosts of all machines."""
        return f"{self.name}.mesh"

    @property
    def prefix(self) -> list[str]:
        """A command that runs another on this machine."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--uts"]

    def run(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True)

    def processes(self) -> list[psutil.Process]:
        """Processes on this machine, without the holder."""
        own = _namespace(self.holder.pid)
        return [each for each in psutil.process_iter() if each.pid != self.holder.pid and _namespace(each.pid) == own]


def _namespace(pid: int) -> int:
    """The mount namespace of a process: each machine has one."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError:  # it has ended, or is another user's
        return 0


@dataclass(frozen=True, slots=True)
class Cable:
    """Two virtual Ethernet devices. Its conditions hold for both directions."""

    ends: tuple[tuple[Machine, str], tuple[Machine, str]]

    def lay(self) -> None:
        (one, name), (other, other_name) = self.ends
        pair = ("type", "veth", "peer", "name", other_name, "netns", str(other.holder.pid))
        subprocess.run(["ip", "link", "add", "name", name, "netns", str(one.holder.pid), *pair], check=True)

    def remove(self) -> None:
        """Remove the devices now. A namespace that ends does so only after a while, and the next cable has the same
        names."""
        (one, name), _ = self.ends
        subprocess.run([*one.prefix, "ip", "link", "delete", name], check=True)

    def limit_rate(self, gbit: int) -> None:
        """Limit the rate. The burst is what the cable carries in 4 ms, the tick of the slowest kernels."""
        bucket = ("root", "tbf", "rate", f"{gbit}gbit", "burst", f"{500 * gbit}kb", "latency", "50ms")
        for machine, device in self.ends:
            machine.run("tc", "qdisc", "replace", "dev", device, *bucket)

    def limit_packets(self, num_bytes: int) -> None:
        """Set the MTU."""
        for machine, device in self.ends:
            machine.run("ip", "link", "set", device, "mtu", str(num_bytes))

    def mend(self) -> None:
        """Undo all limits."""
        for machine, device in self.ends:
            command = [*machine.prefix, "tc", "qdisc", "del", "dev", device, "root"]
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)  # it may have none
        self.limit_packets(1500)


@dataclass(frozen=True, slots=True)
class Wire:
    """A cable that is a program (wire.py)."""

    process: "subprocess.Popen[bytes]"

    def tell(self, *commands: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{command}\n" for command in commands).encode())
        self.process.stdin.flush()

    def mend(self) -> None:
        self.tell("mend", "delay 0", "loss 0")


@dataclass(frozen=True, slots=True)
class Lan:
    """Machines by name, and the cables between each two."""

    machines: Mapping[str, Machine]
    cables: Mapping[frozenset[str], Cable]
    wires: Mapping[frozenset[str], Wire]

    def cable(self, one: str, other: str) -> Cable:
        return self.cables[frozenset((one, other))]

    def wire(self, one: str, other: str) -> Wire:
        return self.wires[frozenset((one, other))]

    def mend(self) -> None:
        """Let all cables be good."""
        for cable in (*self.cables.values(), *self.wires.values()):
            cable.mend()


@contextmanager
def machines(*names: str, wired: bool = False) -> Iterator[Lan]:
    """Start machines and lay cables; with `wired`, cables that are programs. Skips the test where that cannot be."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs the programs {', '.join(missing)}")
    with ExitStack() as stack, tempfile.NamedTemporaryFile("w", suffix="-hosts") as hosts:
        hosts.write("127.0.0.1 localhost\n::1 localhost\n")
        hosts.writelines(f"10.99.0.{number} {name}.mesh\n" for number, name in enumerate(names, 1))
        hosts.flush()
        started = [stack.enter_context(_machine(name, n, Path(hosts.name))) for n, name in enumerate(names, 1)]
        lan = Lan({machine.name: machine for machine in started}, {}, {})
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for one, other in combinations(started, 2):
            cable = Cable(((one, f"{one.name}-{other.name}"), (other, f"{other.name}-{one.name}")))
            if wired:
                wires = dict(lan.wires) | {frozenset((one.name, other.name)): stack.enter_context(_wire(cable))}
                lan = Lan(lan.machines, {}, wires)
            else:
                cable.lay()
                stack.callback(cable.remove)
                lan = Lan(lan.machines, dict(lan.cables) | {frozenset((one.name, other.name)): cable}, {})
            _address(cable)
        yield lan


@contextmanager
def _machine(name: str, number: int, hosts: Path) -> Iterator[Machine]:
    own_net = ["--net"] if number > 1 else []
    command = ["unshare", "--mount", "--uts", *own_net, "sh", "-c", _SETUP, "machine", str(hosts), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"ready\n", f"machine {name} did not start"
            yield Machine(name, number, holder)
        finally:
            holder.kill()


@contextmanager
def _wire(cable: Cable) -> Iterator[Wire]:
    ends = [text for machine, device in cable.ends for text in (device, str(machine.holder.pid))]
    command = [sys.executable, str(Path(__file__).with_name("wire.py")), *ends]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n", "a wire did not start"
            yield Wire(process)
        finally:
            process.kill()


def _address(cable: Cable) -> None:
    """Give both ends the addresses of their machines, and a way to the other's. No machine passes packets on."""
    (one, name), (other, other_name) = cable.ends
    for machine, device, peer in ((one, name, other), (other, other_name, one)):
        machine.run("ip", "link", "set", device, "up")
        machine.run("ip", "addr", "add", machine.ipv4, "peer", f"{peer.ipv4}/32", "dev", device)
        machine.run("ip", "-6", "addr", "add", machine.ipv6, "peer", f"{peer.ipv6}/128", "dev", device, "nodad")
