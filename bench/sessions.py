"""Chat sessions whose KV does not fit into memory: what a disk behind it saves, and what hints do.

    python -m bench.sessions [--shape 135m] [--quantize int8] [--sessions 20] [--turns 4] [--in-memory 0.1]
                             [--first-tokens 400] [--question-tokens 40]

Sessions take turns: each sends all that was said so far and a new question, and gets an answer. Memory holds the KV of
the share `--in-memory` of the sessions, and of a recurrent model the states of a running sequence and of two snapshots
of each. When a session comes again, the others have taken its memory. Five meshes do the same:

    without a prefix cache
    without a disk
    with a disk (`kv_disk`)
    with enough memory
    with hints: as many sessions as fit beside another give their KV high priority, and are shown apart

Turns after the first are counted.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tandem
from bench.shapes import SHAPES, write_shape
from engine.loading.resolve import kv_layout, resolve
from engine.runner_settings import RunnerSettings
from engine.settings import QUANTIZATIONS
from mesh.interrupts import run_async, run_program, showing
from tandem_cli.load_test.endpoints import own_mesh

_ANSWER_TOKENS = 24
_SNAPSHOTS = 2  # of a session: at the end of its prompt and in its answer
_VOCABULARY = 1000


@dataclass(slots=True)
class Turns:
    """Measurements of all turns but the first of some sessions."""

    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def row(self, name: str, num_tokens: int) -> tuple[str, ...]:
        """The cells of a mesh with memory for `num_tokens` tokens."""
        first = sorted(self.first_token_s)
        return (
            name,
            str(num_tokens),
            f"{self.cached_tokens / self.prompt_tokens:.0%}",
            f"{1e3 * statistics.median(first):.0f}",
            f"{1e3 * first[int(0.95 * len(first))]:.0f}",
            f"{self.seconds:.1f}",
        )


async def talk(address: str, options: argparse.Namespace, num_kept: int = 0) -> tuple[Turns, Turns]:
    """Let all sessions take their turns, one request at a time. Returns the turns of the first `num_kept` sessions,
    whose KV has high priority, and those of the others.
    """
    kept, others = Turns(), Turns()
    clock, rng = asyncio.get_running_loop().time, random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, _VOCABULARY) for _ in range(count)]

    sessions = [words(options.first_tokens) for _ in range(options.sessions)]
    async with tandem.AsyncClient(address) as client:
        for turn in range(options.turns):
            for number, session in enumerate(sessions):
                turns = kept if number < num_kept else others
                priority = "high" if turns is kept else None
                session += words(options.question_tokens)
                asked_s, first_token_s = clock(), 0.0
                async for event in client.stream(
                    token_ids=session,
                    max_new_tokens=_ANSWER_TOKENS,
                    ignore_eos=True,
                    session_id=f"session {number}",
                    keep_priority=priority,
                ):
                    if event.token is not None:
                        first_token_s = first_token_s or clock() - asked_s
                        session.append(event.token.id)
                    usage = event.usage
                if turn and usage is not None:
                    turns.first_token_s.append(first_token_s)
                    turns.prompt_tokens += usage.prompt_tokens
                    turns.cached_tokens += usage.cached_tokens
                    turns.seconds += clock() - asked_s
    return kept, others


async def compare(options: argparse.Namespace, model: Path, disk: Path, table: Table) -> None:
    """Run the sessions on five meshes, and add their rows to the table."""
    longest = options.first_tokens + options.turns * (options.question_tokens + _ANSWER_TOKENS)
    longest += _SNAPSHOTS * state_tokens(model, options.quantize)
    all_tokens = options.sessions * longest + 1024
    small = max(2 * longest, int(options.in_memory * all_tokens))
    common = (
        *(f"--model={model}", "--load-format=dummy", f"--quantize={options.quantize}", "--colocated"),
        "--set=decode.max_rolling_batch_size=2",  # each has room for a state beside the KV
    )
    arms = {
        "no prefix cache": (f"--set=decode.max_batch_total_tokens={small}", "--set=decode.prefix_caching=false"),
        "memory for few": (f"--set=decode.max_batch_total_tokens={small}",),
        "and a disk": (f"--set=decode.max_batch_total_tokens={small}", f"--set=decode.kv_disk={disk}"),
        "memory for all": (f"--set=decode.max_batch_total_tokens={all_tokens}",),
    }
    for name, flags in arms.items():
        async with own_mesh((*common, *flags)) as address:
            _, turns = await talk(address, options)
        table.add_row(*turns.row(name, all_tokens if name == "memory for all" else small))
    async with own_mesh((*common, *arms["memory for few"])) as address:
        kept, others = await talk(address, options, num_kept=small // longest - 1)
    table.add_row(*kept.row("of few, those of high priority", small))
    table.add_row(*others.row("beside them, the others", small))


def state_tokens(model: Path, quantize: str) -> int:
    """Tokens whose KV takes as many blocks as the recurrent state of a sequence."""
    settings, config = resolve(RunnerSettings(model, load_format="dummy", quantize=quantize))
    layout = kv_layout(config, settings)
    return layout.state_blocks * layout.block_size


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sessions", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, default="int8")
    parser.add_argument("--sessions", type=int, default=20, metavar="N")
    parser.add_argument("--turns", type=int, default=4, metavar="N")
    parser.add_argument("--in-memory", type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--first-tokens", type=int, default=400, metavar="N")
    parser.add_argument("--question-tokens", type=int, default=40, metavar="N")
    options = parser.parse_args(argv)
    columns = ("", "KV tokens in memory", "found", "first token p50, ms", "p95, ms", "all turns, s")
    table = Table(*columns, title=f"{options.sessions} sessions, {options.turns} turns, {options.shape}")
    console = Console(width=120)
    with showing(table.rows, lambda: console.print(table)), tempfile.TemporaryDirectory() as folder:
        model = write_shape(options.shape, Path(folder))
        run_async(compare(options, model, Path(folder) / "kv", table))


if __name__ == "__main__":
    run_program(main)
