"""Runs `generate` of transformers on static batches of waiting requests; see bench.peers.wire."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.peers.wire import Options, Request, Wire, run, serve_static_batches


class Batches:
    """Generates one batch at a time, padded on the left."""

    def __init__(self, wire: Wire, options: Options) -> None:
        torch.set_num_threads(options.threads)
        dtype = torch.float32 if options.precision == "none" else torch.bfloat16
        self._wire = wire
        self._model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, batch: list[Request]) -> None:
        """Generate until the longest request has all of its tokens, and send the tokens to the driver."""
        longest = max(len(request.prompt) for request in batch)
        pads = [longest - len(request.prompt) for request in batch]
        prompts = torch.tensor([[0] * pad + request.prompt for pad, request in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])

        def tell(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            """Send the tokens of a step. Called after each step as a stopping criterion that never stops."""
            num_new = tokens.shape[1] - longest
            for request, token in zip(batch, tokens[:, -1].tolist(), strict=True):
                if num_new <= request.max_new_tokens:
                    self._wire.tokens(request.id, [token])
            return torch.zeros(len(batch), dtype=torch.bool)

        self._model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=max(request.max_new_tokens for request in batch),
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[tell],
        )


def serve(options: Options) -> None:
    """Serve requests until the driver closes stdin."""
    wire = Wire()
    serve_static_batches(wire, options, Batches(wire, options).generate)


if __name__ == "__main__":
    run(serve)
