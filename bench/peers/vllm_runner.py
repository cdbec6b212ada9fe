"""Runs the engine of vLLM in this process, without server and engine-core process, for the least overhead."""

import ctypes.util
import os
import sys
from typing import Any

from bench.peers.wire import Options, Request, Wire, parse_options


def restart_with_environment(options: Options) -> None:
    """Replace this process by one with the environment that vLLM gives its workers, before libraries are loaded.

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

    own_budget = {"max_num_batched_tokens": options.budget} if options.budget else {}
    arguments = EngineArgs(
        model=str(options.model),
        skip_tokenizer_init=True,
        dtype="float32" if options.precision == "none" else "bfloat16",
        max_model_len=2048,
        max_num_seqs=options.max_seqs,
        num_gpu_blocks_override=options.kv_tokens // 128,
        block_size=128,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 30,
        **own_budget,
    )
    return LLMEngine.from_engine_args(arguments)


class Runner:
    """Adds new requests between steps, and sends the tokens of each step to the driver."""

    def __init__(self, wire: Wire, options: Options) -> None:
        self._wire = wire
        self._engine = engine(options)

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
            temperature=0.0,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(request.id), {"prompt_token_ids": request.prompt}, sampling)


if __name__ == "__main__":
    options = parse_options()
    restart_with_environment(options)
    Runner(Wire(), options).run()
