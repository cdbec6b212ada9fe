"""Libraries that read the memory of another process, over RDMA where there is any and else over TCP: NIXL, Mooncake.

Each listens at a port of its own on all interfaces, and asks for no credential.
"""

import importlib
import logging
import os
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh.domain.errors import TransferFailed

_POLL_S = 50e-6
_INFINIBAND = Path("/sys/class/infiniband")
_ADDRESS = struct.Struct("<Q")


class Remote(Protocol):
    """The memory of another process."""

    def read(self, target: int, offset: int, num_bytes: int, timeout_s: float) -> None:
        """Copy from `offset` of that memory to the address `target`, which is registered. On any thread; several at a
        time. Raises TransferFailed."""
        ...

    def close(self) -> None:
        """Forget it. No read is running."""
        ...


class ReadEngine(Protocol):
    """One library's engine in this process. Methods may take long, and run on any thread. They raise TransferFailed."""

    def register(self, address: int, num_bytes: int) -> None:
        """Let the engine read and write this memory, which stays where it is."""
        ...

    def unregister(self, address: int, num_bytes: int) -> None: ...

    def rendezvous(self, address: int) -> Mapping[str, bytes]:
        """Return what other processes need to read the registered memory at `address`."""
        ...

    def reach(self, rendezvous: Mapping[str, bytes]) -> Remote:
        """Return the memory of another process, by what its `rendezvous` has returned. Reads nothing yet."""
        ...


class NixlEngine(ReadEngine):
    """An agent of NVIDIA's NIXL with UCX, which chooses ways and interfaces (UCX_TLS, UCX_NET_DEVICES)."""

    def __init__(self, host: str) -> None:
        if not _INFINIBAND.exists():  # nixl 1.5.1 loads UCX's part for it anyway, whose end crashes the process's
            os.environ.setdefault("UCX_MODULES", "^ib")
        api = importlib.import_module("nixl._api")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
        self._agent = api.nixl_agent(f"tandem-{secrets.token_hex(8)}", config)
        self._registered: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._num_reached: Counter[str] = Counter()  # by the name of the agent: it is removed with the last

    def register(self, address: int, num_bytes: int) -> None:
        self._registered[address] = self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")

    def unregister(self, address: int, num_bytes: int) -> None:
        self._agent.deregister_memory(self._registered[address])
        del self._registered[address]

    def rendezvous(self, address: int) -> Mapping[str, bytes]:
        return {"agent": self._agent.get_agent_metadata(), "address": _ADDRESS.pack(address)}

    def reach(self, rendezvous: Mapping[str, bytes]) -> Remote:
        (address,) = _ADDRESS.unpack(rendezvous["address"])
        with self._lock:
            found = self._agent.add_remote_agent(rendezvous["agent"])
            name = found.decode() if isinstance(found, bytes) else found
            self._num_reached[name] += 1
        return _NixlRemote(self._agent, name, address, self._leave)

    def _leave(self, name: str) -> None:
        with self._lock:
            self._num_reached[name] -= 1
            if not self._num_reached[name]:
                del self._num_reached[name]
                self._agent.remove_remote_agent(name)


class _NixlRemote(Remote):
    def __init__(self, agent: Any, name: str, address: int, leave: Callable[[str], None]) -> None:
        self._agent = agent
        self._name = name
        self._address = address
        self._leave = leave

    def read(self, target: int, offset: int, num_bytes: int, timeout_s: float) -> None:
        agent, until = self._agent, time.monotonic() + timeout_s
        here = agent.get_xfer_descs([(target, num_bytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(self._address + offset, num_bytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._name)
        try:
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state == "PROC":
            raise TransferFailed(f"nixl: a read of {num_bytes} bytes has not ended in {timeout_s:g} s")
        if state != "DONE":
            raise TransferFailed(f"nixl: a read of {num_bytes} bytes failed ({state})")

    def close(self) -> None:
        self._leave(self._name)


class MooncakeEngine(ReadEngine):
    """An engine of Mooncake over TCP, whose peers find each other by address and port."""

    def __init__(self, host: str) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._host = f"[{host}]" if ":" in host else host
        _require(self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""), "does not start")

    def register(self, address: int, num_bytes: int) -> None:
        _require(self._engine.register_memory(address, num_bytes), "cannot register memory")

    def unregister(self, address: int, num_bytes: int) -> None:
        _require(self._engine.unregister_memory(address), "cannot unregister memory")

    def rendezvous(self, address: int) -> Mapping[str, bytes]:
        segment = f"{self._host}:{self._engine.get_rpc_port()}"
        return {"segment": segment.encode(), "address": _ADDRESS.pack(address)}

    def reach(self, rendezvous: Mapping[str, bytes]) -> Remote:
        return _MooncakeRemote(self._engine, rendezvous["segment"].decode(), _ADDRESS.unpack(rendezvous["address"])[0])


class _MooncakeRemote(Remote):
    """Reads end by Mooncake's own limit (MC_TRANSFER_TIMEOUT)."""

    def __init__(self, engine: Any, segment: str, address: int) -> None:
        self._engine = engine
        self._segment = segment
        self._address = address

    def read(self, target: int, offset: int, num_bytes: int, timeout_s: float) -> None:
        status = self._engine.transfer_sync_read(self._segment, target, self._address + offset, num_bytes)
        _require(status, f"a read of {num_bytes} bytes from {self._segment} failed")

    def close(self) -> None:
        return


def _require(status: int, failure: str) -> None:
    if status != 0:
        raise TransferFailed(f"mooncake: {failure} (status {status})")


@dataclass(frozen=True, slots=True)
class ReadLibrary:
    """A library by the transport's name. `module` is imported to see whether it is there and loads; `open(host)`
    starts an engine at an address of this machine."""

    name: str
    module: str
    open: Callable[[str], ReadEngine]

    def why_not(self) -> str | None:
        """Return why it cannot be used in this process, None if it can. Takes a second."""
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            return str(error)
        return None


NIXL = ReadLibrary("nixl", "nixl._api", NixlEngine)
MOONCAKE = ReadLibrary("mooncake", "mooncake.engine", MooncakeEngine)
