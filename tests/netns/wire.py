"""A cable between two machines as a program: it carries IP packets late, loses some, or carries none.

    python wire.py NAME PID OTHER_NAME OTHER_PID

makes the network device NAME on the machine (the network namespace) of process PID, the other one likewise, and passes
packets between them in order. Lines on standard input change it while it is in use; it ends with its standard input:

    delay 0.02      seconds that each packet takes
    loss 0.01       share of the packets that are lost, each by a draw of its own
    cut             carries nothing, and tells nobody: as a switch that died, not as a plug that was pulled
    mend

Kernels have netem for this, but not all of them; TUN devices are in each.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_BYTES = 1 << 16
_PACKETS_AT_ONCE = 64
_QUEUE_PACKETS = "10000"


class Wire:
    """Both directions of the cable. `ends` are the devices' file descriptors, which do not block."""

    def __init__(self, ends: tuple[int, int], draw: random.Random) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._draw = draw
        self._on_way: deque[tuple[float, int, bytes]] = deque()  # due time, device, packet
        self.delay_s = 0.0
        self.loss = 0.0
        self.is_cut = False

    def run(self, commands: int) -> None:
        """Carry packets until `commands`, a file descriptor of lines, ends."""
        while True:
            wait_s = max(0.0, self._on_way[0][0] - time.monotonic()) if self._on_way else None
            readable, _, _ = select.select([commands, *self._other], [], [], wait_s)
            if commands in readable and not self._command(commands):
                return
            for end in self._other:
                if end in readable:
                    self._take(end)
            self._deliver()

    def _command(self, commands: int) -> bool:
        """Obey what has been written. False if there is nothing more to come."""
        lines = os.read(commands, 4096).decode().splitlines()
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "delay":
                self.delay_s = float(value)
            elif name == "loss":
                self.loss = float(value)
            elif name in ("cut", "mend"):
                self.is_cut = name == "cut"
            else:
                raise ValueError(f"unknown command {line!r}")
        return bool(lines)

    def _take(self, end: int) -> None:
        due_s = time.monotonic() + self.delay_s
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(end, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if not self.is_cut and self._draw.random() >= self.loss:
                self._on_way.append((due_s, self._other[end], packet))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._on_way and self._on_way[0][0] <= now_s:
            _, end, packet = self._on_way.popleft()
            try:
                os.write(end, packet)
            except OSError:  # the device is down, or its queue is full: lost, as on a real cable
                continue


def make_device(name: str, pid: str) -> int:
    """Make a TUN device on the machine of a process; returns its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "txqueuelen", _QUEUE_PACKETS], check=True)
    subprocess.run(["ip", "link", "set", name, "netns", pid], check=True)
    return device


def main(argv: Sequence[str]) -> None:
    name, pid, other_name, other_pid = argv
    wire = Wire((make_device(name, pid), make_device(other_name, other_pid)), random.Random(0))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wire.run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
