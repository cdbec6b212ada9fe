"""Signals that come at bad moments."""

import signal
import subprocess
import sys

import pytest

_INTERRUPTED_IN_A_LINE = """
import logging, os, signal, sys, time
from mesh.interrupts import run_program

class Interrupting(logging.Handler):
    def emit(self, record):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the first one counts
        time.sleep(0.05)
        sys.stdout.write("the line is complete\\n")

def main():
    logging.getLogger().addHandler(Interrupting())
    logging.warning("a line")
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_ASYNCIO = """
import os, signal, time
from mesh.interrupts import run_program

asyncio_code = '''
def keep_books():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**5):
        pass
    print("the books are complete")
'''
names = {"__name__": "asyncio.base_subprocess", "os": os, "signal": signal}
exec(asyncio_code, names)

def main():
    names["keep_books"]()
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_A_REQUEST = """
import asyncio, os, signal
import grpc
from mesh.interrupts import run_program

async def requests():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**5):
        pass
    print("the request is complete", flush=True)
    await asyncio.sleep(60)
    yield b""

async def call():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = channel.stream_stream("/a/b")(requests())
            await asyncio.sleep(60)
    finally:
        await server.stop(None)

run_program(lambda: asyncio.run(call()))
"""


_INTERRUPTED_IN_A_FINALISER = """
import os, signal, time
from mesh.interrupts import run_program

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
        print("the finaliser is complete")

def main():
    Dropped()
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_A_CLASS = """
import os, signal, time
from mesh.interrupts import run_program

class Named:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
        print("the name is set")

def main():
    class Owner:
        attribute = Named()
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_A_WEAK_CALLBACK = """
import os, signal, time, weakref
from mesh.interrupts import run_program

class Dropped:
    pass

def tidy():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**5):
        pass
    print("the callback is complete")

def main():
    weakref.finalize(Dropped(), tidy)
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_A_WEAK_SET = """
import os, signal, time, weakref
from mesh.interrupts import run_program

class Held(set):
    def discard(self, item):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
        print("the set is complete")

class Dropped:
    pass

def main():
    dropped = Dropped()
    held = weakref.WeakSet([dropped])
    held.data = Held(held.data)
    del dropped
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_THE_GARBAGE_COLLECTION = """
import gc, os, signal, time
from mesh.interrupts import run_program

def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    print("the collection has begun")
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**5):
        pass

def main():
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_AFTER_AN_IMPORT = """
import importlib._bootstrap, os, signal, time
from mesh.interrupts import run_program

class Locks(dict):
    def __delitem__(self, name):
        super().__delitem__(name)
        if name == "a module":
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10**5):
                pass
            print("the lock is removed")

class Lock:
    pass

def main():
    bootstrap = importlib._bootstrap
    bootstrap._module_locks = Locks(bootstrap._module_locks)
    lock = bootstrap._get_module_lock("a module")
    del lock
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_PYTORCH = """
import os, signal, time
from mesh.interrupts import run_program

def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**5):
        pass

def main():  # C++ calls Python in the middle of the real one
    exec("interrupt(); print('PyTorch is complete')", {"__name__": "torch", "interrupt": interrupt})
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_AN_IMPORT = """
import os, signal, sys, time
from mesh.interrupts import run_program

class Interrupting:
    def find_spec(self, name, *_):
        if name.startswith("PART"):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

def main():
    sys.meta_path.insert(0, Interrupting())
    try:
        import MODULE
        time.sleep(60)
    finally:
        print("MODULE is complete:", hasattr(sys.modules.get("MODULE"), "NAME"))

run_program(main)
"""


def _interrupted_in(module: str, *, part: str, name: str) -> str:
    """A program that gets a signal while `part` of the module is imported, and looks whether it has `name` then."""
    return _INTERRUPTED_IN_AN_IMPORT.replace("MODULE", module).replace("PART", part).replace("NAME", name)


_INTERRUPTED_IN_NUMPY = _interrupted_in("numpy", part="numpy.", name="array")
_INTERRUPTED_IN_NUMBA = _interrupted_in("numba", part="numba._devicearray", name="njit")


_INTERRUPTED_WHERE_ALL_EXCEPTIONS_ARE_DROPPED = """
import os, signal, time
from mesh.interrupts import run_program

def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
    except:
        print("it is dropped")
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_WITHOUT_THREADS = """
import logging, os, signal, threading, time
from mesh.interrupts import run_program

def fail(thread):
    raise RuntimeError("can't start new thread")

class Interrupting(logging.Handler):
    def emit(self, record):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
        print("the line is complete")

def main():
    threading.Thread.start = fail  # as it does when a limit on processes is reached
    logging.getLogger().addHandler(Interrupting())
    logging.warning("a line")
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_AND_ONCE_UNHEARD = """
import logging, os, signal, time
from mesh.interrupts import run_program

class Interrupting(logging.Handler):
    def emit(self, record):
        os.kill(os.getpid(), signal.SIGTERM)

def main():
    hear = signal.getsignal(signal.SIGALRM)

    def miss(number, frame):  # as Python misses a signal that comes when it enters a system call
        print("an alarm is missed")
        signal.signal(signal.SIGALRM, hear)

    signal.signal(signal.SIGALRM, miss)
    logging.getLogger().addHandler(Interrupting())
    logging.warning("a line")
    time.sleep(60)

run_program(main)
"""


@pytest.mark.parametrize(
    ("program", "told"),
    [
        pytest.param(_INTERRUPTED_IN_A_LINE, "the line is complete\n", id="a line of the log"),
        pytest.param(_INTERRUPTED_IN_ASYNCIO, "the books are complete\n", id="bookkeeping of asyncio"),
        pytest.param(_INTERRUPTED_IN_A_REQUEST, "the request is complete\n", id="messages of a gRPC request"),
        pytest.param(_INTERRUPTED_IN_A_FINALISER, "the finaliser is complete\n", id="a finaliser"),
        pytest.param(_INTERRUPTED_IN_A_CLASS, "the name is set\n", id="the attributes of a class"),
        pytest.param(_INTERRUPTED_IN_A_WEAK_CALLBACK, "the callback is complete\n", id="a weak reference's callback"),
        pytest.param(_INTERRUPTED_IN_A_WEAK_SET, "the set is complete\n", id="a set of weak references"),
        pytest.param(_INTERRUPTED_AFTER_AN_IMPORT, "the lock is removed\n", id="the lock of an import"),
        pytest.param(_INTERRUPTED_IN_THE_GARBAGE_COLLECTION, "the collection has begun\n", id="the garbage collection"),
        pytest.param(_INTERRUPTED_IN_NUMPY, "numpy is complete: True\n", id="the import of numpy"),
        pytest.param(_INTERRUPTED_IN_NUMBA, "numba is complete: True\n", id="the import of numba"),
        pytest.param(_INTERRUPTED_IN_PYTORCH, "PyTorch is complete\n", id="the import of PyTorch"),
        pytest.param(_INTERRUPTED_WHERE_ALL_EXCEPTIONS_ARE_DROPPED, "it is dropped\n", id="a bare except"),
        pytest.param(_INTERRUPTED_AND_ONCE_UNHEARD, "an alarm is missed\n", id="a missed alarm"),
        pytest.param(_INTERRUPTED_WITHOUT_THREADS, "the line is complete\n", id="a system without threads left"),
    ],
)
def test_what_runs_is_completed_first(program: str, told: str) -> None:
    """Otherwise a lock stays taken, the end of a child is missed, or the exception is lost: the process never ends."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, told, "")


_INTERRUPTED_AT_ITS_END = """
import atexit, os, signal, sys, time
from mesh.interrupts import run_program

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it

def tidy():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(60)

atexit.register(tidy)
run_program(lambda: print("done", flush=True))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_program_that_has_come_to_its_end_ends_at_once(name: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED_AT_ITS_END, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.Signals[name], "done\n", "")
