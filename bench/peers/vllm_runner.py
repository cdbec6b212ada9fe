"""vLLM: runs its engine in this process, without server and engine-core process, for the least overhead.

Converted weights are W8A8 in the compressed-tensors format: int8 weights with one scale per output channel, and int8
activations with one scale per token, computed at run time. The tied embedding stays unquantised, as usual in this
format.
"""

import ctypes.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, int8

from bench.peers.wire import Options, Request, Wire, run


def restart_with_environment(options: Options) -> None:
    """Replace this process by one with the environment that vLLM gives its workers, before vLLM is loaded.

    This sets Intel's OpenMP with one thread bound to each core (by default it keeps a core free), and tcmalloc if the
    system has it.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: options.threads])
    preload = [f"{sys.prefix}/lib/libiomp5.so", ctypes.util.find_library("tcmalloc_minimal")]
    environ = {
        "LD_PRELOAD": ":".join(library for library in preload if library),
        "OMP_NUM_THREADS": str(options.threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, sys.orig_argv, os.environ | environ)


def engine(options: Options) -> Any:
    """Create the engine. vLLM is imported here, because the import is slow and prints."""
    from vllm import EngineArgs, LLMEngine

    positions = json.loads((options.model / "config.json").read_text())["max_position_embeddings"]
    own_budget = {"max_num_batched_tokens": options.budget} if options.budget else {}
    arguments = EngineArgs(
        model=str(options.model),
        skip_tokenizer_init=True,
        dtype="float32" if options.precision == "none" else "bfloat16",
        max_model_len=min(options.kv_tokens, positions),
        max_num_seqs=options.max_seqs,
        num_gpu_blocks_override=options.kv_tokens // 128 + 1,  # it keeps one for itself
        block_size=128,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 30,
        enforce_eager=options.eager,
        **own_budget,
    )
    return LLMEngine.from_engine_args(arguments)


class Runner:
    """Adds new requests between steps, and sends the tokens of each step to the driver."""

    def __init__(self, wire: Wire, options: Options) -> None:
        self._wire = wire
        self._engine = engine(options)
        drawn = options.sampling
        self._sampling = {"temperature": 0.0} if drawn is None else drawn._asdict()

    def run(self) -> None:
        """Serve requests until the driver closes stdin."""
        self._wire.ready()
        while True:
            for request in self._wire.arrived(wait_s=0.0 if self._engine.has_unfinished_requests() else None):
                self._add(request)
            for output in self._engine.step():
                self._wire.tokens(int(output.request_id), output.outputs[0].token_ids)
                if output.finished:
                    self._wire.done(int(output.request_id))

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            **self._sampling,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(request.id), {"prompt_token_ids": request.prompt}, sampling)


def serve(options: Options) -> None:
    """Serve requests until the driver closes stdin."""
    restart_with_environment(options)
    Runner(Wire(), options).run()


def quantization(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    """Quantization of the weights or of the activations of linear layers."""
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}


CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": quantization("channel", dynamic=False),
            "input_activations": quantization("token", dynamic=True),
        }
    },
}


def quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A linear layer's weight [out, in] as int8 with scales [out, 1]; other tensors unchanged."""
    if not name.endswith("proj.weight"):
        return {name: weight}
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {name: (weight / scale).round().to(int8), name.replace(".weight", ".weight_scale"): scale}


def convert(checkpoint: Path, target: Path, weights: str) -> None:
    """Quantize the weights and write a complete checkpoint to `target`. Exits for a format other than w8a8."""
    if weights != "w8a8":
        raise SystemExit(f"no format {weights}")
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        tensors |= quantized(name, weight)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}, indent=1))


if __name__ == "__main__":
    run(serve, convert)
