"""A prompt and a decode step of each family of models, compiled and eager, in every type of weights:

    python -m bench.families [FAMILY ...] [--weights float32 bfloat16 int8 int4] [--batch 1 8] [--rounds 3]

All families have about the same size: twelve layers of width 768, some 90 to 140 million weights, which are random. One
thread computes, and times are CPU times of the engine's thread. The compiled decoder and the eager one take turns.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from engine.loading.resolve import kv_layout, resolve, why_eager
from engine.models.read_config import load_decoder_config
from engine.runner_settings import RunnerSettings
from engine.settings import DTYPES
from mesh.domain.errors import ConfigurationError
from mesh.interrupts import run_program, showing
from tandem_cli.capacity.measurement import EngineSteps, StepWorkload
from tandem_cli.model_files.model_folders import write_without_weights

_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 32000}
_PLAIN = _SIZES | {"intermediate_size": 3072, "max_position_embeddings": 2048, "tie_word_embeddings": True}
_GATED = _PLAIN | {"intermediate_size": 2048, "num_key_value_heads": 4}
_GEMMA = _GATED | {"head_dim": 64, "sliding_window": 512, "query_pre_attn_scalar": 64}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": _GATED,
    "Qwen3ForCausalLM": _GATED | {"head_dim": 64},
    "GPT2LMHeadModel": _PLAIN | {"activation_function": "gelu_new"},
    "GPTBigCodeForCausalLM": _PLAIN | {"activation_function": "gelu_pytorch_tanh"},
    "Starcoder2ForCausalLM": _PLAIN | {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"},
    "GPTJForCausalLM": _PLAIN | {"rotary_dim": 32, "activation_function": "gelu_new"},
    "GPTNeoXForCausalLM": _PLAIN | {"hidden_act": "gelu"},
    "OPTForCausalLM": _PLAIN | {"ffn_dim": 3072, "activation_function": "relu", "do_layer_norm_before": True},
    "BloomForCausalLM": _PLAIN,
    "FalconForCausalLM": _PLAIN,
    "PhiForCausalLM": _PLAIN | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma4ForCausalLM": _GEMMA
    | {"num_key_value_heads": 2, "global_head_dim": 128, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 64}
    | {"vocab_size_per_layer_input": 32000, "final_logit_softcapping": 30.0},
    "GraniteForCausalLM": _GATED | {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "StableLmForCausalLM": _GATED | {"partial_rotary_factor": 0.25},
    "Glm4ForCausalLM": _GATED | {"head_dim": 64, "pad_token_id": 0},
    "Llama4ForCausalLM": _GATED
    | {"head_dim": 64, "intermediate_size": 512, "intermediate_size_mlp": 2048, "attention_chunk_size": 512}
    | {"num_local_experts": 8, "interleave_moe_layer_step": 2},
    "MixtralForCausalLM": _GATED | {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
}
"""The facts of config.json by `architectures`."""
_PROMPT_TOKENS = 256


class Arm(NamedTuple):
    """A decoder and a type of weights: a dtype, or a quantization."""

    weights: str
    is_eager: bool

    def __str__(self) -> str:
        return f"{self.weights}, {'eager' if self.is_eager else 'compiled'}"


def write_family(architecture: str, folder: Path) -> Path:
    """Write a model folder for load_format=dummy below `folder`."""
    config = {"architectures": [architecture], "bos_token_id": 1, "eos_token_id": 2, **FAMILIES[architecture]}
    return write_without_weights(folder / architecture, config)


def measure(model_dir: Path, arms: Sequence[Arm], batches: Sequence[int], num_rounds: int) -> dict[Arm, list[float]]:
    """For each arm that can run: milliseconds of a prompt, then of a decode step with each number of sequences."""
    engines = {arm: steps for arm in arms if (steps := _engine(model_dir, arm, max(batches))) is not None}
    rounds: dict[Arm, list[list[float]]] = {arm: [] for arm in engines}
    for _ in range(num_rounds):
        for arm, steps in engines.items():
            rounds[arm].append([steps.prompt_ms(), *(steps.decode_ms(batch) for batch in batches)])
    return {arm: [median(column) for column in zip(*rows, strict=True)] for arm, rows in rounds.items()}


def _engine(model_dir: Path, arm: Arm, max_batch: int) -> EngineSteps | None:
    """None if the engine has no such arm: a decoder that is not compiled, or a type of weights that only that has."""
    quantize, dtype = ("none", arm.weights) if arm.weights in DTYPES else (arm.weights, "auto")
    wanted = RunnerSettings(model_dir, load_format="dummy", quantize=quantize, dtype=dtype, enforce_eager=arm.is_eager)
    try:
        settings, config = resolve(wanted)
    except ConfigurationError:
        return None
    is_eager = why_eager(settings, load_decoder_config(model_dir), kv_layout(config, settings)) is not None
    if is_eager != arm.is_eager:
        return None
    workload = StepWorkload(
        model_dir, quantize, max_batch, prompt_tokens=_PROMPT_TOKENS, dtype=dtype, enforce_eager=arm.is_eager
    )
    return EngineSteps(workload)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=[*FAMILIES])
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--eager", nargs="*", default=["float32", "int8"], help="types of weights to run eagerly, too")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are printed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    arms = [*(Arm(each, is_eager=False) for each in options.weights), *(Arm(each, True) for each in options.eager)]
    times: dict[str, dict[str, list[float]]] = {}
    titles = [f"prompt of {_PROMPT_TOKENS}, ms", *(f"step of {batch}, ms" for batch in options.batch)]
    table = Table("family", "weights and decoder", *titles)
    console = Console(width=120)
    with showing(table.rows, lambda: console.print(table)), tempfile.TemporaryDirectory() as folder:
        for family in options.families:
            found = measure(write_family(family, Path(folder)), arms, options.batch, options.rounds)
            times[family] = {str(arm): ms for arm, ms in found.items()}
            for arm, ms in found.items():
                table.add_row(family, str(arm), *(f"{each:.1f}" for each in ms))
            if options.json:
                options.json.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    run_program(main)
