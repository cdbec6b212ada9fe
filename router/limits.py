"""The limits of a model's requests: by the settings, the model, and the workers that are there."""

from collections.abc import Collection
from dataclasses import dataclass

from checkpoint.model_files import ModelFacts
from mesh.domain.errors import ConfigurationError
from router.served_model import ServedModel
from router.settings import RouterSettings, require_input_below_total
from router.validation import Limits

# Used when neither the model, nor the settings, nor a worker sets a limit.
_UNLIMITED_TOKENS = 1 << 20


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

    def resolve(self, decode_capacities: Collection[int]) -> Limits:
        """Return the limits with decode workers that can hold sequences of these lengths; without any, those by
        settings and model only.
        """
        smallest, largest = (
            min(self._max_total, pick(decode_capacities, default=_UNLIMITED_TOKENS) - self._num_hidden)
            for pick in (min, max)
        )
        return Limits(min(self._max_input, largest - 1), largest, smallest)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model and its current limits. `ready`: there are workers to serve it."""

    model: ServedModel
    limits: Limits
    ready: bool
    max_concurrent_requests: int
    adapters: tuple[str, ...] = ()
