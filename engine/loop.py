"""The engine's thread: the only one that touches scheduler and runner.

Commands are functions of the Scheduler; they come in through a queue and run between steps. Results go out with one
hand-off to the event loop per step. With nothing to do the thread blocks on the queue. If it dies, every waiting
caller and the owner hear of it once, and nothing is accepted any more.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from engine.batch import LayerHook, Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from mesh.domain.errors import WorkerLost
from mesh.domain.tokens import StepOutput

log = structlog.get_logger(__name__)

T = TypeVar("T")
Command = Callable[[Scheduler], T]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced: tokens, and sequences that lost their blocks."""

    outputs: list[StepOutput]
    preempted: list[Sequence]


class Engine:
    """Scheduler and runner joined. Not thread-safe: EngineLoop gives it a thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, on_layers: LayerHook | None = None) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._on_layers = on_layers

    def prepare_thread(self) -> None:
        """Called once by the thread that will step."""
        self._runner.prepare_thread()

    def step(self) -> StepResult:
        """Plan, compute, apply."""
        batch = self.scheduler.schedule()
        outputs: list[StepOutput] = []
        if batch.items:
            outputs = self.scheduler.update(batch, self._runner.run(batch, self._on_layers))
        for item in batch.items:
            if item.sequence.is_over:
                self._runner.forget(item.sequence)
        preempted = self.scheduler.take_preempted()
        for sequence in preempted:
            self._runner.forget(sequence)
        return StepResult(outputs, preempted)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence here; idempotent."""
        self.scheduler.abort(sequence.key)
        self._runner.forget(sequence)


@dataclass(frozen=True, slots=True)
class LoopCallbacks:
    """What the owner hears, on the event loop's thread."""

    on_step: Callable[[StepResult], None]
    on_death: Callable[[BaseException], None]


class EngineLoop:
    """Runs an Engine in a thread of its own, fed and heard from one asyncio event loop."""

    def __init__(self, engine: Engine, callbacks: LoopCallbacks) -> None:
        self._engine = engine
        self._callbacks = callbacks
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._dead: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Finish the current step and end the thread."""
        self._commands.put(self._set_stopping)
        await asyncio.to_thread(self._thread.join)

    async def call(self, command: "Command[T]") -> T:
        """Run `command` between two steps; returns or raises what it does. WorkerLost if the engine is dead."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self._engine.scheduler))
            except Exception as error:
                future.set_exception(error)

        if self._dead is not None:
            raise WorkerLost("the engine has stopped")
        self._commands.put(run)
        # Shielded: once queued, a command runs even if its caller has gone; callers undo what they no longer want.
        return await asyncio.shield(asyncio.wrap_future(future))

    def abort(self, sequence: Sequence) -> None:
        """End a sequence between two steps. Does not wait; idempotent."""
        self._commands.put(lambda: self._engine.abort(sequence))

    def post(self, command: "Command[Any]") -> None:
        """Run `command` between two steps, without waiting. It must not raise."""
        self._commands.put(lambda: command(self._engine.scheduler))

    def _set_stopping(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self._engine.prepare_thread()
            while not self._stopping:
                self._run_commands()
                if self._engine.scheduler.has_work and not self._stopping:
                    result = self._engine.step()
                    if result.outputs or result.preempted:
                        self._loop.call_soon_threadsafe(self._callbacks.on_step, result)
        except BaseException as error:
            log.error("engine died", exc_info=error)
            self._dead = error
            self._fail_commands()
            self._loop.call_soon_threadsafe(self._callbacks.on_death, error)

    def _run_commands(self) -> None:
        """Run what is queued; with no work to go on with, wait for a command first."""
        wait = not self._engine.scheduler.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _fail_commands(self) -> None:
        """Let queued calls end: their commands still run, but the engine computes nothing any more."""
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return
