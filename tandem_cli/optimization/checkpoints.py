"""Quantised checkpoints of candidates, made when the first one needs them, in a folder of OUT."""

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.quantizer.make import FloatCheckpoint, open_float_checkpoint, quantize_checkpoint, require_fit
from engine.quantizer.schemes import Scheme, make_scheme
from mesh.domain.errors import ConfigurationError
from tandem_cli.quantize import DEFAULT_ALPHA

_GROUP_SIZES = (128, 64, 32)
_MAX_CALIBRATION = 256
_MAX_TOKENS = 512


class Checkpoints:
    """Makes checkpoints of one model in a folder, calibrated with prompts as token ids."""

    def __init__(self, model_dir: Path, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        self._model_dir = model_dir
        self._prompts = [prompt[:_MAX_TOKENS] for prompt in prompts if len(prompt) > 1][:_MAX_CALIBRATION]
        self._folder = folder

    def require(self, scheme: str) -> None:
        """Raise ConfigurationError if the scheme cannot be made of the model."""
        if not self._prompts:
            raise ConfigurationError("no prompt has two tokens, so there is nothing to calibrate with")
        checkpoint = open_float_checkpoint(self._model_dir)
        _fitting_scheme(scheme, checkpoint)

    def make(self, scheme: str, on_progress: Callable[[float], None] = lambda share: None) -> Path:
        """The folder of a checkpoint, which is made unless it is there. Raises ConfigurationError."""
        out = self._folder / scheme
        if out.is_dir():
            return out
        checkpoint = open_float_checkpoint(self._model_dir)
        config = checkpoint.config
        quantize_checkpoint(
            checkpoint,
            out,
            _fitting_scheme(scheme, checkpoint),
            [prompt[: config.max_model_len] for prompt in self._prompts],
            self._prompts[:1],  # quality is measured elsewhere
            lambda done: on_progress(done / config.num_layers),
        )
        return out


def _fitting_scheme(name: str, checkpoint: FloatCheckpoint) -> Scheme:
    """The scheme with the largest groups that divide all matrices. Raises ConfigurationError."""
    for group_size in _GROUP_SIZES:
        scheme = make_scheme(name, group_size=group_size, alpha=DEFAULT_ALPHA, dtype=checkpoint.dtype)
        try:
            require_fit(checkpoint, scheme)
        except ConfigurationError:
            if group_size == _GROUP_SIZES[-1]:
                raise
        else:
            return scheme
    raise AssertionError("the last size has returned or raised")
