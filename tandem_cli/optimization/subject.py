"""The model to serve, on this machine: its base precision, the candidates that can run, and its quantised checkpoints.

A checkpoint is made when the first candidate needs it, in a folder of OUT.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.files import checkpoint_files, is_of_weights
from checkpoint.partition_manifest import checksum
from checkpoint.source import ModelSource
from engine.cores import num_numa_nodes
from engine.loading.resolve import kv_layout, require_mtp, resolve, why_eager
from engine.memory import device_memory
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.model_config import ModelConfig
from engine.quantized_formats.config import read_quantization
from engine.quantizer.float_checkpoint import FloatCheckpoint, open_float_checkpoint
from engine.quantizer.make import quantize_checkpoint, require_fit
from engine.quantizer.schemes import Scheme, make_scheme
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError, InvalidRequest
from tandem_cli.capacity.ranks import precision_of
from tandem_cli.capacity.roofline import Precision
from tandem_cli.local_mesh.hardware import available_cores
from tandem_cli.model_files.calibration import CalibrationEncoder
from tandem_cli.model_files.model_folders import find_model
from tandem_cli.optimization.candidates import (
    BASE,
    COMPUTED,
    STORED,
    Candidate,
    Demand,
    Machine,
    combine,
    memory_needed,
    prune,
    require_some,
    usual_layouts,
    why_not_here,
)
from tandem_cli.optimization.questions import Question
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.quantize import DEFAULT_ALPHA

_LEAST_CALIBRATION = 32
_AUTO_PRECISIONS = ("int8", "int4", "smoothquant", "awq", "gptq")
_GROUP_SIZES = (128, 64, 32)
_MAX_CALIBRATION = 256
_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Subject:
    """`name` is what the user called the model. `prompts` and `references` are those of the questions as token ids; a
    question without a reference has an empty one.
    """

    name: str
    folder: Path
    config: ModelConfig
    base: Precision
    machine: Machine
    prompts: tuple[tuple[int, ...], ...]
    references: tuple[tuple[int, ...], ...]

    @classmethod
    def open(cls, name: str, questions: Sequence[Question]) -> "Subject":
        """Find or download the model. Raises ConfigurationError."""
        folder = find_model(ModelSource(name))
        settings, config = resolve(RunnerSettings(folder, "auto"))
        if isinstance(config, EncoderDecoderConfig):
            raise ConfigurationError(f"{config.architecture} has an encoder: only decoder-only models can be optimised")
        layout = kv_layout(config, settings)
        device = torch.device(settings.device)
        free_bytes = device_memory(device).free_bytes
        reason = why_eager(settings, config, layout)
        machine = Machine(device.type, free_bytes, len(available_cores()), reason)
        encoder = CalibrationEncoder(folder, config.vocab_size)
        pairs = [_encoded(encoder, number, question) for number, question in enumerate(questions, start=1)]
        prompts, references = tuple(prompt for prompt, _ in pairs), tuple(reference for _, reference in pairs)
        base = precision_of(settings, config)
        return cls(name, folder, config, base, machine, prompts, references)

    def other_files(self) -> dict[str, str]:
        """A hash of each file of the model but its weights: settings, tokenizer, chat template. Raises OSError."""
        files = [path for path in checkpoint_files(self.folder) if not is_of_weights(path)]
        return {str(path.relative_to(self.folder)): checksum(path) for path in files}

    def calibration(self, num_judged: int) -> list[tuple[int, ...]]:
        """Prompts with references for calibration: those that do not judge, if there are enough of them."""
        texts = [(*prompt, *reference) for prompt, reference in zip(self.prompts, self.references, strict=True)]
        return texts[num_judged:] if len(texts) >= num_judged + _LEAST_CALIBRATION else texts

    def demand(self, questions: Sequence[Question], concurrency: int) -> Demand:
        pairs = zip(questions, self.prompts, strict=True)
        longest = max(len(prompt) + question.job.max_tokens for question, prompt in pairs)
        return Demand(concurrency, min(longest, self.config.max_model_len))

    def precisions(self, recipe: Recipe) -> tuple[str, ...]:
        """The recipe's precisions, or those that may pay here. Raises ConfigurationError if the device lacks one."""
        for name in recipe.precisions:
            if (reason := why_not_here(name, self.machine)) is not None:
                raise ConfigurationError(f"precision {name}: {reason}")
        if recipe.precisions:
            return recipe.precisions
        return tuple(name for name in _AUTO_PRECISIONS if why_not_here(name, self.machine) is None)

    def candidates(
        self, recipe: Recipe, demand: Demand, require_makeable: Callable[[str], None]
    ) -> tuple[list[Candidate], dict[Candidate, str]]:
        """The candidates to try, first the base, and the others with the reasons. `require_makeable` raises
        ConfigurationError if no checkpoint can be made in a scheme. Raises ConfigurationError.
        """
        layouts = recipe.workers or usual_layouts(self.machine.num_cores, num_numa_nodes())
        kinds = recipe.speculations(has_mtp=self._why_no_mtp() is None)
        every = combine(self.precisions(recipe), kinds, layouts)
        needed = memory_needed(self.config, self.base, demand)
        pruned = prune(every, self.machine, demand, needed, self._why_not(every, require_makeable))
        return require_some(every, pruned), pruned

    def fits_twice(self, candidate: Candidate, demand: Demand) -> bool:
        """Whether the weights of the candidate's precision and the base's fit into memory together."""
        needed = memory_needed(self.config, self.base, demand)
        layout = usual_layouts(1, 1)[1]  # one worker
        pair = (Candidate(precision, "none", layout) for precision in (BASE, candidate.precision))
        return sum(map(needed, pair)) < self.machine.memory_bytes

    def _why_not(self, candidates: Sequence[Candidate], require_makeable: Callable[[str], None]) -> dict[str, str]:
        reasons: dict[str, str] = {} if (why_no_mtp := self._why_no_mtp()) is None else {"mtp": why_no_mtp}
        quantization = read_quantization(self.folder)
        for precision in dict.fromkeys(candidate.precision for candidate in candidates):
            if precision in COMPUTED and quantization is not None:
                reasons[precision] = f"the checkpoint is quantised already ({quantization})"
            elif precision in STORED:
                try:
                    require_makeable(precision)
                except ConfigurationError as error:
                    reasons[precision] = str(error)
        return reasons

    def _why_no_mtp(self) -> str | None:
        try:
            require_mtp(RunnerSettings(self.folder))
        except ConfigurationError as error:
            return str(error)
        return None


def _encoded(encoder: CalibrationEncoder, number: int, question: Question) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt and the reference. Raises ConfigurationError with the number of the prompt."""
    try:
        return encoder.encode(question.job), encoder.answer(question.reference or "")
    except (ConfigurationError, InvalidRequest) as error:
        raise ConfigurationError(f"--data, prompt {number}: {error}") from error


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
