"""How a thread gets kernels to call without the interpreter lock: another thread posts them to its mailbox.

A thread that has nothing to do stays in compiled code for a while, longer than Python takes between two steps, and then
leaves, because waiting costs a part of a core.
"""

from functools import partial

import numpy as np

from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.stored import JOB_NUMBERS, call
from engine.kernels.cpu.threads.barrier import MAX_SPINS, arrive, exchange, nap, publish, read_after_pause, wait_until

_POSTED, _DONE, _IS_PRESENT, _WORDS = 8, 16, 24, 32  # in cache lines of their own, behind the job
_MAX_NAPS = 50
"""About 3 milliseconds."""


def mailboxes(count: int) -> Int64s:
    """Mailboxes of so many threads, one a row, for one other thread that posts to them."""
    return np.zeros((count, _WORDS), np.int64)


@partial(entry, nogil=False)
def post(job: Int64s, box: Int64s) -> bool:
    """Let the mailbox's thread call a kernel; see `stored.call`. The thread has done all that was posted before.
    Returns False if it is not in `follow`, which it must be told to call then.
    """
    for number in range(JOB_NUMBERS):
        box[number] = job[number]
    arrive(box[_POSTED:])
    return read_after_pause(box[_IS_PRESENT:]) == 1


@entry
def lead(job: Int64s, boxes: Int64s, others: Int64s) -> None:
    """Call a kernel in this thread, and return once the threads of these mailboxes have done all that was posted."""
    call(job)
    for number in others:
        wait_until(boxes[number, _DONE:], boxes[number, _POSTED])


@entry
def follow(box: Int64s) -> None:
    """Call what is posted, until nothing has been for a while."""
    exchange(box[_IS_PRESENT:], 1)
    while _work(box):
        pass


@jit
def _work(box: Int64s) -> bool:
    """Call what is posted, or what will be in a while. Returns False if nothing was, and the thread has left."""
    done, num_waits = box[_DONE], 0
    while read_after_pause(box[_POSTED:]) == done:
        num_waits += 1
        if num_waits > MAX_SPINS + _MAX_NAPS:
            exchange(box[_IS_PRESENT:], 0)
            if read_after_pause(box[_POSTED:]) == done:  # or else its poster may have seen this thread here
                return False
            exchange(box[_IS_PRESENT:], 1)
        elif num_waits > MAX_SPINS:
            nap()
    call(box)
    publish(box[_DONE:], done + 1)
    return True
