"""Rotations that are looked up are those that a step would compute, to the bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.backend import one_token
from engine.kernels.cpu.arguments import KernelRotations
from engine.models import rotation_table
from engine.models.read_config import load_decoder_config
from engine.models.rope import ropes_of
from engine.models.rotation_table import RotationTable

CPU = torch.device("cpu")


def rows_of(rotations: KernelRotations) -> list[np.ndarray]:
    """What each token has."""
    _, *arrays = rotations
    return [array[:, rotations.rows] for array in arrays if len(array)]


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "phi3-longrope", "olmo3", "ministral3", "gemma4"])
def test_positions_on_both_sides_of_its_end(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    config, rng = load_decoder_config(checkpoint(family)), np.random.default_rng(0)
    ropes = ropes_of(config, CPU, torch.float32)
    tables = []
    for size in (0, 100, 8192):
        monkeypatch.setattr(rotation_table, "_MAX_POSITIONS", size)
        tables.append(RotationTable(ropes, 8192))
    for count in (1, 5, 17, 64):
        for end in (100, 101, 8192):
            positions = torch.from_numpy(np.append(rng.integers(0, end, count - 1), end - 1))
            step = replace(one_token(), positions=positions, rope_lengths=positions + 1, max_decode_context=end)
            computed, *looked_up = (rows_of(table.of_step(step)) for table in tables)
            assert all(np.array_equal(a, b) for given in looked_up for a, b in zip(computed, given, strict=True))
    has_table = tables[2].of_step(replace(step, max_decode_context=8192)).cos.shape[1] == 8192
    assert has_table == (not any(rope.uses_lengths for rope in ropes))
