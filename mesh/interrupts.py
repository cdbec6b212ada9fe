"""Signals end the programs that people run by hand, without a traceback. Such a signal is Ctrl-C, SIGTERM, or SIGHUP,
which comes when the terminal is closed. Its effect depends on when it comes:

while the program is imported   Ctrl-C ends the process, if the package has called `end_imports_quietly`
while `run_program` runs        The first signal raises an exception, so that the program closes what is open. Later
                                signals are ignored. In `run_async` the signal cancels the main task instead, and the
                                exception is raised after the event loop.
while the process ends          Any signal ends it at once.

An alarm repeats the signal where its first try must fail or has failed:

code runs in which no exception may be raised (_CALLERS)           after _AGAIN_S
a library has dropped the exception, as a bare `except:` does      after _AGAIN_S
the event loop has not cancelled the task, because code blocks it  after _BLOCKED_S; the exception is raised there
"""

import os
import signal
import stat
import sys
from collections.abc import Callable, Coroutine, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:  # programs that start fast import asyncio later, or never
    import asyncio

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.01
_BLOCKED_S = 1.0
_CALLERS = (
    "logging.",  # it would keep its lock, for which the cleanup waits
    "grpc.",  # grpc.aio takes any exception of the messages of a request for their end
    "llvmlite.binding.executionengine.",  # LLVM drops exceptions of what it calls while it compiles
    "numba.<module>",  # a C module of it makes an ImportError of KeyboardInterrupt, and ends the process at SystemExit
    "numpy.<module>",  # it cannot be imported again, and PyTorch, which imports it, drops what that raises
    "torch.<module>",  # its C++ calls Python when it is imported, and an exception there aborts the process
    "torch.library.Library.impl",  # the same, when it registers operators
    "weakref.",  # Python drops what callbacks of weak references raise
    "_weakrefset.",
    "importlib._bootstrap._get_module_lock.<locals>.cb",  # such a callback, at each import
    "engine.models.loop_threads.LoopThreads.run",  # the other threads of a step would wait for one that has raised
    "mesh.interrupts._interrupt",  # a handler may run in the middle of asyncio's code
    "mesh.interrupts._on_alarm",
)
"""Modules and functions whose callees must not raise."""


class _FromSignal(BaseException):
    """The exception of a signal. If it is freed while the program runs, it was dropped: the signal comes again."""

    def __del__(self) -> None:
        if id(self) == _ending.error_id:
            _ending.error_id = 0
            for running in _in_loop:
                running.is_told = False
            _come_again(_AGAIN_S)


class _Interrupted(_FromSignal, KeyboardInterrupt):
    pass


class Terminated(_FromSignal, SystemExit):
    """SIGTERM has come, or the terminal was closed; SystemExit itself is raised by a program's own `sys.exit`."""


def end_imports_quietly() -> None:
    """Let Ctrl-C end this process while its program is imported, if it was started as `python -m PACKAGE...`. Python
    would raise KeyboardInterrupt in an import. Call it in the package's `__init__.py`.
    """
    if sys.argv[:1] == ["-m"]:  # as Python documents it for the time until the program has been found
        end_at_ctrl_c()


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process as SIGTERM does, at once."""
    _handle(signal.SIGINT, signal.SIG_DFL)


def raise_at_each_ctrl_c() -> None:
    """Let each Ctrl-C raise KeyboardInterrupt, for a program that goes on after it."""
    _handle(signal.SIGINT, signal.default_int_handler)


def stopping_signals() -> list[signal.Signals]:
    """The signals that stop a program: not those that its caller ignores, as a shell ignores SIGINT in background jobs,
    and nohup SIGHUP.
    """
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def leave_terminal() -> None:
    """Send the output of this process nowhere if it goes to a terminal: writing to a closed one is an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        with suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(null, number)
    os.close(null)


def _handle(number: signal.Signals, handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    if number in stopping_signals() and signal.getsignal(number) != _ignore:
        signal.signal(number, handler)


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run `main`, and end the process with its status, or with 128 and the number of the signal that has ended it: 130
    after Ctrl-C, 143 after SIGTERM, 129 when its terminal was closed.
    """
    try:
        try:
            signal.signal(signal.SIGALRM, _on_alarm)
            for number in _SIGNALS:
                _handle(number, _interrupt)
            sys.unraisablehook = _tell_dropped
            status = main()
        finally:
            _forget_signals()
            for number in _SIGNALS:  # Python drops exceptions while it ends
                _handle(number, signal.SIG_DFL)
            sys.unraisablehook = sys.__unraisablehook__
    except KeyboardInterrupt:  # also one that comes in the lines above
        _forget_signals()
        status = 128 + signal.SIGINT
    sys.exit(status)


def _forget_signals() -> None:
    accept_signal()
    signal.setitimer(signal.ITIMER_REAL, 0)  # while Python ends, an alarm would end the process


def accept_signal() -> None:
    """Say that the program ends by itself after the exception of a signal, which it has caught. Otherwise the signal
    would raise again as soon as the exception is gone.
    """
    _ending.error_id = _ending.number = 0


@contextmanager
def showing(results: Sized, show: Callable[[], object]) -> Iterator[None]:
    """Run the block, which fills `results`; then call `show` if there are some. So does a block that a signal ends."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if results:
            sys.stderr.write("interrupted: only what was complete by then is shown\n")
            show()
        raise
    show()


def run_async(main: Coroutine[Any, Any, T], loop_factory: "Callable[[], asyncio.AbstractEventLoop] | None" = None) -> T:
    """`asyncio.run` for a program of `run_program`. The first signal cancels `main`; when all has ended, it raises."""
    import asyncio

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        _in_loop.append(_InLoop(asyncio.get_running_loop(), task))
        return await main

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(run())
    finally:
        if _in_loop and _in_loop.pop().is_asked:
            _raise()


@dataclass(slots=True)
class _Ending:
    """The signal that ends the program: the first one that has come (0: none, or the program has accepted it).
    `error_id` is the id of its exception (0: not raised, or dropped).
    """

    number: int = 0
    error_id: int = 0


@dataclass(slots=True, eq=False)
class _InLoop:
    """The loop and the task of `run_async`. `is_asked`: the signal has come, and the loop is to cancel the task.
    `is_told`: it has cancelled, or the signal has raised.
    """

    loop: "asyncio.AbstractEventLoop"
    main: "asyncio.Task[Any]"
    is_asked: bool = False
    is_told: bool = False

    def cancel(self) -> None:
        """Cancel as asyncio does at Ctrl-C: an exception in the middle of its loop has crashed Python 3.11."""
        self.is_asked = True
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._cancel)
            _come_again(_BLOCKED_S)

    def _cancel(self) -> None:
        if not self.is_told and not self.main.done():
            self.is_told = True
            self.main.cancel()


_ending = _Ending()
_in_loop: list[_InLoop] = []
"""None or one."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Cancel what an event loop runs; else raise. An alarm raises also in a loop that has not cancelled by then."""
    if number == signal.SIGHUP:
        leave_terminal()
    _ending.number = _ending.number or number
    running = _in_loop[0] if _in_loop else None
    if running is not None and not running.is_asked:
        running.cancel()
    elif running is None or (number == signal.SIGALRM and not running.is_told):
        if not _may_raise(frame):
            _come_again(_AGAIN_S)
            return
        if running is not None:
            running.is_told = True
        _raise()


def _raise() -> NoReturn:
    error = _Interrupted() if _ending.number == signal.SIGINT else Terminated(128 + _ending.number)
    _ending.error_id = id(error)  # from here on alarms do nothing
    for number in _SIGNALS:  # another one would interrupt the cleanup
        signal.signal(number, _ignore)
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        raise error
    finally:
        del error  # the traceback has this frame: without this, only the garbage collection would notice its end


def _come_again(seconds: float) -> None:
    """Let the signal come again, and again until it is heard: Python does not hear one that comes as it enters a system
    call, such as a sleep. The timer of the process is used, because a thread for that cannot be started where the
    system has none left, nor while `threading` is imported.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _on_alarm(alarm: int, frame: FrameType | None) -> None:
    is_heard = _ending.error_id or any(running.is_told for running in _in_loop)
    if is_heard or not _ending.number:  # the program has accepted the signal
        signal.setitimer(signal.ITIMER_REAL, 0)
        return
    for number in _SIGNALS:  # the exception has been dropped
        if signal.getsignal(number) == _ignore:
            signal.signal(number, _interrupt)
    _interrupt(alarm, frame)


def _tell_dropped(dropped: "sys.UnraisableHookArgs") -> None:
    """Say nothing of a signal's exception that Python has dropped, such as in a callback of the garbage collection: it
    is raised again.
    """
    if not isinstance(dropped.exc_value, _FromSignal):
        sys.__unraisablehook__(dropped)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. With SIG_IGN, Python would report a signal that has come a moment before as an error."""


def _may_raise(frame: FrameType | None) -> bool:
    """False where asyncio's own code runs, which would miss the end of a process (a loop that waits for events is in
    `selectors`), in anything called by _CALLERS, in `__del__`, whose exceptions Python drops, and in `__set_name__`, of
    whose exceptions Python 3.11 makes a RuntimeError.
    """
    if frame is not None and _module(frame).startswith("asyncio."):
        return False
    while frame is not None:
        name = f"{_module(frame)}.{frame.f_code.co_qualname}"
        if name.startswith(_CALLERS) or name.endswith((".__del__", ".__set_name__")):
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
