"""The profile of a mesh: how long the steps of its engines take, how much its workers hold, how long messages take.

A step's time is the sum of what its decodes and its prompts cost. Tables say what it takes by the number of rows, at
best measured ones; between their points times are interpolated, beyond them they grow as between the last two.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.roofline import BLOCK_SIZE, Capacity

_PREFILL_PASS_TOKENS, _PREFILL_SEQS = 512, 64
_DECODE_STEP_TOKENS, _DECODE_SEQS = 256, 64
_CONTEXT_TOKENS = 1000

Table = tuple[tuple[int, float], ...]
"""(rows, seconds), ascending."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step.

    `prompt_s`: by the prompt tokens of the step, if it begins their prompts; `prompt_context_s`: for each pair of a
    prompt token and a token computed in earlier steps. `decode_s`: by the sequences that decode, with empty context;
    `decode_context_s`: for each token of context of each sequence.
    """

    prompt_s: Table
    decode_s: Table
    prompt_context_s: float = 0.0
    decode_context_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_s", "decode_s"):
            table: Table = getattr(self, name)
            rows = [row for row, _ in table]
            if not table or rows != sorted(set(rows)) or rows[0] < 1 or any(seconds <= 0 for _, seconds in table):
                raise ConfigurationError(f"{name} must have pairs of rows, ascending from 1, and seconds > 0: {table}")

    def decode(self, num_seqs: int, context_tokens: float) -> float:
        """A step of decodes only, with this context in all of them together."""
        return at(self.decode_s, num_seqs) + self.decode_context_s * context_tokens

    def prompts(self, num_tokens: int, context_pairs: float) -> float:
        """A step of prompts only."""
        return at(self.prompt_s, num_tokens) + self.prompt_context_s * context_pairs

    def both(self, decode_s: float, prompts_s: float) -> float:
        """A step of decodes and prompts, which reads the weights once: an empty prompt would add nothing."""
        return decode_s + max(0.0, prompts_s - at(self.prompt_s, 0))


def at(table: Table, rows: float) -> float:
    """Seconds at this number of rows; never less than half of the first point's."""
    if len(table) == 1:
        return table[0][1]
    index = min(max(bisect_left(table, (rows,)), 1), len(table) - 1)
    (low, low_s), (high, high_s) = table[index - 1], table[index]
    return max(table[0][1] / 2, low_s + (rows - low) * (high_s - low_s) / (high - low))


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """An engine: the times of its steps and the limits of its scheduler.

    `times` are those of an engine whose neighbours rest. While all engines of the other role compute, a step takes
    `stretch` times as long: they share cores, caches and memory, and lend each other cores that are idle. Prompts that
    decode workers compute take what prefill workers' `stretch` says. A sequence holds `state_blocks` blocks beside
    those of its tokens; `windows`: see KVLayout.
    """

    times: StepTimes
    num_blocks: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int = BLOCK_SIZE
    stretch: float = 1.0
    state_blocks: int = 0
    windows: tuple[int, ...] = ()
    windows_are_chunks: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.stretch < math.inf:
            raise ConfigurationError(f"stretch must be >= 1, got {self.stretch}")


@dataclass(frozen=True, slots=True)
class MeshProfile:
    """Workers of both roles, and what lies between them.

    `overhead_s`: what a first token takes in an idle mesh besides computing, and `overhead_stretch` times as long while
    all decode workers compute, where router and clients have the same cores. `transfer_s` and `transfer_token_s`: from
    the first token until the decode worker has all KV, for each transfer and for each token of the prompt's last chunk;
    the rest travels while the prompt is computed.
    """

    about: str
    prefill: WorkerProfile
    decode: WorkerProfile
    overhead_s: float = 0.0
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0
    overhead_stretch: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.overhead_stretch < math.inf:
            raise ConfigurationError(f"overhead_stretch must be >= 1, got {self.overhead_stretch}")

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "MeshProfile":
        """Raises ConfigurationError with the name of the first bad field."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = [".".join(map(str, first["loc"]))] if first["loc"] else []
            raise ConfigurationError(": ".join([f"{path} is no profile of a mesh", *where, first["msg"]])) from error


def best_case(capacity: Capacity, about: str, max_model_len: int, link_gbit_per_s: float) -> MeshProfile:
    """The profile by the formulas of `tandem plan`, which are bounds: real engines take longer. Limits of steps and
    batches are the defaults of workers."""
    device, kv_bytes = capacity.device, capacity.kv_bytes_per_token
    context_s = capacity.decode_step_s(1, _CONTEXT_TOKENS) - capacity.decode_step_s(1, 0)
    pair_s = capacity.model.attention_flops(1, 1) / device.attention_flops_per_s
    times = StepTimes(
        prompt_s=_table((1, 64, 256, _PREFILL_PASS_TOKENS), capacity.prefill_s),
        decode_s=_table((1, 8, 32, 128, 512), lambda batch: capacity.decode_step_s(batch, 0)),
        prompt_context_s=pair_s,
        decode_context_s=context_s / _CONTEXT_TOKENS,
    )
    num_blocks, states = capacity.num_blocks, capacity.state_blocks
    if num_blocks <= states:
        raise ConfigurationError("the weights do not fit into the memory of the device")
    model = capacity.model
    prefill = WorkerProfile(
        times,
        num_blocks,
        _PREFILL_PASS_TOKENS,
        _PREFILL_SEQS,
        max_model_len,
        state_blocks=states,
        windows=model.kv_windows,
        windows_are_chunks=model.windows_are_chunks,
    )
    return MeshProfile(
        about,
        prefill,
        replace(prefill, max_batch_tokens=_DECODE_STEP_TOKENS, max_num_seqs=_DECODE_SEQS),
        transfer_s=capacity.transfer_s(0, link_gbit_per_s * 1e9 / 8),
        transfer_token_s=8 * kv_bytes / (link_gbit_per_s * 1e9),
    )


def _table(rows: Sequence[int], seconds: Callable[[int], float]) -> Table:
    return tuple((row, seconds(row)) for row in rows)
