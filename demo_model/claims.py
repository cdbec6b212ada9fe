"""Asks the bundled model all the arithmetic that README.md says it gets right.

    python -m demo_model.claims demo_model/tandem-small        # in transformers
    python -m demo_model.claims --address 127.0.0.1:50051      # through a mesh that serves it

Right is the expected text, greedily, word for word. In transformers an answer is computed at once: greedy decoding
gives it if each of its tokens is the likeliest after those before it. The status is 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem
from demo_model.questions.numbers import ADD, MULTIPLY, SUBTRACT, difference_of, product_of, sum_of
from demo_model.questions.sample import Sample
from mesh.interrupts import run_async, run_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase  # which take seconds to import

ROWS = 128
REQUESTS_AT_ONCE = 32
DIGIT, HUNDRED, TABLE = range(10), range(100), range(13)
# What comes before the question. All but the first are as in training, which also mixes other kinds of questions.
CHATS: dict[str, tuple[tuple[str, str], ...]] = {
    "alone": (),
    "after a greeting": (("user", "Hello"), ("assistant", "Hello! How can I help you?")),
    "after a sum": (("user", "What is 17 + 25?"), ("assistant", "17 + 25 = 30 + 12 = 42.")),
    "with a system prompt": (("system", "You are a helpful assistant."),),
}


@dataclass(frozen=True)
class Question:
    """A chat that ends with a question, and the only right answer. `claim` is the line of the table that it is of."""

    claim: str
    messages: list[dict[str, str]]
    answer: str


def by_heart() -> Iterator[Sample]:
    """Every sum and difference of two digits, and every product of the tables to 12, in every wording."""
    for a, b in product(DIGIT, repeat=2):
        yield from (sum_of(a, b, template) for template in ADD)
        yield from (difference_of(a, b, template) for template in SUBTRACT if a >= b)
    for a, b in product(TABLE, repeat=2):
        yield from (product_of(a, b, template) for template in MULTIPLY)


def worked_out() -> Iterator[Sample]:
    """Every other sum and difference of numbers below 100, each in one wording."""
    add, subtract = cycle(ADD), cycle(SUBTRACT)
    for a, b in product(HUNDRED, repeat=2):
        if max(a, b) not in DIGIT:
            yield sum_of(a, b, next(add))
            if a >= b:
                yield difference_of(a, b, next(subtract))


def questions() -> Iterator[Question]:
    """All claims: what is known by heart in every chat of CHATS, the rest in one chat each."""
    for chat, sample in product(CHATS, by_heart()):
        yield _asked(f"{sample.kind} by heart, {chat}", chat, sample)
    for chat, sample in zip(cycle(CHATS), worked_out()):
        yield _asked(f"{sample.kind} of larger numbers", chat, sample)


def _asked(claim: str, chat: str, sample: Sample) -> Question:
    ((question, answer),) = sample.turns
    turns = (*CHATS[chat], ("user", question))
    return Question(claim, [{"role": role, "content": text} for role, text in turns], answer)


@torch.inference_mode()
def wrong_in_transformers(folder: Path, questions: list[Question]) -> list[tuple[Question, str]]:
    """The questions whose answer differs, and the likeliest token at each place of the expected answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    by_length = sorted(questions, key=lambda question: len(str(question.messages) + question.answer))
    wrong = []
    for start in range(0, len(by_length), ROWS):
        wrong += _wrong_of_batch(model, tokenizer, by_length[start : start + ROWS])
    return wrong


def _wrong_of_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[Question]
) -> list[tuple[Question, str]]:
    """The same of one batch. Rows are padded on the right, where no token that counts attends."""
    prompts = [
        tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
        for question in batch
    ]
    prompt_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    answer_ids = [
        [*tokenizer.encode(question.answer, add_special_tokens=False), tokenizer.eos_token_id] for question in batch
    ]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]
    likeliest = model(input_ids=pad_sequence(rows, batch_first=True)).logits.argmax(-1)
    wrong = []
    for question, prompt, answer, predicted in zip(batch, prompt_ids, answer_ids, likeliest, strict=True):
        tokens = predicted[len(prompt) - 1 : len(prompt) - 1 + len(answer)].tolist()
        if tokens != answer:
            wrong.append((question, str(tokenizer.decode(tokens))))
    return wrong


async def wrong_of_mesh(address: str, asked: list[Question]) -> list[tuple[Question, str]]:
    """The questions that a mesh answers otherwise, and its answers."""
    at_once = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def ask(question: Question) -> tuple[Question, str] | None:
        async with at_once:
            result = await client.generate(messages=question.messages, max_new_tokens=80)
        return None if result.text == question.answer else (question, result.text)

    async with tandem.AsyncClient(address) as client:
        answers = await asyncio.gather(*map(ask, asked))
    return [answer for answer in answers if answer is not None]


def main() -> int:
    """Print a row for each claim, and the wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "tandem-small")
    parser.add_argument("--address", help="of a router that serves the model")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask one question of N")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = list(islice(questions(), 0, None, arguments.every))
    if arguments.address:
        wrong = run_async(wrong_of_mesh(arguments.address, asked))
    else:
        wrong = wrong_in_transformers(arguments.folder, asked)
    print("| claim | questions | right |\n|---|---:|---:|")
    for claim in dict.fromkeys(question.claim for question in asked):
        count = sum(question.claim == claim for question in asked)
        num_wrong = sum(question.claim == claim for question, _ in wrong)
        print(f"| {claim} | {count:,} | {100 * (1 - num_wrong / count):.2f} % |")
    for question, answer in wrong:
        print(f"{question.claim}: {question.messages[-1]['content']!r} -> {answer!r}, not {question.answer!r}")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_program(main)
