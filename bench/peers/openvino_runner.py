"""OpenVINO: runs openvino-genai's ContinuousBatchingPipeline; see bench.peers.wire.

The format of converted weights is fp32, bf16, int8 or int4. int8 is the default weight compression of the toolkit:
asymmetric, with one scale per output channel. int4 is asymmetric in groups of 32 inputs, as Tandem's, with the
embedding, which is the output matrix, too, in int8.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.wire import Options, Request, Wire, run

_BLOCK_TOKENS = 32  # fixed for CPU
_INT4_GROUP = 32


def pipeline(options: Options) -> Any:
    """A pipeline with continuous batching and chunked prefill. fp32 is set explicitly: CPUs with AMX default to
    bf16.
    """
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = options.max_seqs
    scheduler.num_kv_blocks = options.kv_tokens // _BLOCK_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    if options.budget:
        scheduler.max_num_batched_tokens = options.budget
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads, "PERFORMANCE_HINT": "LATENCY"}
    if options.precision == "none":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        properties |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    return genai.ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)


class Runner:
    """Adds new requests between steps, and sends the tokens of each step to the driver."""

    def __init__(self, wire: Wire, options: Options) -> None:
        self._wire = wire
        self._pipeline = pipeline(options)
        self._sampling: dict[str, Any] = {"do_sample": False}
        if options.sampling is not None:
            self._sampling = {"do_sample": True, **options.sampling._asdict()}
            if not options.sampling.top_k:
                del self._sampling["top_k"]
        self._running: dict[int, Any] = {}

    def run(self) -> None:
        """Serve requests until the driver closes stdin."""
        self._wire.ready()
        while True:
            for request in self._wire.arrived(wait_s=0.0 if self._running else None):
                self._running[request.id] = self._add(request)
            self._pipeline.step()
            for request_id, handle in list(self._running.items()):
                self._tell(request_id, handle)

    def _add(self, request: Request) -> Any:
        config = genai.GenerationConfig(max_new_tokens=request.max_new_tokens, ignore_eos=True, **self._sampling)
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(request.id, prompt, config)

    def _tell(self, request_id: int, handle: Any) -> None:
        while handle.can_read():
            for output in handle.read().values():
                self._wire.tokens(request_id, output.generated_ids)
        if handle.get_status() != genai.GenerationStatus.RUNNING:
            del self._running[request_id]
            self._wire.done(request_id)


def convert(checkpoint: Path, target: Path, weights: str) -> None:
    """Export the checkpoint with optimum and write the model to `target`."""
    import nncf  # not at the top: the export tools load torch, which must not be part of what is measured
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    dtype = "bf16" if weights == "bf16" else "fp32"
    main_export(str(checkpoint), str(target), task="text-generation-with-past", ov_config=OVConfig(dtype=dtype))
    if weights in ("int8", "int4"):
        exported = target / "exported"
        exported.mkdir()
        for file in target.glob("openvino_model.*"):
            file.rename(exported / file.name)
        model = openvino.Core().read_model(exported / "openvino_model.xml")
        mode = getattr(nncf.CompressWeightsMode, f"{weights.upper()}_ASYM")
        groups = {"ratio": 1.0, "group_size": _INT4_GROUP} if weights == "int4" else {}
        compressed = nncf.compress_weights(model, mode=mode, **groups)
        openvino.save_model(compressed, target / "openvino_model.xml", compress_to_fp16=False)
        shutil.rmtree(exported)


if __name__ == "__main__":
    run(lambda options: Runner(Wire(), options).run(), convert)
