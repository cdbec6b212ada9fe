"""Matrices by encoding, and what a rank has of the heads."""

from pathlib import Path

import pytest
import torch

from engine.attention.backend import AttentionShape
from engine.loading.resolve import why_eager
from engine.models.encodings import ENCODINGS, IN_STEPS, Parameters
from engine.models.linear import make_linear
from engine.models.packed_decoder import pack_decoder
from engine.runner_settings import RunnerSettings
from engine.settings import QUANTIZATIONS
from mesh.domain.kv import Span


# Only the compiled decoder has int4.
@pytest.mark.parametrize("encoding", sorted(ENCODINGS.keys() - {"int4", IN_STEPS}))
def test_every_encoding_multiplies_with_the_matrix(encoding: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64), torch.randn(5, 64)
    linear = make_linear(ENCODINGS[encoding](weight))
    tolerance = {"float": 1e-4, "int8": 0.35}[encoding]
    torch.testing.assert_close(linear(linear.ops.rows(x)), x @ weight.T, atol=tolerance, rtol=0)


def test_settings_name_every_encoding() -> None:
    """int4 stands for two."""
    assert {RunnerSettings(Path(), quantize=name).encoding for name in QUANTIZATIONS} == ENCODINGS.keys() - {IN_STEPS}


def test_parameters_are_taken_once_and_matrices_come_with_their_bias() -> None:
    parameters = Parameters("int8")
    parameters.put("norm", torch.ones(3))
    parameters.put("o", torch.randn(4, 3), is_matrix=True)
    parameters.put("o_bias", torch.arange(4.0))
    matrix = parameters.take_linear("o")
    assert (matrix.encoding, matrix.weight.dtype, matrix.weight.shape) == ("int8", torch.int8, (4, 3))
    assert matrix.bias is not None
    assert matrix.bias.tolist() == [0, 1, 2, 3]
    assert parameters.take("norm").tolist() == [1, 1, 1]
    for name in ("norm", "o"):
        with pytest.raises(KeyError):
            parameters.take(name)
        with pytest.raises(KeyError):
            parameters.take_linear(name)


def test_the_embedding_is_the_output_matrix_where_there_is_no_other() -> None:
    parameters, embedding = Parameters(), torch.randn(6, 3)
    parameters.put("lm_head_bias", torch.ones(6))
    output = parameters.take_output(embedding)
    assert output.weight is embedding
    assert output.bias is not None
    own = torch.randn(6, 3)
    parameters.put("lm_head", own, is_matrix=True)
    assert parameters.take_output(embedding).weight is own


def test_a_rank_has_the_query_heads_that_read_its_kv_heads_and_their_slopes() -> None:
    whole = AttentionShape(6, 3, 8, alibi=tuple(range(6)))
    part = whole.shard(Span(1, 2))
    assert (part.num_heads, part.num_kv_heads, part.queries_per_kv_head, part.alibi) == (4, 2, 2, (2, 3, 4, 5))
    assert whole.shard(Span(0, 3)) == whole


def test_an_encoding_that_cannot_be_packed_is_computed_by_the_eager_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.resolve.PACKED", frozenset({"float"}))
    settings = RunnerSettings(Path(), device="cpu", dtype="float32", quantize="int8")
    assert why_eager(settings, None, None) == "encoding int8"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot pack encoding 'int3'"):
        pack_decoder(None, Parameters("int3"), None)  # type: ignore[arg-type]
