"""The synchronous client: AsyncClient on an event loop in a background thread."""

import asyncio
import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

from tandem._requests import GenerateArguments, TokenizeArguments
from tandem._routers import FORK_ADVICE, ChannelFactory, Tls
from tandem.client import DEFAULT_ADDRESS, AsyncClient, BoundToProcess
from tandem.exceptions import Cancelled
from tandem.mesh import HistoryPoint, Mesh, Worker
from tandem.models import Model, Result, Token, TokenEvent

T = TypeVar("T")


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of the constructors of Client and AsyncClient."""

    api_key: str | None
    timeout: float
    max_retries: int
    resume_timeout: float
    tls: Tls | bool
    open_channel: ChannelFactory


class _Closed(RuntimeError):
    """The client was closed before the call, or belongs to the process that this one was forked from."""


class _BackgroundLoop:
    """An event loop in a daemon thread. If nobody holds this object any more, the thread awaits `close()` and ends."""

    def __init__(self, close: Callable[[], Coroutine[object, object, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        # Held from "is it closed?" until work has started. Within, garbage collection may end an iterator: more work.
        self._open = threading.RLock()
        self._closed = False
        self._process = os.getpid()
        self._finishing: set[asyncio.Task[object]] = set()
        is_abandoned = threading.Event()
        work = (self._loop, is_abandoned, close)  # nothing that holds this object
        self._thread = threading.Thread(target=_run_until_stopped, args=work, name="tandem-client", daemon=True)
        self._thread.start()
        self._abandon = weakref.finalize(self, _abandon, self._loop, is_abandoned, self._process)
        self._abandon.atexit = False

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run `coroutine` and return its result. An interrupt (Ctrl-C) cancels it, and is raised after it has ended.

        Raises _Closed where nothing would run the coroutine: after `stop`; in a fork of this process, which has no
        thread but the one that forked; and in an interpreter that exits, which has frozen its daemon threads.
        """
        if self._is_forked:
            coroutine.close()
            raise _Closed(f"this client was made before the process forked: make one in each process; {FORK_ADVICE}")
        tasks: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: ended.set())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # the interrupt came before the task was created
                coroutine.close()
                ended.set()

        try:
            with self._open:
                is_open = not self._closed and not sys.is_finalizing()
                if is_open:
                    self._loop.call_soon_threadsafe(start)
            if is_open:
                ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            ended.wait()
            raise
        if not is_open:
            coroutine.close()
            raise _Closed("this client is closed")
        if tasks[0].cancelled():
            raise Cancelled("the client was closed while it waited")
        return tasks[0].result()

    def finish(self, coroutine: Coroutine[object, object, object]) -> None:
        """Run `coroutine`, and wait for its end unless this is the loop's own thread: the garbage collector, which ends
        abandoned iterators, runs on any thread, and the loop cannot wait for itself. Dropped after `stop`.
        """
        if threading.current_thread() is self._thread:
            task = self._loop.create_task(coroutine)
            self._finishing.add(task)  # asyncio alone would not keep it alive
            task.add_done_callback(self._finishing.discard)
            return
        with suppress(_Closed):
            self.run(coroutine)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def stop(self) -> None:
        """Cancel the calls of other threads, and end the background thread. May be called twice."""
        if self._is_forked:
            return
        with self._open:
            if self._closed:
                return
            self._closed = True
        self._abandon.detach()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _run_until_stopped(
    loop: asyncio.AbstractEventLoop, is_abandoned: threading.Event, close: Callable[[], Coroutine[object, object, None]]
) -> None:
    loop.run_forever()
    if is_abandoned.is_set():
        try:
            loop.run_until_complete(close())
            loop.run_until_complete(_cancel_others())
        finally:
            loop.close()


def _abandon(loop: asyncio.AbstractEventLoop, is_abandoned: threading.Event, process: int) -> None:
    """End the thread without waiting for it: the garbage collector calls this on any thread, the loop's too."""
    if os.getpid() == process:
        is_abandoned.set()
        loop.call_soon_threadsafe(loop.stop)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Client(BoundToProcess):
    """Synchronous version of AsyncClient, with the same methods. Threads may share one client. A forked process makes
    its own, and only if its parent has made no call: gRPC does not survive a fork; the start method spawn always works.
    A client that is not closed keeps its connection and a thread while anything holds it or one of its streams.

    with tandem.Client("127.0.0.1:50051") as client:
        result = client.generate(prompt="The sky is", max_new_tokens=16)
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(address, **options)
        self._background = _BackgroundLoop(self._client.close)

    def acting_for(self, api_key: str | None) -> Self:
        client = copy.copy(self)
        client._client = self._client.acting_for(api_key)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the background thread."""
        try:
            self._background.run(self._client.close())
        except _Closed:
            return
        finally:
            self._background.stop()

    def generate(self, **arguments: Unpack[GenerateArguments]) -> Result:
        return self._background.run(self._client.generate(**arguments))

    def stream(self, **arguments: Unpack[GenerateArguments]) -> Generator[TokenEvent, None, None]:
        """See AsyncClient.stream. Leaving the loop, or `close()` of the iterator, cancels the call."""
        events = self._client.stream(**arguments)

        async def next_event() -> TokenEvent | None:
            return await anext(events, None)

        try:
            while (event := self._background.run(next_event())) is not None:
                yield event
        finally:
            self._background.finish(events.aclose())

    def generate_until_done(
        self, *, max_rounds: int = 8, max_total: int | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Result:
        coroutine = self._client.generate_until_done(max_rounds=max_rounds, max_total=max_total, **arguments)
        return self._background.run(coroutine)

    def tokenize(self, **arguments: Unpack[TokenizeArguments]) -> tuple[Token, ...]:
        return self._background.run(self._client.tokenize(**arguments))

    def render(self, **arguments: Unpack[TokenizeArguments]) -> str:
        return self._background.run(self._client.render(**arguments))

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        return self._background.run(self._client.models(timeout=timeout))

    def model(self, name: str = "", *, timeout: float | None = None) -> Model:
        return self._background.run(self._client.model(name, timeout=timeout))

    def tokenizer_config(self, name: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        return self._background.run(self._client.tokenizer_config(name, timeout=timeout))

    def mesh(self, *, timeout: float | None = None) -> Mesh:
        return self._background.run(self._client.mesh(timeout=timeout))

    def drain(self, worker_id: str, *, timeout: float | None = None) -> None:
        self._background.run(self._client.drain(worker_id, timeout=timeout))

    def undrain(self, worker_id: str, *, timeout: float | None = None) -> None:
        self._background.run(self._client.undrain(worker_id, timeout=timeout))

    def switch_role(self, worker_id: str, role: str, *, timeout: float | None = None) -> None:
        self._background.run(self._client.switch_role(worker_id, role, timeout=timeout))

    def set_traffic(self, name: str, shares: Mapping[str, float], *, timeout: float | None = None) -> None:
        self._background.run(self._client.set_traffic(name, shares, timeout=timeout))

    def history(self, span_s: float | None = None, *, timeout: float | None = None) -> tuple[HistoryPoint, ...]:
        return self._background.run(self._client.history(span_s, timeout=timeout))

    def workers(self, *, timeout: float | None = None) -> tuple[Worker, ...]:
        return self._background.run(self._client.workers(timeout=timeout))

    def wait_ready(self, timeout: float = 60.0) -> None:
        self._background.run(self._client.wait_ready(timeout))
