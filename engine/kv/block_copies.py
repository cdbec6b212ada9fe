"""BlockCopies: KV blocks between a GPU and host memory, on streams of their own, while the model computes.

    read      its stream waits until the model has written the layers ─▶ gather ─▶ copy to the host ─▶ event
    landing   host memory is filled, its checksum computed ─▶ copy to the GPU ─▶ scatter ─▶ event

The calling thread waits for the event. So when a copy returns, its host memory and its blocks are free, and whatever
the model is given afterwards sees the blocks. Threads copy at the same time: each has a stream and memory of its own.

The model's stream is ahead of its host's thread in nothing but this:

* layers of the current step, which readers are told of when they are launched: `note_written` records an event first;
* what the host launches between steps, such as clearing blocks before others get them: `note_changed` records one.

Every other kernel has ended when the results of its step are read, and blocks change hands only afterwards. That is
why a copy need not wait for the step that runs.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesh.domain.kv import Span

log = structlog.get_logger(__name__)

Bytes = NDArray[np.uint8]

_ID_BYTES = 8
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Event(Protocol):
    """A point in a stream: torch.cuda.Event."""

    def synchronize(self) -> None:
        """Let the host wait until the stream has come to it. Returns at once if it was never recorded."""
        ...


class Stream(Protocol):
    """torch.cuda.Stream."""

    def wait_event(self, event: Any) -> None:
        """Let what the stream is given from now on wait for the event."""
        ...

    def record_event(self, event: Any) -> Any:
        """Set the event after the work that the stream has been given."""
        ...


class Streams(Protocol):
    """The streams and memories of one GPU. Plug point: CudaStreams, and a simulator in the tests."""

    def current(self) -> Stream:
        """The stream that the calling thread gives work to: in the model's thread, the model's."""
        ...

    def new_stream(self) -> Stream: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give what this thread launches to `stream`."""
        ...

    def new_event(self) -> Event: ...

    def device_memory(self, num_bytes: int) -> Tensor:
        """Memory of the GPU for the current stream: uint8."""
        ...

    def pinned_memory(self, num_bytes: int) -> Tensor:
        """Host memory that the GPU reaches while the host computes: uint8."""
        ...

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory that is there already, if possible; returns what ends it."""
        ...

    def is_pinned(self, memory: Tensor) -> bool: ...


class CudaStreams:
    """Streams of a CUDA device. Not verified on hardware."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self._device)
        return stream

    def new_stream(self) -> Stream:
        stream: Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_event(self) -> Event:
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def device_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        status = self._call("cudaHostRegister", memory.data_ptr(), memory.nbytes, _PORTABLE)
        if status:
            log.warning("memory cannot be pinned: KV is copied once more", num_bytes=memory.nbytes, cuda_error=status)
            return lambda: None

        def unpin() -> None:
            self._call("cudaHostUnregister", memory.data_ptr())

        return unpin

    def is_pinned(self, memory: Tensor) -> bool:
        return memory.is_pinned()

    def _call(self, name: str, *args: int) -> int:
        """A function of CUDA's runtime; returns its error, 0 if it has none. CUDA keeps the last error of a thread, and
        torch takes it for that of its own next call; so the thread ends.
        """

        def call() -> int:
            with torch.cuda.device(self._device):
                return int(getattr(torch.cuda.cudart(), name)(*args))  # type: ignore[no-untyped-call]

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()


def streams_for(device: torch.device) -> Streams | None:
    """None for devices whose memory the host reads and writes itself."""
    return CudaStreams(device) if device.type == "cuda" else None


class BlockCopies:
    """Copies of one cache's blocks. `units` below is a part of it, uint8 [layers, planes, blocks, units, heads, bytes];
    a payload is the same part of the named blocks, in C order.

    `note_written` and `note_changed` are called by the threads that launch on the model's stream, the others by any.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._local = threading.local()
        self._written: dict[int, Event] = {}  # by layer
        self.note_changed()  # the cache was filled with zeros

    def note_written(self, layers: Span) -> None:
        """The model's stream has been given all kernels that write these layers of the current step."""
        event = self._now()
        for layer in range(layers.first, layers.end):
            self._written[layer] = event

    def note_changed(self) -> None:
        """The model's stream has been given, outside of a step, what changes blocks."""
        self._changed = self._now()

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Let reads into this memory go there directly. Returns what ends it, to be called while the memory lives."""
        return self._streams.pin(torch.frombuffer(memory, dtype=torch.uint8))

    def read(self, units: Tensor, layers: Span, block_ids: Sequence[int], out: Bytes) -> None:
        """Copy these blocks of `layers` to `out`."""
        words, channel = _as_words(units), self._channel(len(block_ids), out.size)
        target = torch.from_numpy(out)
        arriving = target if self._streams.is_pinned(target) else channel.on_host
        with self._streams.on(channel.stream):
            channel.send_ids(block_ids)
            for event in {id(event): event for event in self._events(layers)}.values():
                channel.stream.wait_event(event)
            torch.index_select(words, 2, channel.ids, out=_shaped(channel.on_device, words, len(block_ids)))
            arriving.copy_(channel.on_device, non_blocking=True)
            channel.stream.record_event(channel.done)
        channel.done.synchronize()
        if arriving is not target:
            target.copy_(arriving)

    @contextmanager
    def landing(self, units: Tensor, block_ids: Sequence[int]) -> Iterator[Bytes]:
        """Host memory for a payload of these blocks. When the context ends, its content has been copied to the
        blocks; after an error the blocks are unchanged.
        """
        num_bytes = len(block_ids) * (units.numel() // units.shape[2])
        words, channel = _as_words(units), self._channel(len(block_ids), num_bytes)
        yield channel.on_host.numpy()
        with self._streams.on(channel.stream):
            channel.send_ids(block_ids)
            channel.on_device.copy_(channel.on_host, non_blocking=True)
            channel.stream.wait_event(self._changed)
            words.index_copy_(2, channel.ids, _shaped(channel.on_device, words, len(block_ids)))
            channel.stream.record_event(channel.done)
        channel.done.synchronize()

    def _now(self) -> Event:
        event = self._streams.new_event()
        self._streams.current().record_event(event)
        return event

    def _events(self, layers: Span) -> Iterator[Event]:
        yield self._changed
        for layer in range(layers.first, layers.end):
            if (event := self._written.get(layer)) is not None:
                yield event

    def _channel(self, num_ids: int, num_bytes: int) -> "_Channel":
        channel: _Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = _Channel(self._streams)
        channel.divide(num_ids, num_bytes)
        return channel


class _Channel:
    """One thread's stream, and staging memory on both sides for block ids and a payload, which grows as needed."""

    def __init__(self, streams: Streams) -> None:
        self.stream = streams.new_stream()
        self.done = streams.new_event()
        self._streams = streams
        self._host = self._device = torch.empty(0, dtype=torch.uint8)

    def divide(self, num_ids: int, num_bytes: int) -> None:
        """Make room for a copy. The last one has ended."""
        ids, end = num_ids * _ID_BYTES, num_ids * _ID_BYTES + num_bytes
        if len(self._host) < end:
            self._host = self._streams.pinned_memory(end)
            with self._streams.on(self.stream):
                self._device = self._streams.device_memory(end)
        self._ids_on_host, self.on_host = self._host[:ids].view(torch.int64), self._host[ids:end]
        self.ids, self.on_device = self._device[:ids].view(torch.int64), self._device[ids:end]

    def send_ids(self, block_ids: Sequence[int]) -> None:
        """Copy the ids to the GPU."""
        self._ids_on_host.numpy()[:] = block_ids
        self.ids.copy_(self._ids_on_host, non_blocking=True)


def _as_words(units: Tensor) -> Tensor:
    """The same memory in the widest type, for kernels that move an element a thread."""
    numbers = (units.shape[-1], *units.stride()[:-1], units.storage_offset())
    return units.view(next(word for word in _WORDS if not any(number % word.itemsize for number in numbers)))


def _shaped(payload: Tensor, words: Tensor, num_blocks: int) -> Tensor:
    """A payload of `num_blocks` blocks, with the dtype and shape of `words`."""
    return payload.view(words.dtype).view(*words.shape[:2], num_blocks, *words.shape[3:])
