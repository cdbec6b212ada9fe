"""Compares the greedy answers of a peer with Tandem's, from quantised checkpoints that both read as they are.

    tandem quantize MODEL OUT --scheme awq --data FILE
    python -m bench.peers.checkpoints OUT [OUT ...] [--precision bf16] [--envs .peers]

Engines round activations, sums and KV in ways of their own, so they differ where two tokens are about as probable.
Where the peer has another token than Tandem, Tandem is asked again behind the peer's token, so every place of an answer
is compared after the same tokens. The table says by how much Tandem prefers its own token there, at most, beside how
much it prefers it to the second one at the median of all places: an engine that reads other numbers out of the files
differs by as much as that. `--against FOLDER` lets Tandem serve that folder in place of each, to see such differences.
"""

import argparse
import math
import os
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tandem
from bench.closed_loop import Workload
from bench.peers.arms import running_peer
from bench.peers.catalog import PEERS
from mesh.interrupts import run_async, run_program
from tandem_cli.load_test.endpoints import own_mesh

_TOP = 20
_KV_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """A place of an answer: by how many nats Tandem prefers its token to its second one, and to the peer's, which is 0
    for the same token, and infinite if the peer's is not among Tandem's most probable ones.
    """

    to_second: float
    to_peers: float


Ask = Callable[[Sequence[int], int], Awaitable[Sequence[tandem.Token]]]
"""`ask(prompt, max_new_tokens)`: Tandem's greedy tokens, with the most probable ones at their places."""


async def places_of(prompt: Sequence[int], answer: Sequence[int], ask: Ask) -> list[Place]:
    """Each place of the peer's answer, as Tandem finds it after the prompt and the answer's tokens before it."""
    places: list[Place] = []
    while len(places) < len(answer):
        before = [*prompt, *answer[: len(places)]]
        for own in await ask(before, len(answer) - len(places)):
            theirs = answer[len(places)]
            places.append(_place(own, theirs))
            if own.id != theirs:
                break
    return places


def _place(own: tandem.Token, theirs: int) -> Place:
    logprobs = {other.id: other.logprob for other in own.top}
    best, second = sorted(logprobs.values(), reverse=True)[:2]
    return Place(best - second, 0.0 if own.id == theirs else best - logprobs.get(theirs, -math.inf))


def row_of(name: str, places: Sequence[Place]) -> tuple[str, str, str, str, str]:
    """A row of the table."""
    others = [place.to_peers for place in places if place.to_peers]
    largest = f"{max(others):.4f}" if others else ""
    median = statistics.median(place.to_second for place in places)
    same = f"{1 - len(others) / len(places):.2%}"
    return name, f"{len(places)}", same, largest, f"{median:.4f}"


async def _compare(folder: Path, options: argparse.Namespace) -> list[Place]:
    served = str(options.against or folder)
    async with own_mesh([served, "--colocated"]) as address, tandem.AsyncClient(address) as client:

        async def ask(prompt: Sequence[int], max_new_tokens: int) -> Sequence[tandem.Token]:
            result = await client.generate(
                token_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True, top_logprobs=_TOP
            )
            return result.tokens

        answers = await _peers_answers(folder, (await client.model()).vocab_size, options)
        return [place for prompt, answer in answers for place in await places_of(prompt, answer, ask)]


async def _peers_answers(
    folder: Path, vocab_size: int, options: argparse.Namespace
) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers, one after the other, so that batching has no effect."""
    load = Workload(options.prompts, 1, options.input_tokens, options.output_tokens, vocab_size)
    threads = len(os.sched_getaffinity(0))
    starting = running_peer(
        options.peer, folder, options.precision, options.envs, threads=threads, kv_tokens=_KV_TOKENS, more=["--eager"]
    )
    answers: list[tuple[list[int], list[int]]] = []
    async with starting as peer:
        for prompt in load.prompts():
            answers.append((prompt, [t async for tokens in peer.stream(prompt, load.output_tokens) for t in tokens]))
    return answers


async def _print_table(options: argparse.Namespace) -> None:
    table = Table("checkpoint", "places", "same token", "others, at most, nats", "to the second, median, nats")
    for folder in options.checkpoints:
        table.add_row(*row_of(folder.name, await _compare(folder, options)))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.checkpoints", description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="OUT")
    parser.add_argument("--peer", choices=sorted(PEERS), default="vllm")
    parser.add_argument("--precision", default="bf16", help="of the peer's activations: bf16, or none for fp32 (bf16)")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="what Tandem serves in place of each")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--envs", type=Path, default=Path(".peers"), help="folder of the peers' environments")
    options = parser.parse_args()
    options.checkpoints = [folder.resolve() for folder in options.checkpoints]
    run_async(_print_table(options))


if __name__ == "__main__":
    run_program(main)
