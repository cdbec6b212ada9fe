"""The runner's side of the protocol, and its command line. Needs only the standard library, as it runs in the
environment of each peer.

Messages are lines of JSON. To the runner: {"id": 1, "prompt": [5, 9], "max_new_tokens": 2}; end of file stops it.
From the runner: {"ready": true}, then {"id": 1, "tokens": [7]} for new tokens and {"id": 1, "done": true} at the end.
Decoding is greedy unless --sampling says otherwise, and ignores the end of sequence, so each request gets exactly
max_new_tokens tokens.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_GATHER_S = 0.01  # requests that are sent together arrive within this time


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued."""

    id: int
    prompt: list[int]
    max_new_tokens: int


class Wire:
    """Receives requests and sends tokens. Create it before the engine: it redirects stdout, so that output of the
    engine cannot corrupt the protocol.
    """

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def ready(self) -> None:
        """Tell the driver that the engine is loaded, and start to read requests."""
        threading.Thread(target=self._read, daemon=True).start()
        self._say({"ready": True})

    def arrived(self, *, wait_s: float | None = 0.0) -> list[Request]:
        """Requests since the last call. If there is none, wait up to `wait_s` for one; None waits without limit.

        Raises SystemExit when the driver has closed stdin.
        """
        requests: list[Request] = []
        try:
            request = self._requests.get(wait_s != 0.0, wait_s)
            while request is not None:
                requests.append(request)
                request = self._requests.get_nowait()
        except queue.Empty:
            return requests
        sys.exit(0)

    def tokens(self, request_id: int, tokens: Sequence[int]) -> None:
        """Send new tokens of a request."""
        self._say({"id": request_id, "tokens": list(tokens)})

    def done(self, request_id: int) -> None:
        """Tell the driver that a request has all its tokens."""
        self._say({"id": request_id, "done": True})

    def _say(self, message: dict[str, object]) -> None:
        with self._lock:
            self._output.write(json.dumps(message) + "\n")

    def _read(self) -> None:
        for line in sys.stdin:
            self._requests.put(Request(**json.loads(line)))
        self._requests.put(None)


class Sampling(NamedTuple):
    """How tokens are drawn; off are top_p 1 and top_k 0."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def flags(self) -> list[str]:
        return ["--sampling", *map(str, self)]


def add_sampling_flag(parser: argparse.ArgumentParser) -> None:
    """Its values are texts, see `sampling_of`."""
    about = "draw tokens, e.g. 0.7 0.8 20; without it the most likely ones are taken"
    parser.add_argument("--sampling", nargs=3, metavar=("TEMPERATURE", "TOP_P", "TOP_K"), help=about)


def sampling_of(given: Sequence[str] | None) -> Sampling | None:
    """The values of the flag."""
    return None if given is None else Sampling(float(given[0]), float(given[1]), int(given[2]))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of every runner. `precision` is none (fp32), bf16, int8 or int4; `budget` 0 means the peer's default.
    `eager`: without the compilation of a peer that compiles models.
    """

    model: Path
    precision: str
    threads: int
    budget: int
    max_seqs: int
    kv_tokens: int
    eager: bool = False
    sampling: Sampling | None = None


def parse_options() -> Options:
    """From the command line: --model DIR --precision int8 and so on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    for name in ("threads", "budget", "max-seqs", "kv-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    add_sampling_flag(parser)
    given = vars(parser.parse_args())
    return Options(sampling=sampling_of(given.pop("sampling")), **given)


def run(serve: Callable[[Options], None], convert: Callable[[Path, Path, str], None] | None = None) -> None:
    """Run the module of a peer: `convert CHECKPOINT TARGET FORMAT` converts weights, otherwise it serves requests."""
    if convert is not None and sys.argv[1:2] == ["convert"]:
        checkpoint, target, weights = sys.argv[2:]
        convert(Path(checkpoint), Path(target), weights)
    else:
        serve(parse_options())


def serve_static_batches(wire: Wire, options: Options, generate: Callable[[list[Request]], None]) -> None:
    """Serve requests of an engine without continuous batching until the driver closes stdin: waiting requests form a
    batch, later ones wait for the next. `generate` sends all tokens of a batch to the driver, the most likely ones.
    """
    if options.sampling is not None:
        sys.exit("--sampling: this runner takes the most likely tokens only")
    wire.ready()
    waiting: list[Request] = []
    while True:
        if not waiting:
            waiting = wire.arrived(wait_s=None)
            time.sleep(_GATHER_S)
        waiting += wire.arrived()
        batch, waiting = waiting[: options.max_seqs], waiting[options.max_seqs :]
        generate(batch)
        for request in batch:
            wire.done(request.id)
