"""Arms of a comparison: Tandem and its peers, each started on the same cores from the same weights.

An arm is written NAME or NAME:BUDGET. NAME is `tandem` (prefill and decode separated), `tandem-strict` (the same, but
the decode worker never helps with prompts while the prefill worker is full), `tandem-colocated`, `tandem-colocated-2`
(two colocated workers, each with half of the cores), or a peer of bench.peers.catalog. BUDGET is the maximum number of
tokens per step; prompts are computed in chunks that fit into it.

Arms are measured in turn over several rounds, because the speed of a machine changes within minutes.
"""

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import tandem
from bench.closed_loop import Send, Workload, run_closed_loop
from bench.peers.catalog import PEERS, checkpoint_of, installed, model_for
from bench.peers.process import PeerFailed, PeerProcess, running
from bench.peers.wire import Sampling, add_sampling_flag, sampling_of
from bench.processes import cpu_s
from engine.loading.resolve import kv_layout, resolve
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.settings import as_flags
from tandem_cli.load_test.endpoints import own_mesh
from tandem_cli.load_test.figures import RunFailed

Stream = Callable[[Sequence[int], int], AsyncIterator[Sequence[int]]]
"""`stream(prompt, max_new_tokens)` yields new tokens as they come; the end of sequence is ignored."""

TANDEM: Mapping[str, tuple[str, ...]] = {
    "tandem": (),
    "tandem-strict": ("--prefill-overflow=0",),
    "tandem-colocated": ("--colocated",),
    "tandem-colocated-2": ("--colocated", "--decode=2"),
}
_PRECISIONS = {
    "none": ("auto", "none"),
    "bf16": ("bfloat16", "none"),
    "int8": ("auto", "int8"),
    "int4": ("auto", "int4"),
}
"""Tandem's dtype and quantisation."""
_MAX_SEQS = 64
_KV_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Setup:
    """Options that all arms of a comparison share. `precision`: see _PRECISIONS; none is fp32. `kv_tokens`: room for
    KV, in each of Tandem's workers. `sampling`: None is greedy.
    """

    envs: Path
    shape: str
    precision: str
    cores: tuple[int, ...]
    kv_tokens: int = _KV_TOKENS
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm. Budget 0 means the default of the engine."""

    name: str
    budget: int = 0

    @property
    def label(self) -> str:
        """The arm as written on the command line."""
        return f"{self.name}:{self.budget}" if self.budget else self.name

    @property
    def is_tandem(self) -> bool:
        return self.name in TANDEM


def parse_arm(text: str) -> Arm:
    """Parse NAME or NAME:BUDGET. Raises ValueError for an unknown name, a bad budget, and an engine without budgets."""
    name, colon, budget = text.partition(":")
    if name not in TANDEM and name not in PEERS:
        raise ValueError(f"no arm {name}: {', '.join([*TANDEM, *PEERS])}")
    has_budget = PEERS[name].has_budget if name in PEERS else name != "tandem"
    if colon and not has_budget:
        raise ValueError(f"{name} has no step budget")
    return Arm(name, int(budget) if colon else 0)


def send_through(stream: Stream) -> Send:
    """Adapt a stream to bench.closed_loop.Send."""

    async def send(prompt: list[int], max_new_tokens: int, on_token: Callable[[], None]) -> int:
        count = 0
        async for tokens in stream(prompt, max_new_tokens):
            for _ in tokens:
                on_token()
            count += len(tokens)
        if count != max_new_tokens:
            raise PeerFailed(f"received {count} tokens instead of {max_new_tokens}")
        return count

    return send


def arm_cpu_s() -> float:
    """CPU time of all processes of the arm that runs, so far: of all that this process, the load generator, started."""
    return cpu_s(*psutil.Process().children(recursive=True))


@asynccontextmanager
async def started(arm: Arm, setup: Setup) -> AsyncIterator[Stream]:
    """Start and warm up an arm, and stop it at the end."""
    serve = _tandem if arm.is_tandem else _peer
    async with serve(arm, setup) as stream:
        await run_closed_loop(Workload(2, 1, 256, 8), send_through(stream))
        yield stream


@asynccontextmanager
async def _peer(arm: Arm, setup: Setup) -> AsyncIterator[Stream]:
    model = model_for(PEERS[arm.name], setup.shape, setup.precision, setup.envs)
    starting = running_peer(
        arm.name,
        model.absolute(),
        setup.precision,
        setup.envs,
        threads=len(setup.cores),
        kv_tokens=setup.kv_tokens,
        budget=arm.budget,
        more=() if setup.sampling is None else setup.sampling.flags,
    )
    async with starting as process:
        yield process.stream


@asynccontextmanager
async def running_peer(
    name: str,
    model: Path,
    precision: str,
    envs: Path,
    *,
    threads: int,
    kv_tokens: int,
    budget: int = 0,
    more: Sequence[str] = (),
) -> AsyncIterator[PeerProcess]:
    """Start a peer with a model folder that it can read, given by its absolute path, and stop it at the end. `more`:
    flags of its runner.
    """
    peer = PEERS[name]
    python = installed(envs, peer.engine)
    options = {"model": model, "precision": precision, "threads": threads}
    options |= {"budget": budget, "max_seqs": _MAX_SEQS, "kv_tokens": kv_tokens}
    flags = [*as_flags(**options), *more]
    label = f"{name}:{budget}" if budget else name
    async with running(label, (str(python), "-m", f"bench.peers.{peer.engine}_runner", *flags)) as process:
        yield process


@asynccontextmanager
async def _tandem(arm: Arm, setup: Setup) -> AsyncIterator[Stream]:
    folder, (dtype, quantize) = checkpoint_of(setup.shape, setup.envs), _PRECISIONS[setup.precision]
    flags = [str(folder), *TANDEM[arm.name], *as_flags(dtype=dtype, quantize=quantize)]
    flags += ["--max-step-tokens", str(arm.budget)] if arm.budget else []
    num_bytes = _kv_bytes(RunnerSettings(folder, dtype=dtype, quantize=quantize), setup.kv_tokens)
    flags += [f"--set={role}.kv_cache_bytes={num_bytes}" for role in ("prefill", "decode")]
    async with own_mesh(flags) as address, tandem.AsyncClient(address) as client:
        yield _through(client, setup.sampling)


def _kv_bytes(settings: RunnerSettings, num_tokens: int) -> int:
    try:
        settings, config = resolve(settings)
    except ConfigurationError as error:
        raise RunFailed(str(error)) from error
    layout = kv_layout(config, settings)
    num_blocks = -(-num_tokens // layout.block_size) * layout.groups.count + layout.num_unused
    return num_blocks * layout.block_bytes


def _through(client: tandem.AsyncClient, sampling: Sampling | None) -> Stream:
    drawn = {} if sampling is None else sampling._asdict()

    async def stream(prompt: Sequence[int], max_new_tokens: int) -> AsyncIterator[Sequence[int]]:
        async for event in client.stream(token_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True, **drawn):
            if event.token is not None:
                yield (event.token.id,)

    return stream


async def in_turn(
    arms: Sequence[Arm], repeats: int, measure: Callable[[Arm, int], Awaitable[None]]
) -> AsyncIterator[None]:
    """Call `measure(arm, number of the round)` for each arm in turn, and yield after each round, so that a long run may
    be interrupted. Every other round goes backwards, for the place in a round may matter. A failed arm is reported and
    skipped in later rounds.
    """
    remaining = list(arms)
    for repeat in range(repeats):
        for arm in remaining[:: -1 if repeat % 2 else 1]:
            print(f"round {repeat + 1} of {repeats}: {arm.label}", file=sys.stderr, flush=True)
            try:
                await measure(arm, repeat)
            except* RunFailed as errors:
                remaining.remove(arm)
                print(f"left out from here: {errors.exceptions[0]}", file=sys.stderr, flush=True)
        yield


def write_rows(path: Path | None, setup: Setup, rows: Sequence[Mapping[str, object]], **more: object) -> None:
    """Write what was measured, if a file is asked for."""
    if path is not None:
        shared = {"shape": setup.shape, "precision": setup.precision, "cores": setup.cores, **more}
        path.write_text(json.dumps({**shared, "rows": rows}, indent=1))


def setup_of(options: argparse.Namespace) -> Setup:
    """The setup from the common flags. Also pins this process, the load generator, to the cores of the setup, and so
    all that it starts.
    """
    cores = tuple(options.cores or sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores)
    return Setup(options.envs, options.shape, options.quantize, cores, sampling=sampling_of(options.sampling))


def add_common_flags(parser: argparse.ArgumentParser, default_arms: Sequence[str]) -> None:
    """Add the flags that all comparisons in bench.peers share."""
    parser.add_argument("--arms", type=parse_arm, nargs="+", default=[parse_arm(arm) for arm in default_arms])
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--quantize", default="none", choices=[*_PRECISIONS], help="none is fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", help="cores of all processes; default: all allowed")
    parser.add_argument("--envs", type=Path, default=Path(".peers"), help="folder of the peers' environments")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    add_sampling_flag(parser)
