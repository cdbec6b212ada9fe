"""Settings of a prefill worker."""

from dataclasses import dataclass

from mesh.setting_checks import require_at_least
from mesh.settings import setting
from worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """A worker's settings, and the limits of one prefill step."""

    max_batch_prefill_tokens: int = setting(
        512,
        "maximum prompt tokens of one step; longer prompts are computed in chunks",
        env=("MAX_BATCH_PREFILL_TOKENS",),
    )
    max_num_prompts: int = setting(
        64,
        "maximum prompts computed concurrently; at most max_batch_prefill_tokens, as each needs a token of a step; a "
        "decode worker's max_rolling_batch_size counts running sequences",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_batch_prefill_tokens", "max_num_prompts")

    @property
    def prompts_at_once(self) -> int:
        """Maximum prompts computed concurrently: each needs at least one token of a step."""
        return min(self.max_num_prompts, self.max_batch_prefill_tokens)
