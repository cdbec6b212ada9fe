"""Settings of a decode worker."""

from dataclasses import dataclass

from checkpoint.source import ModelSource
from engine.settings import NO_SPECULATION, Speculation, graph_sizes
from mesh.domain.errors import ConfigurationError
from mesh.setting_checks import require_at_least
from mesh.settings import setting
from worker.settings import WorkerSettings

SPECULATIONS = ("auto", "none", "ngram", "mtp", "draft")
_USUAL_DRAFTS = 8
_MAX_DRAFTS = 64


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """A worker's settings, and those of its batch and of speculative decoding."""

    max_rolling_batch_size: int = setting(
        64,
        "maximum sequences that run here or wait for their KV; for prefill workers see max_num_prompts",
        env=("MAX_BATCH_SIZE", "OPTION_MAX_ROLLING_BATCH_SIZE"),
    )
    max_batch_total_tokens: int = setting(0, "tokens whose KV fits here; 0: by memory", env=("MAX_BATCH_TOTAL_TOKENS",))
    max_step_tokens: int = setting(
        256,
        "maximum tokens of one step when prompts are prefilled here: prompt chunks get the tokens that running "
        "sequences leave; never below max_rolling_batch_size, one token per sequence",
    )
    max_step_stretch: float = setting(
        2.0,
        "about how many times as long a step may take because of prompts that are prefilled here (at least 1.1), "
        "estimated from past steps; 8 prompt tokens always go; holds while sequences from prefill workers run; "
        "0: no such limit, only max_step_tokens",
    )
    cuda_graphs: str = setting(
        "auto",
        "sizes of batches whose decode steps are captured as CUDA graphs at start, such as 1,2,4,8; auto: up to "
        "max_rolling_batch_size; 0: none, nor with enforce_eager",
    )
    speculative: str = setting(
        "auto",
        "speculative decoding: none, ngram (continuations of earlier occurrences), mtp (the model's own layer of "
        "multi-token prediction), draft (a smaller model); "
        "auto: chosen by draft_model and num_speculative_tokens",
    )
    draft_model: str = setting("", "the draft model, named like model; it must have the same tokenizer")
    num_speculative_tokens: int = setting(
        0, f"maximum draft tokens per sequence and step; 0: {_USUAL_DRAFTS} with speculation"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_rolling_batch_size", "max_step_tokens")
        require_at_least(self, 0, "max_batch_total_tokens")
        graph_sizes(self.cuda_graphs, self.max_rolling_batch_size)
        if self.max_step_stretch != 0 and not 1.1 <= self.max_step_stretch < float("inf"):
            raise ConfigurationError(f"max_step_stretch must be 0 or at least 1.1, got {self.max_step_stretch:g}")
        if self.speculative not in SPECULATIONS:
            raise ConfigurationError(f"speculative must be one of {', '.join(SPECULATIONS)}, got {self.speculative!r}")
        if not 0 <= self.num_speculative_tokens <= _MAX_DRAFTS:
            raise ConfigurationError(
                f"num_speculative_tokens must be in [0, {_MAX_DRAFTS}], got {self.num_speculative_tokens}"
            )
        if self.speculative == "draft" and not self.draft_model:
            raise ConfigurationError("speculative=draft needs a draft_model")
        if self.speculative in ("none", "ngram", "mtp") and self.draft_model:
            raise ConfigurationError(
                f"draft_model={self.draft_model} and speculative={self.speculative} do not fit: "
                "set speculative=draft, or leave draft_model out"
            )

    @property
    def step_tokens(self) -> int:
        """Maximum tokens of one step: every running sequence needs one."""
        return max(self.max_step_tokens, self.max_rolling_batch_size)

    def speculation(self) -> Speculation:
        """Return the settings of speculative decoding; download the draft model if needed. Raises
        ConfigurationError."""
        kind = self.speculative
        if kind == "auto" and self.draft_model:
            kind = "draft"
        elif kind == "auto":
            kind = "ngram" if self.num_speculative_tokens else "none"
        if kind == "none":
            return NO_SPECULATION
        draft_model = ModelSource(self.draft_model, cache_dir=self.model_cache).locate() if self.draft_model else None
        return Speculation(kind, self.num_speculative_tokens or _USUAL_DRAFTS, draft_model)
