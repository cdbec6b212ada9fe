"""`python -m rank_worker` on CPU with a stand-in for CUDA graphs: a rank process that captures and replays its steps.

Each replay adds a byte to the file that the variable TANDEM_TEST_REPLAYS names, before its sums: without them the
leader does not end the step.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.decode_graphs import Captured, Run
from engine.loading import graphs
from engine.ranks import rank
from engine.ranks.collectives import summing
from rank_worker.__main__ import main
from tests.fakes.tape import TapeCapture, TapedSums, TapeGraph

REPLAYS = "TANDEM_TEST_REPLAYS"


def stand_ins(capture: Callable[[Any], TapeCapture]) -> Mapping[tuple[Any, str], Any]:
    """By module and name: what makes ranks capture on CPU, with torch's attention and gloo."""
    return {
        (graphs, "_CAPTURES"): {"cpu": capture},
        (graphs, "_CAPTURED_ATTENTION"): ("torch",),
        (rank, "summing"): lambda store, place: TapedSums(summing(store, place)),
    }


class _Noted:
    """A graph whose replays are written down, each as it begins."""

    def __init__(self, graph: TapeGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        with Path(os.environ[REPLAYS]).open("ab") as file:
            file.write(b"r")
        self._graph.replay()


class _NotedCapture(TapeCapture):
    def __call__(self, run: Run, rehearse: Run | None = None) -> Captured:
        hidden = super().__call__(run, rehearse).hidden
        return Captured(_Noted(self.graphs[-1]), hidden)


if __name__ == "__main__":
    for (module, name), stand_in in stand_ins(lambda device: _NotedCapture()).items():
        setattr(module, name, stand_in)
    sys.exit(main())
