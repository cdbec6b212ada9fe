"""ExpertsConfig: the facts of a mixture of experts, a part of engine.models.model_config.ModelConfig."""

from dataclasses import dataclass, field

from mesh.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP: the router sends each token to `top_k` of `num_experts` experts.

    `normalised`: the weights of the selected experts add up to 1. `shared_size`: inner width of the expert that
    processes every token, 0 if there is none; `shared_gate`: a learned gate weights its output. `layers` marks the
    layers with experts; the others have the MLP. engine/models/routing.py computes the choice.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]
    shared_size: int = 0
    shared_gate: bool = False
    scoring: str = field(default="softmax", repr=False)
    """How the router's outputs become scores: `softmax`, `sigmoid` or `sparse-mixer`."""
    choice_bias: bool = field(default=False, repr=False)
    """Experts are chosen by scores plus a learned bias; their weights are made of the scores alone."""
    biases_outputs: bool = field(default=False, repr=False)
    """That bias is added to the router's outputs, before they become scores."""
    num_groups: int = field(default=1, repr=False)
    """Experts are in groups; the `top_groups` with the highest sums of `group_best` scores are chosen first."""
    top_groups: int = field(default=1, repr=False)
    group_best: int = field(default=2, repr=False)
    routed_scale: float = field(default=1.0, repr=False)
    """Factor of the selected experts' weights, after they are normalised."""
    shared_scale: float = field(default=1.0, repr=False)  # factor of the shared expert's results
    share_floor: float = field(default=1e-20, repr=False)
    """Added to what normalised weights are divided by, which keeps them finite where all sigmoids are 0."""
    mixer_range: float = field(default=0.0, repr=False)
    """SparseMixer: the distance from the highest output, in relation to the outputs, of those that have a share."""
    router_bias: bool = field(default=False, repr=False)
    scales_inputs: bool = field(default=False, repr=False)
    """Experts get their rows times the scores, and their results are not weighted."""
    wide_router: bool = field(default=False, repr=False)
    """The router is in fp32, whatever the model's dtype."""


_MAX_EXPERTS = 4096
NO_EXPERTS = ExpertsConfig(0, 0, 0, normalised=False, layers=())


def check_experts(experts: ExpertsConfig) -> None:
    """Raise ConfigurationError unless a token can have `top_k` experts of its groups."""
    num_experts, num_groups = experts.num_experts, experts.num_groups
    if num_experts > _MAX_EXPERTS:  # each takes memory before any tensor is looked for
        raise ConfigurationError(f"config.json: {num_experts} experts are more than {_MAX_EXPERTS}: the file is broken")
    size = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and size < experts.group_best):
        raise ConfigurationError(f"config.json: {num_experts} experts cannot be divided into {num_groups} groups")
    if experts.top_groups > num_groups or experts.top_k > experts.top_groups * size:
        raise ConfigurationError(
            f"config.json: a token cannot have {experts.top_k} experts of {experts.top_groups} of {num_groups} groups "
            f"of {size}"
        )
