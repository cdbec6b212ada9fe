"""Commands, by which rank 0 lets other ranks work with it, and the reports of later stages; as a few bytes each."""

import struct
from dataclasses import astuple, dataclass, fields
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Forward:
    """The command to compute a stage's layers of the step in memory slot `slot`. The sizes give the shapes of the
    metadata there; the rows with LoRA adapters are in `num_runs` runs. Later stages report the KV of `group_size`
    layers at a time, or nothing if it is 0.
    """

    slot: int
    group_size: int
    num_tokens: int
    num_seqs: int
    max_blocks: int
    num_decodes: int
    num_runs: int = 0


@dataclass(frozen=True, slots=True)
class Logits:
    """The command to compute logits."""

    num_rows: int


@dataclass(frozen=True, slots=True)
class PutAdapter:
    """The command to read an adapter, by its number in the settings, into a slot of the model, for the commands that
    follow. No step that has begun uses the slot.
    """

    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class CaptureSteps:
    """The command to capture decode steps, together with rank 0: see engine/ranks/graphs.py."""


@dataclass(frozen=True, slots=True)
class RunGraph:
    """The command to compute a step by the graph that was captured for `graph_seqs` sequences of up to `graph_queries`
    tokens. The other sizes are those of the step's arrays, as in Forward.
    """

    num_tokens: int
    num_seqs: int
    max_blocks: int
    graph_seqs: int
    graph_queries: int
    num_runs: ClassVar[int] = 0  # steps with adapters are not captured


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a later stage to rank 0: the KV of `count` layers of the step in `slot` is written. If `count` is 0,
    the last stage has finished the step.
    """

    slot: int
    first: int = 0
    count: int = 0


Command = Forward | Logits | PutAdapter | CaptureSteps | RunGraph
_KINDS: tuple[type[Command], ...] = (Forward, Logits, PutAdapter, CaptureSteps, RunGraph)
_NUM_VALUES = 8
_COMMAND = struct.Struct(f"<{_NUM_VALUES}q")  # kind, then the fields, padded with 0
_REPORT = struct.Struct("<3q")


def encode_command(command: Command) -> bytes:
    values = (_KINDS.index(type(command)) + 1, *astuple(command))
    return _COMMAND.pack(*values, *[0] * (_NUM_VALUES - len(values)))


def decode_command(message: bytes) -> Command:
    """Raises ValueError for a message that is not a command."""
    if len(message) != _COMMAND.size:
        raise ValueError(f"a command has {_COMMAND.size} bytes, not {len(message)}")
    kind, *values = _COMMAND.unpack(message)
    if not 1 <= kind <= len(_KINDS) or min(values) < 0:
        raise ValueError(f"command {kind} of {values} is not known")
    command = _KINDS[kind - 1](*values[: len(fields(_KINDS[kind - 1]))])
    is_possible = True
    if isinstance(command, Forward):
        is_possible = max(command.num_runs, command.num_decodes) <= command.num_seqs <= command.num_tokens
    elif isinstance(command, RunGraph):
        is_possible = command.num_seqs <= command.num_tokens <= command.graph_seqs * command.graph_queries
    if not is_possible:
        raise ValueError(f"impossible command: {command}")
    return command


def encode_report(report: Report) -> bytes:
    return _REPORT.pack(*astuple(report))


def decode_report(message: bytes) -> Report:
    return Report(*_REPORT.unpack(message))
