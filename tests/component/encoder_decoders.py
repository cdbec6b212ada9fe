"""Small random encoder-decoder checkpoints with a Unigram tokenizer, and what transformers says about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import (
    AutoModelForSeq2SeqLM,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 264
START_TOKEN_ID, EOS_TOKEN_ID, UNK_TOKEN_ID = 0, 1, 2

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 24,  # shorter than prompts and outputs of the tests
    "pad_token_id": START_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "decoder_start_token_id": START_TOKEN_ID,
}


def _t5(**changes: Any) -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(**_SIZES | changes))


def _untied(model: PreTrainedModel) -> PreTrainedModel:
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


FORMS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": _t5,
    "t5-1.1": lambda: _untied(_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, d_kv=32)),
    "ul2": lambda: _untied(_t5(feed_forward_proj="gated-silu", tie_word_embeddings=False, num_decoder_layers=2)),
    "mt5": lambda: _untied(MT5ForConditionalGeneration(MT5Config(**_SIZES, feed_forward_proj="gated-gelu"))),
}


def build_encoder_decoder(form: str, model_dir: Path) -> Path:
    """Save a random model of `form`, with weights that make its predictions peaked; returns `model_dir`."""
    torch.manual_seed(1)
    model = FORMS[form]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
                parameter.mul_(6.0 if form == "t5" and name == "decoder.final_layer_norm.weight" else 1.0)
            elif "relative_attention_bias" in name:
                parameter.normal_(0.0, 1.0)
            elif name in ("shared.weight", "lm_head.weight"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith("q.weight"):
                parameter.normal_(0.0, 0.04)  # scores have no factor that would keep them small
            else:
                parameter.normal_(0.0, 0.12)
    model.save_pretrained(model_dir)
    save_unigram(model_dir)
    return model_dir


def save_unigram(model_dir: Path) -> None:
    """A tokenizer as T5's: pieces of text with their probabilities, words marked by a bar, `</s>` behind each text."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *letters, *("\u2581" + letter for letter in letters), ".", ","]
    pieces += [first + second for first in letters for second in "aeiou"]
    pieces += [f"<extra_{i}>" for i in range(VOCAB_SIZE - len(pieces))]
    tokenizer = Tokenizer(Unigram([(piece, -float(i % 7)) for i, piece in enumerate(pieces)], unk_id=UNK_TOKEN_ID))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS_TOKEN_ID)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>"}')


@dataclass(frozen=True)
class EncoderDecoderReference:
    """A checkpoint in transformers, fp32, eager attention."""

    model: Any

    @classmethod
    def load(cls, model_dir: Path) -> "EncoderDecoderReference":
        model = AutoModelForSeq2SeqLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
        return cls(model.eval())

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
        """Greedy tokens by transformers' own `generate`, the start token left out."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **options
        )
        return out[0, 1:].tolist()

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
        """Log-probs at each generated token: [len(generated), vocab]."""
        start = [START_TOKEN_ID, *generated[:-1]]
        logits = self.model(torch.tensor([list(prompt)]), decoder_input_ids=torch.tensor([start])).logits[0]
        return torch.log_softmax(logits.float(), -1)
