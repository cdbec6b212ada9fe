"""Trains a layer of multi-token prediction for the bundled model, to see how often such a layer is right.

    python -m bench.mtp_layer OUT                             # ten minutes on one core
    python -m bench.speculative --model OUT --extra-layers 60

The layer learns to predict the token after next from the hidden states of the model, which stays as it is. It is told
of a whole chat, as those of published models are; a worker shows it only the tokens that it has sampled itself. The
last line tells how often its first draft is right in both ways.

OUT is a checkpoint of GLM-4.5, a family that has such layers. Its layers without experts are those of Llama, the
bundled model's family.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.encoding import Batch, steps
from demo_model.train import MUON_RATE, Muon, rate_share
from mesh.interrupts import run_program
from tandem_cli.model_files.model_folders import BUNDLED

_RATE = 2e-3
_TRAINING_SEED, _TEST_SEED = 777, 4242
_TEST_STEPS = 12
_SOON = 8
"""The first tokens of an answer, before which the layer has seen few."""


class Layer(nn.Module):
    """A decoder layer behind a frozen model. Its input joins the next token with the model's hidden state."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        facts = model.config.to_dict() | {"num_hidden_layers": 1, "attn_implementation": "eager"}
        hidden, eps = model.config.hidden_size, model.config.rms_norm_eps
        self._model = [model]  # in a list, so that its parameters are not this layer's
        self.decoder = LlamaForCausalLM(LlamaConfig(**facts)).model
        self.embed_norm, self.hidden_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, ids: Tensor, firsts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids [chats, n] -> two hidden states for each place [chats, n - 1]: the model's behind the token after it, and
        the layer's, of which the output matrix makes the same logits. Where `firsts` [chats] are given, the layer sees
        nothing before these places.
        """
        [model] = self._model
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            embedded = model.model.embed_tokens(ids[:, 1:])
        joined = self.projection(torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden[:, :-1])), -1))
        mask = None if firsts is None else _mask(firsts, joined.shape[1])
        result = self.decoder(inputs_embeds=joined, use_cache=False, attention_mask=mask)
        return hidden[:, 1:], result.last_hidden_state

    def matrices(self) -> list[nn.Parameter]:
        return [each for name, each in self.named_parameters() if each.ndim == 2 and "embed_tokens" not in name]

    def norms(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.ndim == 1]


def _mask(firsts: Tensor, length: int) -> Tensor:
    """Added to scores: [chats, 1, places, places seen]."""
    places = torch.arange(length)
    is_seen = (places <= places[:, None]) & (places >= firsts[:, None, None])
    is_seen |= torch.eye(length, dtype=torch.bool)
    return torch.zeros(is_seen.shape).masked_fill(~is_seen, -1e9)[:, None]


def train(layer: Layer, model: LlamaForCausalLM, batches: Iterator[list[Batch]], minutes: float) -> None:
    """Train for that long, on what the assistant says."""
    optimizers = [Muon(layer.matrices(), lr=MUON_RATE), torch.optim.AdamW(layer.norms(), lr=_RATE, weight_decay=0.0)]
    started_s = time.monotonic()
    for number, parts in enumerate(batches):
        done = (time.monotonic() - started_s) / (60 * minutes)
        if done > 1:
            return
        num_targets, loss_sum = sum(int((batch.targets[:, 1:] >= 0).sum()) for batch in parts), 0.0
        for batch in parts:
            targets = batch.targets[:, 1:]
            with torch.autocast("cpu", torch.bfloat16):
                _, hidden = layer(batch.ids)
                logits = model.lm_head(hidden[targets >= 0]).float()
            loss = functional.cross_entropy(logits, targets[targets >= 0], reduction="sum") / num_targets
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, (MUON_RATE, _RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_share(number, done, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if number % 50 == 0:
            print(f"step {number} loss {loss_sum:.4f} {60 * done * minutes:.0f} s", flush=True)


@torch.no_grad()
def shares_right(layer: Layer, model: LlamaForCausalLM, batches: Iterator[list[Batch]]) -> dict[str, list[float]]:
    """How often the first draft is the model's own choice, in whole answers and behind their first tokens: when the
    layer has seen the chat, and when it has seen the answer alone.
    """
    right: dict[str, list[list[Tensor]]] = {"the chat": [[], []], "the answer": [[], []]}
    for batch in (batch for parts in islice(batches, _TEST_STEPS) for batch in parts):
        firsts = (batch.targets >= 0).int().argmax(1)
        place = torch.arange(batch.ids.shape[1] - 1)
        is_target = (batch.targets[:, 1:] >= 0) & (place >= firsts[:, None])
        for name, given in (("the chat", None), ("the answer", firsts)):
            hidden, drafted = layer(batch.ids, given)
            is_right = model.lm_head(drafted).argmax(-1) == model.lm_head(hidden).argmax(-1)
            right[name][0].append(is_right[is_target])
            right[name][1].append(is_right[is_target & (place >= firsts[:, None] + _SOON)])
    return {name: [torch.cat(parts).float().mean().item() for parts in lists] for name, lists in right.items()}


def write(layer: Layer, model: LlamaForCausalLM, out: Path) -> None:
    """Write the model with its layer."""
    shutil.copytree(BUNDLED, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    own = model.config
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": own.num_hidden_layers + 1,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": own.intermediate_size,
        "num_nextn_predict_layers": 1,
    }
    (out / "config.json").write_text(json.dumps(own.to_dict() | config, indent=2))
    stem = f"model.layers.{own.num_hidden_layers}."
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {stem + name: tensor for name, tensor in layer.decoder.layers[0].state_dict().items()}
    tensors |= {f"{stem}eh_proj.weight": layer.projection.weight, f"{stem}hnorm.weight": layer.hidden_norm.weight}
    tensors |= {f"{stem}enorm.weight": layer.embed_norm.weight}
    tensors |= {f"{stem}shared_head.norm.weight": layer.decoder.norm.weight}
    halves = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Train, write, and say how often drafts are right."""
    parser = argparse.ArgumentParser(prog="python -m bench.mtp_layer", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="the checkpoint's folder, which must not exist")
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED)
    model = LlamaForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32, attn_implementation="eager")
    model.requires_grad_(False)  # it has no dropout
    layer = Layer(model)
    train(layer, model, steps(tokenizer, _TRAINING_SEED, "late", 0.06), options.minutes)
    write(layer, model, options.out)
    for name, (share, later) in shares_right(layer, model, steps(tokenizer, _TEST_SEED, "late", 0.0)).items():
        print(f"having seen {name}: {share:.1%} right, {later:.1%} behind the first {_SOON} tokens of answers")


if __name__ == "__main__":
    run_program(main)
