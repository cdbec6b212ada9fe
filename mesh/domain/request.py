"""Requests as workers run them, with their sampling parameters. A prompt is token ids; stop strings do not reach
workers.

The limits and checks here are those of every public API.
"""

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mesh.domain.cache_hints import NO_HINTS, CacheHints
from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import Structure
from mesh.domain.tokens import SequenceKey

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORD_TOKENS = 128
# The client's own token sequences, and up to two spellings of each bad word.
MAX_BAD_WORD_RUNS = 3 * MAX_BAD_WORDS
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_NUM_CHOICES = 8
# Tokens and alternatives of all choices, buffered until the choices can be ranked: a few MiB.
MAX_RANKED_EVENTS = 2**16
# Log-probs of one prompt, alternatives included: about 200 MiB at a worker, and as much at the router.
MAX_PROMPT_LOGPROBS = 2**21
MAX_SEED = 2**64 - 1
# Dividing logits by a smaller temperature would overflow or leave only the most likely token.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules of sampling and of the end of a generation. A temperature below GREEDY_BELOW is greedy.

    The router handles text: it tokenizes `bad_words` into `bad_word_ids` and searches the output for `stop`; workers
    get neither. The engine never completes a token sequence of `bad_word_ids`. `truncate_prompt_tokens` keeps the end
    of a prompt.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    truncate_prompt_tokens: int | None = None
    structure: Structure | None = None

    @property
    def is_greedy(self) -> bool:
        """True if no random draw is needed."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True if tokens must be counted: the repetition, presence or frequency penalty is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest that names the first field out of range."""
        self.validate_lengths()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _at_least("top_k", self.top_k, 0)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed must be in [0, 2^64)")
        if self.truncate_prompt_tokens is not None:
            _at_least("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)
        self._validate_structure()
        self._validate_lists(vocab_size)

    def validate_lengths(self) -> None:
        """The part of `validate` that is about lengths. Raises InvalidRequest."""
        if self.max_new_tokens is not None:
            _at_least("max_new_tokens", self.max_new_tokens, 1)
        _at_least("min_new_tokens", self.min_new_tokens, 0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens ({self.min_new_tokens}) must be <= max_new_tokens ({self.max_new_tokens})"
            )

    def _validate_structure(self) -> None:
        if self.structure is None:
            return
        if self.ignore_eos:
            raise InvalidRequest(f"ignore_eos contradicts {self.structure.kind}: a complete structure must end")
        self.structure.validate()

    def _validate_lists(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")
        for token_id, bias in self.logit_bias.items():
            _token_id("logit_bias", token_id, vocab_size)
            _in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
        self.validate_bad_words(vocab_size)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries")
        for token_id in self.stop_token_ids:
            _token_id("stop_token_ids", token_id, vocab_size)

    def validate_bad_words(self, vocab_size: int) -> None:
        """The part of `validate` that is about bad words. Raises InvalidRequest."""
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words has {len(self.bad_words)} entries, at most {MAX_BAD_WORDS} are allowed")
        for word in self.bad_words:
            if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"each of bad_words must have 1 to {MAX_BAD_WORD_CHARS} characters, not only blanks"
                )
        if len(self.bad_word_ids) > MAX_BAD_WORD_RUNS:
            raise InvalidRequest(f"bad_word_ids has more than {MAX_BAD_WORD_RUNS} entries")
        for ids in self.bad_word_ids:
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"each bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens")
            for token_id in ids:
                _token_id("bad_word_ids", token_id, vocab_size)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequest(f"{name} must be >= {low}, got {value}")


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise InvalidRequest(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value:g}")


def _token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{name}: token id {token_id} is not in the vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True)
class Fork:
    """Another choice (`n > 1`) of the same prompt, which shares the prompt's KV with its parent request. A fork differs
    from its parent in these fields only."""

    request_id: str
    attempt: int
    seed: int
    traceparent: str = ""

    @property
    def key(self) -> SequenceKey:
        return self.request_id, self.attempt


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One attempt at one choice of a request: the sequence that a worker is to run.

    `token_ids` holds the prompt (`num_prompt_tokens` tokens, with the decoder's start tokens of an encoder-decoder
    model), then the tokens that earlier attempts generated; so a replay is simply another SequenceSpec.
    `sampling.max_new_tokens` and `sampling.seed` are always set, stop strings never. `traceparent` is the W3C trace
    context, empty without tracing. `forks` start on the same decode worker as soon as the prompt's KV is complete.
    `adapter` is the digest of the LoRA adapter to use, empty for the base model. `cache_hints`: what the client says
    about the KV afterwards.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    cache_namespace: str = ""
    time_left_s: float | None = None
    traceparent: str = ""
    forks: tuple[Fork, ...] = ()
    adapter: str = ""
    cache_hints: CacheHints = NO_HINTS

    @property
    def key(self) -> SequenceKey:
        return self.request_id, self.attempt

    @property
    def kv_scope(self) -> str:
        """Sequences may share KV only within one scope: namespaces are separate, and KV depends on the adapter."""
        return f"{self.cache_namespace}\0{self.adapter}" if self.adapter else self.cache_namespace

    def forked(self) -> list["SequenceSpec"]:
        """Return one complete SequenceSpec for each fork."""
        return [
            replace(
                self,
                request_id=fork.request_id,
                attempt=fork.attempt,
                sampling=replace(self.sampling, seed=fork.seed),
                prompt_logprobs=False,
                traceparent=fork.traceparent,
                forks=(),
            )
            for fork in self.forks
        ]

    @property
    def num_generated(self) -> int:
        """Tokens generated by earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        """Length, prompt included, at which the sequence ends."""
        assert self.sampling.max_new_tokens is not None
        return self.num_prompt_tokens + self.sampling.max_new_tokens


def mint_id() -> str:
    """Return a new internal id. Ids that clients choose are labels only and never reach workers."""
    return uuid.uuid4().hex
