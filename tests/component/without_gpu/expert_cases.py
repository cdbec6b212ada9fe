"""Random experts, and the kernels that compute them on a device against torch; for the interpreter and for GPUs."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.adapted_linear import Adapters
from engine.models.encodings import LinearParameters
from engine.models.expert_products import ChosenExperts, ExpertProducts
from engine.models.experts_config import ExpertsConfig
from engine.models.layer import DenseMlp, Experts
from engine.models.linear import make_linear
from engine.models.routing import Router
from mesh.domain.kv import Span
from tests.component.without_gpu.paged_attention import TOLERANCES


@dataclass(frozen=True)
class ExpertCase:
    """One step of one layer. `held`: the experts of a rank; None for all."""

    num_rows: int
    num_experts: int = 6
    top_k: int = 2
    hidden: int = 40
    inner: int = 24
    held: Span | None = None
    dtype: torch.dtype = torch.float32


def random_experts(case: ExpertCase, device: torch.device) -> Experts:
    """With kernels that compute all of their steps."""
    torch.manual_seed(0)
    held = case.held or Span(0, case.num_experts)
    router = torch.randn(case.num_experts, case.hidden, device=device).to(case.dtype)
    mlps, matrices = {}, []
    for expert in range(case.num_experts):
        up = torch.randn(2 * case.inner, case.hidden, device=device) * case.hidden**-0.5
        down = torch.randn(case.hidden, case.inner, device=device) * case.inner**-0.5 / 2
        pair = [LinearParameters(matrix.to(case.dtype)) for matrix in (up, down)]
        if held.first <= expert < held.end:
            mlps[expert] = DenseMlp(*map(make_linear, pair), F.silu, gated=True)
            matrices += pair
    products = ExpertProducts(device)
    products.fit_step = True
    on_device = ChosenExperts(products, held, matrices[::2], matrices[1::2], next(iter(mlps.values())).inner)
    config = ExpertsConfig(case.num_experts, case.top_k, case.inner, normalised=True, layers=(True,))
    return Experts(config, Router(config, router), mlps, Adapters(()), on_device)


def random_rows(case: ExpertCase, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(case.num_rows, case.hidden, device=device).to(case.dtype)


def difference(case: ExpertCase, device: torch.device) -> float:
    """The largest difference to torch in fp32 with the same numbers and the same choices; of results above 1, which
    fp16 rounds more coarsely, in relation to them.
    """
    experts, x = random_experts(case, device), random_rows(case, device)
    wide = random_experts(case, device) if case.dtype == torch.float32 else widened(experts)
    chosen, shares = experts.router(x)
    assert experts._on_device is not None
    ours = experts._on_device(x, chosen, shares)
    theirs = wide._one_by_one(x.float(), chosen.flatten(), shares.flatten().float())
    found = (ours.float() - theirs).abs() / theirs.abs().clamp(min=1)
    return float(found.nan_to_num(nan=torch.inf).max())


def widened(experts: Experts) -> Experts:
    """The same experts in fp32, for the host."""
    mlps = {}
    for expert, mlp in experts._experts.items():
        pair = [LinearParameters(linear._weight.float()) for linear in (mlp._up, mlp._down)]  # type: ignore[attr-defined]
        mlps[expert] = DenseMlp(*map(make_linear, pair), F.silu, gated=True)
    return Experts(experts._config, Router(experts._config, experts.router.weight.float()), mlps, Adapters(()))


def require_near(case: ExpertCase, device: torch.device) -> None:
    found = difference(case, device)
    assert found <= TOLERANCES[case.dtype], f"{case}: differs by {found}"


def parts_of_ranks(case: ExpertCase, device: torch.device, num_ranks: int) -> Tensor:
    """The sum of what so many ranks compute, each by its kernels."""
    bounds = [case.num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
    spans = [Span(first, end - first) for first, end in pairwise(bounds)]
    x = random_rows(case, device)
    return torch.stack([random_experts(replace(case, held=span), device)(x) for span in spans]).sum(0)
