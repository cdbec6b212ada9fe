"""Settings of a decode worker."""

from dataclasses import dataclass

from engine.speculation.settings import Speculation
from mesh.domain.errors import ConfigurationError
from mesh.model_source import ModelSource
from mesh.settings import setting
from mesh.worker.settings import WorkerSettings

SPECULATIONS = ("auto", "none", "ngram", "draft")
_USUAL_DRAFTS = 8
_MAX_DRAFTS = 64


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """A worker's settings, the size of its batch, and guesses at what comes next."""

    max_rolling_batch_size: int = setting(
        64, "most sequences running or waiting for KV", env=("MAX_BATCH_SIZE", "OPTION_MAX_ROLLING_BATCH_SIZE")
    )
    max_batch_total_tokens: int = setting(0, "tokens whose KV fits here; 0: by memory", env=("MAX_BATCH_TOTAL_TOKENS",))
    max_step_tokens: int = setting(
        256, "most tokens of one step when prompts are prefilled here: what remains beside running sequences is chunked"
    )
    kv_transports: str = setting("shm,grpc", "payload paths for KV that are accepted")
    speculative: str = setting(
        "auto",
        "guess tokens ahead: none, ngram (what followed the last time), draft (a smaller model's guess); "
        "auto: as draft_model and num_speculative_tokens suggest",
    )
    draft_model: str = setting("", "the draft model, named as models are; it has the same tokenizer")
    num_speculative_tokens: int = setting(
        0, f"most tokens guessed ahead of a sequence in one step; 0: {_USUAL_DRAFTS} with speculation"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculative not in SPECULATIONS:
            raise ConfigurationError(f"speculative must be one of {', '.join(SPECULATIONS)}, got {self.speculative!r}")
        if not 0 <= self.num_speculative_tokens <= _MAX_DRAFTS:
            raise ConfigurationError(
                f"num_speculative_tokens must be in [0, {_MAX_DRAFTS}], got {self.num_speculative_tokens}"
            )
        if self.speculative == "draft" and not self.draft_model:
            raise ConfigurationError("speculative=draft needs a draft_model")
        if self.speculative in ("none", "ngram") and self.draft_model:
            raise ConfigurationError(f"draft_model={self.draft_model} and speculative={self.speculative} do not fit")

    def speculation(self) -> Speculation:
        """How tokens are guessed ahead; the draft model is downloaded if need be. Raises ConfigurationError."""
        kind = self.speculative
        if kind == "auto" and self.draft_model:
            kind = "draft"
        elif kind == "auto":
            kind = "ngram" if self.num_speculative_tokens else "none"
        draft_model = ModelSource(self.draft_model, cache_dir=self.model_cache).locate() if self.draft_model else None
        return Speculation(kind, self.num_speculative_tokens or _USUAL_DRAFTS, draft_model)
