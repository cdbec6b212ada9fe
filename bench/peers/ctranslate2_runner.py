"""Runs CTranslate2's generator on static batches: it has no continuous batching; see bench.peers.wire."""

import json
from typing import Any

import ctranslate2

from bench.peers.static_batches import serve
from bench.peers.wire import Options, Request, Wire, parse_options

_COMPUTE = {"none": "float32", "bf16": "bfloat16", "int8": "int8"}


class Batches:
    """Generates one batch at a time. Tokens have names in this engine, so ids are translated to and fro."""

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
        """Until the longest request has all its tokens."""

        def tell(step: Any) -> bool:
            request = batch[step.batch_id]
            if step.step < request.max_new_tokens:
                self._wire.tokens(request.id, [step.token_id])
            return False

        most = max(request.max_new_tokens for request in batch)
        self._generator.generate_batch(
            [[self._names[token] for token in request.prompt] for request in batch],
            max_length=most,
            min_length=most,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=tell,
        )


if __name__ == "__main__":
    wire, options = Wire(), parse_options()
    serve(wire, options.max_seqs, Batches(wire, options).generate)
