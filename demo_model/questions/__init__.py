"""Templated chats whose answers a program can check, with an honest held-out split.

Every sample has a `key`. Samples whose key hashes into the held-out tenth are never used for training. The key of rule
kinds (arithmetic, spelling) is the operands, so no wording of a held-out problem was trained on. The key of fact kinds
(capitals, explanations) is the text of the question, so the fact was trained on, but not in this wording.
"""

from __future__ import annotations

import random

from demo_model.questions import facts, letters, longer, numbers, recall
from demo_model.questions.sample import Kind, Mix, Sample, is_held_out

KINDS: dict[str, Kind] = {
    **numbers.KINDS,
    **letters.KINDS,
    **facts.KINDS,
    **recall.KINDS,
    **longer.KINDS,
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "Answer the question.",
    "Be brief and correct.",
    "You are the demonstration model of Tandem.",
)

__all__ = ["KINDS", "SYSTEM_PROMPTS", "Kind", "Mix", "Sample", "conversation", "draw", "is_held_out"]


def draw(kind: str, rng: random.Random, held_out: bool) -> Sample:
    """A sample of `kind` from one side of the split, drawn repeatedly until it falls there."""
    while True:
        sample = KINDS[kind].make(rng)
        if is_held_out(sample.key) == held_out:
            return sample


def conversation(rng: random.Random, mix: Mix = "early") -> list[dict[str, str]]:
    """One training chat: an optional system prompt, then mostly one sample, now and then up to six. Many chats of
    several begin with small talk.

    `mix` gives the kinds' shares.
    """
    names = list(KINDS)
    weights = [KINDS[name].share(mix) for name in names]
    count = rng.choices((1, 2, 3, 4, 5, 6), (70, 20, 4, 2, 2, 2))[0]
    kinds = rng.choices(names, weights, k=count)
    if count > 1 and rng.random() < 0.3:
        kinds[0] = "small_talk"
    samples = [draw(kind, rng, held_out=False) for kind in kinds]
    system = samples[0].system
    if system is None and rng.random() < 0.25:
        system = rng.choice(SYSTEM_PROMPTS)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for sample in samples:
        if sample.system is not None and sample is not samples[0]:
            continue
        for question, answer in sample.turns:
            messages.append({"role": "user", "content": _loosen(question, rng)})
            messages.append({"role": "assistant", "content": answer})
    return messages


def _loosen(question: str, rng: random.Random) -> str:
    """Type the question as people do: sometimes without capitals, sometimes no closing mark."""
    case = rng.random()
    if case < 0.15:
        question = question[0].lower() + question[1:]
    elif case < 0.22:
        question = question.lower()
    if rng.random() < 0.15 and question[-1] in "?.!":
        question = question[:-1]
    return question
