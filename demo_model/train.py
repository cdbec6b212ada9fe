"""Trains the bundled chat model and its draft from scratch, offline, on one CPU core.

    python -m demo_model.train                    # both models, as shipped
    python -m demo_model.train --minutes 3 --out some/folder

Writes standard Hugging Face folders. The plain command is seeded; `--minutes` fits its steps to the machine.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.encoding import CONTEXT, Batch, save_tokenizer, steps, train_tokenizer
from demo_model.questions import Mix
from mesh.interrupts import run_program

NEWTON_SCHULZ_STEPS = 4
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

WARMUP_STEPS = 30
MUON_RATE = 0.02
LAST_SHARE = 0.02
PROBE_STEPS = 8
CHECKPOINT_S = 180
SEED = 20
MORE_PEAK = 0.4


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` with its singular values brought close to 1, by a quintic Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalized update, which needs fewer training tokens than AdamW. An optimizer for weight
    matrices. Embeddings and norms need AdamW."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, scaled so that wide and tall matrices move by the same size per entry."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(average, group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


@dataclass(frozen=True)
class Phase:
    """Optimizer steps on one mix of questions. The learning rate decays over `decay_steps`, which may exceed `steps`.

    `mix` selects the kinds' shares; `seed` draws the questions; `peak` is the highest learning rate, as a share of the
    plan's; `random_share` of the chats repeat random tokens. A phase ends after `limit_s` seconds at the latest, and
    the learning rate decays accordingly.
    """

    steps: int
    decay_steps: int
    mix: Mix
    seed: int
    peak: float = 1.0
    random_share: float = 0.0
    limit_s: float = math.inf


@dataclass(frozen=True)
class TrainingPlan:
    """Shape and training of one model. `phases` are those of the shipped weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    learning_rate: float
    phases: tuple[Phase, ...]


PLANS = {
    "tandem-small": TrainingPlan(
        256,
        4,
        8,
        2,
        640,
        2e-3,
        (
            Phase(500, 1700, "early", SEED + 1),
            Phase(1240, 1240, "late", SEED + 2),
            Phase(2200, 2200, "early", SEED + 3),
            Phase(2260, 2260, "late", SEED + 4, MORE_PEAK),
            Phase(2300, 3200, "copying", 31, 0.7, 0.3),
            Phase(4500, 4500, "early", 51, 0.8, 0.3),
            Phase(2600, 2600, "copying", 61, 0.6, 0.1),
            Phase(3200, 3200, "late", 62, 0.5, 0.06),
            Phase(2200, 2200, "late", 71, 0.4, 0.04),
            Phase(700, 700, "late", 81, 0.25, 0.03),
            Phase(2059, 2059, "late", 91, 0.2, 0.06),
            Phase(8265, 8265, "late", 131, 0.3, 0.06),
        ),
    ),
    "tandem-draft": TrainingPlan(
        128, 2, 4, 2, 320, 4e-3, (Phase(300, 1700, "early", SEED + 1), Phase(1200, 1200, "late", SEED + 2))
    ),
}


def build(plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
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


def backward(model: LlamaForCausalLM, parts: list[Batch], bfloat16: bool) -> float:
    """Add the gradients of the mean cross-entropy (nats) over the assistant's tokens in all `parts`; returns the mean.
    The output matrix is applied to those tokens alone.
    """
    num_targets = sum(int((batch.targets >= 0).sum()) for batch in parts)
    total = 0.0
    for batch in parts:
        is_target = batch.targets >= 0
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            states = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[is_target]
            logits = model.lm_head(states)
            loss = functional.cross_entropy(logits, batch.targets[is_target], reduction="sum") / num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def rate_share(step: int, done: float, peak: float) -> float:
    """Share of the plan's learning rate: linear warm-up to `peak`, then a cosine down to LAST_SHARE of it. `done` is
    the share of the phase that is over.
    """
    cosine = LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return min((step + 1) / WARMUP_STEPS, peak * cosine)


def optimizers_for(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW at `learning_rate` for the embedding and the norms."""
    layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    layer_ids = {id(parameter) for parameter in layers}
    other_parameters = [parameter for parameter in model.parameters() if id(parameter) not in layer_ids]
    adam = torch.optim.AdamW(other_parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers = [Muon(layers, lr=MUON_RATE), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def fit(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    plan: TrainingPlan,
    *,
    bfloat16: bool,
    folder: Path | None = None,
) -> None:
    """Train in place for one phase, from a fresh optimizer, and save to `folder` every few minutes. `bfloat16`
    multiplies matrices in bf16; weights, sums and the optimizers' states stay fp32.
    """
    # The fused attention's backward pass in bf16 takes ten times as long as plain products on a CPU.
    model.set_attn_implementation("eager")
    optimizers = optimizers_for(model, plan.learning_rate)
    start, start_cpu = time.monotonic(), time.process_time()
    saved = start
    average: float | None = None
    drawn = steps(tokenizer, phase.seed, phase.mix, phase.random_share)
    for step, parts in enumerate(islice(drawn, phase.steps)):
        elapsed_s = time.monotonic() - start
        done = max(step / phase.decay_steps, elapsed_s / phase.limit_s)
        loss = backward(model, parts, bfloat16)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_share(step, done, phase.peak)
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average = loss if average is None else average + 0.02 * (loss - average)
        is_over = step == phase.steps - 1 or elapsed_s > phase.limit_s
        if step % 100 == 0 or is_over:
            cpu_minutes = (time.process_time() - start_cpu) / 60
            print(f"step {step}/{phase.steps} loss {average:.4f} {cpu_minutes:.1f} minutes of CPU", flush=True)
        if folder is not None and (is_over or time.monotonic() - saved > CHECKPOINT_S):
            save(model, tokenizer, folder)
            saved = time.monotonic()
        if is_over:
            break


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


def scaled(
    plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast, minutes: float, *, bfloat16: bool
) -> tuple[Phase, ...]:
    """The plan's phases, shortened or lengthened to `minutes` from the measured speed of a few steps."""
    start = time.monotonic()
    trial = dataclasses.replace(plan.phases[0], steps=PROBE_STEPS)
    fit(build(plan, tokenizer), tokenizer, trial, plan, bfloat16=bfloat16)
    affordable = minutes * 60 * PROBE_STEPS / (time.monotonic() - start)
    share = affordable / sum(phase.steps for phase in plan.phases)
    return tuple(
        dataclasses.replace(phase, steps=round(phase.steps * share), decay_steps=round(phase.decay_steps * share))
        for phase in plan.phases
    )


def more_phase(arguments: argparse.Namespace) -> Phase:
    """The phase that --more describes."""
    limit_s = math.inf if arguments.minutes is None else 60 * arguments.minutes
    steps = arguments.more
    return Phase(steps, steps, arguments.mix, arguments.seed, arguments.peak, arguments.random_share, limit_s)


def train(name: str, tokenizer: PreTrainedTokenizerFast, arguments: argparse.Namespace) -> None:
    """Train one model from scratch, or further from the weights in `arguments.out` with --more."""
    plan, folder, bfloat16 = PLANS[name], arguments.out / name, arguments.bfloat16
    torch.manual_seed(SEED)
    if arguments.more is not None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        phases: tuple[Phase, ...] = (more_phase(arguments),)
    else:
        phases = (
            plan.phases if arguments.minutes is None else scaled(plan, tokenizer, arguments.minutes, bfloat16=bfloat16)
        )
        torch.manual_seed(SEED)
        model = build(plan, tokenizer)
    print(f"{name}: {model.num_parameters():,} parameters", flush=True)
    for phase in phases:
        fit(model, tokenizer, phase, plan, bfloat16=bfloat16, folder=folder)


def main() -> None:
    """Train the chosen models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the model folders")
    parser.add_argument("--model", choices=sorted(PLANS), help="train this one only")
    parser.add_argument(
        "--minutes", type=float, help="time per model, instead of the shipped steps; with --more a limit"
    )
    parser.add_argument("--more", type=int, metavar="STEPS", help="train the weights in --out further")
    parser.add_argument("--seed", type=int, default=SEED + 4, help="of the questions of --more")
    parser.add_argument("--mix", choices=get_args(Mix), default="late", help="of the questions of --more")
    parser.add_argument("--peak", type=float, default=MORE_PEAK, help="highest learning rate of --more (1: the plan's)")
    parser.add_argument("--random-share", type=float, default=0.0, help="of the chats of --more repeats random tokens")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bf16: faster on CPUs that have it")
    parser.add_argument("--new-tokenizer", action="store_true", help="train one instead of keeping the shipped")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shipped = Path(__file__).parent / "tandem-small"
    fresh = arguments.new_tokenizer
    tokenizer = train_tokenizer(SEED) if fresh else PreTrainedTokenizerFast.from_pretrained(shipped)
    for name in PLANS if arguments.model is None else (arguments.model,):
        train(name, tokenizer, arguments)


if __name__ == "__main__":
    run_program(main)
