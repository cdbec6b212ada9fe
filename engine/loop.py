"""EngineLoop runs an Engine in a thread of its own, the only one that uses the scheduler and the runner.

Commands are functions of the Scheduler; they arrive through a queue and run between steps. Each step hands its results
to the event loop in one call. An idle thread blocks on the queue. If the thread dies, every waiting caller gets an
error, the owner gets one `on_death` call, and later commands are refused. If the thread is stuck, `busy` shows it.
"""

import asyncio
import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog

from engine.engine import Engine, StepResult
from engine.runner import LayerHook
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.errors import WorkerLost
from mesh.tasks import until_ended

log = structlog.get_logger(__name__)

STOP_WAIT_S = 10.0
_MAX_FETCH_S = 10.0  # well below the time in which routers expect a reservation

T = TypeVar("T")
Command = Callable[[Scheduler], T]


@dataclass(frozen=True, slots=True)
class Busy:
    """The current step or command of an engine's thread: how long it has run, and how many tokens it computes."""

    for_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Queued:
    """A command and the future of its caller; no caller waits if `future` is None."""

    command: "Command[Any]"
    future: "Future[Any] | None"

    def run(self, scheduler: Scheduler) -> None:
        if self.future is None:
            self.command(scheduler)
            return
        try:
            result = self.command(scheduler)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        if self.future is not None:
            self.future.set_exception(error)


class EngineLoop:
    """Runs an Engine in its own thread. Commands come from, and results go to, one asyncio event loop.

    `on_step` and `on_death` run on the event loop's thread, `on_computed` on the engine's: after each step, with the
    number of sequences, tokens and seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepResult], None],
        on_death: Callable[[BaseException], None],
        on_computed: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_death = on_death
        self._on_computed = on_computed
        self._commands: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        self._closing = threading.Lock()  # between "is it closed?" and putting a command
        self._closed = False
        self._stopping = False
        self._busy_since_s: float | None = None  # when the current step or command began; written by the thread
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, within_s: float = STOP_WAIT_S) -> None:
        """Finish the current step and end the thread. Commands in the queue fail with WorkerLost.

        Then close the runner, so call it on the thread that loaded it. An engine's thread that is stuck for longer than
        `within_s` is abandoned: it ends with the process, and so do the worker's other ranks. A caller that is
        cancelled waits for all this, too.
        """
        await until_ended(self._stop(within_s))

    async def _stop(self, within_s: float) -> None:
        self.post(self._set_stopping)
        await asyncio.to_thread(self._thread.join, within_s)
        if self._thread.is_alive():
            log.error("engine left in its step", stack=self.stack())
        else:
            self._engine.close()

    def busy(self) -> Busy | None:
        """The current step or command of the thread, None between them. Never blocks; callable from any thread."""
        since_s = self._busy_since_s
        return None if since_s is None else Busy(time.monotonic() - since_s, self._engine.num_step_tokens)

    def stack(self) -> str:
        """Stack trace of the thread; empty if it is not running."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    async def call(self, command: "Command[T]") -> T:
        """Run `command` between two steps and return its result, or raise its error. WorkerLost if the engine stopped.

        A command in the queue runs even if its caller is cancelled.
        """
        future: Future[T] = Future()
        if not self._put(_Queued(command, future)):
            raise WorkerLost("the engine has stopped")
        # Shielded: a cancelled caller must undo the effect of its command.
        return await asyncio.shield(asyncio.wrap_future(future))

    async def begin_role(self, config: SchedulerConfig, on_layers: LayerHook | None) -> None:
        """`Engine.begin_role` between two steps."""
        await self.call(lambda _: self._engine.begin_role(config, on_layers))

    async def prepare(self, choices: Sequence[SequenceState]) -> None:
        """Wait for `Runner.prepare` of a request's choices while steps continue. Raises its errors. If the caller is
        cancelled, all that is prepared is, too.
        """
        preparing = self._engine.prepare(choices)
        try:
            for future in preparing:
                await asyncio.wrap_future(future)
        finally:
            for future in preparing:
                future.cancel()

    async def fetch_evicted(self, sequence: SequenceState) -> None:
        """Give the sequence those of its blocks that were evicted and kept. Called before it is added.

        A disk that is too slow costs _MAX_FETCH_S; then the blocks are computed, as they would be without a disk.
        """
        evicted = self._engine.scheduler.tables.evicted
        if evicted is not None and (missing := await self.call(lambda scheduler: scheduler.tables.missing(sequence))):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MAX_FETCH_S):
                    sequence.from_disk = await asyncio.wrap_future(evicted.fetch(missing))

    def abort(self, sequence: SequenceState) -> None:
        """`Engine.abort` between two steps. Does not wait; idempotent."""
        self.post(lambda _: self._engine.abort(sequence))

    def post(self, command: "Command[Any]") -> None:
        """Run `command` between two steps, without waiting; ignored once the engine has stopped.

        If the command raises, the engine's state is unknown, so the engine dies.
        """
        self._put(_Queued(command, None))

    def _put(self, queued: "_Queued") -> bool:
        with self._closing:
            if not self._closed:
                self._commands.put(queued)
            return not self._closed

    def _set_stopping(self, _: Scheduler) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            idle = True
            while True:
                self._run_commands(wait=idle)
                if self._stopping:
                    break
                begun_s = time.monotonic()
                result = self._timed(self._engine.step)
                if self._on_computed is not None and not result.is_idle:
                    self._on_computed(result.num_seqs, result.num_tokens, time.monotonic() - begun_s)
                # Idle: nothing to compute, or no capacity for waiting sequences. Only a command can change that.
                idle = result.is_idle
                if result.outputs or result.preempted or result.failed:
                    self._on_loop(self._on_step, result)
        except BaseException as error:
            log.error("engine died", exc_info=error)
            self._on_loop(self._on_death, error)
        finally:
            self._close()

    def _on_loop(self, callback: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: `stop` has left this thread in its step
            self._loop.call_soon_threadsafe(callback, argument)

    def _run_commands(self, *, wait: bool) -> None:
        """Run all commands in the queue; with `wait`, block until there is at least one."""
        while True:
            try:
                queued = self._commands.get(block=wait)
            except queue.Empty:
                return
            self._engine.num_step_tokens = 0
            self._timed(partial(queued.run, self._engine.scheduler))
            wait = False

    def _timed(self, call: Callable[[], T]) -> T:
        self._busy_since_s = time.monotonic()
        try:
            return call()
        finally:
            self._busy_since_s = None

    def _close(self) -> None:
        """Refuse further commands, and fail those in the queue."""
        with self._closing:
            self._closed = True
        while not self._commands.empty():
            self._commands.get().fail(WorkerLost("the engine has stopped"))
