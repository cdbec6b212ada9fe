"""The quantiser's shorter ways to numbers: each finds what the plain way finds."""

import pytest
import torch

from engine.quantizer import awq, gptq
from engine.quantizer.statistics import InputStatistics


def random_statistics(num_channels: int, num_tokens: int) -> InputStatistics:
    """Of tokens in which some channels are up to 20 times as large as others."""
    generator = torch.Generator().manual_seed(6)
    statistics = InputStatistics(num_channels, needs_gram=True)
    spread = torch.rand(num_channels, generator=generator).mul(3).exp()
    for tokens in torch.randn(num_tokens, num_channels, generator=generator).mul(spread).split(200):
        statistics.add(tokens)
    return statistics


@pytest.mark.parametrize("num_channels", [100, 1000])
def test_products_of_channels_are_those_of_both_orders(num_channels: int) -> None:
    statistics = InputStatistics(num_channels, needs_gram=True)
    x = torch.randn(50, num_channels, generator=torch.Generator().manual_seed(6))
    for tokens in x.split(20):
        statistics.add(tokens)
    expected = x.double().t() @ x.double()
    assert torch.allclose(statistics.gram.double(), expected, atol=1e-3)
    assert torch.equal(statistics.gram, statistics.gram.t())
    error = torch.randn(30, num_channels, generator=torch.Generator().manual_seed(7))
    cost = float(((error.double() @ expected) * error).sum())
    assert awq.cost_of(error, statistics.gram) == pytest.approx(cost, rel=1e-5)


def test_few_outputs_find_the_factors_that_all_outputs_find(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(4))

    def factors() -> torch.Tensor:
        return awq.search_factors([weight], [random_statistics(128, 600)], lambda each: each, 32, torch.bfloat16)

    found = factors()
    assert found.max() > 1.5 * found.min(), "factors help here"
    monkeypatch.setattr(awq, "_NUM_FINALISTS", 20)
    assert torch.equal(found, factors())


@pytest.mark.parametrize("num_channels", [40, 700])
def test_the_factor_of_an_inverse_is_that_of_its_definition(num_channels: int) -> None:
    """700 channels are inverted in parts. One channel was always 0."""
    gram = random_statistics(num_channels, 2000).gram.clone()
    gram[3], gram[:, 3] = 0, 0
    factor = gptq.inverse_factor(gram).double()
    damped = gram.double()
    damped.diagonal().add_(torch.where(damped.diagonal() == 0, 1.0, 0.01 * damped.diagonal().mean()))
    assert torch.equal(factor, factor.triu())
    identity = factor.t() @ factor @ damped
    assert torch.allclose(identity, torch.eye(num_channels, dtype=torch.float64), atol=1e-3)
    assert factor[3, 3] == 1


def test_the_factor_of_an_inverse_is_the_same_on_any_number_of_threads() -> None:
    """LAPACK's factorisation of so many channels is not."""
    gram, before = random_statistics(1000, 2000).gram, torch.get_num_threads()
    factors = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            factors.append(gptq.inverse_factor(gram))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(factors[0], other) for other in factors[1:])
