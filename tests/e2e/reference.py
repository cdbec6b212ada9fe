"""The log-probs of transformers for tokens that we generated: the other side of the parity tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem import Token
from tests.component.remote_families import load_reference

TOLERANCE = 1e-4


@dataclass
class Reference:
    """A checkpoint in transformers, fp32, eager attention; see tests.component.remote_families.load_reference."""

    model: Any

    @classmethod
    def load(cls, model_dir: Path) -> "Reference":
        return cls(load_reference(model_dir))

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probs of the next token after each position: [len(token_ids), vocab]."""
        logits = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Greedy continuation by transformers' own `generate`."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
        return out[0, len(prompt) :].tolist()

    def check_greedy(self, prompt: list[int], tokens: tuple[Token, ...]) -> None:
        """Every token is transformers' own greedy choice after those before it, with the same log-prob.

        By induction that is what greedy `generate` returns, at the price of one forward pass.
        """
        ids = [token.id for token in tokens]
        scores = self.logprobs(prompt + ids)[len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == ids
        ours = torch.tensor([token.logprob for token in tokens])
        theirs = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (ours - theirs).abs().max() <= TOLERANCE
