"""A model that the router serves: its name, facts, tokenizer and chat template, and its limits. The work with its texts
is that of text/input_processor.py.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from checkpoint.config_json import read_json
from checkpoint.generation_config import read_sampling_defaults, read_stop_strings
from checkpoint.model_facts import ModelFacts, read_model_facts
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from checkpoint.tokenizer_fingerprint import tokenizer_settings
from mesh.domain.errors import ConfigurationError, LayoutMismatch
from mesh.domain.request import SequenceSpec
from mesh.domain.worker import WorkerInfo
from router.settings import RouterSettings, require_input_below_total
from router.text.chat import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.validation import Limits

log = structlog.get_logger(__name__)

# Used when neither the model, nor the settings, nor a worker sets a limit.
_UNLIMITED_TOKENS = 1 << 20
_ADDED_TOKEN = frozenset({"__type", "content", "lstrip", "normalized", "rstrip", "single_word", "special"})
"""Members of transformers' AddedToken."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts of a model from its files, as the router needs them. Immutable; shared by all requests."""

    name: str
    facts: ModelFacts
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recommended values of SamplingParams by name, of which clients are told."""
    stop_strings: tuple[str, ...] = ()
    """They end answers, as end tokens do, unless a request has stop strings of its own."""
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    """What clients are told of the tokenizer: see GetTokenizerResponse."""

    @property
    def decoder_prompt(self) -> tuple[int, ...]:
        """The decoder's start tokens of an encoder-decoder model, sent after the prompt; empty for other models."""
        start = self.facts.decoder_start_token_id
        return () if start is None else (start,)

    def whole_prompt(self, spec: SequenceSpec) -> tuple[int, ...]:
        """Return the tokens that all KV depends on: the prompt that an encoder reads; empty for other models."""
        return spec.token_ids[: spec.num_prompt_tokens] if self.decoder_prompt else ()

    def require_fits(self, info: WorkerInfo) -> None:
        """Raise LayoutMismatch, with both values, for a worker of another tokenizer."""
        if info.tokenizer_fingerprint != self.facts.tokenizer_fingerprint:
            raise LayoutMismatch(
                f"tokenizers differ: {self.facts.tokenizer_fingerprint} at the router, "
                f"{info.tokenizer_fingerprint} at worker {info.worker_id}"
            )

    @classmethod
    def load(
        cls, name: str, model_dir: Path, rope: RopeOverride = NO_ROPE_OVERRIDE, *, with_recommended: bool = False
    ) -> "ServedModel":
        """`with_recommended`: with the sampling and stop strings of generation_config.json. Raises ConfigurationError
        with the name of the broken file.
        """
        facts = read_model_facts(model_dir, rope)
        tokenizer = Tokenizer.load(model_dir, facts.eos_token_ids)
        stops = read_stop_strings(model_dir) if with_recommended else ()
        # A special token has no text in which its name could be found: it ends an answer as an end token does.
        tokens = {text: token_id for text in stops if (token_id := tokenizer.special_id(text)) is not None}
        facts = replace(facts, eos_token_ids=tokenizer.eos_token_ids.union(tokens.values()))
        if facts.eos_token_ids and min(facts.eos_token_ids) >= facts.vocab_size:
            log.warning(
                "no end token is in the vocabulary, so answers end at their limit only: see eos_token_id in "
                "config.json and generation_config.json",
                eos_token_ids=sorted(facts.eos_token_ids),
                vocab_size=facts.vocab_size,
            )
        defaults = read_sampling_defaults(model_dir) if with_recommended else {}
        stop_strings = tuple(text for text in stops if text not in tokens)
        template = ChatTemplate.load(model_dir)
        described = _tokenizer_config(model_dir, template)
        return cls(name, facts, tokenizer, template, defaults, stop_strings, described)


def _tokenizer_config(model_dir: Path, template: ChatTemplate | None) -> dict[str, Any]:
    """The settings as transformers has them once a tokenizer is loaded: special tokens are texts, and the chat template
    is one text. Numbers that JSON has not are null. Raises ConfigurationError.
    """
    config = read_json(model_dir / "special_tokens_map.json", optional=True) | tokenizer_settings(model_dir)
    config.pop("chat_template", None)
    chat = {} if template is None else {"chat_template": template.source}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config | chat)
    described: dict[str, Any] = json.loads(text, object_hook=_special_token, parse_constant=lambda name: None)
    return described


def _special_token(value: dict[str, Any]) -> Any:
    """The text of a token that is written with how it is matched, or another object as it is."""
    return value["content"] if "content" in value and value.keys() <= _ADDED_TOKEN else value


class LimitPolicy:
    """Derives limits from settings, model and workers. Raises ConfigurationError if settings and model conflict."""

    def __init__(self, settings: RouterSettings, facts: ModelFacts) -> None:
        positions = facts.max_positions
        setting = settings.max_total_tokens
        if setting is not None and positions is not None and setting > positions:
            raise ConfigurationError(
                f"max_total_tokens must be <= the model's longest sequence, got {setting} and {positions}"
            )
        self._max_total = setting or positions or _UNLIMITED_TOKENS
        # The start token of an encoder-decoder model's decoder takes a position that clients do not see.
        self._num_hidden = 0 if facts.decoder_start_token_id is None else 1
        self._max_input = settings.max_input_length or self._max_total - 1
        require_input_below_total(self._max_input, self._max_total)

    def resolve(self, decode_capacities: Collection[int]) -> Limits:
        """Return the limits with decode workers that can hold sequences of these lengths; without any, those by
        settings and model only.
        """
        smallest, largest = (
            min(self._max_total, pick(decode_capacities, default=_UNLIMITED_TOKENS) - self._num_hidden)
            for pick in (min, max)
        )
        return Limits(min(self._max_input, largest - 1), largest, smallest)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A served model as it can be used now. `ready`: there are workers to serve it. `since_unix_s`: when this router
    began to serve it.
    """

    model: ServedModel
    limits: Limits
    ready: bool
    max_concurrent_requests: int
    since_unix_s: int
    adapters: tuple[str, ...]
