"""Whether arms choose the same greedy tokens as transformers: that they run the same model, not a look-alike."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.load import Workload
from bench.peers.arms import Arm, Setup, parse_arm, started

_PROMPTS = Workload(num_clients=6, requests_per_client=1, input_tokens=48, output_tokens=24, seed=1)
Answers = list[list[int]]


async def answers(arm: Arm, setup: Setup) -> Answers:
    """The tokens of each prompt, one request at a time: no arm's batching plays a part."""
    found: Answers = []
    async with started(arm, setup) as serving:
        for prompt in _PROMPTS.prompts():
            tokens: list[int] = []
            async for new in serving.stream(prompt, _PROMPTS.output_tokens):
                tokens += new
            found.append(tokens)
    return found


def agreeing(reference: Answers, other: Answers) -> tuple[int, int]:
    """How many answers are the same, and how many tokens are up to the first that differs in each."""
    whole = sum(a == b for a, b in zip(reference, other, strict=True))
    tokens = 0
    for a, b in zip(reference, other, strict=True):
        tokens += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return whole, tokens


async def print_agreement(arms: Sequence[Arm], setup: Setup) -> None:
    """One row for each arm."""
    reference = await answers(parse_arm("transformers"), setup)
    table = Table("arm", "same answers", "same tokens up to the first that differs", title="against transformers")
    total = sum(len(tokens) for tokens in reference)
    for arm in arms:
        whole, tokens = agreeing(reference, await answers(arm, setup))
        table.add_row(arm.label, f"{whole} of {len(reference)}", f"{tokens} of {total}")
    Console(width=120).print(table)
