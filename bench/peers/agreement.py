"""Checks that arms run the same model: compares their greedy tokens with those of transformers."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.peers.arms import Arm, Setup, parse_arm, started
from tandem_cli.load_test.load import Workload

_PROMPTS = Workload(num_clients=6, requests_per_client=1, input_tokens=48, output_tokens=24, seed=1)
Answers = list[list[int]]


async def answers(arm: Arm, setup: Setup) -> Answers:
    """The tokens of each answer. Requests run one at a time, so that batching has no effect."""
    all_tokens: Answers = []
    async with started(arm, setup) as serving:
        for prompt in _PROMPTS.prompts():
            tokens: list[int] = []
            async for new in serving.stream(prompt, _PROMPTS.output_tokens):
                tokens += new
            all_tokens.append(tokens)
    return all_tokens


def count_agreement(reference: Answers, candidate: Answers) -> tuple[int, int]:
    """The number of equal answers, and the total number of tokens before the first difference in each answer."""
    num_equal = sum(a == b for a, b in zip(reference, candidate, strict=True))
    num_tokens = 0
    for a, b in zip(reference, candidate, strict=True):
        num_tokens += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return num_equal, num_tokens


async def print_agreement(arms: Sequence[Arm], setup: Setup) -> None:
    """Print one row per arm."""
    reference = await answers(parse_arm("transformers"), setup)
    table = Table("arm", "same answers", "same tokens up to the first that differs", title="against transformers")
    total = sum(len(tokens) for tokens in reference)
    for arm in arms:
        num_equal, tokens = count_agreement(reference, await answers(arm, setup))
        table.add_row(arm.label, f"{num_equal} of {len(reference)}", f"{tokens} of {total}")
    Console(width=120).print(table)
