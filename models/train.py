"""Trains the bundled chat model and its draft from scratch, offline, on one CPU core.

    python -m models.train                    # both models, as shipped
    python -m models.train --minutes 3 --out /tmp/try

Writes standard Hugging Face folders. The plain command and `--steps` are reproducible; `--minutes` fits the
steps to the machine. The second phase gives more room to what is still hard.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.muon import Muon
from models.packing import Batch, batches
from models.vocabulary import CONTEXT, save_tokenizer, train_tokenizer

ROWS = 8
WARMUP_STEPS = 30
MUON_RATE = 0.02
LAST_SHARE = 0.02
PROBE_STEPS = 8
DECAY_STEPS = 1700  # the first phase ends early on this schedule
SEED = 20


@dataclass(frozen=True)
class Plan:
    """The shape of one model, and the optimizer steps of its two phases as the shipped weights took them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    learning_rate: float
    early_steps: int
    late_steps: int


PLANS = {
    "tandem-small": Plan(256, 4, 8, 2, 640, 2e-3, 500, 1240),
    "tandem-draft": Plan(128, 2, 4, 2, 320, 4e-3, 300, 1200),
}


def build(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A freshly initialised model: Llama with tied embeddings and grouped-query attention."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=plan.hidden // plan.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy (nats) over the assistant's tokens; the output matrix is applied to those alone."""
    states = model.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).last_hidden_state
    wanted = batch.targets >= 0
    return functional.cross_entropy(model.lm_head(states[wanted]), batch.targets[wanted])


def rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to LAST_SHARE."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def optimizers_for(model: LlamaForCausalLM, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    taken = {id(parameter) for parameter in layers}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    adam = torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers = [Muon(layers, lr=MUON_RATE), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def fit(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, late: bool) -> None:
    """Train in place for one phase, from a fresh optimizer and with a schedule of its own."""
    steps = plan.late_steps if late else plan.early_steps
    optimizers, start = optimizers_for(model, plan), time.monotonic()
    average = math.log(len(tokenizer))
    for step, batch in enumerate(islice(batches(tokenizer, SEED + 1 + late, ROWS, late), steps)):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_share(step, steps if late else DECAY_STEPS)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average += 0.02 * (loss.item() - average)
        if step % 100 == 0 or step == steps - 1:
            speed = (step + 1) * batch.ids.numel() / (time.monotonic() - start)
            print(f"step {step}/{steps} loss {average:.4f} {speed:.0f} tokens/s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in fp16, configuration, greedy generation defaults and tokenizer."""
    half = copy.deepcopy(model).half().eval()  # type: ignore[no-untyped-call]
    half.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    half.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def fitted(plan: Plan, tokenizer: PreTrainedTokenizerFast, minutes: float) -> Plan:
    """`plan` with its phases shortened or lengthened to `minutes`, from the measured speed of a few steps."""
    probe, trial = build(plan, tokenizer), dataclasses.replace(plan, early_steps=PROBE_STEPS)
    start = time.monotonic()
    fit(probe, tokenizer, trial, late=False)
    share = minutes * 60 * PROBE_STEPS / (time.monotonic() - start) / (plan.early_steps + plan.late_steps)
    return dataclasses.replace(
        plan, early_steps=round(plan.early_steps * share), late_steps=round(plan.late_steps * share)
    )


def main() -> None:
    """Train the chosen models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the model folders")
    parser.add_argument("--model", choices=sorted(PLANS), help="train this one only")
    parser.add_argument("--minutes", type=float, help="time per model, instead of the shipped steps")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "SECOND"), help="steps of the two phases")
    parser.add_argument("--new-tokenizer", action="store_true", help="train one instead of keeping the shipped")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shipped = Path(__file__).parent / "tandem-small"
    tokenizer = train_tokenizer(SEED) if arguments.new_tokenizer else PreTrainedTokenizerFast.from_pretrained(shipped)
    for name, plan in PLANS.items():
        if arguments.model not in (None, name):
            continue
        if arguments.steps is not None:
            plan = dataclasses.replace(plan, early_steps=arguments.steps[0], late_steps=arguments.steps[1])
        elif arguments.minutes is not None:
            plan = fitted(plan, tokenizer, arguments.minutes)
        torch.manual_seed(SEED)
        model = build(plan, tokenizer)
        print(f"{name}: {model.num_parameters():,} parameters", flush=True)
        for late in (False, True):
            fit(model, tokenizer, plan, late)
            save(model, tokenizer, arguments.out / name)


if __name__ == "__main__":
    main()
