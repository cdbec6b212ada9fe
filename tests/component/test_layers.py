"""Parts of the eager decoder that the small checkpoints do not reach."""

import pytest
import torch
from torch.nn import functional as F

from engine.models.activations import ACTIVATIONS
from engine.models.encodings import LinearParameters
from engine.models.linear import Linear
from engine.models.norms import rms_norm
from engine.models.read_config import SUPPORTED_ACTIVATIONS


@pytest.mark.parametrize("rows", [1, 2, 8, 33, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_large_weights(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(1024, 520), torch.randn(1024), torch.randn(rows, 520)
    expected = F.linear(x, weight, bias if biased else None)
    torch.testing.assert_close(
        Linear(LinearParameters(weight, bias=bias if biased else None))(x), expected, atol=1e-3, rtol=1e-4
    )


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 64), torch.randn(64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))


def test_every_activation_that_is_accepted_exists() -> None:
    assert set(SUPPORTED_ACTIVATIONS) == set(ACTIVATIONS)
