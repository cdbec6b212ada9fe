"""DividedCores: the cores and compute threads of a process, while the ranks that it has started use a part of them."""

import os

import structlog
import torch

log = structlog.get_logger(__name__)


class DividedCores:
    """The cores and threads of this process, divided among `size` ranks. This process is rank 0, and calls the methods
    from the thread that starts the others.
    """

    def __init__(self, size: int) -> None:
        self._cores, self._num_threads = os.sched_getaffinity(0), torch.get_num_threads()
        self.of_rank = _divide(sorted(self._cores), size)
        self.threads_per_rank = max(1, self._num_threads // size)

    def take_own(self) -> None:
        """Leave the other ranks theirs."""
        os.sched_setaffinity(0, self.of_rank[0])
        torch.set_num_threads(self.threads_per_rank)

    def take_all(self) -> None:
        """Take back what the process had."""
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(self._num_threads)


def _divide(cores: list[int], size: int) -> list[tuple[int, ...]]:
    """The cores of each rank. With fewer cores than ranks, all ranks have all of them."""
    if len(cores) < size:
        log.warning("ranks share cores and will wait for each other", ranks=size, cores=len(cores))
        return [tuple(cores)] * size
    return [tuple(cores[len(cores) * rank // size : len(cores) * (rank + 1) // size]) for rank in range(size)]
