"""Limits on the length of prompts and sequences."""

from collections.abc import Iterable
from dataclasses import dataclass

from checkpoint.model_files import ModelFacts
from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import WorkerInfo
from router.settings import RouterSettings, require_input_below_total

# Used when neither the model, nor the settings, nor a worker sets a limit.
_UNLIMITED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that hold for a request now."""

    max_input_tokens: int
    max_total_tokens: int


def capacity_tokens(info: WorkerInfo) -> int:
    """Return the length of the longest sequence that the worker can hold."""
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)


class LimitPolicy:
    """Derives limits from settings, model and workers. Raises ConfigurationError if settings and model conflict."""

    def __init__(self, settings: RouterSettings, facts: ModelFacts) -> None:
        positions = facts.max_positions
        setting = settings.max_total_tokens
        if setting is not None and positions is not None and setting > positions:
            raise ConfigurationError(
                f"max_total_tokens must be <= the model's longest sequence, got {setting} and {positions}"
            )
        self._max_total = setting or positions or _UNLIMITED_TOKENS
        # The start token of an encoder-decoder model's decoder takes a position that clients do not see.
        self._num_hidden = 0 if facts.decoder_start_token_id is None else 1
        self._max_input = settings.max_input_length or self._max_total - 1
        require_input_below_total(self._max_input, self._max_total)

    def resolve(self, decode_workers: Iterable[WorkerInfo]) -> Limits:
        """Return the limits with these workers; the largest worker counts.

        Without workers: by settings and model only.
        """
        capacity = max((capacity_tokens(info) - self._num_hidden for info in decode_workers), default=self._max_total)
        max_total = min(self._max_total, capacity)
        return Limits(min(self._max_input, max_total - 1), max_total)
