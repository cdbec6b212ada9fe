"""A layer of multi-token prediction in a checkpoint, and what transformers computes of it: transformers has no such
layer, so a model of one layer stands for it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

_LAYER = "model.layers.0."
_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "use_cache": False,
}


def add_mtp_layer(model_dir: Path, randomise: Callable[[Any], None]) -> None:
    """Add a random layer to a checkpoint. `randomise` draws the weights of a model."""
    layer = _one_layer(model_dir)
    randomise(layer)
    is_qwen, stem = _naming(model_dir)
    embed_norm, hidden_norm, projection, final_norm = _names(is_qwen=is_qwen)
    hidden = layer.config.hidden_size
    tensors = {
        stem + ("layers.0." if is_qwen else "") + name.removeprefix(_LAYER): value
        for name, value in layer.state_dict().items()
        if name.startswith(_LAYER)
    }
    tensors[stem + final_norm] = layer.model.norm.weight
    for name in (embed_norm, hidden_norm):
        tensors[stem + name] = (0.0 if is_qwen else 1.0) + 0.2 * torch.randn(hidden)
    tensors[stem + projection] = 0.1 * torch.randn(hidden, 2 * hidden)
    [path] = model_dir.glob("*.safetensors")
    copies = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    save_file(load_file(path) | copies, path, metadata={"format": "pt"})


def _naming(model_dir: Path) -> tuple[bool, str]:
    """Whether names are Qwen's, and what all begin with."""
    config = AutoConfig.from_pretrained(model_dir)
    is_qwen = config.model_type.startswith("qwen")
    return is_qwen, "mtp." if is_qwen else f"model.layers.{config.num_hidden_layers}."


def _names(*, is_qwen: bool) -> list[str]:
    """The names of the norms of embedding and hidden state, of the projection and of the final norm."""
    qwen = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    return [f"{name}.weight" for name in (qwen if is_qwen else ("enorm", "hnorm", "eh_proj", "shared_head.norm"))]


def _one_layer(model_dir: Path) -> Any:
    config = AutoConfig.from_pretrained(model_dir)
    for name, value in _ONE_LAYER.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


class Reference:
    """Drafts of a checkpoint with such a layer, by transformers."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._layer = _one_layer(model_dir)
        is_qwen, stem = _naming(model_dir)
        *names, final_norm = (stem + name for name in _names(is_qwen=is_qwen))
        [path] = model_dir.glob("*.safetensors")
        stored = load_file(path)
        of_layer = stem + ("layers.0." if is_qwen else "")
        own = {_LAYER + name.removeprefix(of_layer): value for name, value in stored.items()}
        missing, _ = self._layer.load_state_dict(own | {"model.norm.weight": stored[final_norm]}, strict=False)
        assert set(missing) <= {"model.embed_tokens.weight", "lm_head.weight"}, missing
        self._layer.lm_head.weight = self._model.lm_head.weight
        self._embed_norm, self._hidden_norm, self._projection = (stored[name] for name in names)
        self._offset, self._eps = float(is_qwen), self._model.config.rms_norm_eps

    @torch.no_grad()
    def drafts(self, token_ids: list[int], first: int, count: int) -> tuple[int, ...]:
        """What the layer drafts behind these tokens, of which it has seen those from position `first` on; greedy."""
        result = self._model(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
        hidden, seen = result.hidden_states[-1][0, first - 1 :], token_ids[first:]
        for _ in range(count):
            embedded = self._model.get_input_embeddings()(torch.tensor(seen))
            joined = torch.cat((self._normed(embedded, self._embed_norm), self._normed(hidden, self._hidden_norm)), 1)
            outcome = self._layer(inputs_embeds=(joined @ self._projection.T)[None], output_hidden_states=True)
            hidden = torch.cat((hidden, outcome.hidden_states[-1][0, -1:]))
            seen = [*seen, int(outcome.logits[0, -1].argmax())]
        return tuple(seen[-count:])

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, weight.shape, weight + self._offset, self._eps)
