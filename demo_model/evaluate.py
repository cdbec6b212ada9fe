"""Scores a saved model on held-out questions, with greedy decoding in transformers.

    python -m demo_model.evaluate demo_model/tandem-small --count 50

An answer is right if it equals the expected text. Confidence is exp(mean log-probability) of the tokens in the answer,
including the end of turn; 1 is certain.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo_model.questions import KINDS, Sample, draw
from mesh.interrupts import run_program

NEW_TOKENS = 160
SEED = 7


@dataclass(frozen=True)
class GradedAnswer:
    """One generated answer. `stopped` means that the model ended it before the token limit."""

    sample: Sample
    text: str
    confidence: float
    stopped: bool

    @property
    def right(self) -> bool:
        """Whether the answer equals the expected text."""
        return self.text == self.sample.turns[-1][1]


def messages_of(sample: Sample) -> list[dict[str, str]]:
    """The chat up to and including its last question."""
    messages = [] if sample.system is None else [{"role": "system", "content": sample.system}]
    for question, answer in sample.turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages[:-1]


@torch.inference_mode()
def answer_all(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample]) -> list[GradedAnswer]:
    """Answer one batch of questions with greedy decoding. Prompts are padded on the left."""
    prompts = [
        tokenizer.apply_chat_template(messages_of(sample), tokenize=False, add_generation_prompt=True)
        for sample in samples
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    result = model.generate(  # type: ignore[operator]
        **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True
    )
    generated = result.sequences[:, inputs["input_ids"].shape[1] :]
    logs = torch.stack(result.logits, dim=1).float().log_softmax(-1).gather(2, generated[..., None])[..., 0]
    outcomes = []
    for sample, tokens, log in zip(samples, generated.tolist(), logs.tolist(), strict=True):
        stopped = tokenizer.eos_token_id in tokens
        length = tokens.index(tokenizer.eos_token_id) + 1 if stopped else len(tokens)
        text = str(tokenizer.decode(tokens[: length - stopped]))
        outcomes.append(GradedAnswer(sample, text, math.exp(fmean(log[:length])), stopped))
    return outcomes


def distinct(kind: str, count: int, rng: random.Random) -> list[Sample]:
    """Up to `count` different held-out samples (small kinds have fewer)."""
    samples: dict[tuple[object, ...], Sample] = {}
    for _ in range(count * 20):
        sample = draw(kind, rng, held_out=True)
        samples.setdefault((sample.system, sample.turns), sample)
        if len(samples) == count:
            break
    return list(samples.values())


def share(values: list[bool]) -> str:
    """A percentage, or a dash for none."""
    return f"{100 * fmean(values):.1f} %" if values else "-"


def mean_confidence(outcomes: list[GradedAnswer], right: bool) -> str:
    """Mean confidence of the right or of the wrong answers, or a dash for none."""
    values = [outcome.confidence for outcome in outcomes if outcome.right == right]
    return f"{fmean(values):.3f}" if values else "-"


def row(name: str, outcomes: list[GradedAnswer]) -> str:
    """One line of the table, in Markdown."""
    cells = (
        name,
        str(len(outcomes)),
        share([outcome.right for outcome in outcomes]),
        mean_confidence(outcomes, True),
        mean_confidence(outcomes, False),
        share([outcome.stopped for outcome in outcomes]),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table for one model folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "tandem-small")
    parser.add_argument("--count", type=int, default=50, help="questions per kind, at most")
    parser.add_argument("--wrong", type=int, default=0, help="also print this many wrong answers per kind")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    rng = random.Random(SEED)
    print("| kind | questions | right | confidence, right | confidence, wrong | stops |")
    print("|---|---:|---:|---:|---:|---:|")
    every: list[GradedAnswer] = []
    for kind in KINDS:
        outcomes = answer_all(model, tokenizer, distinct(kind, arguments.count, rng))
        every += outcomes
        print(row(kind + (" (hard)" if KINDS[kind].hard else ""), outcomes), flush=True)
        for outcome in [outcome for outcome in outcomes if not outcome.right][: arguments.wrong]:
            print(f"    {outcome.sample.turns[-1][0]!r} -> {outcome.text!r}")
    easy = [outcome for outcome in every if not KINDS[outcome.sample.kind].hard]
    print(row("**all but hard**", easy))
    print(row("**all**", every))


if __name__ == "__main__":
    run_program(main)
