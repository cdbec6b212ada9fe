"""Workers without a model: real processes and real KV transfers, but steps that only take a configured time.

    TANDEM_PACE=10,0.05 python -m tandem_cli.load_test.paced decode --model ... --registry-address ...
    TANDEM_PACE=10,0.05 python -m tandem_cli.load_test.paced up --port 0 ...         # `tandem up` with such workers

A step sleeps for 10 ms, and for 0.05 ms more per token. Many such workers fit on one core, so the mesh around them can
be measured on a machine without enough cores for engines.
"""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.kv.cache import KVCache
from engine.loading.resolve import kv_layout
from engine.loading.weights import Progress
from engine.models.read_config import load_config
from engine.runner import FinishBatch, LayerHook, RunnerOutput
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.kv import Span
from mesh.domain.tokens import SampledToken
from mesh.process import ServiceProgram
from tandem_cli.load_test.endpoints import PACE_ENV
from tandem_cli.main import execute, parse_arguments

_DEFAULT_PACE = "10,0.05"
_NUM_BLOCKS = 1024
_NUM_LETTERS = 26
_STAMP_PERIOD_MS = 8000.0


class PacedRunner:
    """A LoadedRunner that sleeps instead of computing. Tokens cycle through the alphabet, and their log-probs encode
    the time of their creation (`delay_s`). KV consists of zeros, and is transferred like any other.
    """

    borrows_cores = False
    attention_backend = "none"
    rank_pids: tuple[int, ...] = ()

    def __init__(self, kv_cache: KVCache, step_s: float, token_s: float) -> None:
        self.kv_cache = kv_cache
        self._step_s = step_s
        self._token_s = token_s

    def prepare(self, choices: Sequence[SequenceState]) -> "Sequence[Future[None]]":
        return ()

    def use_cores(self, lent: tuple[int, ...]) -> None: ...

    def clear_blocks(self, block_ids: list[int]) -> None: ...

    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        """Sleep for the time of the step, then report all layers as computed."""
        time.sleep(self._step_s + self._token_s * sum(item.end - item.start for item in batch.items))
        if on_layers is not None:
            on_layers(batch, Span(0, self.kv_cache.layout.num_layers))
        outputs = [_output(item) for item in batch.items]
        return lambda: outputs

    def forget(self, sequence: SequenceState) -> None: ...

    def close(self) -> None: ...


def _output(item: ScheduledSequence) -> RunnerOutput:
    if not item.needs_sampling:
        return RunnerOutput()
    return RunnerOutput((SampledToken(ord("a") + item.end % _NUM_LETTERS, -_stamp_ms()),))


def _stamp_ms() -> float:
    """The time modulo 8 s, which a 32-bit float holds with a precision of a microsecond."""
    return (1000 * time.monotonic()) % _STAMP_PERIOD_MS


def delay_s(logprob: float) -> float:
    """Seconds since the token with this log-prob was made on this machine. Valid below 8 s."""
    return ((_stamp_ms() + logprob) % _STAMP_PERIOD_MS) / 1000


def load(settings: RunnerSettings, on_progress: Progress | None) -> PacedRunner:
    """Load a paced runner with the KV layout of the model and the pace from the environment."""
    step_ms, token_ms = map(float, os.environ.get(PACE_ENV, _DEFAULT_PACE).split(","))
    layout = kv_layout(load_config(settings.model_dir), settings)
    cache = KVCache(layout, settings.num_blocks or _NUM_BLOCKS, torch.device("cpu"))
    return PacedRunner(cache, step_ms / 1000, token_ms / 1000)


def main() -> int:
    """Run one worker, or a mesh with paced workers. The first argument is the role, or `up`; the others are its flags.

    A worker imports only the modules of its role.
    """
    role = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if role == "prefill":
        from prefill_worker.__main__ import serve as serve_prefill
        from prefill_worker.settings import PrefillSettings

        return ServiceProgram("prefill_worker", PrefillSettings, partial(serve_prefill, load=load)).main()
    if role == "decode":
        from decode_worker.__main__ import serve as serve_decode
        from decode_worker.settings import DecodeSettings

        return ServiceProgram("decode_worker", DecodeSettings, partial(serve_decode, load=load)).main()
    if role == "switchable":
        from switchable_worker.__main__ import serve as serve_switchable
        from switchable_worker.settings import SwitchableSettings

        return ServiceProgram("switchable_worker", SwitchableSettings, partial(serve_switchable, load=load)).main()
    if role == "up":
        args = parse_arguments(["up", *sys.argv[1:]])
        roles = ("prefill", "decode", "switchable")
        paced = {role: (sys.executable, "-m", "tandem_cli.load_test.paced", role) for role in roles}
        args.programs = {**args.programs, **paced}
        return execute(args)
    sys.stderr.write("usage: python -m tandem_cli.load_test.paced prefill|decode|switchable|up [FLAGS]\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
