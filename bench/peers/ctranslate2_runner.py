"""CTranslate2: its generator runs on static batches, as it has no continuous batching; see bench.peers.wire.

The format of converted weights is float32, bfloat16 or int8. With int8, activations are quantized to int8 at run time.
"""

import json
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter

from bench.peers.wire import Options, Request, Wire, run, serve_static_batches

_COMPUTE = {"none": "float32", "bf16": "bfloat16", "int8": "int8"}


class Batches:
    """Generates one batch at a time. This engine takes token strings, so ids are converted."""

    def __init__(self, wire: Wire, options: Options) -> None:
        self._wire = wire
        self._names: list[str] = json.loads((options.model / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            str(options.model),
            compute_type=_COMPUTE[options.precision],
            inter_threads=1,
            intra_threads=options.threads,
        )

    def generate(self, batch: list[Request]) -> None:
        """Generate until the longest request has all of its tokens, and send the tokens to the driver."""

        def tell(step: Any) -> bool:
            request = batch[step.batch_id]
            if step.step < request.max_new_tokens:
                self._wire.tokens(request.id, [step.token_id])
            return False

        max_new_tokens = max(request.max_new_tokens for request in batch)
        self._generator.generate_batch(
            [[self._names[token] for token in request.prompt] for request in batch],
            max_length=max_new_tokens,
            min_length=max_new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=tell,
        )


def serve(options: Options) -> None:
    """Serve requests until the driver closes stdin."""
    wire = Wire()
    serve_static_batches(wire, options, Batches(wire, options).generate)


def convert(checkpoint: Path, target: Path, weights: str) -> None:
    """Convert a checkpoint to CTranslate2's format."""
    TransformersConverter(str(checkpoint)).convert(str(target), quantization=weights)


if __name__ == "__main__":
    run(serve, convert)
