"""A model that the router serves: its name, facts, tokenizer and chat template."""

from dataclasses import dataclass
from pathlib import Path

from checkpoint.model_files import NO_ROPE_OVERRIDE, ModelFacts, RopeOverride, read_model_facts
from mesh.domain.errors import LayoutMismatch
from mesh.domain.request import Request
from mesh.domain.worker import WorkerInfo
from router.text.chat import ChatTemplate
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Immutable; shared by all requests."""

    name: str
    facts: ModelFacts
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def decoder_prompt(self) -> tuple[int, ...]:
        """The decoder's start tokens of an encoder-decoder model, sent after the prompt; empty for other models."""
        start = self.facts.decoder_start_token_id
        return () if start is None else (start,)

    def whole_prompt(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that all KV depends on: the prompt that an encoder reads; empty for other models."""
        return request.token_ids[: request.num_prompt_tokens] if self.decoder_prompt else ()

    def require_fits(self, info: WorkerInfo) -> None:
        """Raise LayoutMismatch, with both values, for a worker of another tokenizer."""
        if info.tokenizer_fingerprint != self.facts.tokenizer_fingerprint:
            raise LayoutMismatch(
                f"tokenizers differ: {self.facts.tokenizer_fingerprint} at the router, "
                f"{info.tokenizer_fingerprint} at worker {info.worker_id}"
            )

    @classmethod
    def load(cls, name: str, model_dir: Path, rope: RopeOverride = NO_ROPE_OVERRIDE) -> "ServedModel":
        """Raises ConfigurationError with the name of the broken file."""
        facts = read_model_facts(model_dir, rope)
        return cls(name, facts, Tokenizer.load(model_dir, facts.eos_token_ids), ChatTemplate.load(model_dir))
