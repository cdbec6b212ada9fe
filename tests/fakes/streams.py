"""SimulatedStreams: the streams of a GPU on CPU, which work late and in any order that CUDA allows.

What is launched on a stream waits in its queue. It is done when somebody waits for it, or by chance, and chance says
which stream goes on. What an operation will overwrite is filled with POISON when it is launched, if nothing before
it uses that memory; so whoever reads too early finds POISON, or what was there before.

`forgets` plants a mistake: "wait": streams do not wait for events; "synchronize": the host does not.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

POISON = 0xA5
_COPY, _GATHER = "aten::copy_", "aten::index_select"
_Range = tuple[int, int]


class NotPinned(AssertionError):
    """A copy between the GPU and host memory that is not pinned: CUDA would let the host wait."""


@dataclass(frozen=True, slots=True)
class _Point:
    """`stream` has done its first `position` operations."""

    stream: "SimulatedStream"
    position: int

    @property
    def is_reached(self) -> bool:
        return self.stream.num_done >= self.position


@dataclass(frozen=True, slots=True)
class _Work:
    """An operation on these parts of memory, or a wait for a point."""

    run: Callable[[], object] | None = None
    touches: tuple[_Range, ...] = ()
    after: _Point | None = None


@dataclass(eq=False)
class SimulatedEvent:
    gpu: "SimulatedStreams"
    recorded: _Point | None = None

    def synchronize(self) -> None:
        if self.recorded is not None and self.gpu.forgets != "synchronize":
            self.gpu.run_until(self.recorded)


@dataclass(eq=False)
class SimulatedStream:
    gpu: "SimulatedStreams"
    queue: deque[_Work] = field(default_factory=deque)
    num_done: int = 0

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.recorded is not None and self.gpu.forgets != "wait":
            self.gpu.give(self, _Work(after=event.recorded))

    def record_event(self, event: SimulatedEvent) -> None:
        with self.gpu.lock:
            event.recorded = _Point(self, self.num_done + len(self.queue))


class SimulatedStreams:
    """Implements engine.kv.block_copies.Streams. `num_late` counts operations that were not done when launched."""

    def __init__(self, seed: int, forgets: str = "") -> None:
        self.forgets = forgets
        self.lock = threading.RLock()
        self.num_late = 0
        self.unpinned: list[Tensor] = []
        """Memory whose pinning has ended."""
        self._random = random.Random(seed)
        self._haste = self._random.choice([0.0, 0.2, 0.6])  # of operations that nobody waits for
        self._detours = self._random.choice([0.0, 0.5, 0.9])  # on the way to what somebody waits for
        self._streams: list[SimulatedStream] = []
        self._on_device: list[_Range] = []
        self._pinned: list[_Range] = []
        self._thread = threading.local()
        self._model = self.new_stream()

    def current(self) -> SimulatedStream:
        stream: SimulatedStream = getattr(self._thread, "stream", self._model)
        return stream

    def new_stream(self) -> SimulatedStream:
        stream = SimulatedStream(self)
        self._streams.append(stream)
        return stream

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._thread.stream = self.current(), stream
        try:
            with _Launching(self, stream):
                yield
        finally:
            self._thread.stream = before

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def device_memory(self, num_bytes: int) -> Tensor:
        return self.adopt(torch.full((num_bytes,), POISON, dtype=torch.uint8))

    def pinned_memory(self, num_bytes: int) -> Tensor:
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self._pinned.append(_range(memory))
        return memory

    def pin(self, memory: Tensor) -> Callable[[], None]:
        self._pinned.append(_range(memory))
        return partial(self._unpin, memory)

    def _unpin(self, memory: Tensor) -> None:
        self._pinned.remove(_range(memory))
        self.unpinned.append(memory)

    def is_pinned(self, memory: Tensor) -> bool:
        return _is_in(memory, self._pinned)

    def adopt(self, memory: Tensor) -> Tensor:
        """Call it memory of the GPU."""
        self._on_device.append(_range(memory))
        return memory

    def has_work(self) -> bool:
        """True if something that the model's stream was given is not done."""
        return bool(self._model.queue)

    def read_back(self, tensor: Tensor) -> Tensor:
        """What the model's thread reads at the end of a step: the host waits for its stream."""
        with self.lock:
            self.run_until(_Point(self._model, self._model.num_done + len(self._model.queue)))
            return tensor.clone()

    def launch(self, stream: SimulatedStream, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Put an operation in the queue. Returns the tensor that it changes."""
        changed: Tensor = kwargs.get("out", args[0])
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        name = function._schema.name
        if name == _COPY and len({_is_in(tensor, self._on_device) for tensor in tensors}) > 1:
            if not all(self.is_pinned(tensor) or _is_in(tensor, self._on_device) for tensor in tensors):
                raise NotPinned(f"copy of {changed.nbytes} bytes")
        elif stream is not self._model and not all(_is_in(tensor, self._on_device) for tensor in tensors):
            raise NotPinned(f"{name} reads memory of the host")
        touched = tuple(map(_range, tensors))
        with self.lock:
            pending = [part for each in self._streams for work in each.queue for part in work.touches]
            if name in (_COPY, _GATHER) and not any(_overlap(_range(changed), part) for part in pending):
                changed.view(torch.uint8).fill_(POISON)
            self.give(stream, _Work(partial(function, *args, **kwargs), touched))
        return changed

    def give(self, stream: SimulatedStream, work: _Work) -> None:
        with self.lock:
            stream.queue.append(work)
            while self._random.random() < self._haste and (able := self._able()):
                self._work(self._random.choice(able))
            self.num_late += bool(stream.queue)

    def run_until(self, point: _Point) -> None:
        with self.lock:
            while not point.is_reached:
                if self._random.random() < self._detours:
                    self._work(self._random.choice(self._able()))
                else:
                    self._towards(point)

    def _towards(self, point: _Point) -> None:
        """Do one operation that the point needs."""
        after = point.stream.queue[0].after
        if after is not None and not after.is_reached:
            self._towards(after)
        else:
            self._work(point.stream)

    def _able(self) -> list[SimulatedStream]:
        """The streams whose next operation waits for nothing."""
        heads = ((stream, stream.queue[0].after) for stream in self._streams if stream.queue)
        return [stream for stream, after in heads if after is None or after.is_reached]

    def _work(self, stream: SimulatedStream) -> None:
        work = stream.queue.popleft()
        stream.num_done += 1
        if work.run is not None:
            with _disable_current_modes():  # one thread's work may be done while another launches
                work.run()


class _Launching(TorchDispatchMode):
    """Operations that change tensors are launched; others are views, and numbers of the host."""

    def __init__(self, gpu: SimulatedStreams, stream: SimulatedStream) -> None:
        super().__init__()
        self._gpu = gpu
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        return self._gpu.launch(self._stream, func, args, kwargs or {})


def _range(tensor: Tensor) -> _Range:
    """The addresses of a tensor, or, if it is not contiguous, of its storage."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _overlap(one: _Range, other: _Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _is_in(tensor: Tensor, ranges: Sequence[_Range]) -> bool:
    start, end = _range(tensor)
    return any(first <= start and end <= last for first, last in ranges)
