"""Measures what structured output costs a step: making masks beside the model, and applying them behind it.

    python -m bench.masks [--vocab 49152 151936] [--seqs 1 8 32] [--steps 60]

CPU time of one token of one sequence, on a made-up byte-level vocabulary. Logits are random, so texts are as odd as the
schema lets them be, and masks as hard to make.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.masks import TokenMasks
from engine.sequence import Sequence
from mesh.domain.request import Request
from mesh.domain.sampling import SamplingParams
from mesh.domain.structure import Structure, StructureKind
from mesh.grammar import GrammarCompiler
from mesh.malloc import keep_freed_memory

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 20},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
_STRUCTURE = Structure(StructureKind.JSON_SCHEMA, json.dumps(_SCHEMA))
_SYLLABLES = (
    "ba",
    "be",
    "bi",
    "co",
    "da",
    "en",
    "er",
    "go",
    "ha",
    "in",
    "ka",
    "la",
    "mi",
    "no",
    "on",
    "re",
    "sa",
    "te",
    "un",
)
_END = "<|end|>"


@dataclass
class Costs:
    """CPU seconds, and tokens they were spent on."""

    load_s: float = 0.0
    compile_s: float = 0.0
    make_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)


def main() -> None:
    """Print a row for each size of vocabulary and batch."""
    arguments = _arguments()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    print("vocabulary  sequences  tokenizer  compile   making a mask, mean / p99   applying it")
    for vocab_size in arguments.vocab:
        with tempfile.TemporaryDirectory() as folder:
            end = write_vocabulary(Path(folder), vocab_size)
            for num_seqs in arguments.seqs:
                _show(vocab_size, num_seqs, measure(Path(folder), vocab_size, end, num_seqs, arguments.steps))


def write_vocabulary(folder: Path, vocab_size: int) -> int:
    """What workers read of a checkpoint, tokenizer included; returns the token that ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *('":', '",', '{"', '"}', "},", '":Ġ"', "Ġ{", "Ġ[")])
    draws = random.Random(0)
    while len(tokens) < vocab_size - 1:
        word = "".join(draws.choices(_SYLLABLES, k=draws.randint(1, 4)))
        tokens[draws.choice(("", "Ġ", "Ġ")) + draws.choice((word, word.capitalize()))] = None
    tokenizer = Tokenizer(BPE({token: place for place, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.get_vocab_size() - 1
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": end}))
    return end


def measure(folder: Path, vocab_size: int, end: int, num_seqs: int, num_steps: int) -> Costs:
    """Steps of so many sequences; those that have ended begin anew."""
    costs, compiler = Costs(), GrammarCompiler(folder)
    costs.load_s = _cpu_s(lambda: compiler.compile(Structure(StructureKind.JSON_OBJECT)))
    costs.compile_s = _cpu_s(lambda: compiler.compile(_STRUCTURE))
    masks = TokenMasks(compiler, vocab_size)
    sequences = [_sequence(str(place)) for place in range(num_seqs)]
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        logits = torch.randn(num_seqs, vocab_size, generator=generator)
        costs.make_s.append(_cpu_s(lambda: _make(masks, sequences)) / num_seqs)
        began_s = time.process_time()
        chosen = masks.apply(logits, logits).argmax(1).tolist()
        plain_s = _cpu_s(lambda logits=logits: logits.argmax(1))
        costs.apply_s.append((time.process_time() - began_s - 2 * plain_s) / num_seqs)
        for place, token in enumerate(chosen):
            sequences[place].token_ids.append(token)
            if token == end:
                masks.forget(sequences[place])
                sequences[place] = _sequence(f"{place}-{step}")
    return costs


def _make(masks: TokenMasks, sequences: list[Sequence]) -> None:
    masks.begin(sequences)
    masks.wait()


def _sequence(name: str) -> Sequence:
    sampling = SamplingParams(max_new_tokens=10_000, seed=0, structure=_STRUCTURE)
    return Sequence(Request(name, 0, (0,), 1, sampling))


def _cpu_s(work: Any) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def _show(vocab_size: int, num_seqs: int, costs: Costs) -> None:
    made, applied = sorted(costs.make_s), sorted(costs.apply_s)
    mean_us = sum(made) / len(made) * 1e6
    print(
        f"{vocab_size:10d} {num_seqs:10d} {costs.load_s:8.2f} s {costs.compile_s * 1e3:5.1f} ms"
        f" {mean_us:12.0f} / {made[int(len(made) * 0.99)] * 1e6:5.0f} µs {applied[len(applied) // 2] * 1e6:16.0f} µs"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


if __name__ == "__main__":
    main()
