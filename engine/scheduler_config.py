"""Limits on the batches and sequences of one engine."""

from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_batch_tokens` limits the tokens of a step, `max_num_seqs` the sequences that run at the same time.

    With `whole_prompts` an encoder reads the prompt: its tokens attend to each other, so a prompt is computed in one
    step and shares KV only with equal prompts.
    """

    block_size: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_caching: bool = True
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be >= max_num_seqs ({self.max_num_seqs}): "
                "every running sequence needs one token a step"
            )
