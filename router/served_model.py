"""A model that a router serves: its name, facts, tokenizer and chat template."""

from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import LayoutMismatch
from mesh.domain.worker import WorkerInfo
from mesh.model_files import ModelFacts, read_model_facts
from router.text.chat import ChatTemplate
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Immutable; shared by all requests."""

    name: str
    facts: ModelFacts
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def require_fits(self, info: WorkerInfo) -> None:
        """Raise LayoutMismatch, with both values, for a worker of another tokenizer."""
        if info.tokenizer_fingerprint != self.facts.tokenizer_fingerprint:
            raise LayoutMismatch(
                f"tokenizers differ: {self.facts.tokenizer_fingerprint} at the router, "
                f"{info.tokenizer_fingerprint} at worker {info.worker_id}"
            )

    @classmethod
    def load(cls, name: str, model_dir: Path) -> "ServedModel":
        """Raises ConfigurationError that names the file at fault."""
        facts = read_model_facts(model_dir)
        return cls(name, facts, Tokenizer.load(model_dir, facts.eos_token_ids), ChatTemplate.load(model_dir))
