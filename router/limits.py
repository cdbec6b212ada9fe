"""How long requests may be."""

from collections.abc import Iterable
from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import WorkerInfo
from mesh.model_files import ModelFacts
from router.settings import RouterSettings, require_input_below_total

# Stands in where neither the model, nor the settings, nor a worker sets a limit.
_UNLIMITED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that hold for a request now."""

    max_input_tokens: int
    max_total_tokens: int


def capacity_tokens(info: WorkerInfo) -> int:
    """Longest sequence that a worker can hold."""
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)


class LimitPolicy:
    """Works out limits from settings, model and workers. Raises ConfigurationError if they contradict each other."""

    def __init__(self, settings: RouterSettings, facts: ModelFacts) -> None:
        positions = facts.max_positions
        wanted = settings.max_total_tokens
        if wanted is not None and positions is not None and wanted > positions:
            raise ConfigurationError(
                f"max_total_tokens must be <= the model's longest sequence, got {wanted} and {positions}"
            )
        self._max_total = wanted or positions or _UNLIMITED_TOKENS
        # An encoder-decoder model's decoder begins with a token that takes room, and that clients know nothing of.
        self._num_hidden = 0 if facts.decoder_start_token_id is None else 1
        self._max_input = settings.max_input_length or self._max_total - 1
        require_input_below_total(self._max_input, self._max_total)

    def resolve(self, decode_workers: Iterable[WorkerInfo]) -> Limits:
        """Limits with these workers; the roomiest one counts. Without workers, what settings and model allow."""
        room = max((capacity_tokens(info) - self._num_hidden for info in decode_workers), default=self._max_total)
        max_total = min(self._max_total, room)
        return Limits(min(self._max_input, max_total - 1), max_total)
